"""The mathematics of sketching against short transcriptions with explicit matrices H."""

import dataclasses
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from comfetch import hashing, medians, sketching
from comfetch.plan import MODES, Geometry, WeightPlan
from tests.oracle import (
    close,
    dense_full_gradient,
    dense_lift,
    dense_sketch,
    dense_small_gradient,
    dense_unsketch,
    draw_matrix,
    expanding_matrix,
    hash_matrix,
    sketching_matrix,
    stacked_sketching_matrix,
)

KEYS = st.integers(0, 2**64 - 1)
ROWS = st.integers(1, 3)
HASHES = st.sampled_from(hashing.KINDS)
SCALES = st.sampled_from(sketching.SCALES)
PROJECTIONS = ("mean", "isometric")


@st.composite
def plans(draw: Any, rows: Any = ROWS, hash: Any = HASHES, modes: Any = MODES) -> WeightPlan:
    """Draw plans of weights with groups, blocks, either order of dimensions, of order 2 to 4."""
    mode = draw(st.sampled_from(modes))
    groups, outputs, inputs = draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    rest = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    transposed = draw(st.booleans())
    shape = (groups * inputs, outputs, *rest) if transposed else (groups * outputs, inputs, *rest)
    other = {"output": inputs, "input": outputs, "both": 1}[mode]
    return WeightPlan(
        geometry=Geometry(shape, groups, transposed), mode=mode,
        length=(
            draw(st.integers(1, outputs)) if mode != "input" else outputs,
            draw(st.integers(1, inputs)) if mode != "output" else inputs,
        ),
        rows=draw(rows), blocks=draw(st.sampled_from([n for n in range(1, other + 1) if other % n == 0])),
        hash=draw(hash), scale=draw(SCALES), key=draw(KEYS),
    )  # fmt: skip


def full_weight(plan: WeightPlan) -> Tensor:
    return torch.randn(plan.shape, dtype=torch.float64)


def small_weight(plan: WeightPlan) -> Tensor:
    return torch.randn(plan.small_shape, dtype=torch.float64)


def by_row(plan: WeightPlan, function: Any, weight: Tensor, stacked: bool) -> Tensor:
    """Apply a transcription to every row."""
    parts = weight.numpy() if stacked and plan.rows > 1 else [weight.numpy()] * plan.rows
    return torch.from_numpy(np.stack([function(plan, part, row) for row, part in enumerate(parts)]))


# ------------------------------------------------------------------------------------------------ along one mode


@given(KEYS, st.integers(1, 12), st.data(), HASHES, SCALES)
def test_sketch_and_unsketch_along_any_mode_equal_explicit_matrices(key, size, data, kind, scale) -> None:
    length = data.draw(st.integers(1, size))
    rest = data.draw(st.lists(st.integers(0, 3), max_size=3))
    dim = data.draw(st.integers(0, len(rest)))
    x = torch.randn(*rest[:dim], size, *rest[dim:], dtype=torch.float64)
    negative = data.draw(st.booleans())
    d = dim - x.ndim if negative else dim
    h = draw_matrix(key, size, length, kind)
    a, e = sketching_matrix(h, scale), expanding_matrix(h, scale)

    def along(matrix: np.ndarray, tensor: Tensor) -> Tensor:
        return torch.from_numpy(np.moveaxis(np.tensordot(matrix, tensor.numpy(), (1, dim)), 0, dim))

    s = sketching.sketch(x, key, length, dim=d, hash=kind, scale=scale)
    close(s, along(a, x), 1e-12, "sketch")
    close(sketching.unsketch(s, key, size, dim=d, hash=kind, scale=scale), along(e @ a, x), 1e-12, "unsketch")
    lifted = sketching.lift(s, key, size, dim=d, hash=kind, scale=scale)
    close(lifted, along(np.linalg.pinv(a) @ a, x), 1e-10, "lift")


@given(KEYS, KEYS, HASHES, SCALES)
def test_two_sided_sketch_is_the_product_from_both_sides(first, second, kind, scale) -> None:
    x = torch.randn(6, 3, 9, dtype=torch.float64)
    h1, h2 = draw_matrix(first, 6, 4, kind), draw_matrix(second, 9, 2, kind)
    s = sketching.sketch_both(x, (first, second), (4, 2), dims=(0, 2), hash=kind, scale=scale)
    wanted = np.einsum("ai,ijk,bk->ajb", sketching_matrix(h1, scale), x.numpy(), sketching_matrix(h2, scale))
    close(s, torch.from_numpy(wanted), 1e-12, "sketch_both")
    back = sketching.unsketch_both(s, (first, second), (6, 9), dims=(0, 2), hash=kind, scale=scale)
    wanted = np.einsum("ia,ajb,kb->ijk", expanding_matrix(h1, scale), wanted, expanding_matrix(h2, scale))
    close(back, torch.from_numpy(wanted), 1e-12, "unsketch_both")


