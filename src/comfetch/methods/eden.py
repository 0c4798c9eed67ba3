"""EDEN (Vargaftik et al. 2022): rotate a vector at random, then round each coordinate to one of a few centroids.

Once rotated, the coordinates of any vector look like draws from one normal distribution. So the best centroids for a
normal variable serve all vectors, and one scale takes the bias away.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from comfetch import hashing
from comfetch.errors import OptionError, UploadError
from comfetch.methods.base import State
from comfetch.methods.compressors import BLOCK, WIDTHS, meta, pack, unpack

SMALLEST = 64
"""Coordinates of the smallest chunk: in shorter ones, rotated coordinates are far from normal."""
STEPS, STILL = 2000, 1e-12
"""Steps of Lloyd's iteration at most, and the move below which it ends: the error is the least one up to 10⁻⁴."""


@dataclass(frozen=True)
class Eden:
    """Round at b bits a coordinate after a random rotation, so that E x̂ = x: x̂ = S·Rᵀ Q, S = ‖x‖² / ⟨R x, Q⟩.

    R = H D / √d with the Hadamard matrix H and random signs D; Q has for each coordinate of √d·R x / ‖x‖ the nearest
    of 2^b centroids. This is done chunk by chunk, and each chunk has its S. All that describes D is a key, which
    travels along. The bias is none if R is uniform among all rotations, and small here, unless few coordinates hold
    most of ‖x‖².

    Args:
        bits: b, from 1 to 8.
    """

    bits: int

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 1 <= self.bits <= 8:
            raise OptionError(f"bits={self.bits!r} is not a whole number from 1 to 8.")

    @property
    def variance(self) -> float:
        """Noise ω of long vectors, E‖x̂ − x‖² ≈ ω ‖x‖²: 1 / (1 − D) − 1 with D as in `quantiser`."""
        return 1 / (1 - quantiser(self.bits)[1]) - 1

    def encode(self, vector: Tensor, sizes: Sequence[int], generator: torch.Generator) -> State:
        """Encode x as the packed numbers of its centroids, a scale for each chunk, and a key."""
        key = torch.randint(0, 256, (8,), dtype=torch.uint8, generator=generator)
        sign, centroids = signs(key, vector), quantiser(self.bits)[0].to(vector)
        bounds = (centroids[1:] + centroids[:-1]) / 2
        codes, scales = [], []
        for x, size in zip(*chunked(vector), strict=True):
            norm = torch.linalg.vector_norm(x, dtype=torch.float64)
            safe = torch.where(norm == 0, 1, norm)
            unit = x / safe.to(x.dtype) * sign[: len(x)]
            rotated = hadamard(torch.nn.functional.pad(unit, (0, size - len(x))))
            code = torch.bucketize(rotated, bounds, out_int32=True)
            product = torch.dot(rotated, centroids.index_select(0, code))
            scales.append(norm * math.sqrt(size) / torch.where(norm == 0, 1, product))
            codes.append(pack_fields(code.to(torch.uint8), self.bits))
        return {"centroids": torch.cat(codes), "scales": torch.stack(scales).to(vector.dtype), "key": key}

    def decode(self, code: State, sizes: Sequence[int]) -> Tensor:
        """Decode S·Rᵀ Q."""
        decoded = code["scales"].new_empty(sum(sizes))
        sign, centroids = signs(code["key"], decoded), quantiser(self.bits)[0].to(decoded)
        parts, padded = chunked(decoded)
        packed = code["centroids"].split([size * self.bits // 8 for size in padded])
        for x, size, codes, scale in zip(parts, padded, packed, code["scales"], strict=True):
            rotated = hadamard(centroids.index_select(0, unpack_fields(codes, self.bits, size)))
            torch.mul(rotated[: len(x)], sign[: len(x)], out=x).mul_(scale / math.sqrt(size))
        return decoded

    def expected(self, sizes: Sequence[int], dtype: torch.dtype) -> State:
        """Expect a number of b bits for each coordinate, a scale for each chunk, and the key."""
        padded = chunks(sum(sizes))
        return {
            "centroids": meta(sum(padded) * self.bits // 8, torch.uint8),
            "scales": meta(len(padded), dtype),
            "key": meta(8, torch.uint8),
        }

    def check(self, code: State, sizes: Sequence[int]) -> None:
        """Refuse negative scales. Any numbers and any key can be decoded."""
        if bool((code["scales"] < 0).any()):
            raise UploadError("scales: below 0.")


@functools.cache
def quantiser(bits: int) -> tuple[Tensor, float]:
    """Return 2^b centroids of a standard normal Z in rising order, and D = E (Z − nearest)² (Lloyd 1957, Max 1960).

    Lloyd's iteration c ← E[Z | Z nearest to c] starts from centroids as dense as φ^(1/3), the best for many bits.

    >>> centroids, distortion = quantiser(2)
    >>> print([round(c, 4) for c in centroids.tolist()], round(distortion, 4))
    [-1.5104, -0.4528, 0.4528, 1.5104] 0.1175
    """
    half, normal = 2 ** (bits - 1), NormalDist(0, math.sqrt(3))
    upper = torch.tensor([normal.inv_cdf((half + i + 0.5) / (2 * half)) for i in range(half)], dtype=torch.float64)
    for _ in range(STEPS):
        before, (mass, moment) = upper, cells(upper)
        upper = moment / mass
        if float((upper - before).abs().max()) < STILL:
            break
    mass, moment = cells(upper)
    distortion = 1 - 2 * float((2 * upper * moment - upper.square() * mass).sum())
    return torch.cat([-upper.flip(0), upper]), distortion


def cells(upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return P(Z in cell) and E[Z; Z in cell] for the cells of the centroids above 0."""
    edges = torch.nn.functional.pad((upper[1:] + upper[:-1]) / 2, (1, 1))
    edges[-1] = math.inf
    density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
    above = torch.erfc(edges / math.sqrt(2)) / 2
    return above[:-1] - above[1:], density[:-1] - density[1:]


def chunks(size: int) -> list[int]:
    """Divide a vector into powers of two: the largest as often as it fits, then each smaller one once at most.

    The vector counts as padded to whole smallest chunks, so that at most 63 coordinates are wasted.

    >>> chunks(300_000)
    [131072, 131072, 32768, 4096, 1024]
    """
    count, rest = divmod(-(-size // SMALLEST) * SMALLEST, BLOCK)
    powers = (1 << place for place in reversed(range(BLOCK.bit_length() - 1)))
    return [BLOCK] * count + [power for power in powers if rest & power]


def chunked(vector: Tensor) -> tuple[list[Tensor], list[int]]:
    """Divide a vector into its chunks, and return their padded sizes, too.

    The first and largest chunk is the one that lacks what is padded: a last one with few coordinates would be far from
    normal.
    """
    padded = chunks(len(vector))
    return list(vector.split([len(vector) - sum(padded[1:]), *padded[1:]])), padded


def signs(key: Tensor, like: Tensor) -> Tensor:
    """Draw D from the eight bytes of a key, of the type of a vector: all chunks use the same, from its beginning."""
    number = int.from_bytes(bytes(key.tolist()), "little")
    sign = hashing.draw([number], max(chunks(len(like))), 1, "random").sign[0]
    return torch.from_numpy(sign).to(like)


def hadamard(x: Tensor) -> Tensor:
    """Return H x for 2^k coordinates, y[i] = Σ_j (−1)^|i ∧ j| x[j], in k steps. x is overwritten.

    >>> hadamard(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([10., -2., -4.,  0.])
    """
    y, length = torch.empty_like(x), 1
    while length < len(x):
        old, new = x.view(-1, 2, length), y.view(-1, 2, length)
        torch.add(old[:, 0], old[:, 1], out=new[:, 0])
        torch.sub(old[:, 0], old[:, 1], out=new[:, 1])
        x, y, length = y, x, 2 * length
    return x


def fields(bits: int) -> list[tuple[int, int]]:
    """Divide a code into fields of which a byte holds whole numbers: their widths, and the bits before each.

    >>> fields(7)
    [(1, 0), (2, 1), (4, 3)]
    """
    return [(width, bits & (width - 1)) for width in WIDTHS if bits & width]


def pack_fields(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of b bits, eight or a multiple of them, into b bits each: field by field."""
    return torch.cat([pack((codes >> before) & (2**width - 1), width) for width, before in fields(bits)])


def unpack_fields(packed: Tensor, bits: int, size: int) -> Tensor:
    """Unpack `size` codes as int32."""
    parts = packed.split([size * width // 8 for width, _ in fields(bits)])
    codes = torch.zeros(size, dtype=torch.int32, device=packed.device)
    for part, (width, before) in zip(parts, fields(bits), strict=True):
        codes |= unpack(part, width, size).int() << before
    return codes
