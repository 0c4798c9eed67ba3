"""Decide which layers of a model are sketched, and how: settings -> Plan."""

import dataclasses
import fnmatch
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from comfetch import hashing
from comfetch.errors import ModelError, OptionError
from comfetch.layers import REGISTRY, Recipe
from comfetch.plan import Geometry, Plan, WeightPlan
from comfetch.settings import Settings, is_count

SMALLEST = 8192
"""Weights below which the default policy leaves a layer full: sketching it would save next to nothing."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class Candidate:
    """A layer of a registered type: all its names, the layer, and its recipe or why it has none."""

    names: list[str]
    layer: nn.Module
    recipe: Recipe | str

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def weights(self) -> int:
        """Count the weights that would be sketched."""
        if isinstance(self.recipe, str):
            return 0
        return sum(math.prod(geo.shape) for geo in self.recipe.weights.values())


def make_plan(model: nn.Module, settings: Settings) -> Plan:
    """Plan how a model is sketched. Raise ModelError with every problem found; change nothing."""
    settings.check()
    problems = [
        f"{name}: a lazy parameter has no shape yet. Run one batch through the model first."
        for name, p in model.named_parameters()
        if isinstance(p, nn.parameter.UninitializedParameter)
    ]
    if problems:
        raise ModelError.of(problems)
    candidates, kept = find_candidates(model, settings, problems)
    chosen = _choose(model, candidates, settings, kept, problems)
    factors = _factors(chosen, settings)
    weights: dict[str, WeightPlan] = {}
    for candidate, factor in zip(chosen, factors, strict=True):
        if factor == 1 < max(factors):
            kept[candidate.name] = f"spread={settings.spread:g} leaves nothing to save"
            continue
        problems += [f"{candidate.name}: {problem}" for problem in _obstacles(candidate)]
        own = settings if settings.compression is None else dataclasses.replace(settings, compression=factor)
        _plan_layer(candidate, own, weights, kept, problems)
    if problems:
        raise ModelError.of(problems)
    if not weights:
        reasons = "".join(f"\n  {name or 'the model'}: {why}" for name, why in kept.items())
        raise ModelError(
            f"Nothing to sketch in this {type(model).__name__}.{reasons}\n"
            "Use policy='all' to sketch every supported layer, or name layers with only=[...]. "
            f"Supported types: {', '.join(sorted(t.__name__ for t in REGISTRY))}."
        )
    return Plan(weights, kept)


def find_candidates(
    model: nn.Module, settings: Settings, problems: list[str]
) -> tuple[list[Candidate], dict[str, str]]:
    """Find the layers of registered types, in the order of their registration, and those that look alike."""
    by_id: dict[int, Candidate] = {}
    inside: list[str] = []  # names below a registered layer belong to it
    kept: dict[str, str] = {}
    skipped = _patterns(settings.skip)
    for name, layer in model.named_modules(remove_duplicate=False):
        if any(name.startswith(prefix) for prefix in inside):
            continue
        if id(layer) in by_id:
            by_id[id(layer)].names.append(name)
        elif type(layer) in REGISTRY:
            try:
                recipe = REGISTRY[type(layer)](layer)
            except ModelError as error:
                recipe = f"cannot be sketched: {error}"
                if not _matches(name, skipped):
                    problems.append(f"{name}: {error}, e.g. skip=[{name!r}].")
            by_id[id(layer)] = Candidate([name], layer, recipe)
            inside.append(f"{name}." if name else "")
        elif any(isinstance(layer, known) for known in REGISTRY):
            parent = next(t.__name__ for t in REGISTRY if isinstance(layer, t))
            kept[name] = f"{type(layer).__name__} is a subclass of {parent}; sketch it by register_layer"
            size = sum(p.numel() for p in layer.parameters())
            if size >= SMALLEST and not _matches(name, skipped):
                warnings.warn(f"{name} stays full: {kept[name]}, or name it in skip.", stacklevel=4)
        if inside and inside[-1] == "":
            break
    return list(by_id.values()), kept


def _choose(
    model: nn.Module, candidates: list[Candidate], settings: Settings, kept: dict[str, str], problems: list[str]
) -> list[Candidate]:
    """Choose the layers to sketch by only, skip and policy, and note why each other one stays full."""
    names = [name for candidate in candidates for name in candidate.names] + list(kept)
    only = list(settings.length) if isinstance(settings.length, Mapping) else None
    if settings.only is not None:
        only = _patterns(settings.only)
    skip = _patterns(settings.skip)
    for option, patterns in (("only", only or []), ("skip", skip)):
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                known = ", ".join(names)
                problems.append(f"{option}: no layer is called {pattern!r}. Layers: {known}.")
    reasons: dict[str, str] = {}
    policy = _policy_reasons(model, candidates, settings) if only is None else {}
    for candidate in candidates:
        if isinstance(candidate.recipe, str):
            reasons[candidate.name] = candidate.recipe
        elif any(_matches(name, skip) for name in candidate.names):
            reasons[candidate.name] = "in skip"
        elif only is not None and not any(_matches(name, only) for name in candidate.names):
            reasons[candidate.name] = "not in only"
        elif candidate.name in policy:
            reasons[candidate.name] = policy[candidate.name]
    _keep_ties_together(model, candidates, reasons, only, problems)
    kept.update(reasons)
    return [c for c in candidates if c.name not in reasons]


def _policy_reasons(model: nn.Module, candidates: list[Candidate], settings: Settings) -> dict[str, str]:
    """Say which layers the policy leaves full, and why."""
    real = [c for c in candidates if isinstance(c.recipe, Recipe)]
    if not real or candidates[0].layer is model:
        return {}
    classifier = {c.name: "final classifier" for c in real[-1:] if isinstance(c.layer, nn.Linear)}
    if settings.policy != "default":
        return classifier if settings.policy == "paper" else {}
    reasons = {c.name: f"below {SMALLEST} weights" for c in real if c.weights() < SMALLEST}
    reasons.update({c.name: "1x1 shortcut" for c in real if _is_shortcut(c, real)})
    reasons.update(classifier)
    reasons[real[0].name] = "first layer"
    return reasons


def _is_shortcut(candidate: Candidate, candidates: list[Candidate]) -> bool:
    """Tell a 1×1 convolution that leads around its block: from its inputs to its outputs, past two or more others."""

    def is_conv(c: Candidate) -> bool:
        return isinstance(c.layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)

    layer: Any = candidate.layer
    if not is_conv(candidate) or set(layer.kernel_size) != {1}:
        return False
    scope = candidate.name
    while scope:
        scope = scope.rpartition(".")[0]
        block = [
            c for c in candidates if is_conv(c) and c is not candidate and c.name.startswith(scope and scope + ".")
        ]
        if block:
            first, last = block[0].layer, block[-1].layer
            ends = (first.in_channels, last.out_channels)
            return len(block) >= 2 and ends == (layer.in_channels, layer.out_channels)
    return False


def _keep_ties_together(
    model: nn.Module, candidates: list[Candidate], reasons: dict[str, str], only: list[str] | None, problems: list[str]
) -> None:
    """Leave full whatever shares a weight with something that stays full; refuse ties that cannot be kept."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for local, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{local}" if name else local)
    by_weight = {
        f"{c.name}.{weight}" if c.name else weight: c
        for c in candidates if isinstance(c.recipe, Recipe) for weight in c.recipe.weights
    }  # fmt: skip
    by_other = {
        f"{c.name}.{other}" if c.name else other: c
        for c in candidates if isinstance(c.recipe, Recipe)
        for other, _ in c.layer.named_parameters() if other not in c.recipe.weights
    }  # fmt: skip
    for names in owners.values():
        for name in names if len(names) > 1 else []:
            if name in by_other and by_other[name].name not in reasons:
                others = ", ".join(n for n in names if n != name)
                reasons[by_other[name].name] = f"its {name.rpartition('.')[2]} is also {others}"
                if only is not None:
                    problems.append(f"{by_other[name].name}: {reasons[by_other[name].name]}. Leave it full: skip it.")
    for names in owners.values():
        tied = [by_weight[n] for n in names if n in by_weight]
        if len(names) < 2 or not tied or all(c.name in reasons for c in tied):
            continue
        sketched = [c for c in tied if c.name not in reasons]
        if len(tied) < len(names) or len(sketched) < len(tied):
            rest = [n for n in names if n not in by_weight or by_weight[n].name in reasons]
            if only is not None:
                problems.append(f"{sketched[0].name} shares its weight with {', '.join(rest)}, which stays full.")
            for candidate in sketched:
                reasons[candidate.name] = f"tied to {', '.join(rest)}, which stays full"
        else:
            problems.append(
                f"{' and '.join(names)} are one weight, which two layers would sketch differently. "
                f"Leave it full: skip={[c.name for c in tied]}."
            )