@given(KEYS, st.integers(1, 6), HASHES, SCALES)
def test_rows_are_recovered_by_their_median(key, rows, kind, scale) -> None:
    x = torch.randn(10, 3, dtype=torch.float64)
    s = sketching.sketch_rows(x, key, 4, rows, hash=kind, scale=scale)
    matrices = [draw_matrix(k, 10, 4, kind) for k in sketching.row_keys(key, rows)]
    wanted = np.median(
        np.stack([expanding_matrix(h, scale) @ sketching_matrix(h, scale) @ x.numpy() for h in matrices]), axis=0
    )
    close(sketching.unsketch_rows(s, key, 10, hash=kind, scale=scale), torch.from_numpy(wanted), 1e-12, "median")


@given(KEYS, st.sampled_from([(12, 6), (12, 4), (12, 1), (8, 8), (10, 5)]), st.integers(0, 20), SCALES)
def test_folding_a_sketch_equals_sketching_to_the_shorter_length(key, lengths, extra, scale) -> None:
    long, short = lengths
    x = torch.randn(long + extra, 3, dtype=torch.float64)
    s = sketching.sketch(x, key, long, scale=scale)
    folded = sketching.fold_sketch(s, key, len(x), short, scale=scale)
    close(folded, sketching.sketch(x, key, short, scale=scale), 1e-12, "fold")


@given(KEYS, HASHES, SCALES)
def test_sketching_is_linear(key, kind, scale) -> None:
    x, y = torch.randn(2, 20, 3, dtype=torch.float64)
    one = sketching.sketch(2 * x - 3 * y, key, 7, hash=kind, scale=scale)
    a, b = (sketching.sketch(t, key, 7, hash=kind, scale=scale) for t in (x, y))
    close(one, 2 * a - 3 * b, 1e-12, "sketch of a sum")


@given(KEYS, HASHES, st.sampled_from(PROJECTIONS), st.integers(1, 20))
def test_recovery_is_a_projection_and_never_grows_the_norm(key, kind, scale, length) -> None:
    x = torch.randn(20, 3, dtype=torch.float64)

    def recover(t: Tensor) -> Tensor:
        s = sketching.sketch(t, key, length, hash=kind, scale=scale)
        return sketching.unsketch(s, key, 20, hash=kind, scale=scale)

    once = recover(x)
    close(recover(once), once, 1e-12, "second recovery")
    assert once.norm() <= x.norm() * (1 + 1e-12)
    close((x - once).flatten() @ once.flatten(), torch.zeros((), dtype=torch.float64), 1e-9, "angle")  # orthogonal


@given(KEYS, HASHES)
def test_mean_and_isometric_are_the_same_projection(key, kind) -> None:
    x = torch.randn(20, 3, dtype=torch.float64)
    both = [
        sketching.unsketch(sketching.sketch(x, key, 6, hash=kind, scale=s), key, 20, hash=kind, scale=s)
        for s in PROJECTIONS
    ]
    close(both[0], both[1], 1e-12, "projection")


# ------------------------------------------------------------------------------------------------ whole weights


@given(plans())
def test_plan_sketches_as_the_transcription_does(plan) -> None:
    full = full_weight(plan)
    wanted = by_row(plan, dense_sketch, full, stacked=False)
    close(plan.sketch(full), wanted if plan.rows > 1 else wanted[0], 1e-12, "sketch")


@given(plans())
def test_plan_unsketches_as_the_transcription_does(plan) -> None:
    small = small_weight(plan)
    wanted = by_row(plan, dense_unsketch, small, stacked=True)
    close(plan.unsketch_rows(small), wanted, 1e-12, "unsketch of each row")
    close(plan.unsketch(small), torch.from_numpy(np.median(wanted.numpy(), axis=0)), 1e-12, "unsketch")


@given(plans())
def test_lifted_gradient_is_the_chain_rule_summed_over_rows(plan) -> None:
    small = small_weight(plan)
    wanted = by_row(plan, dense_full_gradient, small, stacked=True).sum(0)
    close(plan.lift_gradient(small), wanted, 1e-12, "lift_gradient")
    full = full_weight(plan).requires_grad_()
    (plan.sketch(full) * small).sum().backward()
    close(full.grad, wanted, 1e-12, "gradient by autograd")


@given(plans(rows=st.just(1)))
def test_gradient_through_unsketch_is_the_transposed_expansion(plan) -> None:
    small, full = small_weight(plan).requires_grad_(), full_weight(plan)
    (plan.unsketch(small) * full).sum().backward()
    close(small.grad, torch.from_numpy(dense_small_gradient(plan, full.numpy())), 1e-12, "gradient")


