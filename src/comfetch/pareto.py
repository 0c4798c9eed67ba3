"""Say which run wins where: accuracy against bytes, memory and seconds, and the front of those that none beats."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from comfetch.api import parse_bytes
from comfetch.errors import OptionError
from comfetch.footprint import format_bytes
from comfetch.report import Group, Run

CLOSE = 0.05
"""A run sized to a budget stands at it, if it is so near: settings have steps, and measures differ a little."""
TOLD = 2
"""So many runs are named after the best."""
MOST = 6
"""So many places of a front are told one by one."""


FRONT = (
    "Filled points are on the front: no other run is both cheaper and better. The line is the best accuracy up to each "
    "cost; a run is beaten if another one is no dearer and no worse, and better in one of both. Seconds are those of "
    "the machine that ran them."
)


@dataclass(frozen=True)
class Axis:
    """What accuracy is held against."""

    name: str
    title: str
    measure: Callable[[Run], float]
    write: Callable[[float], str]
    less: str = "smaller"
    per: str = ""


def exchange_bytes(run: Run) -> float:
    """Return what a client gets and sends in a round, on average."""
    exchanges = sum(record.get("clients", 1) for record in run.rounds)
    return (run.total("bytes_down") + run.total("bytes_up")) / max(1, exchanges)


AXES = (
    Axis("bytes", "bytes of a client in a round", exchange_bytes, format_bytes, per=" a round"),
    Axis("memory", "memory of a client", lambda run: run.memory(), format_bytes),
    Axis("seconds", "seconds of the run", lambda run: run.total("seconds"), lambda x: f"{x:.3g} s", "faster"),
)


@dataclass(frozen=True)
class Point:
    """One group of runs: what it costs, its accuracy in percent, and how far its seeds spread."""

    label: str
    cost: float
    accuracy: float
    spread: float | None = None

    def beats(self, other: "Point") -> bool:
        """Tell whether it is no dearer and no worse than another, and one of both better."""
        as_good = self.cost <= other.cost and self.accuracy >= other.accuracy
        return as_good and (self.cost, self.accuracy) != (other.cost, other.accuracy)


def points(groups: Sequence[Group], axis: Axis) -> list[Point]:
    """Place groups of runs on an axis."""
    found = []
    for group, name in zip(groups, short_labels(groups), strict=True):
        cost, _ = group.values(axis.measure)
        accuracy, spread = group.values(lambda run: 100 * run.last("accuracy"))
        budget = sized_to(group.runs[0], axis.name)
        if budget is not None and abs(cost / budget - 1) <= CLOSE:
            cost = budget
        found.append(Point(name, cost, accuracy, spread))
    return found


def sized_to(run: Run, kind: str) -> float | None:
    """Return the budget of a kind that a run was sized to, if it was."""
    found, number = [*str(run.options.get("equal", "")).split(), "", ""][:2]
    try:
        return parse_bytes(number) if found == kind else None
    except OptionError:
        return None


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats, from cheap to dear.

    >>> [p.label for p in front([Point("a", 1, 50), Point("b", 2, 40), Point("c", 3, 60)])]
    ['a', 'c']
    """
    best, found = -math.inf, list[Point]()
    for point in sorted(points, key=lambda p: (p.cost, -p.accuracy)):
        same = bool(found) and (point.cost, point.accuracy) == (found[-1].cost, found[-1].accuracy)
        if point.accuracy > best or same:
            found.append(point)
            best = max(best, point.accuracy)
    return found


def short_labels(groups: Sequence[Group]) -> list[str]:
    """Call each group by its method, with as much besides as tells it from the others."""
    parts = [group.label.split(", ") for group in groups]
    names = [first.rsplit(" ", 1)[0] if first.endswith("×") else first for first, *_ in parts]
    for tries in ([first for first, *_ in parts], [group.label for group in groups]):
        names = [name if names.count(name) == 1 else longer for name, longer in zip(names, tries, strict=True)]
    return names


def by_task(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Part groups by their task; one that stands alone has nothing to be compared with."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(str(group.runs[0].options.get("task", "?")), []).append(group)
    return {task: members for task, members in found.items() if len(members) > 1}


def verdicts(groups: Sequence[Group]) -> list[tuple[Axis, list[str]]]:
    """Say for each axis which run wins where, in sentences."""
    return [(axis, _sentences(points(groups, axis), axis)) for axis in AXES]


def _sentences(found: list[Point], axis: Axis) -> list[str]:
    best = front(found)
    told = list({point.cost: point for point in best}.values())
    shown = told if len(told) <= MOST else [*told[: MOST - 1], told[-1]]
    sentences = [_ranking([p for p in found if p.cost <= place.cost], place.cost, axis) for place in shown]
    sentences.append(f"No run is both {axis.less} and better than {_and([point.label for point in best])}.")
    beaten = [point for point in found if any(other.beats(point) for other in found)]
    if beaten:
        who = _and([point.label for point in beaten]) if len(beaten) < MOST else f"The {len(beaten)} others"
        sentences.append(f"{who} {'is' if len(beaten) == 1 else 'are'} beaten.")
    return sentences


def _ranking(affordable: list[Point], cost: float, axis: Axis) -> str:
    """Say who is best among the runs that cost at most so much."""
    first, *others = sorted(affordable, key=lambda p: (-p.accuracy, p.cost))
    text = f"At {axis.write(cost)}{axis.per} {first.label} is best ({_percent(first)})"
    then = [f"{p.label} ({_percent(p)}{_apart(first, p)})" for p in others[:TOLD]]
    if len(others) > TOLD:
        then.append(f"{len(others) - TOLD} more")
    return f"{text}, then {_and(then)}." if then else f"{text}; all others need more."


def _percent(point: Point) -> str:
    return f"{point.accuracy:.1f}" + (f" ± {point.spread:.1f}" if point.spread else "")


def _apart(first: Point, other: Point) -> str:
    """Warn of a difference that is within the spread of the seeds."""
    if first.spread is None or other.spread is None:
        return ""
    return ", within the spread" if first.accuracy - other.accuracy <= math.hypot(first.spread, other.spread) else ""


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
