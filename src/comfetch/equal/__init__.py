"""Compare methods on equal terms: size each to one budget of bytes, client memory or client work."""

import bisect
import dataclasses
import math
import re
from dataclasses import dataclass

from comfetch.api import parse_bytes
from comfetch.equal.costs import KINDS, Meter, check_kind, format_cost
from comfetch.equal.knobs import Knob, knob_of
from comfetch.errors import ModelError, OptionError
from comfetch.experiment import CLIENTS, FEDERATION, TASK, Experiment
from comfetch.methods import METHODS

__all__ = ["KINDS", "Knob", "Meter", "Sized", "check_kind", "format_cost", "knob_of", "read_budget", "size_to"]

STEP = 4
"""Factor between the sizes that are tried first."""


@dataclass(frozen=True)
class Sized:
    """An experiment at the largest setting whose cost is within a budget, or at its smallest, if none is.

    Args:
        setting: what its knob was set to, such as "compression 9.7"; or why nothing was set.
    """

    experiment: Experiment
    kind: str
    budget: float
    cost: int
    setting: str

    @property
    def fits(self) -> bool:
        """Tell whether the budget is met."""
        return self.cost <= self.budget

    @property
    def verdict(self) -> str:
        """Say how it stands to the budget."""
        if self.fits:
            return self.setting
        over, budget = format_cost(self.kind, self.cost), format_cost(self.kind, self.budget)
        return f"cannot meet {budget}: needs {over} ({self.setting}{_hint(self)})"


def size_to(experiment: Experiment, budget: float, kind: str, meter: Meter | None = None) -> Sized:
    """Find the setting of a method's knob whose cost is the largest within a budget.

    The own setting of the experiment stays if it costs as much as the best, or if its knob does not change the cost.

    Args:
        kind: of cost, one of `KINDS`. meter: what measures, and remembers what it has measured.
    """
    check_kind(kind)
    meter = meter or Meter()
    knob = knob_of(experiment)
    if knob is None:
        return Sized(experiment, kind, budget, meter.cost(experiment, kind), "nothing to set")
    search, last = _Search(experiment, knob, kind, budget, meter), len(knob.settings) - 1
    own = search.own()
    if own is not None and own == search.at(last) == search.at(0):
        return Sized(experiment, kind, budget, own, f"{knob.name} does not change it")
    place = search.largest(last)
    if own is not None and own == search.at(place):
        return Sized(experiment, kind, budget, own, "as given")
    place = search.roundest(place)
    setting = f"{knob.name} {knob.settings[place]:g}"
    return Sized(knob.set(experiment, knob.settings[place]), kind, budget, int(search.at(place)), setting)


