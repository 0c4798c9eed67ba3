"""Sketched fully connected layers."""

import math

from torch import Tensor, nn

from comfetch.layers.base import Recipe, SketchedLayer, register_layer, with_bias
from comfetch.plan import Geometry


class SketchedLinear(SketchedLayer):
    """y = Ŵ x + b, computed as the small product and its expansion."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs)."""
        columns = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).t()
        rows = self.product("weight").multiply(self.weight, columns)
        return with_bias(rows, self.bias).view(*x.shape[:-1], len(rows))


@register_layer(nn.Linear)
def linear(layer: nn.Linear) -> Recipe | str:
    """Describe nn.Linear: the weight is (outputs, inputs)."""
    return Recipe({"weight": Geometry(tuple(layer.weight.shape))}, SketchedLinear)