def _obstacles(candidate: Candidate) -> list[str]:
    """Say what keeps a layer from being replaced."""
    problems = []
    if any(getattr(candidate.layer, hooks, None) for hooks in _HOOKS):
        problems.append("it has hooks, which its sketched twin would not run. Remove them, or skip it.")
    assert isinstance(candidate.recipe, Recipe)
    parameters = dict(candidate.layer.named_parameters())
    for weight in candidate.recipe.weights:
        if weight not in parameters:
            problems.append(f"its {weight} is not a parameter (weight_norm, pruning?). Remove that, or skip it.")
    return problems


def _factors(candidates: list[Candidate], settings: Settings) -> list[float]:
    """Return the compression of each layer: together they keep 1/compression of the weights (`spread_factors`)."""
    sizes = [candidate.weights() for candidate in candidates]
    return spread_factors(sizes, settings.compression or 1.0, settings.spread)


def spread_factors(sizes: Sequence[int], compression: float, spread: float) -> list[float]:
    """Return a compression for each layer of n weights: f ∝ n^spread, at least 1, with Σ n/f = Σ n / compression.

    >>> spread_factors([100, 10000], 10, 0.0), spread_factors([100, 10000], 10, 0.5)
    ([10, 10], [1.08..., 10.89...])
    """
    if not spread or compression == 1:
        return [compression] * len(sizes)
    full: set[int] = set()
    while True:
        budget = sum(sizes) / compression - sum(sizes[i] for i in full)
        unit = budget / sum(n ** (1 - spread) for i, n in enumerate(sizes) if i not in full)
        factors = [1.0 if i in full else n**spread / unit for i, n in enumerate(sizes)]
        above = {i for i, factor in enumerate(factors) if factor <= 1}
        if above == full or len(above) == len(sizes):  # all: a compression that is 1 up to rounding
            return [round(max(1.0, factor), 9) for factor in factors]
        full = above


