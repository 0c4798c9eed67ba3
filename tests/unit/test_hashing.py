"""Hashes: pinned for good, uniform, pairwise independent, balanced, foldable."""

import math

import numpy as np
import pytest

from comfetch import hashing
from comfetch.errors import ComfetchError, OptionError

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15

# Pinned: they may never change, or files and clients of other versions no longer agree.
FOLDED = {
    (0,): 16294208416658607535,
    (0, "conv1", 3): 10611375034756860580,
    (MASK, "layer4.1.conv2.weight"): 17803991827570513786,
    (7, 1, 2): 1650069959653123811,
    (7, ""): 16854655023023660976,
    (7, -1): 12225420764836534112,
    (5, "größe"): 7846879231534226806,
}
INDEX = {
    "balanced": [[4, 1, 0, 1, 1, 4, 2, 3, 3, 0, 0, 2], [2, 3, 2, 0, 0, 1, 0, 4, 1, 1, 3, 4]],
    "random": [[4, 2, 0, 4, 0, 1, 0, 3, 1, 4, 1, 3], [3, 3, 1, 0, 4, 0, 2, 3, 2, 4, 1, 1]],
}
SIGN = [[1, -1, 1, 1, 1, 1, -1, -1, 1, -1, 1, -1], [1, 1, -1, -1, -1, -1, 1, 1, 1, 1, 1, -1]]


