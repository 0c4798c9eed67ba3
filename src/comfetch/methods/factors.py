"""Layers whose weights are products of two small ones, W = W₀ + s · out · in: what low-rank methods share.

Without the frozen base W₀ (and s = 1) a layer is low-rank itself, and no full weight exists; with it, the factors are
adapters. The state has `weight_in` and `weight_out` in place of `weight`; all other names are those of torch's layer.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comfetch.blueprint import Blueprint
from comfetch.layers import REGISTRY, Recipe, meta_copy
from comfetch.layers.attention import SketchedAttention
from comfetch.layers.conv import CONVOLVE
from comfetch.layers.parents import OFF
from comfetch.policy import make_plan
from comfetch.settings import Settings

State = dict[str, Tensor]
IN, OUT, BASE = "_in", "_out", "_base"


@dataclass(frozen=True)
class Factoring:
    """Say how a weight is seen as matrices (groups, m, n), and as products of (m, rank) and (rank, n).

    Args:
        shape: full shape. groups: independent matrices stacked along dimension 0 (attention packs three).
        split: divide a kernel between both factors, (outputs · kw, inputs · kh), not (outputs, inputs · kh · kw).
        rank: of each matrix.
    """

    shape: tuple[int, ...]
    groups: int = 1
    split: bool = False
    rank: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of rows and columns, m and n, of one matrix."""
        if self.split:
            outputs, inputs, height, width = self.shape
            return outputs * width, inputs * height
        return self.shape[0] // self.groups, math.prod(self.shape[1:])

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of both factors, in and out, as layers hold them."""
        if self.split:
            outputs, inputs, height, width = self.shape
            return (self.rank, inputs, height, 1), (outputs, self.rank, 1, width)
        ones = (1,) * (len(self.shape) - 2)
        return (self.groups * self.rank, *self.shape[1:]), (self.shape[0], self.rank, *ones)

    def matrices(self, weight: Tensor) -> Tensor:
        """See a weight as (groups, m, n)."""
        if self.split:
            weight = weight.permute(0, 3, 1, 2)
        return weight.reshape(self.groups, *self.size)

    def factors(self, small: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """See both factors as (groups, rank, n) and (groups, m, rank)."""
        if self.split:
            out = out.permute(0, 3, 1, 2)
        return small.reshape(self.groups, self.rank, -1), out.reshape(self.groups, -1, self.rank)

    def lift(self, small: Tensor, out: Tensor) -> Tensor:
        """W = out · in, in the full shape."""
        small, out = self.factors(small, out)
        product = out @ small
        if self.split:
            outputs, inputs, height, width = self.shape
            return product.view(outputs, width, inputs, height).permute(0, 2, 3, 1).contiguous()
        return product.view(self.shape)

    def truncate(self, u: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Make the factors √S Vᵀ and U √S of the largest singular values; u, s and v are those of `matrices`."""
        root = s[:, : self.rank].sqrt()
        small, out = root[:, :, None] * v[:, : self.rank], u[:, :, : self.rank] * root[:, None]
        shape_in, shape_out = self.shapes
        if self.split:
            out = out.view(self.shape[0], self.shape[3], self.rank, 1).permute(0, 2, 3, 1)
        return small.reshape(shape_in).contiguous(), out.reshape(shape_out).contiguous()

    def squared_norm(self, small: Tensor, out: Tensor) -> Tensor:
        """‖out · in‖² = tr(outᵀ out · in inᵀ), without the product."""
        small, out = self.factors(small, out)
        return ((out.mT @ out) * (small @ small.mT)).sum()


Factorings = dict[str, Factoring]