def _plan_layer(
    candidate: Candidate, settings: Settings, weights: dict[str, WeightPlan], kept: dict[str, str], problems: list[str]
) -> None:
    """Plan every weight of one layer, under all of its names."""
    assert isinstance(candidate.recipe, Recipe)
    geometries = candidate.recipe.weights
    if isinstance(settings.length, int) and not any(_is_shortened(g, settings) for g in geometries.values()):
        kept[candidate.name] = f"length {settings.length} is not below its size"
        return
    for weight, geometry in geometries.items():
        names = [f"{name}.{weight}" if name else weight for name in candidate.names]
        try:
            lengths = _lengths(candidate.names, geometry, settings)
        except OptionError as error:
            problems.append(f"{names[0]}: {error}")
            continue
        plan = WeightPlan(
            geometry=geometry, mode=settings.mode, length=lengths, rows=settings.rows,
            blocks=_blocks(geometry, lengths, settings), hash=settings.hash, scale=settings.scale,
            key=hashing.fold(settings.key, names[0]),
        )  # fmt: skip
        weights.update(dict.fromkeys(names, plan))


def _is_shortened(geometry: Geometry, settings: Settings) -> bool:
    """Tell whether a length for all layers fits into a sketched mode of this weight."""
    assert isinstance(settings.length, int)
    sizes = {"output": geometry.outputs, "input": geometry.inputs, "both": max(geometry.outputs, geometry.inputs)}
    return settings.length <= sizes[settings.mode]


def _lengths(names: list[str], geometry: Geometry, settings: Settings) -> tuple[int, int]:
    """Return the lengths of the output and input mode. A length for all layers is at most a mode's size."""
    sizes = (geometry.outputs, geometry.inputs)
    sketched = (settings.mode != "input", settings.mode != "output")
    wanted: tuple[Any, ...]
    if settings.length is None:
        factor = settings.compression or 1.0
        if settings.mode == "both":
            factor = math.sqrt(factor)
        exact = settings.policy == "paper"
        wanted = tuple(shorten(size, factor, exact) for size in sizes)
    elif isinstance(settings.length, int):
        wanted = tuple(min(size, settings.length) for size in sizes)
    else:
        given = [v for pattern, v in settings.length.items() if any(fnmatch.fnmatch(n, pattern) for n in names)]
        if not given:
            raise OptionError("length says nothing about it. Name it there, too, or leave it out of only.")
        wanted = given[0] if isinstance(given[0], tuple) else (given[0], given[0])
        for size, length, side, yes in zip(sizes, wanted, ("outputs", "inputs"), sketched, strict=True):
            if yes and not (is_count(length) and length <= size):
                raise OptionError(f"length {length!r} is not between 1 and {size}, the number of its {side}.")
    return (wanted[0] if sketched[0] else sizes[0], wanted[1] if sketched[1] else sizes[1])


def shorten(size: int, compression: float, exact: bool = False) -> int:
    """Return the length for a compression: size/compression, at least 1.

    Lengths of 8 and more become multiples of 8, where kernels are fast, unless `exact` (the paper's
    ⌊size/compression⌋).

    >>> shorten(512, 10), shorten(512, 10, exact=True), shorten(64, 10)
    (48, 51, 6)
    """
    length = size / compression
    if compression == 1 or exact or length < 8:
        return max(1, math.floor(length + 1e-9))
    return min(size, 8 * max(1, math.floor(length / 8 + 0.5)))


def _blocks(geometry: Geometry, lengths: tuple[int, int], settings: Settings) -> int:
    """Return the divisor of the other side that is nearest to the blocks asked for, the smaller at a tie."""
    if settings.mode == "both":
        return 1
    if settings.mode == "output":
        other, factor = geometry.inputs, geometry.outputs / lengths[0]
    else:
        other, factor = geometry.outputs, geometry.inputs / lengths[1]
    if settings.blocks != "auto":
        wanted = float(settings.blocks)
    else:
        wanted = factor if settings.compression is None else settings.compression
    return min((n for n in range(1, other + 1) if other % n == 0), key=lambda n: (abs(n - wanted), n))


def _patterns(names: str | Iterable[str] | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