def mix(x: int) -> int:
    """Finalise as splitmix64 does, in Python's own integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def step(x: int) -> int:
    return mix((x + GOLDEN) & MASK)


def fold(key: int, *words: int | str) -> int:
    state = step(key)
    for word in words:
        if isinstance(word, str):
            data = word.encode()
            state = step(state ^ (0x535452 << 40))  # "STR"
            state = step(state ^ len(data))
            for start in range(0, len(data), 8):
                state = step(state ^ int.from_bytes(data[start : start + 8], "little"))
        else:
            state = step(state ^ (word & MASK))
    return state


def draw(key: int, size: int, length: int, kind: str) -> tuple[list[int], list[int]]:
    states = [(mix(key) + (j + 1) * GOLDEN) & MASK for j in range(size)]
    places = [mix(s) for s in states]
    sign = [-1 if mix(s ^ GOLDEN) >> 63 else 1 for s in states]
    if kind == "random":
        return [((p >> 32) * length) >> 32 for p in places], sign
    rank = {j: r for r, j in enumerate(sorted(range(size), key=lambda j: places[j]))}
    return [rank[j] % length for j in range(size)], sign


@pytest.mark.parametrize("words", FOLDED)
def test_fold_gives_its_golden_values(words: tuple) -> None:
    assert hashing.fold(*words) == FOLDED[words]


@pytest.mark.parametrize("words", [*FOLDED, (3, "a" * 8), (3, "a" * 9, 2**70 + 5), (MASK, "x", "y")])
def test_fold_equals_splitmix64_in_plain_integers(words: tuple) -> None:
    assert hashing.fold(*words) == fold(*words)


@pytest.mark.parametrize("kind", hashing.KINDS)
def test_draw_gives_its_golden_values(kind: str) -> None:
    index, sign = hashing.draw([0, MASK], 12, 5, kind)
    assert index.tolist() == INDEX[kind]
    assert sign.tolist() == SIGN


@pytest.mark.parametrize("kind", hashing.KINDS)
@pytest.mark.parametrize("size, length", [(1, 1), (5, 5), (37, 8), (300, 7)])
def test_draw_equals_splitmix64_in_plain_integers(kind: str, size: int, length: int) -> None:
    keys = [0, 1, 2**63, MASK, 123456789]
    index, sign = hashing.draw(keys, size, length, kind)
    for row, key in enumerate(keys):
        assert (index[row].tolist(), sign[row].tolist()) == draw(key, size, length, kind)


def test_words_of_different_kinds_and_groupings_give_different_keys() -> None:
    words = [(), (0,), (1,), ("",), ("0",), ("1",), ("a", "b"), ("ab",), ("b", "a"), ("a",), (97,), (0, 0), ("a\0",)]
    assert len({hashing.fold(0, *w) for w in words}) == len(words)


@pytest.mark.parametrize("key", [-1, 2**64, 1.0, "7", True, None])
def test_key_that_is_no_integer_of_64_bits_is_refused(key: object) -> None:
    with pytest.raises(OptionError, match="between 0 and 2\\*\\*64 - 1") as error:
        hashing.fold(key)  # type: ignore[arg-type]
    assert isinstance(error.value, ComfetchError) and isinstance(error.value, ValueError)


def test_numpy_integers_are_keys() -> None:
    assert hashing.fold(np.uint64(MASK), "a") == hashing.fold(MASK, "a")
    assert hashing.fold(np.int32(5), "a") == hashing.fold(5, "a")


@pytest.mark.parametrize("length", [0, 7, -1])
def test_length_outside_the_size_is_refused(length: int) -> None:
    with pytest.raises(OptionError, match="not between 1 and 6"):
        hashing.draw([0], 6, length)


def test_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="balanced, random"):
        hashing.draw([0], 6, 2, "perfect")


@pytest.mark.parametrize("size, length", [(10, 3), (64, 64), (100, 7), (513, 32), (9, 1)])
def test_balanced_hash_loads_all_buckets_alike(size: int, length: int) -> None:
    index, _ = hashing.draw(list(range(20)), size, length, "balanced")
    loads = hashing.loads(index, length)
    assert set(loads.ravel().tolist()) <= {size // length, -(-size // length)}
    assert (loads.sum(1) == size).all()


def test_random_hash_leaves_the_share_of_buckets_empty_that_theory_says() -> None:
    size, length = 512, 256
    index, _ = hashing.draw(list(range(400)), size, length, "random")
    empty = (hashing.loads(index, length) == 0).mean()
    assert empty == pytest.approx((1 - 1 / length) ** size, abs=0.004)
    assert empty == pytest.approx(math.exp(-size / length), abs=0.004)


def test_loads_count_each_bucket() -> None:
    assert hashing.loads(np.array([[0, 2, 2], [1, 1, 1]]), 4).tolist() == [[1, 0, 2, 0], [0, 3, 0, 0]]


@pytest.mark.parametrize("length, shorter", [(24, 12), (24, 8), (24, 1), (60, 20), (7, 7)])
def test_balanced_hash_of_a_divisor_is_the_longer_one_modulo_it_with_the_same_signs(length: int, shorter: int) -> None:
    keys = list(range(30))
    long, short = hashing.draw(keys, 61, length), hashing.draw(keys, 61, shorter)
    assert (long.index % shorter == short.index).all()
    assert (long.sign == short.sign).all()


def test_signs_do_not_depend_on_length_or_kind() -> None:
    signs = [hashing.draw([9], 50, n, kind).sign for n in (3, 50) for kind in hashing.KINDS]
    assert all((s == signs[0]).all() for s in signs)


@pytest.mark.parametrize("kind", hashing.KINDS)
def test_buckets_are_uniform_for_each_coordinate_over_keys(kind: str) -> None:
    keys, size, length = 4000, 6, 5
    index, sign = hashing.draw(list(range(keys)), size, length, kind)
    counts = np.stack([(index == bucket).sum(0) for bucket in range(length)])  # (length, size)
    expected = np.full((length, size), keys / length)
    if kind == "balanced":  # bucket 0 holds two of the six ranks
        expected = np.outer([2, 1, 1, 1, 1], np.full(size, keys / 6))
    chi_square = ((counts - expected) ** 2 / expected).sum(0)
    assert chi_square.max() < 25  # 4 degrees of freedom: above 25 with probability 5e-5
    assert abs(sign.mean(0)).max() < 4.5 / math.sqrt(keys)


def test_random_hash_is_pairwise_independent_over_keys() -> None:
    keys, size, length = 4000, 8, 4
    index, sign = hashing.draw([hashing.fold(1, "test", k) for k in range(keys)], size, length, "random")
    for i in range(size):
        for j in range(i):
            joint = np.bincount(index[:, i] * length + index[:, j], minlength=length**2)
            assert (((joint - keys / 16) ** 2) / (keys / 16)).sum() < 50  # 15 degrees of freedom
            assert abs((sign[:, i] * sign[:, j]).mean()) < 4.5 / math.sqrt(keys)
            assert abs((sign[:, i] * (index[:, j] - 1.5)).mean()) < 4.5 * 1.12 / math.sqrt(keys)


@pytest.mark.parametrize("kind", hashing.KINDS)
def test_neighbouring_coordinates_collide_no_more_than_by_chance(kind: str) -> None:
    keys, size, length = 200, 256, 16
    index, sign = hashing.draw(list(range(keys)), size, length, kind)
    chance = 1 / length if kind == "random" else (size / length - 1) / (size - 1)
    for lag in (1, 2, 16, 128):
        same = index[:, lag:] == index[:, :-lag]
        assert same.mean() == pytest.approx(chance, abs=5 * math.sqrt(chance / same.size))
        assert abs((sign[:, lag:] * sign[:, :-lag]).mean()) < 5 / math.sqrt(same.size)


def test_hashes_of_derived_keys_are_independent() -> None:
    keys = [
        hashing.fold(3, "output", row, group, block) for row in range(3) for group in range(2) for block in range(8)
    ]
    _, sign = hashing.draw(keys, 4096, 64)
    correlation = sign.astype(float) @ sign.astype(float).T / 4096
    assert abs(correlation - np.eye(len(keys))).max() < 5 / math.sqrt(4096)
