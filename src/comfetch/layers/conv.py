"""Sketched convolutions and transposed convolutions, of 1, 2 and 3 dimensions, with every option of torch's.

The small weight is convolved as so many groups as the product has parts, between signed sums over channels. Two
things make that fast on CPUs. The arranged weight has its channels innermost, which sends grouped convolutions to the
kernels for that layout, and taps that meet nothing but padding are left out. And where the map is so small that a
convolution is mostly padding (2×2 under a 3×3 kernel), it is written as a matrix product over channels and positions.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comfetch.layers.base import Product, Recipe, SketchedLayer, register_layer
from comfetch.plan import Geometry

CONVOLVE: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONVOLVE_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
Sizes = tuple[int, ...]


class SketchedConv(SketchedLayer):
    """y = Ŵ * x + b."""

    weight: Tensor
    bias: Tensor | None
    full: Any

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, …) or (channels, …) as torch's layer does."""
        if x.ndim == len(self.full.kernel_size) + 1:
            return self.forward(x[None])[0]
        x, padding = self._pad(_KeepLayout.apply(x))
        product = self.product("weight")
        window = Window(tuple(x.shape[2:]), self.full.kernel_size, self.full.stride, padding, self.full.dilation)
        weight = product.weight(self.weight)
        if window.is_small(product.plan.compression):
            y = _multiply(product, weight, x, window)
        else:
            last = is_channels_last(x) or not has_plain_kernel(weight)
            summed = sum_inputs(product, x, last)
            y = finish_outputs(product, _convolve(weight, summed, window), is_channels_last(x))
        return add_bias(y, self.bias)

    def _pad(self, x: Tensor) -> tuple[Tensor, Sizes]:
        """Do all padding here that is not symmetric and with zeros; return what is left for the convolution."""
        full = self.full
        none = (0,) * len(full.kernel_size)
        if full.padding_mode != "zeros":
            return F.pad(x, full._reversed_padding_repeated_twice, mode=full.padding_mode), none
        if full.padding == "same":
            left, right = full._reversed_padding_repeated_twice[::2], full._reversed_padding_repeated_twice[1::2]
            if left == right:
                return x, tuple(reversed(left))
            return F.pad(x, full._reversed_padding_repeated_twice), none
        return x, none if full.padding == "valid" else full.padding


