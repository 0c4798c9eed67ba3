"""Find out what a folder of experiments still needs: which runs are missing, cut, or finished."""

from dataclasses import dataclass
from pathlib import Path

from comfetch import records
from comfetch.errors import ComfetchError, RunError
from comfetch.experiment import Experiment, read_experiment


@dataclass(frozen=True)
class Planned:
    """An experiment, the folder of its run, and whether that is missing, cut or finished."""

    name: str
    experiment: Experiment
    folder: Path
    state: str


def plan_runs(tomls: Path, runs: Path) -> list[Planned]:
    """Read the experiments `tomls/*.toml`, whose runs are in `runs`; raise all problems before anything is run."""
    paths = sorted(tomls.glob("*.toml"))
    if not paths:
        raise RunError(f"{tomls} holds no TOML files. Give the folder of the experiments.")
    planned, problems = [], []
    for path in paths:
        try:
            planned.append(_plan(path, runs / path.stem))
        except ComfetchError as error:
            problems.append(str(error))
    if problems:
        raise RunError("\n".join(problems))
    return planned


def _plan(path: Path, folder: Path) -> Planned:
    experiment = read_experiment(path)
    experiment.make_method()
    if not (folder / records.OPTIONS).exists():
        return Planned(path.stem, experiment, folder, "missing")
    records.check_folder(folder, experiment.options())
    return Planned(path.stem, experiment, folder, "finished" if records.finished(folder, experiment.rounds) else "cut")