@given(plans(rows=st.just(1)))
def test_lift_is_the_pseudo_inverse_of_the_sketch(plan) -> None:
    small = small_weight(plan)
    close(plan.lift(small), torch.from_numpy(dense_lift(plan, small.numpy())), 1e-9, "lift")


@given(plans(rows=st.integers(2, 3)))
@settings(max_examples=12)
def test_lift_of_many_rows_is_the_pseudo_inverse_of_their_stack(plan) -> None:
    small = small_weight(plan)
    inverse = np.linalg.pinv(stacked_sketching_matrix(plan))
    wanted = torch.from_numpy((inverse @ small.numpy().ravel()).reshape(plan.shape))
    close(plan.lift(small), wanted, 1e-8, "lift")


@given(plans())
def test_sketch_of_a_lifted_change_of_a_sketch_is_that_change(plan) -> None:
    change = plan.sketch(full_weight(plan))
    close(plan.sketch(plan.lift(change)), change, 1e-8, "sketch of the lift")


@given(plans(hash=st.just("balanced")), st.data())
def test_folded_weight_is_the_weight_sketched_shorter(plan, data) -> None:
    def shorter(side: int, sketched: bool) -> int:
        n = plan.length[side]
        return data.draw(st.sampled_from([m for m in range(1, n + 1) if n % m == 0])) if sketched else n

    lengths = (shorter(0, plan.mode != "input"), shorter(1, plan.mode != "output"))
    short = dataclasses.replace(plan, length=lengths)
    full = full_weight(plan)
    close(plan.fold(plan.sketch(full), lengths), short.sketch(full), 1e-12, "fold")


@given(plans(rows=st.just(1)))
@settings(max_examples=15)
def test_loads_belong_to_each_element_of_the_small_weight(plan) -> None:
    """The load of an element is the number of elements of the full weight that it is a sum of."""
    count = dataclasses.replace(plan, scale="count")
    matrix = stacked_sketching_matrix(count)
    wanted = torch.from_numpy(np.abs(matrix).sum(1)).view(plan.small_shape)
    close(plan.load_power(1).expand(plan.small_shape), wanted, 1e-12, "load")


@given(plans(rows=st.just(1)))
def test_fresh_full_weights_survive_the_sketch_with_their_norm(plan) -> None:
    full = full_weight(plan)
    fresh = plan.fresh(full)
    if plan.scale == "count":
        assert torch.equal(fresh, full)
        return
    seen = plan.unsketch(plan.sketch(fresh))
    close(seen, fresh, 1e-9, "fresh weight after the sketch")
    if float(seen.norm()) > 0:
        close(seen.norm(), full.norm(), 1e-9, "norm")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=7))
def test_median_is_that_of_numpy(values) -> None:
    found = medians.median(torch.tensor(values, dtype=torch.float64)[:, None])
    assert float(found) == pytest.approx(float(np.median(values)))