@dataclass(frozen=True)
class _Search:
    """Search the settings of a knob, which go from small clients to large ones."""

    experiment: Experiment
    knob: Knob
    kind: str
    budget: float
    meter: Meter

    def own(self) -> int | None:
        """Return the cost of the experiment as it is; None if it cannot be made."""
        try:
            return self.meter.cost(self.experiment, self.kind)
        except (ModelError, OptionError):
            return None

    def at(self, place: int) -> float:
        """Return the cost at a place; below 0 where a model is too small to be made, infinite where too large."""
        try:
            return self.meter.cost(self.knob.set(self.experiment, self.knob.settings[place]), self.kind)
        except OptionError:
            return -1
        except ModelError:
            return math.inf

    def largest(self, last: int) -> int:
        """Return the last place that does not exceed the budget; if all do, the cheapest that was found.

        From the large end on: the smallest sketches need more memory again, for more blocks, each with its hash.
        """
        if self.kind != "memory" and self.at(last) > self.budget and self.at(0) > self.budget:
            return 0
        high = last
        for low in self._steps(last):
            if self.at(low) <= self.budget:
                place = low if low == last else self._between(low, high)
                return place if self.at(place) >= 0 else place + 1  # all that could be made exceed it
            high = low
        return min(self._steps(last), key=self.at)

    def roundest(self, place: int) -> int:
        """Return the place of a shorter number that costs as much, if there is one."""
        for digits in (1, 2):
            power = math.floor(math.log10(self.knob.settings[place])) - digits + 1
            unit = self.knob.settings[place] / 10**power
            shorter = float(f"{math.floor(unit) if self.knob.options else math.ceil(unit)}e{power}")
            if shorter in self.knob.settings and self.at(self.knob.settings.index(shorter)) == self.at(place):
                return self.knob.settings.index(shorter)
        return place

    def _steps(self, last: int) -> list[int]:
        """Return places from the large end to the small one, each a quarter of the size of the one before."""
        wanted, steps = self.knob.size(last), []
        for place in range(last, -1, -1):
            if place in (0, last) or self.knob.size(place) <= wanted:
                steps.append(place)
                wanted = self.knob.size(place) / STEP
        return steps

    def _between(self, low: int, high: int) -> int:
        """Return the last place that fits, between one that does and one that does not.

        Costs are nearly linear in the size, so the place is guessed; every third time it is halved.
        """
        tries = 0
        while high - low > 1:
            tries += 1
            cheap, dear = max(0.0, self.at(low)), self.at(high)
            middle = (low + high) // 2
            if tries % 3 and math.isfinite(dear) and dear > cheap:
                part = (self.budget - cheap) / (dear - cheap)
                size = self.knob.size(low) + part * (self.knob.size(high) - self.knob.size(low))
                guess = bisect.bisect_right(range(low, high), size, key=self.knob.size) + low - 1
                middle = min(max(guess, low + 1), high - 1)
            low, high = (middle, high) if self.at(middle) <= self.budget else (low, middle)
        return low


def read_budget(text: str, experiment: Experiment, kind: str, meter: Meter | None = None) -> float:
    """Read a budget: a number with a unit, such as 300kB, or what a method costs, such as comfetch@10 or fedavg.

    The method stands in the task, federation and local training of the experiment, with its own defaults besides.
    """
    check_kind(kind)
    name, _, setting = (part.strip() for part in text.partition("@"))
    if name in METHODS:
        return (meter or Meter()).cost(_reference(name, setting, experiment), kind)
    if "@" in text:
        raise OptionError(f"budget={text!r}: {name!r} is no method. Choose one of: {', '.join(METHODS)}.")
    if kind != "flops":
        try:
            return parse_bytes(text)
        except OptionError as error:
            raise OptionError(f"{error} Or name a method, such as comfetch@10.") from error
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:flops?)?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise OptionError(f"budget={text!r} is not a number of operations. Write, for example, 3GFLOP or comfetch@10.")
    return float(match[1]) * 1000.0 ** " kmgt".index(match[2].lower() or " ")


def _reference(method: str, setting: str, experiment: Experiment) -> Experiment:
    """Return the experiment that a budget such as comfetch@10 names."""
    groups = (TASK, FEDERATION, CLIENTS)
    told = {
        f.name: getattr(experiment, f.name) for f in dataclasses.fields(Experiment) if f.metadata["group"] in groups
    }
    made = Experiment.of({**told, "method": method, "method_options": None, "preset": "default"})
    if not setting:
        return made
    knob = knob_of(made)
    if knob is None:
        raise OptionError(f"budget={method}@{setting}: {method} has no setting of its size. Write {method} alone.")
    try:
        value = float(setting) if isinstance(knob.settings[0], float) else int(setting)
    except ValueError as error:
        raise OptionError(f"budget={method}@{setting}: {setting!r} is no {knob.name}. Write a number.") from error
    return knob.set(made, value)


def _hint(sized: Sized) -> str:
    """Say what else would make a method smaller."""
    method = sized.experiment.make_method()
    return (
        "; 'changes = true' sends less" if sized.kind == "bytes" and getattr(method, "changes", None) is False else ""
    )
