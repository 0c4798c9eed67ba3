"""What all sketched layers share: the registry, the small product, and the base class."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from comfetch import hashing, medians
from comfetch.errors import OptionError
from comfetch.plan import Geometry, WeightPlan
from comfetch.sketching import SignedSum

Plans = dict[str, WeightPlan]


@dataclass(frozen=True)
class Recipe:
    """Say how a layer is sketched: its weights by parameter name, and what builds the small layer."""

    weights: Mapping[str, Geometry]
    build: Callable[[Any, Plans], "SketchedLayer"]


Describe = Callable[[Any], Recipe | str]
REGISTRY: dict[type[nn.Module], Describe] = {}
T = TypeVar("T", bound=Describe)


def register_layer(torch_type: type[nn.Module]) -> Callable[[T], T]:
    """Register how layers of exactly this type are sketched.

    The decorated function gets a layer (perhaps on the meta device) and returns its Recipe, or, as text, the reason why
    this one stays full. It raises ModelError for options that cannot be sketched.
    """
    if not (isinstance(torch_type, type) and issubclass(torch_type, nn.Module)):
        raise OptionError(f"register_layer({torch_type!r}): expected a subclass of torch.nn.Module.")

    def register(describe: T) -> T:
        if torch_type in REGISTRY:
            raise OptionError(f"{torch_type.__name__} is registered already, by {REGISTRY[torch_type]!r}.")
        REGISTRY[torch_type] = describe
        return describe

    return register


class Product(nn.Module):
    """Multiply with a sketched weight: signed sums of the inputs, the small product, signed sums of its outputs.

    A weight of G groups, g blocks and k rows becomes `parts` small matrices, (parts, outputs, inputs, rest), of which
    part p takes the p-th slice of the (summed) inputs. The order of all rows is (group, block, row, coordinate).

    Args:
        plan: the weight's plan.
        group: take this group alone (attention keeps three independent products in one weight).
    """

    factor: Tensor | None

    def __init__(self, plan: WeightPlan, group: int | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.picked = range(plan.geometry.groups) if group is None else range(group, group + 1)
        self.groups = len(self.picked)
        self.parts = self.groups * plan.blocks * (1 if plan.mode == "output" else plan.rows)
        hashes = {side: [self._draw(side, row) for row in range(plan.rows)] for side in plan.sides}
        self.before = self._signed_sum("input", hashes) if "input" in hashes else None
        self.after = self._signed_sum("output", hashes) if "output" in hashes else None
        self.register_buffer("factor", self._isometric_factor(hashes), persistent=False)

    def weight(self, small: Tensor) -> Tensor:
        """Arrange a small weight for the product: (parts, outputs, inputs, rest)."""
        plan, geo = self.plan, self.plan.geometry
        if plan.rows == 1:
            small = small[None]
        k, g = plan.rows, plan.blocks
        x = small.reshape(k, geo.groups, small.shape[1] // geo.groups, small.shape[2], -1)
        if geo.transposed:
            x = x.transpose(2, 3)
        x = x[:, self.picked.start : self.picked.stop]
        if plan.mode == "output":
            x = x.unflatten(3, (g, -1)).permute(1, 3, 0, 2, 4, 5)  # group, block, row, outputs, inputs, rest
            x = x.flatten(0, 1).flatten(1, 2)
        else:
            x = x.unflatten(2, (g, -1)).permute(1, 2, 0, 3, 4, 5).flatten(0, 2)
        return x if self.factor is None else x * self.factor.to(x.dtype)

    def finish(self, rows: Tensor) -> Tensor:
        """Bring the product's rows, (parts · outputs, n), to the full outputs, (groups · outputs, n)."""
        if self.plan.rows == 1:
            return rows if self.after is None else self.after(rows)
        rows = self.estimates(rows)
        return medians.median(rows).flatten(0, -2)

    def estimates(self, rows: Tensor) -> Tensor:
        """Expand the product's rows to the k estimates of the outputs that the median is taken over: (k, …, n)."""
        k = self.plan.rows
        if self.after is not None:
            return self.after(rows).unflatten(0, (k, -1))
        return rows.unflatten(0, (self.parts // k, k, -1)).transpose(0, 1)

    def multiply(self, small: Tensor, columns: Tensor) -> Tensor:
        """Multiply columns with the weight: (inputs, n) -> (outputs, n)."""
        if self.before is not None:
            columns = self.before(columns)
        slices = columns.unflatten(0, (self.parts, -1))
        return self.finish(torch.bmm(self.weight(small)[..., 0], slices).flatten(0, 1))

    def _draw(self, side: str, row: int) -> hashing.Hash:
        blocks = self.plan.blocks
        index, sign = self.plan.draw(side, row)
        wanted = slice(self.picked.start * blocks, self.picked.stop * blocks)
        return hashing.Hash(index[wanted], sign[wanted])

    def _signed_sum(self, side: str, hashes: Mapping[str, list[hashing.Hash]]) -> SignedSum:
        """Make the sums of one side: from the small product's rows to the outputs, or from the inputs to its rows."""
        k, g = self.plan.rows, self.plan.blocks
        index = np.stack([h.index for h in hashes[side]], axis=1)  # (groups · blocks, rows, size)
        sign = np.stack([h.sign for h in hashes[side]], axis=1)
        size = index.shape[2]
        length = self.plan.length[0 if side == "output" else 1]
        small = index + (np.arange(len(index) * k) * length).reshape(-1, k, 1)
        row = np.arange(k)[None, :, None] * self.groups if side == "output" else 0  # inputs serve all rows
        full = (row + (np.arange(len(index)) // g)[:, None, None]) * size + np.arange(size)
        full = np.broadcast_to(full, small.shape)
        small_count = len(index) * k * length
        full_count = self.groups * size * (k if side == "output" else 1)
        if side == "output":
            return SignedSum(full.ravel(), small.ravel(), sign.ravel(), full_count, small_count)
        return SignedSum(small.ravel(), full.ravel(), sign.ravel(), small_count, full_count)

    def _isometric_factor(self, hashes: Mapping[str, list[hashing.Hash]]) -> Tensor | None:
        """Return D^(-1/2) of each sketched mode, shaped for `weight`: in `isometric` the signs alone do not expand."""
        if self.plan.scale != "isometric":
            return None
        factor = torch.ones((), dtype=torch.float64)
        for side, drawn in hashes.items():
            length = self.plan.length[0 if side == "output" else 1]
            load = np.stack([hashing.loads(h.index, length) for h in drawn], axis=1)  # (groups · blocks, rows, length)
            scale = torch.from_numpy(np.maximum(load, 1)).double() ** -0.5
            if self.plan.mode == "output":
                scale = scale.flatten(1)  # rows stand among the outputs of one part
            else:
                scale = scale.flatten(0, 1)
            factor = factor * (scale[:, :, None, None] if side == "output" else scale[:, None, :, None])
        return factor if factor.ndim else None


class SketchedLayer(nn.Module):
    """Base of sketched layers: holds the small weights under the full layer's names, and remembers the full layer.

    It copies the layer's plain attributes (in_features, stride, …), and keeps the layer itself on the meta device, for
    `unsketch`: that copy has no storage, and is no submodule. Parameters are left uninitialised.
    """

    def __init__(self, full: nn.Module, plans: Plans) -> None:
        super().__init__()
        for name, value in vars(full).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self.plans = plans
        self._full = (meta_copy(full),)  # in a tuple, so that it is no submodule
        for name, parameter in full._parameters.items():
            self.register_parameter(name, None if parameter is None else _empty(parameter, plans.get(name)))
        self.products = nn.ModuleDict(self.make_products(plans))
        self.train(full.training)

    def make_products(self, plans: Plans) -> dict[str, nn.Module]:
        """Make the product of each sketched weight; layers that multiply otherwise make their own."""
        return {name: Product(plan) for name, plan in plans.items()}

    @property
    def full(self) -> nn.Module:
        """Return the full layer on the meta device: options and shapes, no values."""
        return self._full[0]

    def product(self, weight: str) -> Product:
        """Return the product of one sketched weight."""
        found = self.products[weight]
        assert isinstance(found, Product)
        return found

    def unsketched(self) -> nn.Module:
        """Return the full layer with the weights Ŵ = E S."""
        layer: nn.Module = meta_copy(self.full)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                value = parameter.detach()
                value = self.plans[name].unsketch(value) if name in self.plans else value.clone()
                setattr(layer, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
        return layer.train(self.training)

    def extra_repr(self) -> str:
        """Show each sketched weight."""
        return ", ".join(
            f"{name}: {tuple(p.shape)} -> {tuple(p.small_shape)} {p.mode}, {p.blocks} blocks, {p.rows} rows"
            for name, p in self.plans.items()
        )


def meta_copy(module: nn.Module) -> Any:
    """Copy a module with its parameters on the meta device, without copying their values."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        twin = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(twin, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


def with_bias(rows: Tensor, bias: Tensor | None) -> Tensor:
    """Bring (outputs, n) to a contiguous (n, outputs) and add the bias."""
    y = rows.t().contiguous()
    return y if bias is None else y.add_(bias)


def _empty(parameter: nn.Parameter, plan: WeightPlan | None) -> nn.Parameter:
    shape = parameter.shape if plan is None else plan.small_shape
    device = "cpu" if parameter.is_meta else parameter.device
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=device), parameter.requires_grad)
