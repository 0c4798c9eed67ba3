"""Show what sketched clients save: FedAvg and Comfetch on digits, at several compressions."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from comfetch import records
from comfetch.cli.options import Quiet, Threads, set_threads
from comfetch.cli.runs import run_watched
from comfetch.cli.watch import Watch
from comfetch.experiment import Experiment
from comfetch.report import Group, find_runs, group_runs, label, relevant, table

COMPRESSIONS = (2.0, 4.0, 10.0)
SETTINGS = {"task": "digits", "clients": 10, "rounds": 20, "local_epochs": 2}
PICTURE = "accuracy-bytes.png"
SHOWN = ("accuracy", "bytes_down", "bytes_up", "client_memory", "seconds")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the picture.")] = Path("runs/demo"),
    threads: Threads = 1,
    quiet: Quiet = False,
) -> None:
    """Train digits with FedAvg and with Comfetch at compression 2, 4 and 10: about a minute on two cores.

    A demo that was cut goes on where it stopped; one that is complete is shown again. The model is too small to be
    shared among cores, so one thread is the default.
    """
    set_threads(threads)
    experiments = [Experiment.of({**SETTINGS, "method": "fedavg"})]
    experiments += [Experiment.of({**SETTINGS, "compression": compression}) for compression in COMPRESSIONS]
    folders = [out / experiment.folder_name() for experiment in experiments]
    console = Console()
    with Watch(console, quiet) as watch:
        for number, (experiment, folder) in enumerate(zip(experiments, folders, strict=True)):
            follow = watch.follow(label(relevant(experiment.options())), experiment.rounds, partition=number == 0)
            run_watched(experiment, folder, follow, resume=(folder / records.OPTIONS).exists())
    groups = group_runs(find_runs(folders))
    draw(groups, out / PICTURE)
    watch.show(results(groups))
    watch.say(f"The picture of accuracy against bytes is {out / PICTURE}. For a page: comfetch report {out}")


def draw(groups: list[Group], path: Path) -> None:
    """Draw accuracy against bytes."""
    from comfetch.plots import accuracy_curves, to_png

    to_png(accuracy_curves(groups, "bytes", legend=True), path)


def results(groups: list[Group]) -> Table:
    """Make the table of results for a terminal."""
    header, *rows = table(groups, SHOWN)
    made = Table(header_style="bold")
    for title in header:
        made.add_column(title, justify="left" if title == header[0] else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made
