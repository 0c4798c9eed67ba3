"""The command line: `comfetch demo`, `run`, `tune`, `compare`, `report`, `footprint` and `methods`."""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import click
import typer

from comfetch import __version__
from comfetch.cli.demo import demo
from comfetch.cli.runs import INTERRUPTED, compare, run, tune
from comfetch.cli.show import footprint, methods, report
from comfetch.errors import ComfetchError

WRONG_INPUT, FAULT = 2, 1

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train networks federatedly whose clients hold, get and send only sketches of the weights.",
)
for command in (demo, run, tune, compare, report, footprint, methods):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    if version:
        typer.echo(f"comfetch {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line and exit: with 2 and one line on standard error if the input was wrong."""
    warnings.showwarning = _show_warning
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; whatever happens is told in one line."""
    try:
        result: Any = app(args=list(arguments), prog_name="comfetch", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Abort:
        return _tell("interrupted", INTERRUPTED)
    except click.ClickException as error:
        return _tell(error.format_message(), WRONG_INPUT)
    except ComfetchError as error:
        return _tell(str(error), WRONG_INPUT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _tell(f"{where}{error.strerror or error}", WRONG_INPUT)
    except Exception as error:
        if os.environ.get("COMFETCH_TRACEBACK"):
            raise
        return _tell(f"{type(error).__name__}: {error} (set COMFETCH_TRACEBACK=1 to see where)", FAULT)


def _tell(message: str, code: int) -> int:
    """Print a message as one line on standard error."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    print("comfetch:", "; ".join(line for line in lines if line), file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, without the place in the code."""
    print("comfetch: note:", " ".join(str(message).split()))
