"""Sketched convolutions and transposed convolutions, of 1, 2 and 3 dimensions, with every option of torch's."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from comfetch.layers.base import Product, Recipe, SketchedLayer, register_layer
from comfetch.plan import Geometry

CONVOLVE: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONVOLVE_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class SketchedConv(SketchedLayer):
    """y = Ŵ * x + b: a grouped convolution with the small weight, between signed sums over channels."""

    weight: Tensor
    bias: Tensor | None
    full: Any

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, …) or (channels, …) as torch's layer does."""
        full, dims = self.full, len(self.full.kernel_size)
        if x.ndim == dims + 1:
            return self.forward(x[None])[0]
        padding = full.padding
        if full.padding_mode != "zeros":
            x, padding = F.pad(x, full._reversed_padding_repeated_twice, mode=full.padding_mode), 0
        product: Product = self.products["weight"]  # type: ignore[assignment]
        x = sum_inputs(product, x)
        weight = product.weight(self.weight)
        kernel = weight.reshape(-1, weight.shape[2], *full.kernel_size)
        z = CONVOLVE[dims](x, kernel, None, full.stride, padding, full.dilation, product.parts)
        return finish_outputs(product, z, self.bias)


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
        padding = full._output_padding(
            x, output_size, full.stride, full.padding, full.kernel_size, dims, full.dilation
        )
        product: Product = self.products["weight"]  # type: ignore[assignment]
        x = sum_inputs(product, x)
        weight = product.weight(self.weight).transpose(1, 2)
        kernel = weight.reshape(-1, weight.shape[2], *full.kernel_size)
        convolve = CONVOLVE_TRANSPOSED[dims]
        z = convolve(x, kernel, None, full.stride, full.padding, padding, product.parts, full.dilation)
        return finish_outputs(product, z, self.bias)


def sum_inputs(product: Product, x: Tensor) -> Tensor:
    """Sum the channels of (batch, channels, …) into the product's inputs."""
    return x if product.before is None else channels_from_rows(product.before(rows_from_channels(x)), x)


def finish_outputs(product: Product, z: Tensor, bias: Tensor | None) -> Tensor:
    """Bring the channels of the small convolution to the full ones, and add the bias."""
    if product.after is None and product.plan.rows == 1:
        y = z
    else:
        y = channels_from_rows(product.finish(rows_from_channels(z)), z)
    return y if bias is None else y + bias.view(-1, *[1] * (y.ndim - 2))


def rows_from_channels(x: Tensor) -> Tensor:
    """(batch, channels, …) -> (channels, batch · …)."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def channels_from_rows(rows: Tensor, like: Tensor) -> Tensor:
    """(channels, batch · …) -> (batch, channels, …), contiguous."""
    return rows.view(len(rows), len(like), *like.shape[2:]).transpose(0, 1).contiguous()


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
