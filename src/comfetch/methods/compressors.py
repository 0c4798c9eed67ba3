"""Compress one vector to a few small tensors: top-k, scaled signs, stochastic quantisation, and the count sketch.

A compressor encodes a vector as tensors that travel, and decodes these on the other side. What it expects of them is
known beforehand, so that a server can refuse what no client of its own can have sent.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from comfetch import hashing
from comfetch.errors import OptionError, UploadError
from comfetch.medians import median
from comfetch.methods.base import State
from comfetch.sketching import expand, row_keys

NORMS = ("max", "l2")
WIDTHS = (1, 2, 4, 8)
"""Bits of a packed code: so many that a byte holds a whole number of codes."""
BLOCK = 1 << 17
"""Coordinates that are worked on at a time: they stay in the processor's cache."""


class Compressor(Protocol):
    """A way to compress a vector that consists of blocks, the weights of a model, of the sizes given."""

    def encode(self, vector: Tensor, sizes: Sequence[int], generator: torch.Generator) -> State:
        """Encode a vector; random choices are drawn from the generator."""

    def decode(self, code: State, sizes: Sequence[int]) -> Tensor:
        """Decode a vector."""

    def expected(self, sizes: Sequence[int], dtype: torch.dtype) -> State:
        """Say what the code of a vector looks like: names, shapes and dtypes."""

    def check(self, code: State, sizes: Sequence[int]) -> None:
        """Raise UploadError if a code of the shapes expected cannot be decoded."""


@dataclass(frozen=True)
class Plain:
    """Send the vector as it is."""

    def encode(self, vector: Tensor, sizes: Sequence[int], generator: torch.Generator) -> State:
        """Encode x as x."""
        return {"values": vector.clone()}

    def decode(self, code: State, sizes: Sequence[int]) -> Tensor:
        """Decode x as x."""
        return code["values"]

    def expected(self, sizes: Sequence[int], dtype: torch.dtype) -> State:
        """Expect all values."""
        return {"values": meta(sum(sizes), dtype)}

    def check(self, code: State, sizes: Sequence[int]) -> None:
        """Accept any values."""


@dataclass(frozen=True)
class TopK:
    """Send the largest coordinates of the whole vector in magnitude: their values, and their places as int32.

    >>> TopK(0.5).encode(torch.tensor([3.0, -4.0, 0.0, 3.0]), [4], torch.Generator())
    {'values': tensor([ 3., -4.]), 'index': tensor([0, 1], dtype=torch.int32)}
    """

    fraction: float

    def __post_init__(self) -> None:
        if not (isinstance(self.fraction, int | float) and 0 < self.fraction <= 1):
            raise OptionError(
                f"fraction={self.fraction!r} is not in (0, 1]. It is the part of the coordinates that is sent."
            )

    def encode(self, vector: Tensor, sizes: Sequence[int], generator: torch.Generator) -> State:
        """Encode x as its largest values and where they are."""
        index = largest(vector, count(self.fraction, len(vector)))
        return {"values": vector[index], "index": index.to(torch.int32)}

    def decode(self, code: State, sizes: Sequence[int]) -> Tensor:
        """Decode the values in their places, and 0 elsewhere."""
        return scatter(code["values"], code["index"], sum(sizes))

    def expected(self, sizes: Sequence[int], dtype: torch.dtype) -> State:
        """Expect as many values and places as the fraction says."""
        k = count(self.fraction, sum(sizes))
        return {"values": meta(k, dtype), "index": meta(k, torch.int32)}

    def check(self, code: State, sizes: Sequence[int]) -> None:
        """Refuse places that are out of range, repeated or unsorted."""
        index = code["index"]
        if int(index[0]) < 0 or int(index[-1]) >= sum(sizes) or bool((index.diff() <= 0).any()):
            raise UploadError(f"index: not sorted, repeated or outside 0..{sum(sizes) - 1}.")


