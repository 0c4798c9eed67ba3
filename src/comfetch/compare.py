"""Find out what a folder of experiments still needs: which runs are missing, cut, or finished.

On equal terms, every experiment is sized to one budget first, and those that cannot meet it are named and not run.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfetch import records
from comfetch.equal import KINDS, Meter, Sized, check_kind, format_cost, read_budget, size_to
from comfetch.errors import ComfetchError, OptionError, RunError
from comfetch.experiment import Experiment, read_experiment
from comfetch.plan import format_table

TERMS = (
    "task", "model", "stem", "norm", "init", "limit", "clients", "fraction", "rounds", "partition", "alpha", "unequal",
    "evaluation", "statistics", "validation", "local_epochs", "local_steps", "batch_size",
)  # fmt: skip
"""Options that all experiments must share to be compared on equal terms."""
TOO_LARGE = "too large"
SEED = "-seed"
DRIFT = 0.01
"""Part by which the cost of the method that a budget names may move, by a new default for example, while runs that were
sized to it before still count as sized to it."""


@dataclass(frozen=True)
class Terms:
    """What is to be equal, and how much of it there is: "300kB", or what a method costs, "comfetch@10"."""

    kind: str
    budget: str

    def __post_init__(self) -> None:
        check_kind(self.kind)


@dataclass(frozen=True)
class Planned:
    """An experiment, the folder of its run, and whether that is missing, cut, finished, or too large for the budget."""

    name: str
    experiment: Experiment
    folder: Path
    state: str
    sized: Sized | None = None


OnSize = Callable[[str, Sized], None]
"""Called with the name of an experiment and to what it was sized, as soon as that is known."""


def plan_runs(
    tomls: Path, runs: Path, terms: Terms | None = None, meter: Meter | None = None, on_size: OnSize | None = None,
    seeds: int | None = None,
) -> list[Planned]:  # fmt: skip
    """Read the experiments `tomls/*.toml`, whose runs are in `runs`; raise all problems before anything is run.

    Args:
        seeds: run each experiment so many times, in `runs/name-seed0` and so on; None runs it once, in `runs/name`.
    """
    experiments, problems = _read(tomls)
    if seeds is not None:
        experiments = with_seeds(experiments, seeds)
    if terms is not None and problems:
        raise RunError("\n".join(problems))
    sizes = size_all(experiments, terms, meter or Meter(), runs, on_size) if terms else {}
    planned = []
    for name, given in experiments.items():
        sized = sizes.get(name)
        experiment = given if sized is None else sized.experiment
        try:
            state = TOO_LARGE if sized is not None and not sized.fits else _state(experiment, runs / name)
        except ComfetchError as error:
            problems.append(str(error))
        else:
            planned.append(Planned(name, experiment, runs / name, state, sized))
    if problems:
        raise RunError("\n".join(problems))
    return planned


def read_experiments(tomls: Path) -> dict[str, Experiment]:
    """Read the experiments of a folder by name; raise all their problems at once."""
    found, problems = _read(tomls)
    if problems:
        raise RunError("\n".join(problems))
    return found


def _read(tomls: Path) -> tuple[dict[str, Experiment], list[str]]:
    """Read the experiments of a folder by name, and what is wrong with others."""
    paths = sorted(tomls.glob("*.toml"))
    if not paths:
        raise RunError(f"{tomls} holds no TOML files. Give the folder of the experiments.")
    found, problems = {}, []
    for path in paths:
        try:
            experiment = read_experiment(path)
            experiment.make_method()
            found[path.stem] = experiment
        except ComfetchError as error:
            problems.append(str(error))
    return found, problems


def with_seeds(experiments: Mapping[str, Experiment], seeds: int) -> dict[str, Experiment]:
    """Repeat experiments as `name-seed0` and so on, all of the first seed before those of the next.

    The first has the seed and the key of the experiment itself; both grow by one from each to the next.
    """
    if seeds < 1:
        raise OptionError(f"seeds={seeds} is below 1. It is how many times each experiment is run.")
    return {
        f"{name}{SEED}{one.seed + extra}": Experiment.of(
            {**one.options(), "seed": one.seed + extra, "key": one.key + extra}
        )
        for extra in range(seeds)
        for name, one in experiments.items()
    }


def _state(experiment: Experiment, folder: Path) -> str:
    if not (folder / records.OPTIONS).exists():
        return "missing"
    records.check_folder(folder, experiment.options())
    return "finished" if records.finished(folder, experiment.rounds) else "cut"


def size_all(
    experiments: Mapping[str, Experiment], terms: Terms, meter: Meter, runs: Path | None = None,
    on_size: OnSize | None = None,
) -> dict[str, Sized]:  # fmt: skip
    """Size experiments to one budget; those that have begun in `runs` under the same terms keep their size.

    Experiments that differ in their random numbers only are sized once, for the first of these.
    """
    check_terms(experiments)
    groups = by_draws(experiments)
    first = {names[0]: experiments[names[0]] for names in groups}
    budgets = {name: read_budget(terms.budget, one, terms.kind, meter) for name, one in first.items()}
    if len(set(budgets.values())) > 1:
        told = ", ".join(f"{format_cost(terms.kind, budget)} for {name}" for name, budget in budgets.items())
        raise OptionError(
            f"budget={terms.budget} is not the same for all: {told}. Let them train alike, or give it as a number."
        )
    sizes = {}
    for names in groups:
        one, budget = experiments[names[0]], budgets[names[0]]
        sized = _begun(one, terms, budget, meter, runs / names[0] if runs else None)
        sized = sized or noted(size_to(one, budget, terms.kind, meter), terms)
        if on_size is not None:
            on_size(names[0], sized)
        for name in names:
            draws = {option: getattr(experiments[name], option) for option in ("seed", "key")}
            sizes[name] = dataclasses.replace(sized, experiment=dataclasses.replace(sized.experiment, **draws))
    return {name: sizes[name] for name in experiments}


def by_draws(experiments: Mapping[str, Experiment]) -> list[list[str]]:
    """Put together the names of experiments that differ in seed and key only, in the order of these."""
    groups: dict[Any, list[str]] = {}
    for name, one in experiments.items():
        groups.setdefault(dataclasses.replace(one, seed=0, key=0), []).append(name)
    return [sorted(names, key=lambda n: (experiments[n].seed, experiments[n].key)) for names in groups.values()]


def noted(sized: Sized, terms: Terms) -> Sized:
    """Let the experiment say what it was sized to."""
    told = f"{terms.kind} {sized.budget:.0f}{_named(terms)}"
    return dataclasses.replace(sized, experiment=dataclasses.replace(sized.experiment, equal=told))


def _named(terms: Terms) -> str:
    """Write which method the budget names, if it is not a number."""
    return "" if terms.budget[:1].isdigit() else f" as {terms.budget}"


def _begun(one: Experiment, terms: Terms, budget: float, meter: Meter, folder: Path | None) -> Sized | None:
    """Return the size that a run of the same experiment on the same terms began with."""
    if folder is None or not (folder / records.OPTIONS).exists():
        return None
    try:
        found = read_experiment(folder / records.OPTIONS)
    except ComfetchError:
        return None
    match = re.fullmatch(rf"{terms.kind} (\d+){re.escape(_named(terms))}", found.equal or "")
    if match is None or not same_budget(float(match[1]), budget, terms):
        return None
    kept = {name: getattr(found, name) for name in ("compression", "method_options", "equal")}
    cost = meter.cost(found, terms.kind)
    notes = {row["run"]: row["setting"] for row in records.read_json(folder.parent / records.EQUAL).get("runs", [])}
    setting = notes.get(folder.name, "as its run began")
    sized = Sized(dataclasses.replace(one, **kept), terms.kind, float(match[1]), cost, setting)
    same = sized.experiment == dataclasses.replace(found, rounds=one.rounds)
    return sized if same and sized.fits else None


def same_budget(before: float, now: float, terms: Terms) -> bool:
    """Tell whether runs sized to a budget before are sized to it now; one that names a method may drift with it."""
    return round(before) == round(now) or (bool(_named(terms)) and abs(before - now) <= DRIFT * now)


def check_terms(experiments: Mapping[str, Experiment]) -> None:
    """Refuse experiments that do not train on the same data, in the same federation, for the same random numbers."""
    problems = []
    for term in TERMS:
        values = {name: getattr(one, term) for name, one in experiments.items()}
        if len(set(values.values())) > 1:
            problems.append(f"{term} is {_spoken(values)}")
    draws = {
        names[0]: [(experiments[name].seed, experiments[name].key) for name in names] for names in by_draws(experiments)
    }
    if len({str(drawn) for drawn in draws.values()}) > 1:
        problems.append(f"(seed, key) is {_spoken(draws)}")
    if problems:
        raise OptionError(f"On equal terms all experiments must share these: {'; '.join(problems)}.")


def _spoken(values: Mapping[str, Any]) -> str:
    """Say which value stands where, each once."""
    first: dict[str, str] = {}
    for name, value in values.items():
        first.setdefault(str(value), name)
    return ", ".join(f"{value} in {name}" for value, name in first.items())


def cost_table(planned: Sequence[Planned], meter: Meter) -> str:
    """Write what the runs cost a client, before anything is run."""
    rows, known = [], dict[Experiment, list[str]]()
    for one in planned:
        same = dataclasses.replace(one.experiment, seed=0, key=0)
        if same not in known:
            known[same] = [format_cost(kind, meter.cost(one.experiment, kind)) for kind in KINDS]
        told = one.sized.verdict if one.sized else one.state
        rows.append((one.name, one.experiment.method, *known[same], told))
    return format_table(("run", "method", "bytes a round", "memory", "FLOP a step", "setting"), rows)


def note_sizes(planned: Sequence[Planned], terms: Terms, runs: Path) -> None:
    """Write down beside the runs what was equal, and what could not meet it.

    What is noted there of other runs on the same terms stays: a folder may be run in parts.
    """
    sizes = [(one, one.sized) for one in planned if one.sized is not None]
    rows = {
        one.name: {"run": one.name, "method": one.experiment.method, "cost": sized.cost, "setting": sized.setting,
                   "fits": sized.fits}
        for one, sized in sizes
    }  # fmt: skip
    records.make_folder(runs)
    budget = max(sized.budget for _, sized in sizes)
    before = records.read_json(runs / records.EQUAL)
    named = (before.get("kind"), before.get("as")) == (terms.kind, terms.budget)
    if named and same_budget(before["budget"], budget, terms):
        rows = {row["run"]: row for row in before["runs"]} | rows
    told = {"kind": terms.kind, "budget": round(budget), "as": terms.budget, "runs": list(rows.values())}
    records.write_json(runs / records.EQUAL, told)
