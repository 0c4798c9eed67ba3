"""Sketched embeddings: output is the embedding dimension, input the vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comfetch import medians, sketching
from comfetch.errors import ModelError
from comfetch.layers.base import Plans, Recipe, SketchedLayer, register_layer
from comfetch.plan import Geometry


class SketchedEmbedding(SketchedLayer):
    """y = row v of Ŵ: rows of the small table, picked by the hash of the vocabulary and expanded by that of the output.

    A lookup is no product, so the hashes stand here as they are drawn, (rows · blocks, size), instead of as sums.
    """

    weight: Tensor
    full: nn.Embedding
    factor: Tensor | None
    input_index: Tensor
    input_sign: Tensor
    output_index: Tensor
    output_sign: Tensor

    def __init__(self, full: nn.Embedding, plans: Plans) -> None:
        super().__init__(full, plans)
        self.plan = plans["weight"]
        for side in self.plan.sides:
            drawn = [self.plan.draw(side, row) for row in range(self.plan.rows)]
            index = torch.stack([torch.from_numpy(h.index) for h in drawn])
            sign = torch.stack([torch.from_numpy(h.sign) for h in drawn])
            self.register_buffer(f"{side}_index", index.int(), persistent=False)
            self.register_buffer(f"{side}_sign", sign, persistent=False)
        factor = self.plan.load_power(-0.5) if self.plan.scale == "isometric" else None
        self.register_buffer("factor", _broadcastable(factor), persistent=False)

    def make_products(self, plans: Plans) -> dict[str, nn.Module]:
        """Make none."""
        return {}

    def forward(self, ids: Tensor) -> Tensor:
        """Look up (…) ids: (…, embedding dimension)."""
        small = self.weight if self.factor is None else self.weight * self.factor.to(self.weight.dtype)
        tables = small.unbind() if self.plan.rows > 1 else [small]
        rows = torch.stack([self._look_up(table, ids.flatten(), row) for row, table in enumerate(tables)])
        return medians.median(rows).view(*ids.shape, self.full.embedding_dim)

    def _look_up(self, table: Tensor, ids: Tensor, row: int) -> Tensor:
        full, blocks = self.full, self.plan.blocks
        if self.plan.mode == "output":
            sparse = full.sparse and table is self.weight  # no sparse gradient passes through rows or factors
            z = F.embedding(ids, table, full.padding_idx, scale_grad_by_freq=full.scale_grad_by_freq, sparse=sparse)
        else:
            index = self.input_index[row][:, ids].t().long()  # (n, blocks)
            sign = self.input_sign[row][:, ids].t().to(table.dtype)
            parts = table.view(len(table) * blocks, -1)
            z = F.embedding(index * blocks + torch.arange(blocks, device=ids.device), parts) * sign[..., None]
            z = z.flatten(1)
            z = self._weigh_gradients(z, ids)
        if self.plan.mode == "input":
            return z
        index, sign = self.output_index[row], self.output_sign[row]
        if blocks == 1:
            return sketching.expand(z, index[0], sign[0])
        block = ids // (full.num_embeddings // blocks)
        return z.gather(1, index[block].long()) * sign[block].to(z.dtype)

    def _weigh_gradients(self, z: Tensor, ids: Tensor) -> Tensor:
        """Give no gradient through the padding index, and divide by the count of each id with scale_grad_by_freq.

        Torch's lookup does both by row, but here ids share rows.
        """
        if self.full.scale_grad_by_freq:
            _, place, counts = ids.unique(return_inverse=True, return_counts=True)
            share = 1 / counts[place].to(z.dtype)[:, None]
            z = z * share + (z * (1 - share)).detach()
        if self.full.padding_idx is not None:
            z = torch.where((ids == self.full.padding_idx)[:, None], z.detach(), z)
        return z


@register_layer(nn.Embedding)
def embedding(layer: nn.Embedding) -> Recipe | str:
    """Describe nn.Embedding: the weight is (vocabulary, embedding dimension), inputs first."""
    if layer.max_norm is not None:
        raise ModelError("max_norm rescales rows of the full weight in place; set max_norm=None or skip it")
    return Recipe({"weight": Geometry(tuple(layer.weight.shape), transposed=True)}, SketchedEmbedding)


def _broadcastable(factor: Tensor | None) -> Tensor | None:
    """Shrink dimensions along which a factor is constant to 1."""
    if factor is None:
        return None
    for dim in range(factor.ndim):
        first = factor.narrow(dim, 0, 1)
        if bool((factor == first).all()):
            factor = first
    return factor.contiguous()
