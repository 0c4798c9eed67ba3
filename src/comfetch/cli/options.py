"""Derive command line options from the fields of `Experiment`, so that they are described once."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from comfetch.errors import OptionError
from comfetch.experiment import Experiment

FIELDS = {field.name: field for field in dataclasses.fields(Experiment)}
RUNNING = "Running"

DataDir = Annotated[
    str | None,
    typer.Option(
        help="Folder with the datasets, before COMFETCH_DATA; 'hub' fetches from Hugging Face. (default none)",
        rich_help_panel=RUNNING,
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="Torch device, such as cpu or cuda:0.", rich_help_panel=RUNNING)]
Threads = Annotated[
    int | None, typer.Option(help="Threads of torch.", rich_help_panel=RUNNING, show_default="torch's choice")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.", rich_help_panel=RUNNING)]


def takes_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each experiment field named; it gets those that were given as `options`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "options"]
        derived = [_parameter(name) for name in names]

        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            options = {name: given.pop(name) for name in names}
            command(options={name: value for name, value in options.items() if value is not None}, **given)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (own[0], *derived, *own[1:])]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    """Make the option of a field. It is None unless given: TOML file and preset come before the field's default."""
    field, dashed = FIELDS[name], name.replace("_", "-")
    about = field.metadata["help"]
    if field.metadata["choices"]:
        about = f"{about.removesuffix('.')}: {', '.join(field.metadata['choices'])}."
    option = typer.Option(
        f"--{dashed}/--no-{dashed}" if field.type is bool else f"--{dashed}",
        help=f"{about} (default {str(field.default).lower()})",
        rich_help_panel=field.metadata["group"],
        show_default=False,
    )
    wanted: Any = field.type
    annotation: Any = Annotated[wanted | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def set_threads(threads: int | None) -> None:
    """Let torch use so many threads."""
    import torch

    if threads is None:
        return
    if not 1 <= threads <= 1024:
        raise OptionError(f"threads={threads} is not from 1 to 1024.")
    torch.set_num_threads(threads)


def check_file(path: Path, what: str) -> None:
    """Refuse a path that is not there."""
    if not path.exists():
        raise OptionError(f"{path} does not exist. Give {what}.")
