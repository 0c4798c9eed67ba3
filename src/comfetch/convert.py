"""Swap the layers of a model for their sketched twins, and back."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from comfetch.blueprint import Blueprint, materialise
from comfetch.errors import MismatchError, ModelError
from comfetch.layers import REGISTRY, Recipe, SketchedLayer
from comfetch.layers.parents import guard, unguard
from comfetch.plan import Plan, WeightPlan

Fill = Callable[[str, Tensor, WeightPlan | None, Tensor], None]
"""Fill (name, full tensor, plan or None, the small layer's tensor)."""


def swap(model: nn.Module, plan: Plan, fill: Fill, kept: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of the model with every planned layer swapped. The model itself stays as it is.

    Layers are swapped by identity while copying, so shared layers stay shared, wherever they are referred to.
    """
    memo: dict[int, Any] = dict(kept or {})
    unknown = set(plan)
    for name, layer in model.named_modules(remove_duplicate=False):
        if type(layer) not in REGISTRY:
            continue
        prefix = f"{name}." if name else ""
        local = {w.removeprefix(prefix): p for w, p in plan.items() if w.startswith(prefix)}
        if not local:
            continue
        recipe = REGISTRY[type(layer)](layer)
        if not isinstance(recipe, Recipe) or not set(recipe.weights) <= set(local):
            continue
        plans = {weight: local[weight] for weight in recipe.weights}
        unknown -= {prefix + weight for weight in plans}
        if id(layer) not in memo:
            _check_shapes(prefix, recipe, plans)
            small = recipe.build(layer, plans)
            full = dict(layer.named_parameters(remove_duplicate=False))
            for weight, target in small.named_parameters(remove_duplicate=False):
                fill(prefix + weight, full[weight], plans.get(weight), target.data)
            memo[id(layer)] = small
    if unknown:
        raise MismatchError(f"The plan names weights that this model does not have: {', '.join(sorted(unknown))}.")
    result: nn.Module = copy.deepcopy(model, memo)
    result.__dict__["_comfetch_kept"] = dict(plan.kept)
    guard(result)
    return result


def swap_given(model: nn.Module, plan: Plan) -> nn.Module:
    """Swap layers whose weights exist: project them, and warn how much of them is lost."""
    lost = total = 0.0

    def fill(name: str, full: Tensor, weight_plan: WeightPlan | None, target: Tensor) -> None:
        nonlocal lost, total
        if weight_plan is None:
            target.copy_(full)
            return
        small = weight_plan.sketch(full.detach())
        target.copy_(small)
        total += float(full.detach().square().sum())
        lost += float((weight_plan.unsketch(small) - full).detach().square().sum())

    result = swap(model, plan, fill)
    if total and lost / total > 1e-6:
        warnings.warn(
            f"Sketching lost {lost / total:.0%} of the energy of the weights given (squared norm). For a model that is "
            "not trained yet, give sketch() its constructor instead: fresh weights are scaled to keep their variance.",
            stacklevel=3,
        )
    return result


def swap_fresh(built: Blueprint, plan: Plan) -> nn.Module:
    """Swap layers whose weights do not exist, and draw small ones that keep variances (docs/mathematics.md, 8)."""
    problems: list[str] = []
    unlike: list[str] = []

    def fill(name: str, full: Tensor, weight_plan: WeightPlan | None, target: Tensor) -> None:
        if weight_plan is None:
            target.copy_(materialise(built, full, name, problems) if full.is_meta else full)
        elif not full.is_meta:
            target.copy_(weight_plan.sketch(weight_plan.fresh(full.detach())))
        else:
            if not built.initialise(full, target):
                unlike.append(name)
                nn.init.uniform_(target, -1, 1).mul_(weight_plan.geometry.inputs**-0.5)
            if weight_plan.rows > 1:
                _undo_median(target)
            target.mul_(weight_plan.fresh_factor().to(target))

    for module in built.model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            built.forget_row(module.weight, module.padding_idx)  # set below, where the index has a row of its own
    result = swap(built.model, plan, fill, _materialised(built, plan, problems))
    if problems:
        raise ModelError.of(problems)
    if unlike:
        warnings.warn(
            f"{', '.join(unlike)}: not initialised as the constructor says, which cannot be repeated in the small "
            "shape, but uniformly with variance 1/(3 · inputs).",
            stacklevel=3,
        )
    _zero_padding(result)
    return result


def swap_empty(built: Blueprint, plan: Plan) -> nn.Module:
    """Swap layers of a model that is to receive its weights: all values are NaN, so that a forgotten load is loud."""

    def fill(name: str, full: Tensor, weight_plan: WeightPlan | None, target: Tensor) -> None:
        if target.is_floating_point():
            target.fill_(torch.nan)

    kept: dict[int, Any] = {}
    for _, parameter in _kept_parameters(built, plan):
        value = torch.full_like(parameter, torch.nan, device="cpu")
        kept[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
    for buffer in built.model.buffers():  # those that are not persistent will not be received
        if buffer.is_meta:
            value = torch.zeros_like(buffer, device="cpu")
            if not built.initialise(buffer, value) and value.is_floating_point():
                value.fill_(torch.nan)
            kept[id(buffer)] = value
    return swap(built.model, plan, fill, kept)


def unsketch(sketched: nn.Module) -> nn.Module:
    """Return the full module, an independent copy: every sketched layer becomes torch's, with the weight Ŵ = E S."""
    layers = [m for m in sketched.modules() if isinstance(m, SketchedLayer)]
    if not layers:
        raise ModelError(f"This {type(sketched).__name__} has no sketched layers: nothing to unsketch.")
    memo: dict[int, Any] = {id(layer): layer.unsketched() for layer in layers}
    result: nn.Module = copy.deepcopy(sketched, memo)
    result.__dict__.pop("_comfetch_kept", None)
    unguard(result)
    return result


def plan_of(sketched: nn.Module) -> Plan:
    """Return the plan of a sketched model."""
    weights = {
        f"{name}.{weight}" if name else weight: plan
        for name, layer in sketched.named_modules(remove_duplicate=False)
        if isinstance(layer, SketchedLayer)
        for weight, plan in layer.plans.items()
    }
    return Plan(weights, sketched.__dict__.get("_comfetch_kept"))


def _check_shapes(prefix: str, recipe: Recipe, plans: dict[str, WeightPlan]) -> None:
    for weight, geometry in recipe.weights.items():
        if plans[weight].geometry != geometry:
            raise MismatchError(
                f"{prefix}{weight} is {geometry} in this model, but {plans[weight].geometry} in the plan."
            )


def _materialised(built: Blueprint, plan: Plan, problems: list[str]) -> dict[int, Any]:
    """Make every meta tensor that no swapped layer takes along real."""
    kept: dict[int, Any] = {}
    for name, parameter in _kept_parameters(built, plan):
        value = materialise(built, parameter, name, problems)
        kept[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
    for name, buffer in built.model.named_buffers():
        if buffer.is_meta:
            kept[id(buffer)] = materialise(built, buffer, name, problems)
    for module in built.model.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in kept and module.padding_idx is not None:
            kept[id(module.weight)].data[module.padding_idx] = 0
    return kept


def _kept_parameters(built: Blueprint, plan: Plan) -> list[tuple[str, nn.Parameter]]:
    """List the meta parameters outside the swapped layers."""
    swapped = tuple(f"{layer}." if layer else "" for layer in {name.rpartition(".")[0] for name in plan})
    return [(name, p) for name, p in built.model.named_parameters() if p.is_meta and not name.startswith(swapped)]


def _undo_median(target: Tensor) -> None:
    """Scale k independent rows so that their median, which is narrower than each, has the variance of one."""
    middle = target.double().sort(dim=0).values
    k = len(target)
    middle = middle[(k - 1) // 2 : k // 2 + 1].mean(0)
    norm = torch.linalg.vector_norm(middle)
    if norm > 0:
        target.mul_(torch.linalg.vector_norm(target.double()) / k**0.5 / norm)


def _zero_padding(model: nn.Module) -> None:
    """Give the padding index of sketched embeddings its zero row, where it has one of its own."""
    for module in model.modules():
        if isinstance(module, SketchedLayer) and isinstance(module.full, nn.Embedding):
            index: Any = module.full.padding_idx
            if index is not None and module.plans["weight"].mode == "output":
                module.get_parameter("weight").data[..., index, :] = 0