class Factored(nn.Module):
    """Base of factored layers: the factors of some weights, the other parameters as they are, all of them NaN."""

    def __init__(self, full: nn.Module, plans: Factorings, scale: float, based: bool) -> None:
        super().__init__()
        copy_options(full, self)
        self.plans, self.scale, self._full = plans, scale, (meta_copy(full),)  # in a tuple, so that it is no submodule
        for name, parameter in full._parameters.items():
            if parameter is None:
                self.register_parameter(name, None)
            elif name not in plans:
                kept = nn.Parameter(_nan(parameter.shape, parameter), parameter.requires_grad)
                self.register_parameter(name, kept)
            else:
                for end, shape in zip((IN, OUT), plans[name].shapes, strict=True):
                    self.register_parameter(name + end, nn.Parameter(_nan(shape, parameter)))
                self.register_buffer(name + BASE, _nan(plans[name].shape, parameter) if based else None, False)
        self.train(full.training)

    @property
    def full(self) -> Any:
        """Return the full layer on the meta device: options and shapes, no values."""
        return self._full[0]

    def parts(self, name: str = "weight") -> tuple[Tensor, Tensor, Tensor | None]:
        """Return both factors of a weight, the second one scaled, and its base."""
        out = getattr(self, name + OUT)
        return getattr(self, name + IN), out if self.scale == 1 else out * self.scale, getattr(self, name + BASE)

    def squared_norm(self) -> Tensor:
        """Return the sum of ‖out · in‖² over the layer's own factored weights."""
        own = [(p, getattr(self, n + IN), getattr(self, n + OUT)) for n, p in self.plans.items() if "." not in n]
        return torch.stack([plan.squared_norm(small, out) for plan, small, out in own]).sum()


class FactoredLinear(Factored):
    """y = W₀ x + out (in x) + b."""

    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs)."""
        small, out, base = self.parts()
        y = F.linear(F.linear(x, small), out, self.bias)
        return y if base is None else y + F.linear(x, base)


class FactoredConv(Factored):
    """y = W₀ * x + out * (in * x) + b; a divided kernel goes along the height first, then along the width."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, …) as torch's layer does."""
        small, out, base = self.parts()
        full, convolve = self.full, CONVOLVE[small.ndim - 2]
        where = (full.stride, full.padding, full.dilation)
        if not self.plans["weight"].split:
            y = convolve(convolve(x, small, None, *where), out, self.bias)
        else:
            rest = zip(where, (1, 0, 1), strict=True)
            along = [((pair[0], none), (none, pair[1])) for pair, none in rest]
            y = convolve(convolve(x, small, None, *[a for a, _ in along]), out, self.bias, *[b for _, b in along])
        return y if base is None else y + convolve(x, base, None, *where)


class FactoredEmbedding(Factored):
    """y = row v of W₀ + out · in."""

    def forward(self, ids: Tensor) -> Tensor:
        """Look up (…) ids: (…, embedding dimension)."""
        small, out, base = self.parts()
        y = F.embedding(ids, out, self.full.padding_idx) @ small
        return y if base is None else y + F.embedding(ids, base)


class FactoredRecurrent(Factored):
    """A recurrent layer. Torch's kernels take full weights, so the factors are multiplied out in each pass."""

    def forward(self, *inputs: Any) -> Any:
        """Run torch's layer."""
        weights = {name: getattr(self, name) for name in self.full._parameters if name not in self.plans}
        for name, plan in self.plans.items():
            small, out, base = self.parts(name)
            product = plan.lift(small, out)
            weights[name] = product if base is None else product + base
        return call_with(self.full, weights, self.training, *inputs)


class _Multiply:
    """Multiply columns with the group of a packed weight that belongs to q, k or v."""

    before = None

    def __init__(self, plan: Factoring, group: int) -> None:
        self.plan, self.group = plan, group

    def multiply(self, parts: tuple[Tensor, Tensor, Tensor | None], columns: Tensor) -> Tensor:
        """Map (inputs, n) to (outputs, n)."""
        small, out = self.plan.factors(*parts[:2])
        y = out[self.group] @ (small[self.group] @ columns)
        return y if parts[2] is None else y + self.plan.matrices(parts[2])[self.group] @ columns


class FactoredAttention(Factored):
    """y = Wₒ · attention(W_q query, W_k key, W_v value), each W factored: the sketched layer with other products."""

    forward: Any = SketchedAttention.forward
    _unbatched: Any = SketchedAttention._unbatched
    _project: Any = SketchedAttention._project
    _merge: Any = SketchedAttention._merge
    _extend: Any = SketchedAttention._extend

    def __init__(self, full: Any, plans: Factorings, scale: float, based: bool) -> None:
        super().__init__(full, plans, scale, based)
        self.out_proj = FactoredLinear(full.out_proj, {"weight": plans["out_proj.weight"]}, scale, based)

    def _product(self, name: str) -> Any:
        if "in_proj_weight" in self.plans:
            return _Multiply(self.plans["in_proj_weight"], "qkv".index(name)), self.parts("in_proj_weight")
        return _Multiply(self.plans[f"{name}_proj_weight"], 0), self.parts(f"{name}_proj_weight")


