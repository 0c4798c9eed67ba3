import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comfetch import hashing
from comfetch.errors import OptionError, UploadError
from comfetch.methods.compressors import (
    KINDS,
    CountSketch,
    Plain,
    Quantise,
    Sign,
    TopK,
    check_sketch,
    largest,
    make_compressor,
    pack,
    table_length,
    unpack,
)

COMPRESSORS = [
    Plain(), TopK(0.1), TopK(1.0), TopK(1e-9), Sign(), Quantise(1, 4), Quantise(3, 5, "l2"), Quantise(7, 64),
    Quantise(100, 3), Quantise(127, 1000, "l2"),
]  # fmt: skip
SIZES = [7, 1, 16, 5]


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector(dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(sum(SIZES), generator=draws(seed), dtype=torch.float64).to(dtype)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 70), st.integers(0, 2**31))
def test_codes_are_packed_without_loss_into_as_few_bytes_as_they_need(bits, size, seed):
    codes = torch.randint(0, 2**bits, (size,), generator=draws(seed), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == -(-size * bits // 8)
    assert torch.equal(unpack(packed, bits, size), codes)


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_code_looks_as_expected_and_decodes_to_the_same_shape_and_type(compressor, dtype):
    x = vector(dtype)
    code = compressor.encode(x, SIZES, draws())
    expected = compressor.expected(SIZES, dtype)
    assert {n: (t.shape, t.dtype) for n, t in code.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    compressor.check(code, SIZES)
    decoded = compressor.decode(code, SIZES)
    assert (decoded.shape, decoded.dtype) == (x.shape, dtype)


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_zeros_stay_zeros(compressor):
    code = compressor.encode(torch.zeros(29), SIZES, draws())
    assert not compressor.decode(code, SIZES).any()


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_show_in_the_code(compressor, bad):
    x = vector()
    x[3] = bad
    code = compressor.encode(x, SIZES, draws())
    compressor.check(code, SIZES)
    assert not all(bool(t.isfinite().all()) for t in code.values())


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 1.0])
def test_top_k_keeps_the_largest_and_the_first_of_equals(fraction):
    x = vector().round()  # many ties
    k = max(1, int(fraction * len(x) + 0.5))
    kept = np.zeros(len(x))
    order = np.argsort(-np.abs(x.numpy()), kind="stable")[:k]
    kept[order] = x.numpy()[order]
    code = TopK(fraction).encode(x, SIZES, draws())
    assert len(code["values"]) == k
    np.testing.assert_array_equal(TopK(fraction).decode(code, SIZES).numpy(), kept)


def test_the_largest_are_found_among_zeros():
    assert largest(torch.tensor([0.0, 0.0, -5.0, 0.0]), 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "index",
    [[-1, 3, 4], [0, 3, 29], [0, 3, 3], [4, 3, 5], [0, 3, 2**31 - 1]],
    ids=["low", "high", "twice", "order", "far"],
)
def test_places_that_no_vector_has_are_refused(index):
    compressor = TopK(0.1)
    code = compressor.encode(vector(), SIZES, draws())
    code["index"] = torch.tensor(index, dtype=torch.int32)
    with pytest.raises(UploadError, match="index: not sorted, repeated or outside 0..28"):
        compressor.check(code, SIZES)


def test_signs_are_scaled_by_the_mean_magnitude_of_their_block():
    x = vector()
    decoded = Sign().decode(Sign().encode(x, SIZES, draws()), SIZES)
    wanted = [part.abs().mean() * part.sign() for part in x.split(SIZES)]
    torch.testing.assert_close(decoded, torch.cat(wanted))


@pytest.mark.parametrize("compressor", [Quantise(1, 4), Quantise(3, 5, "l2"), Quantise(7, 64), Quantise(2, 29, "l2")])
def test_random_rounding_has_no_bias_and_its_variance_is_within_the_bound(compressor):
    x = vector()
    generator = draws()
    tries = torch.stack([compressor.decode(compressor.encode(x, SIZES, generator), SIZES) for _ in range(1000)])
    spread = (tries - x).square().sum(1)
    error = tries.std(0) / 1000**0.5
    assert bool(((tries.mean(0) - x).abs() <= 5 * error + 1e-12).all())
    assert float(spread.mean()) <= compressor.variance * float(x.square().sum())


@pytest.mark.parametrize(("levels", "width"), [(1, 2), (2, 4), (7, 4), (8, 8), (127, 8)])
def test_levels_take_as_many_bits_as_they_need(levels, width):
    compressor = Quantise(levels, 64)
    assert compressor.width == width
    code = compressor.encode(torch.randn(4096, generator=draws()), [4096], draws())
    assert (code["codes"].nbytes, code["norms"].nbytes) == (4096 * width // 8, 4 * 64)


def test_codes_beyond_the_levels_and_negative_norms_are_refused():
    compressor = Quantise(3, 8)
    code = compressor.encode(vector(), SIZES, draws())
    with pytest.raises(UploadError, match="codes: beyond 3 levels"):
        compressor.check({**code, "codes": torch.full_like(code["codes"], 255)}, SIZES)
    with pytest.raises(UploadError, match="norms: below 0"):
        compressor.check({**code, "norms": -code["norms"]}, SIZES)


def test_random_rounding_depends_on_the_generator_alone():
    codes = [Quantise(7).encode(vector(), SIZES, draws(seed))["codes"] for seed in (1, 1, 2)]
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_the_count_sketch_equals_its_matrices_and_adds_up(rows):
    size, length, key = 30, 8, 5
    sketch = CountSketch(key, size, rows, length)
    matrices = np.zeros((rows, length, size))
    for row, h in enumerate(matrices):
        (index,), (sign,) = hashing.draw([hashing.fold(key, "row", row)], size, length, "random")
        h[index, np.arange(size)] = sign
    x, y = (torch.randn(size, generator=draws(seed), dtype=torch.float64) for seed in (1, 2))
    np.testing.assert_allclose(sketch.sketch(x).numpy(), matrices @ x.numpy(), atol=1e-12)
    estimates = np.median([h.T @ h @ x.numpy() for h in matrices], axis=0)
    np.testing.assert_allclose(sketch.unsketch(sketch.sketch(x)).numpy(), estimates, atol=1e-12)
    torch.testing.assert_close(sketch.sketch(x) + sketch.sketch(y), sketch.sketch(x + y))


def test_a_table_has_the_size_that_the_compression_says():
    assert table_length(1000, 4, 5) * 5 == 250
    assert table_length(3, 100, 5) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(0), lambda: TopK(1.1), lambda: TopK("much"), lambda: Quantise(0), lambda: Quantise(128),
        lambda: Quantise(True), lambda: Quantise(2.5), lambda: Quantise(7, 0), lambda: Quantise(7, 8, "l1"),
        lambda: make_compressor("zip", 0.1, 7, 8), lambda: make_compressor("quantise", 0.1, 7, 8, KINDS[:2]),
        lambda: check_sketch(0.5, 5), lambda: check_sketch(4, 0), lambda: check_sketch(4, 2.5),
    ],
)  # fmt: skip
def test_options_that_cannot_be_meant_are_refused(make):
    with pytest.raises(OptionError, match="=.* is (not|below)"):
        make()
