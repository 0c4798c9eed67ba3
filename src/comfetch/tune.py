"""Find the learning rate of every experiment of a folder by one search, the same for all.

The search: `trials` rates on a logarithmic grid from the lowest to the highest, each run for `rounds` rounds on what is
left of the training examples when a part is held out. The rate with the best accuracy on that part is taken, of equal
ones that with the smaller loss. Few rounds leave neighbouring rates close, and favour what learns fast: with `finals`,
that many of the best are run again for all rounds of the experiment, and the best of these is taken. The test set is
not used. A rate at which the loss is not finite is a trial, too.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfetch import records
from comfetch.compare import OnSize, Terms, by_draws, read_experiments, size_all
from comfetch.equal import Meter
from comfetch.errors import OptionError, RunError
from comfetch.experiment import Experiment

TRIALS = ".trials.jsonl"


@dataclass(frozen=True)
class Search:
    """How rates are searched: how many, between which, for how many rounds, what part is held out, how many finals."""

    trials: int = 7
    rounds: int = 5
    lowest: float = 0.0003
    highest: float = 0.03
    validation: float = 0.1
    finals: int = 0

    def __post_init__(self) -> None:
        for name in ("trials", "rounds"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} is below 1.")
        if not 0 < self.lowest <= self.highest < math.inf or (self.trials > 1 and self.lowest == self.highest):
            raise OptionError(f"lowest={self.lowest:g} and highest={self.highest:g} are no range of learning rates.")
        if not 0 < self.validation < 1:
            raise OptionError(f"validation={self.validation:g} is not between 0 and 1. It is the part to hold out.")
        if not 0 <= self.finals <= self.trials:
            raise OptionError(
                f"finals={self.finals} is not between 0 and trials={self.trials}. It is how many of these are repeated."
            )

    def rates(self) -> list[float]:
        """Return the grid, of three significant digits.

        >>> Search(trials=5).rates()
        [0.0003, 0.000949, 0.003, 0.00949, 0.03]
        """
        if self.trials == 1:
            return [float(f"{math.sqrt(self.lowest * self.highest):.3g}")]
        step = (self.highest / self.lowest) ** (1 / (self.trials - 1))
        return [float(f"{self.lowest * step**place:.3g}") for place in range(self.trials)]

    def trial(self, experiment: Experiment, rate: float, rounds: int) -> Experiment:
        """Return the experiment of one trial; what it was sized to is left out, since it changes nothing."""
        return dataclasses.replace(
            experiment, lr=rate, rounds=rounds, validation=self.validation, evaluation="server", equal=None
        )  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """The rate that was found for experiments that differ in their random numbers only."""

    names: list[str]
    rate: float
    accuracy: float
    at_edge: bool


def tune(
    folder: Path, search: Search | None = None, *, terms: Terms | None = None, data_dir: str | None = None,
    device: str = "cpu", on_trial: Callable[[str, dict[str, Any]], None] | None = None, on_size: OnSize | None = None,
) -> list[Tuned]:  # fmt: skip
    """Find a rate for every experiment `folder/*.toml`, and write it there as `lr`; all other options stay.

    Experiments that differ in seed and key only are tuned once, by the first of these. All trials are kept in
    `name.trials.jsonl` beside the file, and one that is there already is not run again.

    Args:
        terms: size the experiments first, as their comparison will. Those that cannot meet the budget are left alone.
        on_trial: called with the name and the record of each trial that is run. on_size: with each size that is found.
    """
    search = search or Search()
    experiments = read_experiments(folder)
    sized = experiments
    if terms is not None:
        sizes = size_all(experiments, terms, Meter(data_dir), on_size=on_size)
        sized = {name: one.experiment for name, one in sizes.items() if one.fits}
    found = []
    for names in by_draws({name: dataclasses.replace(one, lr=search.lowest) for name, one in sized.items()}):
        path = folder / f"{names[0]}{TRIALS}"
        one = sized[names[0]]
        wanted = [(rate, search.rounds) for rate in search.rates()]
        best = _best(_trials(one, search, wanted, path, names[0], data_dir, device, on_trial))
        if best[0]["failed"]:
            raise RunError(f"{names[0]}: all {search.trials} rates failed. The last: {best[-1]['failed']}")
        finals = [(row["lr"], one.rounds) for row in best[: search.finals]]
        final = _best(_trials(one, search, finals, path, names[0], data_dir, device, on_trial))
        taken = next((row for row in final if not row["failed"]), best[0])
        edge = search.trials > 1 and taken["lr"] in (search.rates()[0], search.rates()[-1])
        found.append(Tuned(names, taken["lr"], taken["accuracy"], edge))
        for name in names:
            toml = folder / f"{name}.toml"
            records.write_text(toml, records.format_toml({**records.read_options(toml), "lr": taken["lr"]}))
    return found


def _best(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort trials, the best accuracy first; of equal ones, the smaller loss."""
    return sorted(rows, key=lambda row: (-row["accuracy"], row["loss"] if row["loss"] is not None else math.inf))


def _trials(
    experiment: Experiment, search: Search, wanted: Iterable[tuple[float, int]], path: Path, name: str,
    data_dir: str | None, device: str, on_trial: Callable[[str, dict[str, Any]], None] | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run the trials that are not on record, and return all of them; `wanted` are their rates and rounds."""
    known = {row["trial"]: row for row in read_trials(path)}
    rows = []
    for rate, rounds in wanted:
        trial = search.trial(experiment, rate, rounds)
        digest = hashlib.sha256(json.dumps(trial.options(), sort_keys=True).encode()).hexdigest()[:12]
        if digest not in known:
            known[digest] = {"trial": digest, "lr": rate, "rounds": rounds, "validation": search.validation}
            known[digest] |= _tried(trial, data_dir, device)
            records.append_line(path, known[digest])
            if on_trial is not None:
                on_trial(name, known[digest])
        rows.append(known[digest])
    return rows


def _tried(trial: Experiment, data_dir: str | None, device: str) -> dict[str, Any]:
    """Run a trial; one whose loss does not stay finite has no accuracy."""
    try:
        last = trial.run(data_dir=data_dir, device=device).records[-1]
    except RunError as error:
        return {"accuracy": 0.0, "loss": None, "failed": str(error)}
    return {"accuracy": last["accuracy"], "loss": last["test_loss"], "failed": ""}


def read_trials(path: Path) -> Iterable[dict[str, Any]]:
    """Read the trials on record; a line that was cut off is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
