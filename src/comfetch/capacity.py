"""Clients of different size: one plan for each capacity class, nested, so that a class's sketch is a fold of a larger.

A capacity is a compression, 1 being the full model. All classes share keys and blocks, those of the smallest class, and
their lengths form a chain of divisors (docs/mathematics.md, 9 and 18). So their subspaces are nested, V₁ ⊃ V₂ ⊃ …, and
each level of them, V_l without V_(l+1), is averaged over the clients that cover it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from comfetch.errors import OptionError
from comfetch.plan import MODES, Plan, WeightPlan
from comfetch.settings import Settings, check_compression


def check_capacities(capacities: Sequence[float], settings: Settings) -> tuple[float, ...]:
    """Return the capacities in order, or say which nearest ones work."""
    if not capacities:
        raise OptionError("capacities is empty. Give at least one compression, for example 1,2,4,8.")
    for capacity in capacities:
        check_compression(capacity)
    ordered = tuple(sorted({float(capacity) for capacity in capacities}))
    power = 0.5 if settings.mode == "both" else 1.0
    works = nearest_chain(ordered, power)
    if works != ordered:
        why = "squares of whole numbers (mode both divides each side by the root)" if power < 1 else "whole numbers"
        raise OptionError(
            f"capacities={format_capacities(ordered)}: a sketch folds if lengths divide each other, so the factors "
            f"from one to the next above 1 must be {why}. The nearest that work: {format_capacities(works)}."
        )
    if len(ordered) > 1:
        for name, value, wanted in (
            ("scale", settings.scale, ("mean", "isometric")), ("hash", settings.hash, ("balanced",)),
            ("rows", settings.rows, (1,)),
        ):  # fmt: skip
            if value not in wanted:
                choices = " or ".join(repr(choice) for choice in wanted)
                raise OptionError(f"{name}={value!r}: classes of different capacity need {choices}.")
    return ordered


def nearest_chain(capacities: Sequence[float], power: float = 1.0) -> tuple[float, ...]:
    """Return the nearest capacities whose factors, from one above 1 to the next, are whole numbers to 1/`power`.

    >>> nearest_chain([1, 2, 3, 10])
    (1.0, 2.0, 4.0, 12.0)
    """
    above = [capacity for capacity in capacities if capacity > 1]
    chain = above[:1]
    for capacity in above[1:]:
        factor = max(2, math.floor((capacity / chain[-1]) ** power + 0.5))
        chain.append(chain[-1] * round(factor ** (1 / power)))
    return (*(1.0 for capacity in capacities if capacity == 1), *(float(capacity) for capacity in chain))


def capacity_plans(smallest: Plan, capacities: Sequence[float]) -> dict[float, Plan]:
    """Lengthen the plan of the smallest class for the others; the full class sketches nothing."""
    least = max(capacities)
    plans = {}
    for capacity in capacities:
        if capacity == 1:
            plans[capacity] = Plan({})
        else:
            factor = least / capacity
            weights = {name: _lengthen(name, plan, factor, capacity) for name, plan in smallest.items()}
            plans[capacity] = Plan(weights, smallest.kept)
    return plans


def average_levels(name: str, plans: Mapping[float, Plan], updates: Mapping[float, tuple[Tensor, float]]) -> Tensor:
    """Average lifted updates of classes: Δ = Σ_l (P_l − P_(l+1)) · mean of the updates of classes that cover level l.

    Args:
        plans: the plan of every class. updates: by class, the mean update in full shape and the weight of its clients.
    """
    levels = sorted(plans)
    total = result = torch.zeros_like(next(iter(updates.values()))[0])
    weight = 0.0
    for level, following in zip(levels, [*levels[1:], None], strict=True):
        if level in updates:
            update, clients = updates[level]
            total = total + clients * update
            weight += clients
        if weight:
            mean = total / weight
            covered = _project(plans[level], name, mean)
            result = result + (covered if following is None else covered - _project(plans[following], name, mean))
    return result


def format_capacities(capacities: Sequence[float]) -> str:
    """Write capacities as they are given.

    >>> format_capacities((1.0, 2.5))
    '1,2.5'
    """
    return ",".join(f"{capacity:g}" for capacity in capacities)


def parse_capacities(text: str) -> tuple[float, ...]:
    """Read capacities from text such as "1,2,4,8"."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(f"capacities={text!r} is not a list of numbers. Write, for example, 1,2,4,8.") from error


def _lengthen(name: str, plan: WeightPlan, factor: float, capacity: float) -> WeightPlan:
    """Make a plan's lengths longer by a factor, on each of its sketched sides."""
    each = round(factor ** (1 / len(plan.sides)))
    out, inp = (length * (each if side in plan.sides else 1) for side, length in zip(MODES, plan.length, strict=False))
    if out > plan.geometry.outputs or inp > plan.geometry.inputs:
        raise OptionError(
            f"capacities: {name} would have the length {max(out, inp)} in class {capacity:g}, above its size. "
            "Leave out the class, give it a larger compression, or set spread=0."
        )
    return dataclasses.replace(plan, length=(out, inp))


def _project(plan: Plan, name: str, full: Tensor) -> Tensor:
    return plan[name].unsketch(plan[name].sketch(full)) if name in plan.weights else full
