"""Turn a PyTorch model into one whose weights exist only as count sketches."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from comfetch.blueprint import Blueprint, blueprint
from comfetch.convert import swap, swap_fresh, swap_given
from comfetch.errors import ModelError, OptionError
from comfetch.footprint import check_optimiser, count, format_bytes, meta_model
from comfetch.layers import SketchedLayer, meta_copy
from comfetch.plan import Plan
from comfetch.policy import make_plan
from comfetch.settings import Length, Settings

DEFAULT_COMPRESSION = 4


def sketch(
    model_or_constructor: nn.Module | Callable[[], nn.Module],
    *,
    compression: float | None = None,
    length: Length | None = None,
    budget: int | str | None = None,
    key: int = 0,
    mode: str = "output",
    rows: int = 1,
    blocks: int | str = "auto",
    hash: str = "balanced",
    scale: str = "mean",
    policy: str = "default",
    spread: float = 0.0,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    batch: Any = None,
    optimiser: str = "adam",
) -> nn.Module:
    """Return the model with its layers swapped for sketched ones; the model given stays as it is.

    Give a constructor to train from scratch: the model is built without its full weights, and the small ones start
    with the variance of the full ones. The weights of a model given are projected, and a warning says how much of
    them is lost. Make the optimiser after sketching: one made before still holds the parameters of the old model.

    Args:
        compression: factor by which each sketched weight shrinks (the default is 4). length: the length itself, for all
            layers or by layer name. budget: bytes, or text such as "256MB", for a whole training step on `batch` with
            `optimiser`; the smallest compression that fits is taken. At most one of the three.
        key: what the hashes are drawn from; the same key gives the same hashes everywhere. mode: sketch the outputs,
        the inputs or both (each by the square root of the compression). rows: independent sketches of each weight,
        whose outputs' median is taken; k rows cost k times as much. blocks: parts of the other mode with a hash of
        their own; "auto" takes about as many as the compression. hash: balanced or random. scale: mean, isometric or
        count (see `comfetch.sketching`). policy: "default" leaves full what is small or fragile: the first layer, the
        final classifier, 1x1 shortcuts, and
            layers below 8192 weights. "all" sketches every supported layer. "paper" sketches all but the final linear
            layer, with lengths rounded down instead of to multiples of 8.
        spread: how much harder large layers are compressed than small ones, at the same number of weights in all: a
            layer of n weights by a factor proportional to n^spread. 0 compresses all alike; 0.5 is often more accurate,
            for more work: early layers, small but applied at many places, keep more.
        only, skip: names or patterns of layers to sketch, whatever the policy says, and to leave full.

    >>> model = sketch(lambda: nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 256), nn.Linear(256, 2)), compression=4)
    >>> model[1].weight.shape
    torch.Size([64, 64])
    """
    built = _built(model_or_constructor)
    settings = Settings(compression, length, key, mode, rows, blocks, hash, scale, policy, spread, only, skip)
    plan = _plan(built.model, settings, budget, batch, optimiser)
    return swap_given(built.model, plan) if isinstance(model_or_constructor, nn.Module) else swap_fresh(built, plan)


def plan_for(model_or_constructor: nn.Module | Callable[[], nn.Module], settings: Settings) -> tuple[Plan, Blueprint]:
    """Plan a sketch without making it; the blueprint has the model, without its weights if a constructor was given."""
    built = _built(model_or_constructor)
    return _plan(built.model, settings, None, None, "adam"), built


def parse_bytes(budget: int | str) -> int:
    """Read a number of bytes: an integer, or text with a unit (kB, MB, GB are powers of 1000; KiB, MiB, GiB of 1024).

    >>> parse_bytes("256MB"), parse_bytes("1 KiB"), parse_bytes(7)
    (256000000, 1024, 7)
    """
    powers = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", str(budget), re.IGNORECASE)
    if isinstance(budget, bool) or not match or float(match[1]) <= 0:
        raise OptionError(f"budget={budget!r} is not a number of bytes. Write, for example, 256MB.")
    return int(float(match[1]) * powers[(match[2] or "").lower()])


def _built(model_or_constructor: nn.Module | Callable[[], nn.Module]) -> Blueprint:
    if isinstance(model_or_constructor, nn.Module):
        built = Blueprint(model_or_constructor)
    elif callable(model_or_constructor):
        built = blueprint(model_or_constructor)
    else:
        raise TypeError(f"sketch() takes a model or its constructor, not a {type(model_or_constructor).__name__}.")
    if any(isinstance(m, SketchedLayer) for m in built.model.modules()):
        raise ModelError("This model is sketched already. Sketch the full model, or unsketch it first.")
    return built


def _plan(model: nn.Module, settings: Settings, budget: int | str | None, batch: Any, optimiser: str) -> Plan:
    sizes = {"compression": settings.compression, "length": settings.length, "budget": budget}
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} were given together. Give one of them.")
    check_optimiser(optimiser)
    if budget is not None:
        return _plan_for_budget(model, settings, parse_bytes(budget), batch, optimiser)
    if settings.length is None and settings.compression is None:
        settings = replace(settings, compression=DEFAULT_COMPRESSION)
    return make_plan(model, settings)


def _plan_for_budget(model: nn.Module, settings: Settings, budget: int, batch: Any, optimiser: str) -> Plan:
    """Find the smallest compression whose predicted training step fits the budget, to 1 % of the compression."""
    if batch is None:
        raise OptionError("budget needs batch: the example input whose activations are to fit, too.")
    cost: dict[float, tuple[int, Plan]] = {}

    def fits(compression: float) -> bool:
        plan = make_plan(model, replace(settings, compression=compression))
        small = swap(meta_copy(model), plan, lambda *_: None)
        cost[compression] = (count(meta_model(small), batch, optimiser).total, plan)
        return cost[compression][0] <= budget

    if fits(1.0):
        return cost[1.0][1]
    longest = max(max(plan.length) for plan in cost[1.0][1].values())
    limit = 2 * (longest**2 if settings.mode == "both" else longest)
    low, high, step = 1.0, 2.0, 2.0
    while not fits(high):
        low, high = high, high * step
        if high > limit and step == 2.0:  # bytes do not fall steadily: more blocks have more hashes
            low, high, step = 1.0, 2.0**0.25, 2.0**0.25
        elif high > limit:
            least = min(total for total, _ in cost.values())
            raise OptionError(
                f"budget={format_bytes(budget)} is below the floor of this model: its activations on this batch and "
                f"the layers that stay full need at least {least} bytes ({format_bytes(least)}) at any compression."
            )
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return cost[high][1]