@dataclass(frozen=True)
class Sign:
    """Send one bit for each coordinate, and one scale for each block: x̂ = (‖x_B‖₁ / |B|) · sign(x), sign(0) = 1."""

    def encode(self, vector: Tensor, sizes: Sequence[int], generator: torch.Generator) -> State:
        """Encode x as bits and the mean magnitude of each block."""
        scale = torch.stack([block.abs().sum() / max(1, len(block)) for block in vector.split(list(sizes))])
        return {"signs": pack((vector >= 0).to(torch.uint8), 1), "scale": scale}

    def decode(self, code: State, sizes: Sequence[int]) -> Tensor:
        """Decode plus or minus the scale of the block."""
        scale = code["scale"].repeat_interleave(torch.tensor(sizes, device=code["scale"].device))
        return torch.where(unpack(code["signs"], 1, sum(sizes)) == 1, scale, -scale)

    def expected(self, sizes: Sequence[int], dtype: torch.dtype) -> State:
        """Expect a bit for each coordinate and a scale for each block."""
        return {"signs": meta(-(-sum(sizes) // 8), torch.uint8), "scale": meta(len(sizes), dtype)}

    def check(self, code: State, sizes: Sequence[int]) -> None:
        """Accept any bits and scales."""


@dataclass(frozen=True)
class Quantise:
    """Round at random to s levels of a bucket's norm, without bias (QSGD).

    x̂ = ‖x_B‖ · sign(x) · ξ / s with ξ = ⌊s·|x| / ‖x_B‖ + u⌋, u uniform in [0, 1), so that E x̂ = x.

    Args:
        levels: s. A code −s..s takes 2, 4 or 8 bits: 1, 7 and 127 levels make full use of them.
        bucket: coordinates that share a norm. norm: "l2", as in the definition, or "max", which loses less.
    """

    levels: int
    bucket: int = 512
    norm: str = "max"

    def __post_init__(self) -> None:
        if isinstance(self.levels, bool) or not isinstance(self.levels, int) or not 1 <= self.levels <= 127:
            raise OptionError(f"levels={self.levels!r} is not a whole number from 1 to 127.")
        if isinstance(self.bucket, bool) or not isinstance(self.bucket, int) or self.bucket < 1:
            raise OptionError(f"bucket={self.bucket!r} is not a whole number of at least 1.")
        if self.norm not in NORMS:
            raise OptionError(f"norm={self.norm!r} is not known. Choose one of: {', '.join(NORMS)}.")

    @property
    def width(self) -> int:
        """Bits of a code."""
        return next(bits for bits in WIDTHS if 2 * self.levels < 2**bits)

    @property
    def variance(self) -> float:
        """Bound ω of the noise: E‖x̂ − x‖² ≤ ω ‖x‖² = min(B/s², √B/s) ‖x‖²."""
        return min(self.bucket / self.levels**2, math.sqrt(self.bucket) / self.levels)

    def encode(self, vector: Tensor, sizes: Sequence[int], generator: torch.Generator) -> State:
        """Encode x as packed codes and the norm of each bucket."""
        codes, norms = zip(*(self._encode(part, generator) for part in vector.split(self._step)), strict=True)
        return {"codes": torch.cat(codes), "norms": torch.cat(norms)}

    def _encode(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.nn.functional.pad(x, (0, -len(x) % self.bucket)).view(-1, self.bucket)
        norms = rows.norm(dim=1) if self.norm == "l2" else rows.abs().amax(1)
        usable = (norms > 0) & norms.isfinite()
        steps = self.levels / torch.where(usable, norms, 1)
        levels = torch.where(usable[:, None], rows.abs() * steps[:, None], 0).view(-1)[: len(x)]
        noise = torch.rand(len(x), generator=generator, dtype=x.dtype).to(x.device)
        code = (levels + noise).floor().clamp(max=self.levels).to(torch.int16)
        shifted = torch.where(x < 0, -code, code) + self.levels
        return pack(shifted.to(torch.uint8), self.width), norms

    def decode(self, code: State, sizes: Sequence[int]) -> Tensor:
        """Decode norm · code / s."""
        decoded = code["norms"].new_empty(sum(sizes))
        packed, norms = self._step * self.width // 8, self._step // self.bucket
        parts = zip(decoded.split(self._step), code["codes"].split(packed), code["norms"].split(norms), strict=True)
        for x, codes, scale in parts:
            levels = unpack(codes, self.width, len(x)).to(torch.int16) - self.levels
            torch.div(scale.repeat_interleave(self.bucket)[: len(x)] * levels, self.levels, out=x)
        return decoded

    @property
    def _step(self) -> int:
        """Coordinates that are worked on at a time: whole buckets, and whole bytes of codes."""
        return self.bucket * 8 * max(1, BLOCK // (8 * self.bucket))

    def expected(self, sizes: Sequence[int], dtype: torch.dtype) -> State:
        """Expect the packed codes and a norm for each bucket."""
        size = sum(sizes)
        return {
            "codes": meta(-(-size * self.width // 8), torch.uint8),
            "norms": meta(-(-size // self.bucket), dtype),
        }

    def check(self, code: State, sizes: Sequence[int]) -> None:
        """Refuse codes beyond the levels, and negative norms."""
        if int(unpack(code["codes"], self.width, sum(sizes)).max()) > 2 * self.levels:
            raise UploadError(f"codes: beyond {self.levels} levels.")
        if bool((code["norms"] < 0).any()):
            raise UploadError("norms: below 0.")


KINDS = ("top_k", "sign", "quantise")


def make_compressor(kind: str, fraction: float, levels: int, bucket: int, kinds: Sequence[str] = KINDS) -> Compressor:
    """Make a compressor of a method's options."""
    if kind not in kinds:
        raise OptionError(f"compressor={kind!r} is not known. Choose one of: {', '.join(kinds)}.")
    made: dict[str, Compressor] = {"top_k": TopK(fraction), "sign": Sign(), "quantise": Quantise(levels, bucket)}
    return made[kind]


class CountSketch:
    """Sketch a whole vector to a table of `rows` × `length` (Charikar et al. 2002), and estimate it from the table.

    Row r of the table is H_r x, with H_r drawn from the key; the estimate is the median of the rows' H_rᵀ H_r x. Only
    the key is shared, and tables add up as their vectors do.
    """

    def __init__(self, key: int, size: int, rows: int, length: int) -> None:
        hash = hashing.draw(row_keys(key, rows), size, length, "random")
        self.index, self.sign = torch.from_numpy(hash.index).int(), torch.from_numpy(hash.sign)
        self.shape = (rows, length)

    def sketch(self, vector: Tensor) -> Tensor:
        """Sketch x: table[r, index_r[j]] += sign_r[j] · x[j]."""
        table = vector.new_zeros(self.shape)
        for row, index, sign in zip(table, self.index.to(vector.device), self.sign.to(vector.device), strict=True):
            row.index_add_(0, index, vector * sign)
        return table

    def unsketch(self, table: Tensor) -> Tensor:
        """Estimate x: the median over r of sign_r[j] · table[r, index_r[j]]."""
        index, sign = self.index.to(table.device), self.sign.to(table.device)
        estimate = table.new_empty(index.shape[1])
        parts = zip(estimate.split(BLOCK), index.split(BLOCK, dim=1), sign.split(BLOCK, dim=1), strict=True)
        for x, places, signs in parts:
            x.copy_(median(torch.stack([expand(*row) for row in zip(table, places, signs, strict=True)])))
        return estimate


@functools.lru_cache(maxsize=2)
def count_sketch(key: int, size: int, rows: int, length: int) -> CountSketch:
    """Return the count sketch of a key; drawing it costs more than using it, so it is kept."""
    return CountSketch(key, size, rows, length)


def check_sketch(compression: float, rows: int) -> None:
    """Raise if a table cannot be meant."""
    if not (isinstance(compression, int | float) and 1 <= compression < math.inf):
        raise OptionError(f"compression={compression!r} is below 1. It is a factor: 4 means four times smaller.")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise OptionError(f"rows={rows!r} is not a whole number of at least 1.")


def table_length(size: int, compression: float, rows: int) -> int:
    """Return the length of each row, so that the whole table is `compression` times smaller than the vector."""
    return max(1, math.floor(size / (compression * rows) + 0.5))


def count(fraction: float, size: int) -> int:
    """Return how many coordinates a fraction is: at least one, as `transforms.top_k` counts them."""
    return min(size, max(1, math.floor(fraction * size + 0.5)))


def largest(vector: Tensor, k: int) -> Tensor:
    """Return the sorted places of the k largest magnitudes; of equal ones the first, and NaN before all numbers."""
    size = vector.abs()
    size = torch.where(size.isnan(), math.inf, size)
    bound = size.kthvalue(len(size) - k + 1).values
    chosen = size > bound
    ties = (size == bound).nonzero().squeeze(1)
    chosen[ties[: k - int(chosen.sum())]] = True
    return chosen.nonzero().squeeze(1)


def scatter(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Put values into their places of a vector of zeros."""
    return values.new_zeros(size).index_copy_(0, index.long(), values)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes 0..2^bits − 1 of type uint8 into bytes, the first in the lowest bits.

    >>> pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 4)
    tensor([33,  3], dtype=torch.uint8)
    """
    per = 8 // bits
    rows = torch.nn.functional.pad(codes, (0, -len(codes) % per)).view(-1, per)
    packed = rows[:, 0].clone()
    for place in range(1, per):
        packed |= rows[:, place] << (bits * place)
    return packed


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """Unpack the first `size` codes of bytes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & (2**bits - 1)).view(-1)[:size]


def meta(size: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor without values, of one dimension."""
    return torch.empty(size, dtype=dtype, device="meta")
