"""Show runs that were made, and footprints before any is."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from comfetch.api import sketch
from comfetch.blueprint import blueprint
from comfetch.cli.options import DataDir, takes_options
from comfetch.data import TASKS
from comfetch.data.own import import_function, is_own
from comfetch.errors import OptionError
from comfetch.experiment import Experiment
from comfetch.footprint import OPTIMISERS
from comfetch.footprint import footprint as count_footprint
from comfetch.methods import METHODS
from comfetch.plan import format_table
from comfetch.report import write_report

Target = Annotated[str, typer.Argument(metavar="TASK|MODULE:CONSTRUCTOR", help="A task, or what builds a model.")]
SIZES = ("preset", "model", "stem", "norm", "mode", "rows", "blocks", "hash", "scale", "policy", "spread", "batch_size")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="File to write: .html, .md or .csv.")] = Path("report.html"),
) -> None:
    """Write the report of some runs: a page with curves, table, partitions and footprints; or only the table.

    Runs that differ in seed and key only are averaged. The page is one file and needs no network.

    Examples:

        comfetch report runs/demo --out report.html

        comfetch report runs/a runs/b --out table.csv
    """
    groups = write_report(runs, out)
    typer.echo(f"{out}: {sum(len(group.runs) for group in groups)} runs in {len(groups)} rows.")


def methods() -> None:
    """List all methods: what goes down, what goes up, and what a client holds.

    The options of a method itself are given by --method-options; `comfetch.methods` documents them.

    Example:

        comfetch run digits --method qsgd --method-options "levels = 1"
    """
    rows = [(name, kind.down, kind.up, kind.holds) for name, kind in METHODS.items()]
    typer.echo(format_table(("method", "down", "up", "the client holds"), rows))


@takes_options(*SIZES)
def footprint(
    target: Target,
    options: dict[str, Any],
    compression: Annotated[float | None, typer.Option(help="Factor by which each sketched weight shrinks.")] = None,
    budget: Annotated[str | None, typer.Option(help="Bytes of a training step, such as 256MB, instead.")] = None,
    optimiser: Annotated[str, typer.Option(help=f"Optimiser of the clients: {', '.join(OPTIMISERS)}.")] = "adam",
    shape: Annotated[
        str | None, typer.Option("--input", help="Shape of one input of MODULE:CONSTRUCTOR: 3x32x32.")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Print the bytes of a training step, full and sketched, before anything is trained.

    The full weights are never built. Without --compression and --budget, the compression is 4. With a budget, the
    smallest compression that fits is taken. For MODULE:CONSTRUCTOR, activations are counted if --input is given.

    Examples:

        comfetch footprint cifar10 --model resnet18 --compression 10

        comfetch footprint digits --budget 3MB

        comfetch footprint comfetch.models:resnet18 --input 3x224x224
    """
    experiment = Experiment.of({**options, "task": target})
    build, batch = _built(experiment, shape, data_dir)
    model = sketch(
        build, compression=compression, budget=budget, batch=batch, optimiser=optimiser, **experiment.sketch()
    )
    typer.echo(str(count_footprint(model, batch, optimiser=optimiser)))


def _built(experiment: Experiment, shape: str | None, data_dir: str | None) -> tuple[Any, Any]:
    """Return the constructor and a batch: of a task, or of a model's own constructor, if the name gives a model."""
    name = experiment.task
    if name not in TASKS and is_own(name) and _builds_model(name):
        batch = None if shape is None else torch.empty(experiment.batch_size, *_shape(shape), device="meta")
        return import_function(name), batch
    task, build = experiment.load(data_dir)
    size = min(experiment.batch_size, len(task.train))
    inputs, _ = task.batch(task.train, torch.arange(size))
    return build, inputs


def _builds_model(name: str) -> bool:
    """Tell whether a path names the constructor of a model, rather than a function that returns a task."""
    make = import_function(name)
    try:
        blueprint(make)
    except Exception:  # a task's function, which reads its data, may fail in any way without real tensors
        return False
    return True


def _shape(text: str) -> list[int]:
    sizes = text.lower().split("x")
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise OptionError(f"--input {text!r} is not a shape. Write, for example, 3x32x32.")
    return [int(size) for size in sizes]
