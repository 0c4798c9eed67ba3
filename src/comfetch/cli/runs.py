"""Run experiments: one of them, or what a folder of them still needs."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from comfetch import records
from comfetch.cli.options import FIELDS, RUNNING, DataDir, Device, Quiet, Threads, set_threads, takes_options
from comfetch.cli.watch import Follow, Watch
from comfetch.compare import Planned, plan_runs
from comfetch.errors import ComfetchError, OptionError, RunError
from comfetch.experiment import Experiment, read_experiment
from comfetch.footprint import format_bytes
from comfetch.simulation import History

INTERRUPTED = 130
ENGINES = ("local", "ray")
What = Annotated[
    str, typer.Argument(metavar="TASK", help="A task (name, file.py, module:function), or an experiment.toml.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the run.", rich_help_panel=RUNNING, show_default="runs/<task>-<method>-<compression>-<hash>"
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.", rich_help_panel=RUNNING)]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        help=f"What carries the messages: {', '.join(ENGINES)}. Ray is Flower's simulation: clients are processes.",
        rich_help_panel=RUNNING,
    ),
]
Tensorboard = Annotated[
    bool, typer.Option("--tensorboard", help="Write event files into --out, too.", rich_help_panel=RUNNING)
]


@takes_options(*(name for name in FIELDS if name != "task"))
def run(
    task: What, options: dict[str, Any], data_dir: DataDir = None, device: Device = "cpu", out: Out = None,
    resume: Resume = False, threads: Threads = None, engine: EngineName = "local", tensorboard: Tensorboard = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Train a task federatedly on this machine, with all records in one folder.

    Options given here go before those of the TOML file, and these before the preset's. Ctrl-C stops a run; --resume
    goes on with it, bit for bit.

    Examples:

        comfetch run digits --compression 10 --rounds 20

        comfetch run cifar10 --preset paper --compression 4 --data-dir ../shared/data --out runs/paper-4

        comfetch run experiment.toml --seed 1
    """
    set_threads(threads)
    given = Path(task)
    experiment = (
        read_experiment(given, options) if given.suffix == ".toml" else Experiment.of({"task": task, **options})
    )
    folder = out or Path("runs") / experiment.folder_name()
    watch = Watch(Console(), quiet)
    follow = watch.follow(experiment.task, experiment.rounds, folder / "tensorboard" if tensorboard else None, True)
    try:
        with watch:
            history = run_watched(experiment, folder, follow, resume, data_dir, device, engine)
    except KeyboardInterrupt as stop:
        again = ["comfetch", "run", str(folder / records.OPTIONS), "--out", str(folder), "--resume"]
        again += ["--data-dir", data_dir] if data_dir else []
        again += ["--device", device] if device != "cpu" else []
        again += ["--threads", str(threads)] if threads else []
        again += ["--engine", engine] if engine != "local" else []
        typer.echo(interruption(folder, shlex.join(again)), err=True)
        raise typer.Exit(INTERRUPTED) from stop
    watch.say(f"{summary(history)} Everything is in {folder}. For a page: comfetch report {folder}")


def run_watched(
    experiment: Experiment, folder: Path, follow: Follow, resume: bool, data_dir: str | None = None,
    device: str = "cpu", engine: str = "local",
) -> History:  # fmt: skip
    """Run an experiment and show how it goes."""
    if resume and folder.exists():
        for change in records.environment_changes(folder):
            follow.watch.say(f"{folder}: {change}. The result may differ in its last bits.")
    run = _runner(engine)
    try:
        return run(
            experiment, folder, data_dir=data_dir, device=device, resume=resume, on_start=follow.started,
            on_round=follow.round,
        )  # fmt: skip
    finally:
        follow.close()


def _runner(engine: str) -> Callable[..., History]:
    """Return what runs an experiment."""
    if engine not in ENGINES:
        raise OptionError(f"engine={engine!r} is not known. Choose one of: {', '.join(ENGINES)}.")
    if engine == "local":
        return Experiment.run
    try:
        from comfetch.flower import run_on_ray
    except ImportError as error:
        raise OptionError(f"engine='ray' needs Flower: pip install 'comfetch[flower]'. ({error})") from error
    return run_on_ray


def interruption(folder: Path, command: str) -> str:
    """Say what a run that was stopped has kept, and how to go on."""
    if not (folder / records.OPTIONS).exists():
        return "comfetch: interrupted before the first round. Nothing was saved."
    done = records.rounds_done(folder)
    return f"comfetch: interrupted after round {done}, which is saved. Go on with: {command}"


def summary(history: History) -> str:
    """Say what a run gave."""
    down, up = (sum(record[name] for record in history.records) for name in ("bytes_down", "bytes_up"))
    rounds = len(history.records)
    return (
        f"Accuracy {history.accuracy:.1%} after {rounds} round{'s' if rounds > 1 else ''}, "
        f"{format_bytes(down)} down and {format_bytes(up)} up."
    )


def compare(
    experiments: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of TOML files, one a run.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the runs.", show_default="runs/<name of DIR>")] = None,
    data_dir: DataDir = None, device: Device = "cpu", threads: Threads = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Run what a folder of experiments still needs: DIR/name.toml is run in OUT/name.

    What is missing is run, what was cut goes on, what is finished stays. A run folder that holds another configuration
    is never touched: it is refused before anything is run. A run that fails does not stop the others.

    Example:

        comfetch compare experiments --out runs/experiments && comfetch report runs/experiments
    """
    set_threads(threads)
    planned = plan_runs(experiments, out or Path("runs") / experiments.resolve().name)
    failures = []
    try:
        with Watch(Console(), quiet) as watch:
            for one in planned:
                watch.say(f"{one.name}: {one.state}")
                failures += _run_planned(one, watch, data_dir, device)
    except KeyboardInterrupt as stop:
        typer.echo("comfetch: interrupted. Finished rounds are saved; the same command goes on with them.", err=True)
        raise typer.Exit(INTERRUPTED) from stop
    if failures:
        raise RunError("\n".join([f"{len(failures)} of {len(planned)} runs failed", *failures]))


def _run_planned(one: Planned, watch: Watch, data_dir: str | None, device: str) -> list[str]:
    """Run one experiment if it is not finished; return what went wrong, if anything."""
    if one.state == "finished":
        return []
    follow = watch.follow(one.name, one.experiment.rounds)
    try:
        history = run_watched(one.experiment, one.folder, follow, one.state == "cut", data_dir, device)
    except ComfetchError as error:
        return [f"{one.name}: {error}"]
    watch.say(f"{one.name}: {summary(history)}")
    return []
