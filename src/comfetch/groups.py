"""Make optimiser groups in which a step on a small weight moves Ŵ as the full layer's step would move W.

All elements of one bucket receive the same gradient up to sign, and Adam and SGD are odd and element-wise, so a step
on W through the sketch is a step on S with a rate multiplied by a power of the load n (docs/mathematics.md, 8): n for
`count`, √n for `isometric` with Adam, 1 for `mean`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from comfetch.convert import plan_of
from comfetch.errors import OptionError
from comfetch.plan import WeightPlan

MULTIPLIER = "rate_multiplier"
_POWER = {"mean": 0.0, "isometric": 0.5, "count": 1.0}


def parameter_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return optimiser groups with the rates multiplied so that Ŵ moves as the full W would.

    Weights whose buckets all have one load share a plain group with that multiple of `lr`. Where loads differ within a
    weight, its group carries the multipliers in `rate_multiplier`, and every optimiser of torch applies them after its
    step: S ← S₀ + m · (S₁ − S₀).

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
    factor = plan.load_power(_POWER[plan.scale])
    loaded = factor[factor > 0]
    return loaded[0] if bool((loaded == loaded[0]).all()) else factor


def _install_hooks() -> None:
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_remember)
        register_optimizer_step_post_hook(_multiply)
        _installed = True


_installed = False


def _remember(optimiser: Optimizer, args: Any, kwargs: Any) -> None:
    old = {id(p): p.detach().clone() for g in optimiser.param_groups if MULTIPLIER in g for p in g["params"]}
    if old:
        optimiser.__dict__["_comfetch_before"] = old


def _multiply(optimiser: Optimizer, args: Any, kwargs: Any) -> None:
    old = optimiser.__dict__.pop("_comfetch_before", {})
    for group in optimiser.param_groups:
        if MULTIPLIER in group:
            for p in group["params"]:
                before = old[id(p)]
                with torch.no_grad():
                    p.copy_(before + group[MULTIPLIER].to(p) * (p - before))
