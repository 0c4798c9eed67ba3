"""Gather run folders, average what differs in random numbers only, and write the table: Markdown, CSV, or a page."""

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comfetch import records
from comfetch.equal import format_cost
from comfetch.errors import OptionError, RunError
from comfetch.experiment import DRAWS, OPTIONS, SKETCH, Experiment, heeds, is_compressed
from comfetch.footprint import format_bytes

FIRST = ("method", "compression")
"""Options that a label begins with."""


@dataclass(frozen=True)
class Run:
    """What a run folder holds."""

    folder: Path
    options: dict[str, Any]
    rounds: list[dict[str, Any]]
    partition: dict[str, Any]
    footprint: dict[str, Any]

    def total(self, name: str) -> float:
        """Add up a number over all rounds."""
        return float(sum(record[name] for record in self.rounds))

    def last(self, name: str) -> float:
        """Return a number of the last round; NaN if it was not measured."""
        value = self.rounds[-1][name]
        return math.nan if value is None else float(value)

    def memory(self) -> float:
        """Return the peak of a client's training and what it keeps from round to round, together at their largest."""
        return float(max(record["client_memory"] + record.get("client_kept", 0) for record in self.rounds))

    def best(self, name: str) -> float:
        """Return the largest of a number over the rounds."""
        return float(max(record[name] for record in self.rounds))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their random numbers only."""

    label: str
    runs: list[Run] = field(default_factory=list)

    def values(self, measure: Callable[[Run], float]) -> tuple[float, float | None]:
        """Return mean and standard deviation of a number over the runs; one run has no deviation."""
        found = [measure(run) for run in self.runs]
        return statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None

    def series(self, name: str) -> list[list[float]]:
        """Return a number by round, for each run, up to the last round that all of them have."""
        length = min(len(run.rounds) for run in self.runs)
        return [[float(record[name]) for record in run.rounds[:length]] for run in self.runs]


@dataclass(frozen=True)
class Column:
    """A column of the table: what it is called, how it is taken from a run and written."""

    name: str
    title: str
    measure: Callable[[Run], float]
    write: Callable[[float], str]


COLUMNS = (
    Column("rounds", "rounds", lambda run: run.last("round"), lambda x: f"{x:g}"),
    Column("accuracy", "accuracy %", lambda run: run.last("accuracy"), lambda x: f"{100 * x:.1f}"),
    Column("best_accuracy", "best %", lambda run: run.best("accuracy"), lambda x: f"{100 * x:.1f}"),
    Column("accuracy_full", "server's W %", lambda run: run.last("accuracy_full"), lambda x: f"{100 * x:.1f}"),
    Column("bytes_down", "down", lambda run: run.total("bytes_down"), format_bytes),
    Column("bytes_up", "up", lambda run: run.total("bytes_up"), format_bytes),
    Column("client_memory", "memory", lambda run: run.memory(), format_bytes),
    Column("seconds", "seconds", lambda run: run.total("seconds"), lambda x: f"{x:.1f}"),
)


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """Read every run in folders, which are runs or hold runs; runs without a finished round are left out."""
    folders: dict[Path, None] = {}
    for path in paths:
        found = sorted(options.parent for options in path.rglob(records.OPTIONS)) if path.is_dir() else []
        if not found:
            raise RunError(f"{path} is no run folder and holds none: no {records.OPTIONS} was found in it.")
        folders.update(dict.fromkeys(found))
    runs = [run for folder in folders if (run := read_run(folder)).rounds]
    if not runs:
        raise RunError("None of these runs has finished a round yet.")
    return runs


def read_run(folder: Path) -> Run:
    """Read what a run folder holds."""
    options, rounds = records.read_options(folder / records.OPTIONS), records.read_rounds(folder)
    needed = {"round", "loss", "accuracy", "accuracy_full", "bytes_down", "bytes_up", "client_memory", "seconds"}
    for record in rounds:
        if missing := needed - record.keys():
            raise RunError(f"{folder / records.ROUNDS}: a record lacks {', '.join(sorted(missing))}.")
    partition, footprint = (records.read_json(folder / name) for name in (records.PARTITION, records.FOOTPRINT))
    return Run(folder, options, rounds, partition, footprint)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put together what differs in seed and key only, and call each group by what sets it apart."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(relevant(run.options).items())), []).append(run)
    members = [relevant(group[0].options) for group in groups.values()]
    names = list(dict.fromkeys(name for options in members for name in options if name not in FIRST))
    apart = [name for name in names if len({str(options[name]) for options in members if name in options}) > 1]
    told = [_beyond_usual(options) for options in members]
    made = [Group(label(options, apart), group) for options, group in zip(told, groups.values(), strict=True)]
    return sorted(made, key=lambda group: (_compression(group.runs[0].options), group.label))


def label(options: dict[str, Any], apart: Sequence[str] = ()) -> str:
    """Call a run by its method, its compression, and the options that set it apart.

    >>> label({"method": "comfetch", "compression": 4.0, "lr": 0.1}, ["lr"])
    'comfetch 4×, lr 0.1'
    """
    method = options.get("method", "run")
    first = f"{method} {options['compression']:g}×" if "compression" in options else method
    return ", ".join([first, *(_words(name, options[name]) for name in apart if name in options)])


def _words(name: str, value: Any) -> str:
    if name == "method_options":
        return str(value)
    spoken = name.replace("_", " ")
    if isinstance(value, bool):
        return spoken if value else f"no {spoken}"
    return f"{spoken} {value}"


def table(groups: Sequence[Group], shown: Sequence[str] = ()) -> list[list[str]]:
    """Write the table, or the columns `shown`: a header, and a row for each group with mean ± sd over its seeds."""
    columns = [column for column in COLUMNS if not shown or column.name in shown]
    rows = [["run", "seeds", *(column.title for column in columns)]]
    for group in groups:
        cells = [_cell(column, *group.values(column.measure)) for column in columns]
        rows.append([group.label, str(len(group.runs)), *cells])
    return rows


def to_markdown(groups: Sequence[Group], missed: Sequence[str] = ()) -> str:
    """Write the table as Markdown, and which run wins where."""
    from comfetch.pareto import by_task, verdicts

    rows = table(groups)
    lines = [" | ".join(row) for row in (rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:])]
    text = ["# Runs of comfetch", "", *(f"| {line} |" for line in lines), "", NOTE, ""]
    told = [
        f"- {task}, {axis.title}: {' '.join(words)}"
        for task, members in by_task(groups).items()
        for axis, words in verdicts(members)
    ]
    return "\n".join([*text, *(["## Which wins where", "", *missed, *told, ""] if told or missed else [])])


NOTE = (
    "Accuracy of what clients run, in the last round; ± is the standard deviation over seeds. Bytes are totals over "
    "all rounds and clients; memory is the measured peak of the largest client, with what it keeps between rounds."
)


def to_csv(groups: Sequence[Group], missed: Sequence[str] = ()) -> str:
    """Write the table as CSV, in plain numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    sides = [f"{column.name}_{side}" for column in COLUMNS for side in ("mean", "sd")]
    writer.writerow(["run", "task", "method", "compression", "seeds", *sides])
    for group in groups:
        options = group.runs[0].options
        numbers = [number for column in COLUMNS for number in group.values(column.measure)]
        what = [group.label, options.get("task"), options.get("method"), _compression(options), len(group.runs)]
        writer.writerow([*what, *("" if number is None or math.isnan(number) else number for number in numbers)])
    return text.getvalue()


