import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comfetch import hashing
from comfetch.errors import OptionError, UploadError
from comfetch.methods import Client, Message, Upload, check_upload, eden
from comfetch.methods.compressors import BLOCK
from comfetch.methods.eden import Eden, chunks, hadamard, pack_fields, quantiser, unpack_fields

BITS = range(1, 9)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector(size: int, dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=draws(seed), dtype=torch.float64).to(dtype)


def coded(x: torch.Tensor, bits: int, generator: torch.Generator | None = None) -> torch.Tensor:
    code = Eden(bits).encode(x, [len(x)], generator or draws())
    return Eden(bits).decode(code, [len(x)])


def loss(decoded: torch.Tensor, x: torch.Tensor) -> float:
    """‖x̂ − x‖² / ‖x‖²."""
    return float((decoded.double() - x.double()).square().sum() / x.double().square().sum())


def matrix(size: int) -> np.ndarray:
    """Hadamard's matrix by its definition."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


def lloyd(bits: int) -> list[float]:
    """Centroids of a normal variable, cell by cell over the whole line, from evenly spaced ones."""
    normal, points = NormalDist(), np.linspace(-2, 2, 2**bits).tolist()
    for _ in range(800):
        edges = [-40.0, *((a + b) / 2 for a, b in itertools.pairwise(points)), 40.0]
        cells = itertools.pairwise(edges)
        points = [(normal.pdf(a) - normal.pdf(b)) / (normal.cdf(b) - normal.cdf(a)) for a, b in cells]
    return points


def transcribed(x: np.ndarray, bits: int, key: bytes, sizes: list[int]) -> np.ndarray:
    """x̂ = S·Rᵀ Q of each chunk, with explicit matrices; what is padded is lacking in the first chunk."""
    centroids, out, end = quantiser(bits)[0].numpy(), [], 0
    for number, d in enumerate(sizes):
        start, end = end, end + d - (sum(sizes) - len(x) if number == 0 else 0)
        part = np.zeros(d)
        part[: end - start] = x[start:end]
        (sign,) = hashing.draw([int.from_bytes(key, "little")], d, 1, "random").sign
        r = matrix(d) @ np.diag(sign) / math.sqrt(d)
        turned = r @ part
        unit = turned * math.sqrt(d) / np.linalg.norm(part)
        q = np.array([min(centroids, key=lambda c, u=u: abs(c - u)) for u in unit])
        scale = part @ part / (turned @ q)
        out.append((scale * r.T @ q)[: end - start])
    return np.concatenate(out)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_centroids_are_those_of_lloyds_iteration_from_elsewhere(bits):
    np.testing.assert_allclose(quantiser(bits)[0].numpy(), lloyd(bits), rtol=1e-8)


def test_centroids_are_those_of_the_literature():
    assert quantiser(1)[0][1] == pytest.approx(math.sqrt(2 / math.pi))
    assert quantiser(2)[0][2:].tolist() == pytest.approx([0.4528, 1.5104], abs=5e-5)
    assert quantiser(3)[0][4:].tolist() == pytest.approx([0.2451, 0.7560, 1.3439, 2.1520], abs=6e-5)
    distortions = [quantiser(bits)[1] for bits in BITS]
    wanted = [0.3634, 0.1175, 0.03454, 0.009497, 0.002499]
    assert distortions[:5] == pytest.approx(wanted, rel=3e-3)  # Max 1960, to four digits at best
    asymptote = math.pi * math.sqrt(3) / 2 / 4**8  # Panter and Dite 1951
    assert distortions[7] == pytest.approx(asymptote, rel=0.01)


@pytest.mark.parametrize("bits", BITS)
def test_centroids_rise_are_symmetric_and_each_is_the_mean_of_its_cell(bits):
    centroids, distortion = quantiser(bits)
    assert bool((centroids.diff() > 0).all())
    assert torch.equal(centroids, -centroids.flip(0))
    sample = torch.randn(1 << 20, generator=draws(), dtype=torch.float64)
    nearest = centroids[torch.bucketize(sample, (centroids[1:] + centroids[:-1]) / 2)]
    assert float((sample - nearest).square().mean()) == pytest.approx(distortion, rel=0.01)
    assert float((sample * nearest).mean()) == pytest.approx(1 - distortion, rel=0.01)


@pytest.mark.parametrize("size", [1, 2, 8, 64, 256])
def test_the_fast_transform_equals_hadamards_matrix(size):
    x = vector(size)
    np.testing.assert_allclose(hadamard(x.clone()).numpy(), matrix(size) @ x.numpy(), atol=1e-12)
    torch.testing.assert_close(hadamard(hadamard(x.clone())), size * x)


@given(st.integers(1, 5 * BLOCK))
def test_chunks_are_powers_of_two_that_waste_little(size):
    found = chunks(size)
    assert 0 <= sum(found) - size < 64
    assert all(64 <= chunk <= BLOCK and chunk.bit_count() == 1 for chunk in found)
    assert found == sorted(found, reverse=True)
    assert len(found) - found.count(BLOCK) <= 11


@given(st.sampled_from(BITS), st.integers(1, 9), st.integers(0, 2**31))
def test_codes_of_any_width_are_packed_without_loss(bits, eights, seed):
    codes = torch.randint(0, 2**bits, (8 * eights,), generator=draws(seed), dtype=torch.uint8)
    packed = pack_fields(codes, bits)
    assert (packed.dtype, len(packed)) == (torch.uint8, bits * eights)
    assert torch.equal(unpack_fields(packed, bits, 8 * eights), codes.int())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1, 5, 54, 64, 200])
def test_it_equals_its_transcription(bits, size):
    x = vector(size)
    code = Eden(bits).encode(x, [size], draws(3))
    wanted = transcribed(x.numpy(), bits, code["key"].numpy().tobytes(), chunks(size))
    np.testing.assert_allclose(Eden(bits).decode(code, [size]).numpy(), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [449, 500, 640, 704])
def test_many_chunks_equal_their_transcription(size, monkeypatch):
    monkeypatch.setattr(eden, "BLOCK", 256)
    x = vector(size) * torch.arange(size)
    code = Eden(2).encode(x, [size], draws(3))
    wanted = transcribed(x.numpy(), 2, code["key"].numpy().tobytes(), chunks(size))
    assert len(code["scales"]) == len(chunks(size)) > 1
    np.testing.assert_allclose(Eden(2).decode(code, [size]).numpy(), wanted, rtol=1e-9, atol=1e-12)


@given(
    st.sampled_from(BITS),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**31),
)
def test_a_code_looks_as_expected_and_decodes_to_the_same_shape_and_type(bits, sizes, dtype, seed):
    x = vector(sum(sizes), dtype, seed)
    code = Eden(bits).encode(x, sizes, draws(seed))
    expected = Eden(bits).expected(sizes, dtype)
    assert {n: (t.shape, t.dtype) for n, t in code.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
    assert code["centroids"].nbytes == -(-len(x) // 64) * 8 * bits
    Eden(bits).check(code, sizes)
    decoded = Eden(bits).decode(code, sizes)
    assert (decoded.shape, decoded.dtype) == (x.shape, dtype)
    assert bool(decoded.isfinite().all())
    assert float(decoded @ x) == pytest.approx(float(x @ x), rel=1e-4)  # what S is chosen for


@pytest.mark.parametrize(("bits", "wanted"), [(1, math.pi / 2 - 1), (2, 0.1331), (4, 0.00959)])
@pytest.mark.parametrize("power", [1, 3], ids=["normal", "long tails"])
def test_the_error_is_that_of_the_theory_whatever_the_vector(bits, wanted, power):
    x = vector(BLOCK + 3 * 64 + 1, torch.float32) ** power
    assert Eden(bits).variance == pytest.approx(wanted, rel=2e-3)
    assert loss(coded(x, bits), x) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_there_is_no_bias_over_keys(bits):
    x, generator = vector(200), draws()
    tries = torch.stack([coded(x, bits, generator) for _ in range(1000)])
    error = tries.std(0) / 1000**0.5
    assert bool(((tries.mean(0) - x).abs() <= 5 * error).all())
    assert loss(tries.mean(0), x) < 3 * Eden(bits).variance / 1000


def test_a_code_depends_on_the_key_alone_and_is_decoded_without_anything_else():
    x = vector(300, torch.float32)
    codes = [Eden(3).encode(x, [300], draws(seed)) for seed in (1, 1, 2)]
    assert all(torch.equal(codes[0][name], codes[1][name]) for name in codes[0])
    assert not torch.equal(codes[0]["key"], codes[2]["key"])
    assert not torch.equal(codes[0]["centroids"], codes[2]["centroids"])
    other = Eden(3).decode({**codes[0], "key": codes[2]["key"]}, [300])
    assert loss(Eden(3).decode(codes[0], [100, 200]), x) < 0.1 < 1 < loss(other, x)


@pytest.mark.parametrize("bits", BITS)
def test_zeros_stay_zeros_and_a_chunk_of_zeros_harms_no_other(bits):
    assert not coded(torch.zeros(100), bits).any()
    x = torch.cat([torch.zeros(BLOCK), vector(256, torch.float32)])
    decoded = coded(x, bits)
    assert not decoded[:BLOCK].any()
    assert loss(decoded, x) < 1


@pytest.mark.parametrize("value", [3.5, -1e-30, 1e30])
def test_one_coordinate_alone_comes_through(value):
    torch.testing.assert_close(coded(torch.tensor([value]), 2), torch.tensor([value]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("factor", [1e-40, 1e-30, 1e30])
def test_size_does_not_matter(factor):
    x = vector(1000, torch.float32)
    torch.testing.assert_close(coded(x * factor, 4) / factor, coded(x, 4), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_values_that_are_not_finite_are_refused_with_the_upload(bits, bad):
    x = vector(300, torch.float32)
    x[3] = bad
    code = Eden(bits).encode(x, [300], draws())
    with pytest.raises(UploadError, match="scales has NaN or infinite values"):
        check_upload(Upload(Client(0, 1), Message(code)), Message({}), Eden(bits).expected([300], torch.float32))


def test_negative_scales_are_refused():
    code = Eden(2).encode(vector(10), [10], draws())
    with pytest.raises(UploadError, match="scales: below 0"):
        Eden(2).check({**code, "scales": -code["scales"]}, [10])


@pytest.mark.parametrize("bits", [0, 9, 2.0, True, None])
def test_bits_that_cannot_be_meant_are_refused(bits):
    with pytest.raises(OptionError, match="bits=.* is not a whole number from 1 to 8"):
        Eden(bits)
