"""Say which one setting makes a method larger or smaller, and which values it has."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comfetch.experiment import Experiment, read_method_options
from comfetch.methods import METHODS

LEVELS = (1, 7, 127)
"""Levels that make full use of 2, 4 and 8 bits; those between cost as much as the next of them."""
RANKS = range(1, 4097)
LARGEST_COMPRESSION, SMALLEST_FRACTION = 5, -6
"""Powers of ten."""


@functools.cache
def three_digits(lowest: int, highest: int) -> tuple[float, ...]:
    """Return all numbers of three significant digits from one power of ten to another.

    >>> three_digits(0, 1)[:2], three_digits(0, 1)[-2:], len(three_digits(0, 1))
    ((1.0, 1.01), (9.99, 10.0), 901)
    """
    powers = range(lowest, highest)
    return (*(float(f"{m}e{power - 2}") for power in powers for m in range(100, 1000)), float(f"1e{highest}"))


@dataclass(frozen=True)
class Knob:
    """The setting that makes a method's clients larger or smaller.

    Args:
        name: how it is called. settings: its values, from small clients to large ones.
        options: names of the options that are set to it; those of the method itself, unless it is the compression.
        ratio: `fraction` is set to ratio / compression, too, where a method has both.
    """

    name: str
    settings: Sequence[float]
    options: tuple[str, ...] = ()
    ratio: float | None = None

    def size(self, place: int) -> float:
        """Return how large clients are at a place, in units of their own."""
        return self.settings[place] if self.options else 1 / self.settings[place]

    def set(self, experiment: Experiment, setting: float) -> Experiment:
        """Return the experiment at a setting."""
        own = read_method_options(experiment.method_options or "")
        if self.options:
            return dataclasses.replace(
                experiment, method_options=_written({**own, **dict.fromkeys(self.options, setting)})
            )
        own.pop("compression", None)
        if self.ratio is not None:
            own["fraction"] = min(1.0, float(f"{self.ratio / setting:.3g}"))
        return dataclasses.replace(experiment, compression=float(setting), method_options=_written(own))


def knob_of(experiment: Experiment) -> Knob | None:
    """Return the knob of an experiment's method; None if it has none, or if something else decides its size."""
    kind = METHODS[experiment.method]
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    own = read_method_options(experiment.method_options or "")
    if ("capacities" in fields and experiment.capacities is not None) or own.get("weights") is not None:
        return None
    if "compression" in fields:
        return Knob("compression", three_digits(0, LARGEST_COMPRESSION)[::-1], ratio=_ratio(experiment, fields, own))
    compressor = own.get("compressor", fields["compressor"].default) if "compressor" in fields else None
    if "fraction" in fields and compressor in (None, "top_k"):
        return Knob("fraction", three_digits(SMALLEST_FRACTION, 0), ("fraction",))
    if "levels" in fields and compressor in (None, "quantise"):
        return Knob("levels", LEVELS, ("levels",))
    if "down_levels" in fields:
        return Knob("levels", LEVELS, ("down_levels", "up_levels"))
    return Knob("rank", RANKS, ("rank",)) if "rank" in fields else None


def _ratio(experiment: Experiment, fields: dict[str, Any], own: dict[str, Any]) -> float | None:
    """Return fraction · compression as they were given, or as the method has them by default."""
    if "fraction" not in fields:
        return None
    if "fraction" in own:
        return float(own["fraction"] * own.get("compression", experiment.compression))
    return float(fields["fraction"].default * fields["compression"].default)


def _written(own: dict[str, Any]) -> str | None:
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in own.items()) or None
