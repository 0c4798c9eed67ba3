"""Sketch, unsketch and expand tensors: the mathematics, for any hash, along any one mode.

H is the length × size matrix with H[index[j], j] = sign[j]; n is the load of each bucket and D = diag(n) = H Hᵀ.
Sketching is S = A W and unsketching Ŵ = E S, with A and E by scale (docs/mathematics.md, 8):

==========  ==========  ===========  ==================================================
scale       A           E            E A
==========  ==========  ===========  ==================================================
count       H           Hᵀ           HᵀH: unbiased, but inflates by the load
isometric   D^(-1/2) H  Hᵀ D^(-1/2)  a projection; S has orthonormal coordinates
mean        D⁻¹ H       Hᵀ           the same projection; S is a set of tied weights
==========  ==========  ===========  ==================================================

No matrix H is ever built: every operation here is one signed sum over the rows of a table (`SignedSum`), forward and
backward, with as many additions as the tensor has elements.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from comfetch import hashing, medians
from comfetch.errors import MismatchError, OptionError

SCALES = ("mean", "isometric", "count")


class SignedSum(nn.Module):
    """Sum signed rows: out[i] = Σ_t sign[i, t] · rows[source[i, t]], a sparse matrix of signs and its transpose.

    The buffers follow the module to its device, but are no part of its state: they come from a key. The transpose is
    kept beside the matrix, so that the gradient is a sum of the same kind, with no temporary larger than its result.
    """

    source: Tensor
    offsets: Tensor
    sign: Tensor
    source_back: Tensor
    offsets_back: Tensor
    sign_back: Tensor

    def __init__(self, target: np.ndarray, source: np.ndarray, sign: np.ndarray, targets: int, sources: int) -> None:
        """Hold the matrix whose entries are sign[e] at (target[e], source[e])."""
        super().__init__()
        self.targets, self.sources = targets, sources
        for name, row, column, count in (("", target, source, targets), ("_back", source, target, sources)):
            order = np.argsort(row, kind="stable")
            offsets = np.searchsorted(row[order], np.arange(count))
            self.register_buffer(f"source{name}", _int32(column[order]), persistent=False)
            self.register_buffer(f"offsets{name}", _int32(offsets), persistent=False)
            self.register_buffer(f"sign{name}", torch.from_numpy(sign[order].astype(np.int8)), persistent=False)

    @classmethod
    def spread(cls, hash: hashing.Hash, length: int) -> "SignedSum":
        """Make Hᵀ for a batch of hashes: (batch · length) rows -> (batch · size) rows."""
        batch, size = hash.index.shape
        source = hash.index + np.arange(batch)[:, None] * length
        return cls(np.arange(batch * size), source.ravel(), hash.sign.ravel(), batch * size, batch * length)

    def forward(self, rows: Tensor) -> Tensor:
        """Apply the matrix: (sources, n) -> (targets, n)."""
        return self._apply_side(rows, False)

    def transposed(self, rows: Tensor) -> Tensor:
        """Apply the transposed matrix: (targets, n) -> (sources, n)."""
        return self._apply_side(rows, True)

    def _apply_side(self, rows: Tensor, back: bool) -> Tensor:
        if torch.is_grad_enabled() and rows.requires_grad:
            out: Tensor = _SignedSum.apply(rows, self, back)
            return out
        return self.sum(rows, back)

    def sum(self, rows: Tensor, back: bool) -> Tensor:
        """Apply the matrix or its transpose, without a gradient."""
        source, offsets, sign, results = self.side(back)
        if rows.shape[1] == 0 or source.numel() == 0:
            return rows.new_zeros(results, rows.shape[1])
        return F.embedding_bag(source, rows.contiguous(), offsets, mode="sum", per_sample_weights=sign.to(rows.dtype))

    def side(self, back: bool) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return source, offsets, sign and number of results of the matrix or of its transpose."""
        if back:
            return self.source_back, self.offsets_back, self.sign_back, self.sources
        return self.source, self.offsets, self.sign, self.targets

    def extra_repr(self) -> str:
        """Show the shape of the matrix."""
        return f"{self.targets}x{self.sources}"


