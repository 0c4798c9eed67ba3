"""Build models at a width, without the full ones coming into existence."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comfetch.blueprint import Blueprint, blueprint
from comfetch.errors import OptionError
from comfetch.widths.axes import CONVOLUTIONS, WEIGHTED, Axis, Widths, cut, join, plan_widths

Build = Callable[[], nn.Module]
Make = Callable[[str, Tensor, tuple[int, ...]], Tensor]
"""(name, full tensor on the meta device, small shape) -> the small tensor."""


def shrink(model: nn.Module, plan: Widths, ratio: float, make: Make) -> nn.Module:
    """Copy a model at a ratio of its width; `make` gives all of its tensors."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        small = make(name, parameter, plan.shape(name, parameter.shape, ratio))
        memo[id(parameter)] = nn.Parameter(small, parameter.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = make(name, buffer, plan.shape(name, buffer.shape, ratio))
    result: nn.Module = copy.deepcopy(model, memo)
    before = dict(model.named_modules(remove_duplicate=False))
    for name, layer in result.named_modules(remove_duplicate=False):
        _resize(layer, before[name], plan.norms.get(name), ratio)
    return result


def _resize(layer: Any, full: Any, norm: Axis | None, ratio: float) -> None:
    """Set the sizes that a layer keeps as plain attributes."""
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, CONVOLUTIONS):
        depthwise = full.groups > 1
        layer.out_channels = len(layer.weight)
        layer.groups = layer.out_channels if depthwise else 1
        layer.in_channels = layer.out_channels if depthwise else layer.weight.shape[1]
    elif isinstance(layer, nn.Embedding):
        layer.embedding_dim = layer.weight.shape[1]
    elif isinstance(layer, nn.RNNBase):
        layer.hidden_size = layer.get_parameter("weight_hh_l0").shape[1]
        layer.input_size = layer.get_parameter("weight_ih_l0").shape[1]
    elif isinstance(layer, nn.MultiheadAttention):
        layer.embed_dim = len(layer.out_proj.weight)
        layer.head_dim = layer.embed_dim // layer.num_heads
        weights = (layer.k_proj_weight, layer.v_proj_weight)
        layer.kdim, layer.vdim = (layer.embed_dim if weight is None else weight.shape[1] for weight in weights)
    elif norm is not None:
        width = norm.outer * norm.width(ratio) * norm.inner
        if isinstance(layer, nn.LayerNorm):
            layer.normalized_shape = (*layer.normalized_shape[:-1], width)
        elif isinstance(layer, nn.GroupNorm):
            layer.num_channels, layer.num_groups = width, math.gcd(layer.num_groups, width)
        else:
            layer.num_features = width


def shrink_empty(built: Blueprint, plan: Widths, ratio: float) -> nn.Module:
    """Build a narrow model that is to receive its weights: all values are NaN, so that a forgotten load is loud."""

    def make(name: str, full: Tensor, shape: tuple[int, ...]) -> Tensor:
        same = shape == tuple(full.shape)
        if same and not full.is_meta:
            return full.detach().clone()
        value = torch.zeros(shape, dtype=full.dtype)
        is_buffer = same and not isinstance(full, nn.Parameter)  # one that is not persistent will not be received
        if not (is_buffer and built.initialise(full, value)) and value.is_floating_point():
            value.fill_(torch.nan)
        return value

    return shrink(built.model, plan, ratio, make)


@dataclass(frozen=True)
class Narrowed:
    """A constructor of a model at a ratio of its width, with fresh weights; the full ones never exist.

    Weights are drawn as the model's own constructor draws them, and scaled by √(full inputs / small inputs), so that
    the variance of outputs stays. What cannot be drawn in a smaller shape is uniform with variance 1/(3 · inputs).
    """

    build: Build
    ratio: float

    def __call__(self) -> nn.Module:
        """Build the narrow model."""
        built = blueprint(self.build)
        scaled = {
            join(name, local)
            for name, layer in built.model.named_modules()
            if isinstance(layer, WEIGHTED) and not isinstance(layer, nn.Embedding)
            for local, parameter in layer.named_parameters() if parameter.ndim > 1
        }  # fmt: skip

        def make(name: str, full: Tensor, shape: tuple[int, ...]) -> Tensor:
            small = torch.empty(shape, dtype=full.dtype)
            if not full.is_meta:
                return small.copy_(cut(full.detach(), tuple(torch.arange(size) for size in shape)))
            if not built.initialise(full, small):
                nn.init.uniform_(small, -1, 1).mul_(math.prod(full.shape[1:]) ** -0.5)
            if name in scaled:
                small.mul_(math.sqrt(math.prod(full.shape[1:]) / math.prod(shape[1:])))
            return small

        with torch.no_grad():
            return shrink(built.model, plan_widths(built.model), self.ratio, make)


def narrow(build: Build, ratio: float) -> Narrowed:
    """Return a constructor of the same model with ⌈ratio · channels⌉ of the channels of every hidden layer.

    >>> narrow(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), 0.5)()
    Sequential(
      (0): Linear(in_features=6, out_features=4, bias=True)
      (1): ReLU()
      (2): Linear(in_features=4, out_features=2, bias=True)
    )
    """
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise OptionError(f"ratio={ratio!r} is not in (0, 1]. It is the part of the channels that is kept.")
    return Narrowed(build, float(ratio))


def narrow_to(build: Build, weights: float) -> Narrowed:
    """Return the constructor of the widest narrow model whose state has at most so many floating point numbers."""
    model = blueprint(build).model
    plan, state = plan_widths(model), model.state_dict()
    full = count_weights(plan, state, 1.0)
    low, high = 0.0, 1.0
    if weights >= full:
        return Narrowed(build, 1.0)
    if weights < count_weights(plan, state, 1e-9):
        least = count_weights(plan, state, 1e-9)
        raise OptionError(f"{weights:g} weights are below the floor of this model: one channel a layer needs {least}.")
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if count_weights(plan, state, middle) <= weights else (low, middle)
    return Narrowed(build, low)


def count_weights(plan: Widths, state: Mapping[str, Tensor], ratio: float) -> int:
    """Count the floating point numbers of a state at a ratio."""
    return sum(math.prod(plan.shape(n, t.shape, ratio)) for n, t in state.items() if t.is_floating_point())
