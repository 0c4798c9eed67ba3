"""Find the hidden channels of a model, cut its weights to some of them, and put them back.

A plan of axes says for each tensor of a model's state which of its dimensions count hidden channels. Dimensions of one
size are cut alike, whatever the layer: what is added to each other (residuals) has one size, so it keeps fitting.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from comfetch.errors import ModelError

Choose = Callable[[int, int], Tensor]
"""(channels, width) -> the channels that are kept."""
Index = tuple[Tensor | None, ...]
"""For each dimension of a tensor the coordinates that are kept; None keeps all."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
WEIGHTED = (nn.Linear, *CONVOLUTIONS, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)


@dataclass(frozen=True)
class Axis:
    """A dimension of hidden channels: `outer` copies of them (gates, heads), each `inner` neighbours wide (flattening).

    Args:
        channels: their number in full. multiple: their number in small is a multiple of this (heads).
    """

    channels: int
    outer: int = 1
    inner: int = 1
    multiple: int = 1

    @property
    def size(self) -> int:
        """Size of the dimension in full."""
        return self.outer * self.channels * self.inner

    def width(self, ratio: float) -> int:
        """Return the number of channels at a ratio: ⌈ratio · channels⌉, by the rule of HeteroFL."""
        return self.multiple * max(1, math.ceil(self.channels // self.multiple * ratio - 1e-9))

    def index(self, kept: Tensor) -> Tensor:
        """Return the coordinates of channels."""
        first = torch.arange(self.outer)[:, None, None] * self.channels + kept[None, :, None]
        return (first * self.inner + torch.arange(self.inner)).flatten()


Axes = tuple[Axis | None, ...]


@dataclass
class Widths:
    """The axes of every tensor of a model's state, and of every normalised dimension, by module."""

    axes: dict[str, Axes] = field(default_factory=dict)
    norms: dict[str, Axis] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    """Linear layers and convolutions, but those of a group for each channel, whose outputs are hidden."""

    def shape(self, name: str, full: torch.Size, ratio: float) -> tuple[int, ...]:
        """Return a tensor's shape at a ratio."""
        axes = self.axes.get(name, (None,) * len(full))
        return tuple(
            size if axis is None else axis.outer * axis.width(ratio) * axis.inner
            for size, axis in zip(full, axes, strict=True)
        )

    def index(self, ratio: float, choose: Choose) -> dict[str, Index]:
        """Return the coordinates that every tensor keeps."""
        drawn: dict[Axis, Tensor] = {}

        def index(axis: Axis | None) -> Tensor | None:
            if axis is not None and axis not in drawn:
                drawn[axis] = axis.index(choose(axis.channels, axis.width(ratio)))
            return None if axis is None else drawn[axis]

        return {name: tuple(index(axis) for axis in axes) for name, axes in self.axes.items()}


def cut(tensor: Tensor, index: Index) -> Tensor:
    """Keep some coordinates of each dimension."""
    for dim, kept in enumerate(index):
        if kept is not None:
            tensor = tensor.index_select(dim, kept.to(tensor.device))
    return tensor


def add_at(target: Tensor, index: Index, value: Tensor | float) -> None:
    """Add a value to the coordinates that `cut` would keep."""
    while index and index[-1] is None:
        index = index[:-1]
    if not index:
        target.add_(value)
        return
    grid = []
    for dim, kept in enumerate(index):
        shape = [1] * len(index)
        shape[dim] = -1
        grid.append((torch.arange(target.shape[dim]) if kept is None else kept).to(target.device).view(shape))
    target[tuple(grid)] += value


def first_channels(channels: int, width: int) -> Tensor:
    """Keep the first channels, as HeteroFL does.

    >>> first_channels(8, 3)
    tensor([0, 1, 2])
    """
    return torch.arange(width)


def plan_widths(model: nn.Module) -> Widths:
    """Find the hidden channels of a model: all but the inputs of its first layer and the outputs of its last.

    First and last are meant in the order of registration, as for sketching. Raise ModelError for what cannot be cut.
    """
    layers = {name: layer for name, layer in _outer_modules(model) if isinstance(layer, WEIGHTED)}
    if not layers or not isinstance(list(layers.values())[-1], nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        raise ModelError("A model is cut to a width between its first layer and its last, a linear one or convolution.")
    walk = _Walk(model, next(iter(layers)), list(layers)[-1])
    for name, module in _outer_modules(model):
        walk.visit(name, module)
    if walk.problems:
        raise ModelError.of(walk.problems)
    if not any(axis for axes in walk.plan.axes.values() for axis in axes):
        raise ModelError("This model has no hidden channels, so it cannot be narrower.")
    return walk.plan


def _outer_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the modules by name, without those inside attention, which belong to it."""
    found: list[tuple[str, nn.Module]] = []
    inside: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not any(name.startswith(prefix) for prefix in inside):
            found.append((name, module))
            if isinstance(module, nn.MultiheadAttention):
                inside.append(f"{name}.")
    return found


class _Walk:
    """Visit modules in order, and note the axes of their tensors."""

    def __init__(self, model: nn.Module, first: str, last: str) -> None:
        self.plan, self.problems = Widths(), list[str]()
        self.first, self.last = first, last
        self.flow: Axis | None = None  # the outputs of the layer before
        self.folds = False  # whether they have positions that a flattening would bring into the channels
        self.multiples: dict[int, int] = {}
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                size = module.embed_dim
                self.multiples[size] = math.lcm(self.multiples.get(size, 1), module.num_heads)

    def visit(self, name: str, module: Any) -> None:
        """Note the axes of one module's own tensors."""
        if isinstance(module, nn.Linear):
            self.note(name, module, weight=(self.outputs(name, module.out_features), self.inputs(name, module)))
        elif isinstance(module, CONVOLUTIONS):
            self.convolution(name, module)
        elif isinstance(module, nn.Embedding):
            self.note(name, module, weight=(None, self.outputs(name, module.embedding_dim)))
        elif isinstance(module, nn.RNNBase):
            self.recurrent(name, module)
        elif isinstance(module, nn.MultiheadAttention):
            self.attention(name, module)
        elif isinstance(module, NORMS):
            self.norm(name, module)
        elif module._parameters or module._buffers:
            self.bare(name, module)
        if isinstance(module, WEIGHTED):
            self.flow, self.folds = self.output, isinstance(module, CONVOLUTIONS)

    def hidden(self, channels: int) -> Axis:
        """Return the plain axis of so many channels."""
        return Axis(channels, multiple=self.multiples.get(channels, 1))

    def outputs(self, name: str, channels: int) -> Axis | None:
        """Return the output axis of a layer; the last one's is kept."""
        self.output = None if name == self.last else self.hidden(channels)
        return self.output

    def inputs(self, name: str, module: Any) -> Axis | None:
        """Return the input axis of a layer: the outputs of the layer before, flattened perhaps, if they fit."""
        size = int(getattr(module, "in_features", 0) or getattr(module, "in_channels", 0) or module.input_size)
        if name == self.first:
            return None
        if self.flow is None or self.flow.size == size:
            return self.flow or self.hidden(size)
        if self.folds and size % self.flow.size == 0 and not isinstance(module, CONVOLUTIONS):
            return Axis(self.flow.channels, inner=size // self.flow.size, multiple=self.flow.multiple)
        return self.hidden(size)

    def convolution(self, name: str, module: Any) -> None:
        """Note a convolution, plain or with a group for each channel."""
        inputs, outputs = self.inputs(name, module), self.outputs(name, module.out_channels)
        if module.groups == 1:
            self.note(name, module, weight=(outputs, inputs))
        elif module.groups == module.in_channels == module.out_channels and name not in (self.first, self.last):
            self.note(name, module, weight=(outputs, None))
        else:
            self.problems.append(f"{name}: a convolution of {module.groups} groups cannot be cut to a width.")

    def recurrent(self, name: str, module: nn.RNNBase) -> None:
        """Note a recurrent layer: its gates are stacked, and so are its directions."""
        if module.proj_size:
            self.problems.append(f"{name}: a recurrent layer with a projection cannot be cut to a width.")
        inputs, directions = self.inputs(name, module), 2 if module.bidirectional else 1
        plain = self.hidden(module.hidden_size)
        self.output = Axis(plain.channels, directions, multiple=plain.multiple)
        for local, tensor in module.named_parameters():
            gates = Axis(plain.channels, len(tensor) // plain.channels, multiple=plain.multiple)
            before = plain if local.startswith("weight_hh") else inputs if "_l0" in local else self.output
            self.set(name, local, tensor, (gates, before))

    def attention(self, name: str, module: nn.MultiheadAttention) -> None:
        """Note attention: all heads stay, and each is cut alike."""
        if name == self.first:
            self.problems.append(f"{name}: attention in the first place has the width of the model's inputs.")
        embed, heads = self.hidden(module.embed_dim), module.num_heads
        within = embed.multiple // heads
        inside, packed = (Axis(module.head_dim, copies * heads, multiple=within) for copies in (1, 3))
        sides = {"in_proj_weight": (packed, embed), "in_proj_bias": (packed,), "out_proj.weight": (embed, inside),
                 "out_proj.bias": (embed,), "q_proj_weight": (inside, embed), "bias_k": (None, None, inside),
                 "bias_v": (None, None, inside), "k_proj_weight": (inside, self.hidden(module.kdim)),
                 "v_proj_weight": (inside, self.hidden(module.vdim))}  # fmt: skip
        for local, tensor in module.named_parameters():
            self.set(name, local, tensor, sides[local])
        self.output = embed

    def norm(self, name: str, module: Any) -> None:
        """Note a normalisation of the channels, or of the last dimension."""
        if isinstance(module, nn.LayerNorm):
            size, dims = module.normalized_shape[-1], len(module.normalized_shape)
        else:
            size, dims = int(getattr(module, "num_features", 0) or module.num_channels), 1
        axis = self.flow if self.flow is not None and self.flow.size == size else self.hidden(size)
        self.plan.norms[name] = axis
        for local, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.ndim == dims:
                self.set(name, local, tensor, (*(None,) * (dims - 1), axis))

    def bare(self, name: str, module: nn.Module) -> None:
        """Cut a parameter of a module of unknown type in its last dimension that has the size of a layer in there."""
        sizes = {
            int(size)
            for layer in module.modules() if isinstance(layer, WEIGHTED) and layer is not module
            for weight in [getattr(layer, "weight", None)] if weight is not None
            for size in weight.shape[1 if isinstance(layer, nn.Embedding) else 0 :][:1]
        }  # fmt: skip
        sizes |= {layer.embed_dim for layer in module.modules() if isinstance(layer, nn.MultiheadAttention)}
        for local, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            matching = [dim for dim, size in enumerate(tensor.shape) if size in sizes]
            axes: list[Axis | None] = [None] * tensor.ndim
            if matching:
                axes[matching[-1]] = self.hidden(tensor.shape[matching[-1]])
            self.plan.axes[join(name, local)] = tuple(axes)

    def note(self, name: str, module: nn.Module, weight: Axes) -> None:
        """Note the axes of a layer with a weight, and perhaps a bias, which goes with its outputs."""
        self.set(name, "weight", module.weight, weight)
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            self.set(name, "bias", bias, weight)
        if not isinstance(module, nn.Embedding) and getattr(module, "groups", 1) == 1 and weight[0] is not None:
            self.plan.hidden.append(name)

    def set(self, name: str, local: str, tensor: Any, axes: Axes) -> None:
        """Note the axes of one tensor; dimensions that are not named are kept."""
        self.plan.axes[join(name, local)] = (*axes, *[None] * tensor.ndim)[: tensor.ndim]


def join(name: str, local: str) -> str:
    """Return the name of a module's tensor in the state of the model."""
    return f"{name}.{local}" if name else local