def sorted_median(rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the median over dimension 0 and the gradient of the rows, by sorting them all."""
    k = len(rows)
    middle = rows.sort(dim=0, stable=True).indices[(k - 1) // 2 : k // 2 + 1]
    back = torch.zeros_like(rows)
    for place in middle:
        back.scatter_(0, place[None], grad[None] / len(middle))
    return rows.gather(0, middle).mean(0), back


@given(st.data(), st.integers(3, 20), st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
def test_median_with_a_gradient_is_that_of_a_stable_sort(data, k, dtype) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    few = data.draw(st.booleans())  # equal values, infinite ones and NaN
    values = st.sampled_from([0.0, 1.0, 2.5, -2.5, math.inf, -math.inf, math.nan]) if few else st.floats(-1e4, 1e4)
    count = k * math.prod(shape)
    rows = torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count)), dtype=dtype).view(k, *shape)
    if data.draw(st.booleans()) and shape:
        rows = rows.transpose(0, 1).contiguous().transpose(0, 1)  # as layers that sketch their inputs give them
    grad = torch.randn(shape, dtype=dtype)
    wanted, wanted_back = sorted_median(rows, grad)
    found = medians.median(rows.requires_grad_())
    found.backward(grad)
    assert found.dtype == dtype and torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(rows.grad, wanted_back)


@pytest.mark.parametrize("k", [3, 4, 5, 16, 17])
@pytest.mark.parametrize("shape", [(200, 1000), (2, 3, 50_000), (300_000,), (1, 140_000)], ids=str)
def test_median_of_many_values_is_that_of_a_few(k: int, shape: tuple[int, ...]) -> None:
    """They are worked on in pieces."""
    rows, grad = torch.randn(k, *shape), torch.randn(shape)
    wanted, wanted_back = sorted_median(rows, grad)
    found = medians.median(rows.requires_grad_())
    found.backward(grad)
    assert torch.equal(found, wanted) and torch.equal(rows.grad, wanted_back)
    assert torch.equal(found, medians.median(rows.detach()))


@given(KEYS, HASHES, st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), SCALES)
def test_dtype_is_kept_and_rounding_is_that_of_the_dtype(key, kind, dtype, scale) -> None:
    x = torch.randn(30, 4)
    s = sketching.sketch(x.to(dtype), key, 5, hash=kind, scale=scale)
    back = sketching.unsketch(s, key, 30, hash=kind, scale=scale)
    assert s.dtype == back.dtype == dtype
    exact = sketching.sketch(x.to(dtype).double(), key, 5, hash=kind, scale=scale)
    close(s, exact, 12 * torch.finfo(dtype).eps, "sketch")


# ------------------------------------------------------------------------------------------------ in expectation


@pytest.mark.parametrize("kind", hashing.KINDS)
def test_mean_of_recovered_tensor_over_keys_tends_to_the_tensor(kind: str) -> None:
    """Test ruling 1, too: with the sign of the bucket, HᵀH would be biased."""
    size, length, keys = 12, 4, 8000
    index, sign = hashing.draw([hashing.fold(0, "mean", k) for k in range(keys)], size, length, kind)
    total = np.zeros((size, size))
    for j in range(keys):
        h = hash_matrix(index[j], sign[j], length)
        total += h.T @ h
    assert np.abs(total / keys - np.eye(size)).max() < 5 * math.sqrt(1 / length / keys)
    x = torch.randn(size, 2, dtype=torch.float64)
    hashes = hashing.Hash(index, sign)
    sketcher = sketching.Sketcher(hashes, length, "count")
    mean = sketcher.unsketch(sketcher.sketch(x.expand(keys, -1, -1))).mean(0)
    close(mean, x, 0.1, "mean over keys")


def test_count_sketch_error_bound_holds_at_its_stated_probability() -> None:
    """P(|x̂ᵢ − xᵢ| > ε‖x‖) ≤ 1/(c ε²) for one row (Chebyshev), and less for the median of k rows (binomial tail)."""
    size, length, keys, rows = 400, 48, 300, 5
    epsilon = math.sqrt(3 / length)
    x = torch.randn(size, dtype=torch.float64) * torch.logspace(0, -2, size, dtype=torch.float64)
    bound = epsilon * float(x.norm())
    failures = torch.zeros(2, dtype=torch.float64)
    for key in range(keys):
        s = sketching.sketch_rows(x, key, length, rows, hash="random")
        one = sketching.unsketch(s[0], sketching.row_keys(key, rows)[0], size, hash="random", scale="count")
        many = sketching.unsketch_rows(s, key, size, hash="random")
        failures[0] += ((one - x).abs() > bound).double().mean() / keys
        failures[1] += ((many - x).abs() > bound).double().mean() / keys
    tail = sum(math.comb(rows, j) * (1 / 3) ** j * (2 / 3) ** (rows - j) for j in range(3, rows + 1))
    assert 0 < failures[0] <= 1 / 3
    assert failures[1] <= tail
    assert failures[1] < failures[0] / 2


def test_squared_error_is_what_ruling_6_says() -> None:
    """Count inflates: a relative squared error of about (d − 1)/c; a projection loses 1 − c/d."""
    size, length, keys = 256, 32, 200
    x = torch.randn(size, dtype=torch.float64)
    error = dict.fromkeys(sketching.SCALES, 0.0)
    for key in range(keys):
        for scale in sketching.SCALES:
            back = sketching.unsketch(sketching.sketch(x, key, length, scale=scale), key, size, scale=scale)
            error[scale] += float((back - x).square().sum() / x.square().sum()) / keys
    assert error["count"] == pytest.approx(size / length - 1, rel=0.1)
    assert error["mean"] == pytest.approx(1 - length / size, rel=0.02)
    assert error["isometric"] == pytest.approx(error["mean"], rel=1e-9)


@pytest.mark.parametrize("kind", hashing.KINDS)
def test_heavy_hitters_are_found_with_several_rows(kind: str) -> None:
    size, length, rows = 5000, 200, 7
    for key in range(10):
        x = torch.randn(size, dtype=torch.float64)
        heavy = torch.randperm(size)[:10]
        x[heavy] = 60.0 * torch.randn(10, dtype=torch.float64).sign()
        back = sketching.unsketch_rows(sketching.sketch_rows(x, key, length, rows, hash=kind), key, size, hash=kind)
        assert set(back.abs().topk(10).indices.tolist()) == set(heavy.tolist())
        assert torch.equal(back[heavy].sign(), x[heavy].sign())