class Window:
    """How a kernel goes over a map: sizes, stride, padding and dilation for each dimension."""

    def __init__(self, size: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> None:
        self.size, self.kernel, self.stride, self.padding, self.dilation = size, kernel, stride, padding, dilation
        self.dimensions = tuple(zip(size, kernel, stride, padding, dilation, strict=True))
        self.out = tuple(_out(*dimension) for dimension in self.dimensions)

    def is_small(self, compression: float) -> bool:
        """Tell whether a matrix over all pairs of positions is little larger than S, and below the full weight."""
        pairs = math.prod(self.size) * math.prod(self.out)
        return 0 < pairs < math.prod(self.kernel) * min(2.01, compression)


def _out(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _convolve(weight: Tensor, x: Tensor, window: Window) -> Tensor:
    """Convolve x with (parts, outputs, inputs, taps), a group for each part."""
    taps = [_live_taps(*dimension) for dimension in window.dimensions]
    live = tuple(slice(a, b) for a, b, _ in taps)
    if has_plain_kernel(weight) and not is_channels_last(x):
        kernel = weight.flatten(0, 1).unflatten(2, window.kernel)[(slice(None), slice(None), *live)].contiguous()
    else:
        last = weight.transpose(2, 3).flatten(0, 1).unflatten(1, window.kernel)
        kernel = last[(slice(None), *live)].contiguous().movedim(-1, 1)
    convolve = CONVOLVE[len(taps)]
    z: Tensor = convolve(x, kernel, None, window.stride, [p for *_, p in taps], window.dilation, len(weight))
    return z


def has_plain_kernel(weight: Tensor) -> bool:
    """Tell whether the channels of (parts, outputs, inputs, taps) fill vectors: the usual layout is fast, too."""
    return weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0


def _live_taps(size: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int, int]:
    """Return the range of taps that ever meet data, not padding only, and the padding left to that range."""
    out = _out(size, kernel, stride, padding, dilation)
    live = [t for t in range(kernel) if any(0 <= o * stride + t * dilation - padding < size for o in range(out))]
    if live:
        first, last = min(live[0], padding // dilation), live[-1]
        left = padding - first * dilation
        if _out(size, last - first + 1, stride, left, dilation) == out:
            return first, last + 1, left
    return 0, kernel, padding


def _multiply(product: Product, weight: Tensor, x: Tensor, window: Window) -> Tensor:
    """Convolve as a product of matrices over channels and positions, (parts, outputs · out, inputs · size)."""
    inputs, outputs = math.prod(window.size), math.prod(window.out)
    make = _placement.__wrapped__ if torch.compiler.is_compiling() else _placement  # compilers trace no caches
    place = make(window.dimensions, weight.dtype, weight.device)
    matrix = (weight @ place).unflatten(3, (outputs, inputs)).transpose(2, 3).flatten(3).flatten(1, 2)
    if product.before is None:
        slices = x.flatten(1).unflatten(1, (product.parts, -1)).permute(1, 2, 0)
    else:
        summed = product.before(x.flatten(2).permute(1, 2, 0).flatten(1))
        slices = summed.unflatten(1, (inputs, len(x))).flatten(0, 1).unflatten(0, (product.parts, -1))
    z = torch.bmm(matrix, slices).unflatten(1, (-1, outputs)).flatten(2).flatten(0, 1)
    rows = product.finish(z).unflatten(1, (outputs, len(x)))
    if is_channels_last(x):
        return rows.permute(2, 1, 0).contiguous().unflatten(1, window.out).movedim(-1, 1)
    return rows.permute(2, 0, 1).contiguous().unflatten(2, window.out)


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # a tensor made in inference mode could not be used in training later
def _placement(dimensions: tuple[Sizes, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the 0/1 matrix (taps, out · size) that says through which tap each output position sees each input one."""
    place = torch.ones(1, 1, 1, dtype=dtype, device=device)
    for size, kernel, stride, padding, dilation in dimensions:
        tap = torch.arange(kernel, device=device)[:, None, None]
        out = torch.arange(_out(size, kernel, stride, padding, dilation), device=device)[:, None]
        seen = out * stride + tap * dilation - padding == torch.arange(size, device=device)
        place = torch.kron(place, seen.to(dtype))
    return place.flatten(1)


class SketchedConvTranspose(SketchedLayer):
    """y = Ŵ *ᵀ x + b, in the same way."""

    weight: Tensor
    bias: Tensor | None
    full: Any

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Map (batch, channels, …) or (channels, …) as torch's layer does."""
        full, dims = self.full, len(self.full.kernel_size)
        if x.ndim == dims + 1:
            return self.forward(x[None], output_size)[0]
        padding = full._output_padding(x, output_size, full.stride, full.padding, full.kernel_size, dims, full.dilation)
        product = self.product("weight")
        last = is_channels_last(x)
        x = sum_inputs(product, _KeepLayout.apply(x), last)
        weight = product.weight(self.weight).transpose(1, 2)
        kernel = weight.reshape(-1, weight.shape[2], *full.kernel_size)
        convolve = CONVOLVE_TRANSPOSED[dims]
        options = (full.stride, full.padding, padding, product.parts, full.dilation)
        return add_bias(finish_outputs(product, convolve(x, kernel, None, *options), last), self.bias)


def sum_inputs(product: Product, x: Tensor, last: bool) -> Tensor:
    """Sum the channels of (batch, channels, …) into the product's inputs, innermost in memory with `last`."""
    if product.before is None:
        return x
    return _FromRows.apply(product.before(_ToRows.apply(x)), tuple(x.shape), last)


def finish_outputs(product: Product, z: Tensor, last: bool) -> Tensor:
    """Bring the channels of the small convolution to the full ones, innermost in memory with `last`."""
    if product.after is None and product.plan.rows == 1:
        return to_layout(z, last)
    shape, rows = tuple(z.shape), [_ToRows.apply(z)]
    del z  # with blocks it is as large as the outputs of all rows: whatever is used up must go before those are made
    return _FromRows.apply(product.finish(rows.pop()), shape, last)


class _KeepLayout(torch.autograd.Function):
    """Return a tensor as it is, and its gradient in the tensor's own layout.

    A convolution hands back the gradient in the layout of its weight; layers before would then work on two layouts at
    once, which is slow.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.last = is_channels_last(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return to_layout(grad, ctx.last)


class _ToRows(torch.autograd.Function):
    """(batch, channels, …) -> (channels, batch · …), by way of the usual layout: two fast copies, not a slow one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape, ctx.last = x.shape, is_channels_last(x)
        return x.contiguous().transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _FromRows.apply(grad, ctx.shape, ctx.last)


class _FromRows(torch.autograd.Function):
    """(channels, batch · …) -> (batch, channels, …), in either layout."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shape: Sizes, last: bool) -> Tensor:
        return to_layout(rows.view(len(rows), shape[0], *shape[2:]).transpose(0, 1).contiguous(), last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ToRows.apply(grad), None, None


def is_channels_last(x: Tensor) -> bool:
    """Tell whether the channels of (batch, channels, …) are innermost in memory."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def to_layout(x: Tensor, last: bool) -> Tensor:
    """Bring a tensor into one of the two layouts."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x.contiguous()


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias to the channels."""
    return y if bias is None else y + bias.to(y.dtype).view(-1, *[1] * (y.ndim - 2))


@register_layer(nn.Conv1d)
@register_layer(nn.Conv2d)
@register_layer(nn.Conv3d)
def conv(layer: Any) -> Recipe | str:
    """Describe convolutions: the weight is (outputs, inputs of a group, …)."""
    if layer.groups > 1 and layer.in_channels == layer.groups:
        return "depthwise: each output has one input channel, so there is nothing to share"
    return Recipe({"weight": Geometry(tuple(layer.weight.shape), layer.groups)}, SketchedConv)


@register_layer(nn.ConvTranspose1d)
@register_layer(nn.ConvTranspose2d)
@register_layer(nn.ConvTranspose3d)
def conv_transpose(layer: Any) -> Recipe | str:
    """Describe transposed convolutions: the weight is (inputs, outputs of a group, …)."""
    if layer.groups > 1 and layer.in_channels == layer.groups:
        return "depthwise: each output has one input channel, so there is nothing to share"
    geometry = Geometry(tuple(layer.weight.shape), layer.groups, transposed=True)
    return Recipe({"weight": geometry}, SketchedConvTranspose)