FACTORED: dict[type[nn.Module], type[Factored]] = {
    nn.Linear: FactoredLinear, nn.Conv1d: FactoredConv, nn.Conv2d: FactoredConv, nn.Conv3d: FactoredConv,
    nn.Embedding: FactoredEmbedding, nn.LSTM: FactoredRecurrent, nn.GRU: FactoredRecurrent, nn.RNN: FactoredRecurrent,
    nn.MultiheadAttention: FactoredAttention,
}  # fmt: skip


def plan_factors(
    model: nn.Module, policy: str, rank: Callable[[int, int], int], split: bool = False
) -> dict[str, Factorings]:
    """Choose layers as sketching does, and give each of their weights the rank for its (m, n).

    A layer stays full where its factors would not be smaller, or cannot do what it does. Returns, by layer, the plan of
    each weight.
    """
    chosen = make_plan(model, Settings(compression=1, policy=policy))
    plans: dict[str, Factorings] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        recipe = REGISTRY[type(layer)](layer) if type(layer) in FACTORED else ""
        prefix = f"{name}." if name else ""
        if not isinstance(recipe, Recipe) or not {prefix + weight for weight in recipe.weights} <= set(chosen):
            continue
        layer_any: Any = layer
        plain = getattr(layer_any, "padding_mode", "zeros") == "zeros" and getattr(layer_any, "groups", 1) == 1
        divided = split and type(layer) is nn.Conv2d and not isinstance(layer_any.padding, str)
        plan = {w: Factoring(g.shape, g.groups, divided) for w, g in recipe.weights.items()}
        plan = {w: Factoring(p.shape, p.groups, p.split, rank(*p.size)) for w, p in plan.items()}
        if plain and all(1 <= p.rank * sum(p.size) < math.prod(p.size) for p in plan.values()):
            plans[name] = plan
    return plans


def flat(plans: dict[str, Factorings]) -> Factorings:
    """Name every planned weight in full."""
    return {f"{name}.{w}" if name else w: plan for name, layer in plans.items() for w, plan in layer.items()}


def build_factored(
    built: Blueprint, plans: dict[str, Factorings], scale: float = 1.0, based: bool = False
) -> nn.Module:
    """Copy a model with its planned layers factored; all values are NaN, so that a forgotten load is loud."""
    layers: dict[int, Any] = {}
    for name, plan in plans.items():
        layer = built.model.get_submodule(name)
        if id(layer) not in layers:
            layers[id(layer)] = FACTORED[type(layer)](layer, plan, scale, based)
    return rebuild(built, layers)


def rebuild(built: Blueprint, layers: dict[int, Any]) -> nn.Module:
    """Copy a model with some layers replaced, by identity, and the parameters of all others NaN."""
    memo = dict(layers)
    replaced = [module for module in built.model.modules() if id(module) in layers]
    gone = {id(parameter) for module in replaced for parameter in module.parameters()}
    for parameter in built.model.parameters():
        if id(parameter) not in gone:
            memo[id(parameter)] = nn.Parameter(_nan(parameter.shape, parameter), parameter.requires_grad)
    for buffer in built.model.buffers():
        if buffer.is_meta:
            value = torch.zeros_like(buffer, device="cpu")
            if not built.initialise(buffer, value) and value.is_floating_point():
                value.fill_(torch.nan)
            memo[id(buffer)] = value
    result: nn.Module = copy.deepcopy(built.model, memo)
    for module in result.modules():
        for parent, switches in OFF.items():  # fast paths that read weights which are not there
            if isinstance(module, parent):
                for switch, value in switches.items():
                    setattr(module, switch, value)
    return result


def copy_options(source: nn.Module, target: nn.Module) -> None:
    """Copy a layer's plain attributes (in_features, num_heads, …), which its parents may read."""
    for name, value in vars(source).items():
        if name == "_qkv_same_embed_dim" or not (name.startswith("_") or name == "training"):
            setattr(target, name, value)


def call_with(layer: nn.Module, weights: State, training: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a layer whose parameters are on the meta device with other ones."""
    layer.train(training)
    return torch.func.functional_call(layer, weights, args, kwargs)


def _nan(shape: Any, like: Tensor) -> Tensor:
    return torch.full(tuple(shape), torch.nan, dtype=like.dtype)
