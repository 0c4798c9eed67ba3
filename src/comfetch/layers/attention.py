"""Sketched multi-head attention, with every option of torch's."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comfetch.errors import MismatchError
from comfetch.layers.base import Plans, Product, Recipe, SketchedLayer, register_layer, with_bias
from comfetch.layers.linear import SketchedLinear
from comfetch.plan import Geometry


class SketchedAttention(SketchedLayer):
    """y = Ŵₒ · attention(Ŵ_q query, Ŵ_k key, Ŵ_v value): four small products around torch's attention.

    The packed in_proj_weight holds three products, each with its own hashes. The output projection is a child, as in
    torch's layer, so that its parameters keep their names; its plan stands here as `out_proj.weight`.
    """

    full: Any
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool

    def __init__(self, full: Any, plans: Plans) -> None:
        super().__init__(full, {name: plan for name, plan in plans.items() if "." not in name})
        self.plans = plans
        self._qkv_same_embed_dim: bool = full._qkv_same_embed_dim
        self.out_proj = SketchedLinear(full.out_proj, {"weight": plans["out_proj.weight"]})

    def make_products(self, plans: Plans) -> dict[str, nn.Module]:
        """Make one product for each of q, k and v, whether their weights are packed or not."""
        if "in_proj_weight" not in plans:
            return super().make_products(plans)
        return {name: Product(plans["in_proj_weight"], group) for group, name in enumerate("qkv")}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Map query, key and value as torch's layer does; see there for shapes and masks.

        Returns:
            The output, of the query's shape, and the attention weights if they are needed, else None.
        """
        if query.ndim == 2:
            return self._unbatched(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise MismatchError("is_causal=True says that attn_mask is causal: give that mask, too.")
        q, k, v = self._project(query, key, value)
        mask = None
        if need_weights or key_padding_mask is not None:
            is_causal = False
        if not is_causal:
            mask = self._merge(attn_mask, key_padding_mask, q, k)
        k, v, mask = self._extend(k, v, mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
            heads = weights @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        order = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        output = self.out_proj(heads.permute(*order).flatten(2))
        return output, weights.mean(1) if weights is not None and average_attn_weights else weights

    def unsketched(self) -> nn.Module:
        """Return the full layer with the weights Ŵ = E S."""
        layer = super().unsketched()
        layer.out_proj = self.out_proj.unsketched()
        return layer

    def _unbatched(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, need: bool, *options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend without a batch: (length, features)."""
        dim = 0 if self.batch_first else 1
        batched = {id(x): x.unsqueeze(dim) for x in (query, key, value)}
        q, k, v = (batched[id(x)] for x in (query, key, value))
        output, weights = self(q, k, v, None if padding is None else padding[None], need, *options)
        return output.squeeze(dim), None if weights is None else weights.squeeze(0)

    def _project(self, *inputs: Tensor) -> list[Tensor]:
        """Multiply query, key and value with their weights: each (batch, heads, length, head_dim).

        Inputs that are one and the same tensor are transposed once.
        """
        transposed: dict[int, Tensor] = {}
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = []
        for name, x, bias in zip("qkv", inputs, biases, strict=True):
            product, small = self._product(name)
            if id(x) not in transposed:
                rows = x.flatten(0, 1).t()
                transposed[id(x)] = rows if product.before is None else rows.contiguous()
            y = with_bias(product.multiply(small, transposed[id(x)]), bias)
            y = y.view(*x.shape[:2], self.num_heads, self.head_dim)
            projected.append(y.permute(0, 2, 1, 3) if self.batch_first else y.permute(1, 2, 0, 3))
        return projected

    def _product(self, name: str) -> tuple[Product, Tensor]:
        """Return the product and the small weight of q, k or v."""
        if self.in_proj_weight is not None:
            return self.product(name), self.in_proj_weight
        name = f"{name}_proj_weight"
        return self.product(name), getattr(self, name)

    def _merge(self, attn: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Merge both masks into one that is added to the scores, (batch or 1, heads or 1, target, source)."""
        batch, heads, target, _ = q.shape
        source = k.shape[2]
        merged = None
        if attn is not None:
            if attn.shape not in ((target, source), (batch * heads, target, source)):
                raise MismatchError(
                    f"attn_mask has shape {tuple(attn.shape)}; expected {(target, source)} or"
                    f" {(batch * heads, target, source)}."
                )
            merged = _additive(attn, q.dtype).view(-1, heads if attn.ndim == 3 else 1, target, source)
        if padding is not None:
            if padding.shape != (batch, source):
                raise MismatchError(f"key_padding_mask has shape {tuple(padding.shape)}; expected {(batch, source)}.")
            padding = _additive(padding, q.dtype)[:, None, None]
            merged = padding if merged is None else merged + padding
        return merged

    def _extend(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append bias_k and bias_v, and zeros, to the keys and values; every target sees them."""
        before = k.shape[2]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, bias.view(1, self.num_heads, 1, -1).expand(len(x), -1, -1, -1)], dim=2)
                for x, bias in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return k, v, None if mask is None else F.pad(mask, (0, k.shape[2] - before))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a mask of booleans, True for what is not seen, into one of 0 and -∞."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


@register_layer(nn.MultiheadAttention)
def attention(layer: nn.MultiheadAttention) -> Recipe | str:
    """Describe nn.MultiheadAttention: each projection is (outputs, inputs); a packed one is three of them."""
    weights = {}
    if layer.in_proj_weight is not None:
        weights["in_proj_weight"] = Geometry(tuple(layer.in_proj_weight.shape), groups=3)
    else:
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weights[name] = Geometry(tuple(getattr(layer, name).shape))
    weights["out_proj.weight"] = Geometry(tuple(layer.out_proj.weight.shape))
    return Recipe(weights, SketchedAttention)
