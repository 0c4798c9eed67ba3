"""Draw hashes from 64-bit keys by integer arithmetic alone.

A hash of n coordinates onto `length` buckets is an `index` (the bucket of each coordinate) and a `sign`. Both follow
from a key, so only the key travels (docs/mathematics.md, 2). The arithmetic is that of splitmix64 on unsigned 64-bit
integers, the same on every platform; golden values in the tests pin it for good.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from comfetch.errors import OptionError

KINDS = ("balanced", "random")

U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
BLOCK = 1 << 15
"""Coordinates that are drawn at a time: all of their intermediate numbers stay in the processor's cache."""


class Hash(NamedTuple):
    """A batch of hashes: bucket and sign of each coordinate, both of shape (batch, size)."""

    index: npt.NDArray[np.int64]  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    sign: npt.NDArray[np.int8]


def mix(x: U64) -> U64:
    """Scramble 64-bit integers one to one (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def fold(key: int, *words: int | str) -> int:
    """Derive a key from a key and words: key' = mix(… mix(mix(key + g) ^ word₁ + g) … ^ wordₙ + g).

    A word is an integer, or text, which counts as its length and its UTF-8 bytes in groups of eight. Neither the length
    of a sketch nor the number of clients belongs into a key: shorter sketches must be folds of longer ones.

    >>> fold(0, "conv1", 3) == fold(0, "conv1", 3) != fold(0, "conv1", 4)
    True
    """
    state = _step(check_key(key))
    for word in words:
        if isinstance(word, str):
            data = word.encode()
            numbers = [len(data)] + [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
            state = _step(state ^ 0x5354520000000000)  # marks text, so that a word "…" never equals a number
        else:
            numbers = [word & _MASK]
        for number in numbers:
            state = _step(state ^ number)
    return state


def check_key(key: int) -> int:
    """Return `key` if it is an integer of 64 bits, else raise."""
    if isinstance(key, bool) or not isinstance(key, int | np.integer) or not 0 <= key <= _MASK:
        raise OptionError(f"key={key!r} is not an integer between 0 and 2**64 - 1.")
    return int(key)


def draw(keys: list[int], size: int, length: int, kind: str = "balanced") -> Hash:
    """Draw one hash of `size` coordinates onto `length` buckets for each key.

    `random`: the bucket of each coordinate is drawn alone, uniform and pairwise independent (up to the quality of the
    64-bit mixer), as in the paper. `balanced`: the rank of each coordinate in a keyed order, modulo the length; every
    bucket holds ⌊size/length⌋ or ⌈size/length⌉ coordinates, and the hash of a length c' that divides c is the hash of
    length c modulo c'. Signs depend on the key alone, for both kinds.

    >>> index, sign = draw([7], size=6, length=3)
    >>> sorted(index[0].tolist())
    [0, 0, 1, 1, 2, 2]
    """
    if kind not in KINDS:
        raise OptionError(f"hash={kind!r} is not known. Choose one of: {', '.join(KINDS)}.")
    if not 1 <= length <= size:
        raise OptionError(f"length={length} is not between 1 and {size}, the size of the sketched mode.")
    state, shape = mix(np.asarray(keys, dtype=np.uint64))[:, None], (len(keys), size)
    index, sign = np.empty(shape, np.int64), np.empty(shape, np.int8)
    for part in _blocks(size, max(1, BLOCK // max(1, len(keys)))):
        coordinates = np.arange(part.start, part.stop, dtype=np.uint64)[None, :]
        with np.errstate(over="ignore"):
            drawn = state + (coordinates + np.uint64(1)) * _GOLDEN
            places, signs = mix(drawn), mix(drawn ^ _GOLDEN)
        sign[:, part] = 1 - 2 * (signs >> np.uint64(63)).astype(np.int8)
        if kind == "random":
            places = (places >> np.uint64(32)) * np.uint64(length) >> np.uint64(32)
        index[:, part] = places.view(np.int64)
    if kind == "balanced":
        order = np.argsort(index.view(np.uint64), axis=1, kind="stable")
        np.put_along_axis(index, order, np.arange(size)[None, :] % length, axis=1)
    return Hash(index, sign)


def loads(index: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Count the coordinates in each bucket: (batch, size) -> (batch, length)."""
    batch = np.arange(len(index))[:, None] * length
    return np.bincount((index + batch).ravel(), minlength=len(index) * length).reshape(len(index), length)


def _blocks(size: int, step: int) -> list[slice]:
    """Divide a range into parts of so many, the last one shorter."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _step(state: int) -> int:
    """Do one step of splitmix64: `mix` on a single Python integer, which is faster than an array of one."""
    x = (state + int(_GOLDEN)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