def _to_html(groups: Sequence[Group], missed: Sequence[str]) -> str:
    from comfetch.page import to_html

    return to_html(groups, missed)


FORMATS: dict[str, Callable[[Sequence[Group], Sequence[str]], str]] = {
    ".html": _to_html,
    ".md": to_markdown,
    ".csv": to_csv,
}


def write_report(paths: Iterable[Path], out: Path) -> list[Group]:
    """Write the report of some runs in the format that the name of the file asks for."""
    if out.suffix not in FORMATS:
        raise OptionError(f"{out}: its name must end in {', '.join(FORMATS)}.")
    folders = list(paths)
    groups = group_runs(find_runs(folders))
    records.write_text(out, FORMATS[out.suffix](groups, find_missed(folders)))
    return groups


def find_missed(paths: Iterable[Path]) -> list[str]:
    """Say what was not run in folders of runs of one budget, since it could not meet it."""
    found: dict[Path, None] = {}
    for path in paths:
        found.update(dict.fromkeys(sorted(path.rglob(records.EQUAL))))
    sentences = []
    for path in found:
        equal = records.read_json(path)
        kind, missed = equal.get("kind", ""), [row for row in equal.get("runs", []) if not row["fits"]]
        needs = {row["method"]: f"{row['method']} ({format_cost(kind, row['cost'])})" for row in missed}
        if needs:
            budget = format_cost(kind, equal["budget"])
            sentences.append(f"Not run, as they need more than {budget} of {kind}: {', '.join(needs.values())}.")
    return sentences


def relevant(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out what two runs of a group may differ in, and what the method does not heed."""
    ignored = {DRAWS} if is_compressed(options.get("method", "")) else {DRAWS, SKETCH}
    return {
        name: value
        for name, value in options.items()
        if name not in OPTIONS
        or (OPTIONS[name].metadata["group"] not in ignored and heeds(options.get("method", ""), name))
    }


def _beyond_usual(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a run has by default: by its method and its preset."""
    given = {name: value for name, value in options.items() if name in {"method", "preset"}}
    try:
        usual = {**Experiment.of(given).options(), "method": None, "compression": None, "preset": "default"}
    except OptionError:  # of another version
        return options
    return {name: value for name, value in options.items() if usual.get(name) != value}


def _compression(options: dict[str, Any]) -> float:
    return float(options.get("compression", 1.0)) if is_compressed(options.get("method", "")) else 1.0


def _cell(column: Column, mean: float, deviation: float | None) -> str:
    if math.isnan(mean):
        return "–"
    written = column.write(mean)
    return written if not deviation else f"{written} ± {column.write(deviation)}"
