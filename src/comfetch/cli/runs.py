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
from comfetch.compare import TOO_LARGE, OnSize, Planned, Terms, cost_table, note_sizes, plan_runs
from comfetch.equal import KINDS, Meter
from comfetch.errors import ComfetchError, OptionError, RunError
from comfetch.experiment import Experiment, read_experiment
from comfetch.footprint import format_bytes
from comfetch.simulation import History
from comfetch.tune import Search
from comfetch.tune import tune as find_rates

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
EQUAL = "Equal terms"
Equal = Annotated[
    str | None, typer.Option(help=f"What clients have equally much of: {', '.join(KINDS)}.", rich_help_panel=EQUAL)
]
Budget = Annotated[
    str | None,
    typer.Option(help="How much: 300kB, 2GFLOP, or what a method costs: comfetch@10.", rich_help_panel=EQUAL),
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
    seeds: Annotated[int | None, typer.Option(help="Run each so many times, in OUT/name-seed0 and so on.")] = None,
    equal: Equal = None, budget: Budget = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sizes and costs, and run nothing.")] = False,
    data_dir: DataDir = None, device: Device = "cpu", threads: Threads = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Run what a folder of experiments still needs: DIR/name.toml is run in OUT/name.

    What is missing is run, what was cut goes on, what is finished stays. A run folder that holds another configuration
    is never touched: it is refused before anything is run. A run that fails does not stop the others.

    With --seeds 3, each experiment is run three times, with seed and key as its file says, then one and two higher.

    With --equal, every experiment is first sized to one budget, by the one setting that makes its method larger or
    smaller; one that cannot meet it is named, with what it needs, and is not run. Data, federation and random numbers
    must be the same for all. --dry-run prints what each would cost a client.

    Examples:

        comfetch compare experiments --seeds 3 --out runs/experiments && comfetch report runs/experiments

        comfetch compare experiments --equal bytes --budget comfetch@10 --dry-run

        comfetch compare experiments --equal memory --budget 3MB
    """
    set_threads(threads)
    terms, meter = read_terms(equal, budget), Meter(data_dir)
    folder = out or Path("runs") / experiments.resolve().name
    planned = plan_runs(experiments, folder, terms, meter, _say_size(quiet), seeds)
    if dry_run or terms is not None:
        show = typer.echo if dry_run else Watch(Console(), quiet).say
        show(cost_table(planned, meter))
    if dry_run:
        return
    if terms is not None:
        note_sizes(planned, terms, folder)
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


def read_terms(equal: str | None, budget: str | None) -> Terms | None:
    """Return the terms of a comparison, if there are any."""
    if (equal is None) != (budget is None):
        missing, given = ("--equal", "--budget") if equal is None else ("--budget", "--equal")
        raise OptionError(f"{given} needs {missing}. Write, for example, --equal bytes --budget comfetch@10.")
    return None if equal is None or budget is None else Terms(equal, budget)


def _say_size(quiet: bool) -> OnSize:
    """Return what tells each size as soon as it is found: for large models that takes a while."""
    watch = Watch(Console(stderr=True), quiet)
    return lambda name, sized: watch.say(f"{name}: {sized.verdict}")


def _run_planned(one: Planned, watch: Watch, data_dir: str | None, device: str) -> list[str]:
    """Run one experiment if it is not finished; return what went wrong, if anything."""
    if one.state in ("finished", TOO_LARGE):
        return []
    follow = watch.follow(one.name, one.experiment.rounds)
    try:
        history = run_watched(one.experiment, one.folder, follow, one.state == "cut", data_dir, device)
    except ComfetchError as error:
        return [f"{one.name}: {error}"]
    watch.say(f"{one.name}: {summary(history)}")
    return []


def tune(
    experiments: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of TOML files, one an experiment.")],
    trials: Annotated[int, typer.Option(help="Learning rates that are tried for each.")] = Search.trials,
    rounds: Annotated[int, typer.Option(help="Rounds of a trial.")] = Search.rounds,
    lowest: Annotated[float, typer.Option(help="Lowest rate.")] = Search.lowest,
    highest: Annotated[float, typer.Option(help="Highest rate.")] = Search.highest,
    validation: Annotated[float, typer.Option(help="Part of the training examples held out.")] = Search.validation,
    finals: Annotated[int, typer.Option(help="How many of the best are tried again, for all rounds.")] = Search.finals,
    equal: Equal = None, budget: Budget = None,
    data_dir: DataDir = None, device: Device = "cpu", threads: Threads = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Find the learning rate of every experiment by one search, the same for all, and write it into its file.

    Every experiment is run at the same rates, evenly spaced on a logarithmic scale, on the training examples without a
    part that is held out; the best accuracy on that part decides. With --finals 2, the best two are run again for all
    rounds of the experiment, and these decide. The test set is not used. Files that differ in seed and key only are
    tuned once. DIR/name.trials.jsonl keeps all trials; those that are there are not run again. With --equal,
    experiments are first sized as `compare --equal` does it.

    Example:

        comfetch tune experiments --trials 7 --rounds 5
    """
    set_threads(threads)
    search, watch = Search(trials, rounds, lowest, highest, validation, finals), Watch(Console(), quiet)

    def told(name: str, trial: dict[str, Any]) -> None:
        outcome = trial["failed"] or f"accuracy {trial['accuracy']:.1%}"
        watch.say(f"{name}: lr {trial['lr']:g}: {outcome}")

    try:
        found = find_rates(
            experiments, search, terms=read_terms(equal, budget), data_dir=data_dir, device=device, on_trial=told,
            on_size=_say_size(quiet),
        )  # fmt: skip
    except KeyboardInterrupt as stop:
        typer.echo("comfetch: interrupted. Finished trials are saved; the same command goes on with them.", err=True)
        raise typer.Exit(INTERRUPTED) from stop
    for one in found:
        edge = " It is at the edge of the grid: widen it with --lowest or --highest." if one.at_edge else ""
        watch.say(f"{', '.join(one.names)}: lr {one.rate:g}, accuracy {one.accuracy:.1%} on what was held out.{edge}")
