"""Make optimiser groups in which a step on a small weight moves Ŵ as the full layer's step would move W.

All elements of one bucket receive the same gradient up to sign, and Adam and SGD are odd and element-wise, so a step
on W through the sketch is a step on S with a rate multiplied by a power of the load n (docs/mathematics.md, 8): n for
`count`, √n for `isometric` with Adam, 1 for `mean`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from comfetch import hashing
from comfetch.convert import plan_of
from comfetch.errors import OptionError
from comfetch.plan import WeightPlan

MULTIPLIER = "rate_multiplier"
_HIDDEN = "_comfetch_hidden"
_POWER = {"mean": 0.0, "isometric": 0.5, "count": 1.0}


def parameter_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return optimiser groups with the rates multiplied so that Ŵ moves as the full W would.

    Weights whose buckets all have one load share a plain group with that multiple of `lr`. Where loads differ within a
    weight, its group carries the multipliers in `rate_multiplier`, and every optimiser of torch heeds them:
    S ← S₀ + m · (S₁ − S₀).

    >>> from comfetch import sketch
    >>> model = sketch(lambda: nn.Linear(64, 64), compression=4, scale="count", hash="balanced")
    >>> [group["lr"] for group in parameter_groups(model, lr=0.5)]
    [0.5, 2.0]
    """
    if not lr > 0:
        raise OptionError(f"lr={lr!r} is not above 0.")
    plans = plan_of(model)
    plain: dict[float, list[nn.Parameter]] = {1.0: []}
    special: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        multiplier = _multiplier(plans.weights.get(name))
        if multiplier is None or multiplier.ndim == 0:
            plain.setdefault(1.0 if multiplier is None else float(multiplier), []).append(parameter)
        else:
            special.append({"params": [parameter], "lr": lr, MULTIPLIER: multiplier.to(parameter)})
    groups = [{"params": parameters, "lr": lr * m} for m, parameters in plain.items() if parameters]
    if special:
        _install_hooks()
    return groups + special


def _multiplier(plan: WeightPlan | None) -> Tensor | None:
    """Return the multiplier of a weight: a scalar if it is the same for all, shaped for broadcasting otherwise."""
    if plan is None or _POWER[plan.scale] == 0:
        return None
    factor = math.prod((_factor(plan, side) for side in plan.sides), start=torch.ones((), dtype=torch.float64))
    return factor.view(*factor.shape, *[1] * (len(plan.shape) - 2)) if factor.ndim else factor


def _factor(plan: WeightPlan, side: str) -> Tensor:
    """Return the power of one side's loads: a scalar, or (rows if many, …, …) of as few elements as can be."""
    groups, blocks = plan.geometry.groups, plan.blocks
    length, other = plan.length if side == "output" else plan.length[::-1]
    loads = np.stack([hashing.loads(plan.draw(side, row).index, length) for row in range(plan.rows)])
    load = torch.from_numpy(loads).double()  # (rows, groups · blocks, length)
    factor = torch.where(load > 0, load.clamp(min=1) ** _POWER[plan.scale], 0.0)
    loaded = factor[factor > 0]
    if bool((loaded == loaded[0]).all()):
        return loaded[0]
    dim = 1
    if (side == "output") != plan.geometry.transposed:
        factor, dim = factor.unflatten(1, (groups, blocks)).transpose(2, 3).flatten(1, 2), 2
    if factor.shape[dim] > 1:
        factor = factor.repeat_interleave(other // blocks, dim)
    return factor if plan.rows > 1 else factor[0]


def _install_hooks() -> None:
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True


_installed = False


def _before_step(optimiser: Optimizer, args: Any, kwargs: Any) -> Any:
    """Do the steps of weights with multipliers, and hide their gradients from the step of all others."""
    if not any(MULTIPLIER in group for group in optimiser.param_groups):
        return None
    closure, rest = args[1] if len(args) > 1 else kwargs.get("closure"), {**kwargs}
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
        args, rest["closure"] = args[:1], lambda: loss
    step: Any = type(optimiser).step
    hidden = optimiser.__dict__.pop(_HIDDEN, [])  # by a step that has called this one, or that failed
    stepped = multiply_steps(optimiser, lambda: step.__wrapped__(optimiser, **rest))  # without hooks
    optimiser.__dict__[_HIDDEN] = [(p, p.grad) for p in stepped] or hidden
    for p in stepped:
        p.grad = None
    return args, rest


def _after_step(optimiser: Optimizer, args: Any, kwargs: Any) -> None:
    for p, grad in optimiser.__dict__.pop(_HIDDEN, ()):
        p.grad = grad


def multiply_steps(optimiser: Optimizer, step: Callable[[], Any]) -> list[Tensor]:
    """Step the groups with multipliers, one after the other: S ← S₀ + m · (S₁ − S₀). Only one S₀ is kept at a time.

    Returns:
        The weights that were stepped: those with a gradient.
    """
    groups, stepped = optimiser.param_groups, list[Tensor]()
    for group in groups:
        weights = [p for p in group["params"] if p.grad is not None] if MULTIPLIER in group else []
        if weights:
            multiplier, optimiser.param_groups = group.pop(MULTIPLIER), [group]  # plain while it is stepped
            try:
                _multiply(weights, multiplier, step)
            finally:
                group[MULTIPLIER], optimiser.param_groups = multiplier, groups
            stepped += weights
    return stepped


@torch.no_grad()
def _multiply(weights: list[Tensor], multiplier: Tensor, step: Callable[[], Any]) -> None:
    before = [p.detach().clone() for p in weights]
    step()
    for p, old in zip(weights, before, strict=True):
        p.sub_(old).mul_(multiplier.to(p)).add_(old)