class _SignedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: SignedSum, back: bool) -> Tensor:
        ctx.matrix, ctx.back = matrix, back
        return matrix.sum(rows, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SignedSum.apply(grad, ctx.matrix, not ctx.back), None, None


def expand(z: Tensor, index: Tensor, sign: Tensor, dim: int = -1) -> Tensor:
    """Expand a short output to the full one: y[i] = sign[i] * z[index[i]] along `dim`.

    The result equals that of the full weight ``unsketch(S)``, which is never built.

    >>> expand(torch.tensor([10.0, 20.0]), torch.tensor([0, 1, 1]), torch.tensor([1, 1, -1]))
    tensor([ 10.,  20., -20.])
    """
    shape = [1] * z.ndim
    shape[dim] = -1
    return z.index_select(dim, index) * sign.to(z.dtype).view(shape)


class Sketcher(nn.Module):
    """Sketch along one mode with a batch of hashes, all of one size and length.

    Tensors have the shape (batch, size, n) in full and (batch, length, n) in small: each batch entry has its own hash.
    """

    load: Tensor

    def __init__(self, hash: hashing.Hash, length: int, scale: str = "mean") -> None:
        super().__init__()
        check_scale(scale)
        self.batch, self.size = hash.index.shape
        self.length, self.scale = length, scale
        self.matrix = SignedSum.spread(hash, length)
        load = torch.from_numpy(hashing.loads(hash.index, length)).double()
        self.register_buffer("load", load, persistent=False)

    def sketch(self, full: Tensor) -> Tensor:
        """S = A W."""
        self._expect(full, self.size, "sketch")
        small = self.matrix.transposed(full.flatten(0, 1))
        return small.unflatten(0, (self.batch, self.length)) * self._factor(full, {"isometric": -0.5, "mean": -1.0})

    def unsketch(self, small: Tensor) -> Tensor:
        """Ŵ = E S."""
        self._expect(small, self.length, "unsketch")
        return self._spread(small * self._factor(small, {"isometric": -0.5}))

    def lift(self, update: Tensor) -> Tensor:
        """ΔW = A⁺ ΔS, the smallest change of W whose sketch is ΔS (docs/mathematics.md, 7)."""
        self._expect(update, self.length, "lift")
        return self._spread(update * self._factor(update, {"isometric": -0.5, "count": -1.0}))

    def lift_gradient(self, gradient: Tensor) -> Tensor:
        """g_W = Aᵀ g_S, the chain rule."""
        self._expect(gradient, self.length, "lift the gradient of")
        return self._spread(gradient * self._factor(gradient, {"isometric": -0.5, "mean": -1.0}))

    def drop_gradient(self, full: Tensor) -> Tensor:
        """(Aᵀ)⁺ Δ, the pseudo-inverse of `lift_gradient`."""
        self._expect(full, self.size, "drop")
        small = self.matrix.transposed(full.flatten(0, 1))
        return small.unflatten(0, (self.batch, self.length)) * self._factor(full, {"isometric": -0.5, "count": -1.0})

    def fold(self, small: Tensor, length: int) -> Tensor:
        """Fold a sketch to a shorter one, as if W itself had been sketched to `length` (docs/mathematics.md, 9)."""
        self._expect(small, self.length, "fold")
        if length < 1 or self.length % length:
            raise OptionError(
                f"A sketch of length {self.length} folds only to lengths that divide it, not to {length}."
            )
        n = self.load.to(small)[:, :, None]
        shorter = n.view(self.batch, -1, length, 1).sum(1, keepdim=True).clamp(min=1)
        parts, n = small.view(self.batch, -1, length, small.shape[2]), n.view(self.batch, -1, length, 1)
        weight = {"count": torch.ones_like(n), "isometric": (n / shorter).sqrt(), "mean": n / shorter}[self.scale]
        return (parts * weight).sum(1)

    def _spread(self, small: Tensor) -> Tensor:
        return self.matrix(small.flatten(0, 1)).unflatten(0, (self.batch, self.size))

    def _factor(self, like: Tensor, powers: dict[str, float]) -> Tensor:
        """Return loadᵖ, (batch, length, 1), with p by scale, 0 if not given; empty buckets give 0 unless p is 0."""
        power = powers.get(self.scale, 0.0)
        n = self.load.to(like.device)
        factor = torch.where(n > 0, n.clamp(min=1) ** power, 0.0) if power else torch.ones_like(n)
        return factor.to(like.dtype)[:, :, None]

    def _expect(self, tensor: Tensor, size: int, verb: str) -> None:
        if tensor.ndim != 3 or tensor.shape[:2] != (self.batch, size):
            raise MismatchError(
                f"Cannot {verb} a tensor of shape {tuple(tensor.shape)}: expected ({self.batch}, {size}, n)."
            )


def sketch(x: Tensor, key: int, length: int, *, dim: int = 0, hash: str = "balanced", scale: str = "mean") -> Tensor:
    """Sketch a tensor of any order along one mode: S = A x along `dim`.

    >>> sketch(torch.ones(6, 4), key=0, length=2).shape
    torch.Size([2, 4])
    """
    return _along(x, dim, sketcher(key, x.shape[dim], length, hash, scale).to(x.device).sketch)


def unsketch(s: Tensor, key: int, size: int, *, dim: int = 0, hash: str = "balanced", scale: str = "mean") -> Tensor:
    """Recover an estimate of the full tensor from its sketch: x̂ = E S along `dim`."""
    return _along(s, dim, sketcher(key, size, s.shape[dim], hash, scale).to(s.device).unsketch)


def lift(update: Tensor, key: int, size: int, *, dim: int = 0, hash: str = "balanced", scale: str = "mean") -> Tensor:
    """Lift the change of a sketch to the smallest change of the full tensor that has this sketch: A⁺ ΔS."""
    return _along(update, dim, sketcher(key, size, update.shape[dim], hash, scale).to(update.device).lift)


def fold_sketch(s: Tensor, key: int, size: int, length: int, *, dim: int = 0, scale: str = "mean") -> Tensor:
    """Fold a balanced sketch to a shorter `length` that divides its own: equals sketching x to `length` at once."""
    folder = sketcher(key, size, s.shape[dim], "balanced", scale).to(s.device)
    return _along(s, dim, lambda rows: folder.fold(rows, length))


def sketch_rows(
    x: Tensor, key: int, length: int, rows: int, *, dim: int = 0, hash: str = "balanced", scale: str = "count"
) -> Tensor:
    """Sketch k times, each row under its own key: (rows, …) with `length` at `dim` of each."""
    keys = row_keys(key, rows)
    return torch.stack([sketch(x, k, length, dim=dim, hash=hash, scale=scale) for k in keys])


def unsketch_rows(
    s: Tensor, key: int, size: int, *, dim: int = 0, hash: str = "balanced", scale: str = "count"
) -> Tensor:
    """Recover the full tensor from k sketches: the coordinate-wise median of the k estimates."""
    keys = row_keys(key, len(s))
    estimates = [unsketch(row, k, size, dim=dim, hash=hash, scale=scale) for row, k in zip(s, keys, strict=True)]
    return medians.median(torch.stack(estimates))


def sketch_both(
    x: Tensor, keys: tuple[int, int], lengths: tuple[int, int], *, dims: tuple[int, int] = (0, 1),
    hash: str = "balanced", scale: str = "mean",
) -> Tensor:  # fmt: skip
    """Sketch along two modes at once: S = A₁ x A₂ᵀ."""
    for key, length, dim in zip(keys, lengths, dims, strict=True):
        x = sketch(x, key, length, dim=dim, hash=hash, scale=scale)
    return x


def unsketch_both(
    s: Tensor, keys: tuple[int, int], sizes: tuple[int, int], *, dims: tuple[int, int] = (0, 1),
    hash: str = "balanced", scale: str = "mean",
) -> Tensor:  # fmt: skip
    """Recover a tensor that was sketched along two modes: x̂ = E₁ S E₂ᵀ."""
    for key, size, dim in zip(keys, sizes, dims, strict=True):
        s = unsketch(s, key, size, dim=dim, hash=hash, scale=scale)
    return s


def solve_least(apply: Any, adjoint: Any, target: Tensor, tolerance: float | None = None, steps: int = 1000) -> Tensor:
    """Find the smallest x with apply(x) = target in the sense of least squares (conjugate gradients, CGLS).

    This is the pseudo-inverse of k stacked sketches (docs/mathematics.md, 7), without building their matrix.
    """
    tolerance = 10 * torch.finfo(target.dtype).eps if tolerance is None else tolerance
    residual = target.clone()
    slope = adjoint(residual)
    x, direction = torch.zeros_like(slope), slope.clone()
    first = norm = float(slope.square().sum())
    for _ in range(steps):
        if norm <= tolerance**2 * first or norm == 0:
            break
        image = apply(direction)
        alpha = norm / float(image.square().sum())
        x += alpha * direction
        residual -= alpha * image
        slope = adjoint(residual)
        norm, previous = float(slope.square().sum()), norm
        direction = slope + (norm / previous) * direction
    return x


def row_keys(key: int, rows: int) -> list[int]:
    """Derive the keys of k independent rows."""
    if rows < 1:
        raise OptionError(f"rows={rows} is below 1. It is the number of independent sketches.")
    return [hashing.fold(key, "row", row) for row in range(rows)]


@_disable_dynamo  # hashes are drawn by numpy; this decorator, unlike the public one, does not load the compiler
def sketcher(key: int, size: int, length: int, hash: str = "balanced", scale: str = "mean") -> Sketcher:
    """Make the sketcher of one hash."""
    return Sketcher(hashing.draw([hashing.check_key(key)], size, length, hash), length, scale)


def check_scale(scale: str) -> None:
    """Raise if `scale` is not one of SCALES."""
    if scale not in SCALES:
        raise OptionError(f"scale={scale!r} is not known. Choose one of: {', '.join(SCALES)}.")


def _along(x: Tensor, dim: int, apply: Any) -> Tensor:
    """Apply a function of (1, size, n) tensors along one dimension of a tensor of any order."""
    moved = x.movedim(dim, 0)
    rest = moved.shape[1:]
    out: Tensor = apply(moved.reshape(1, len(moved), math.prod(rest)))
    return out.view(out.shape[1], *rest).movedim(0, dim)


def _int32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
