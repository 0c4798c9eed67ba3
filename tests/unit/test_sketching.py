"""What sketching promises beside its mathematics: refusals, dtypes, devices, autograd, compile, cost."""

import pytest
import torch
from torch import Tensor

from comfetch import hashing, medians, sketching
from comfetch.errors import ComfetchError, MismatchError, OptionError
from comfetch.footprint import track
from tests.oracle import compiles

scripts = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
"""Mark of tests that use derivatives forward: torch compiles some formulas of its own."""


def test_expand_picks_signed_entries_along_any_dimension() -> None:
    z = torch.arange(6.0).view(2, 3)
    index, sign = torch.tensor([1, 0, 1]), torch.tensor([1, -1, -1])
    assert torch.equal(sketching.expand(z, index, sign, dim=0), torch.stack([z[1], -z[0], -z[1]]))
    columns = torch.stack([z[:, 1], -z[:, 0], -z[:, 1]], dim=1)
    assert torch.equal(sketching.expand(z, index, sign), columns)
    assert torch.equal(sketching.expand(z, index, sign, dim=1), columns)


@pytest.mark.parametrize("rows, wanted", [([3.0], 3.0), ([1.0, 4.0], 2.5), ([9.0, 1, 4], 4.0), ([9.0, 1, 2, 4], 3.0)])
def test_median_of_an_even_number_is_the_mean_of_the_middle_two(rows: list[float], wanted: float) -> None:
    assert float(medians.median(torch.tensor(rows)[:, None])) == wanted


def test_gradient_of_an_even_median_goes_half_to_each_middle_row() -> None:
    rows = torch.tensor([[9.0], [1.0], [2.0], [4.0]], requires_grad=True)
    medians.median(rows).sum().backward()
    assert rows.grad.flatten().tolist() == [0.0, 0.0, 0.5, 0.5]


@scripts
@pytest.mark.parametrize("k", [3, 4, 5, 16, 17, 18])
def test_median_has_all_derivatives_that_torch_gives_a_sort(k: int) -> None:
    rows = torch.randn(k, 2, 3, dtype=torch.float64, requires_grad=True)
    options = {"check_batched_grad": True, "fast_mode": k > 5}
    assert torch.autograd.gradcheck(medians.median, (rows,), check_forward_ad=True, **options)
    assert torch.autograd.gradgradcheck(lambda t: medians.median(t).tanh(), (rows,), **options)


@scripts
@pytest.mark.parametrize("k", [3, 4])
def test_median_can_be_transformed_by_torch_func(k: int) -> None:
    def loss(rows: Tensor) -> Tensor:
        return (medians.median(rows) ** 3).sum()

    def sorted_loss(rows: Tensor) -> Tensor:
        return (rows.sort(dim=0).values[(k - 1) // 2 : k // 2 + 1].mean(0) ** 3).sum()

    batch = torch.randn(2, k, 4, dtype=torch.float64)
    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        wanted = torch.stack([transform(sorted_loss)(rows) for rows in batch])
        torch.testing.assert_close(torch.func.vmap(transform(loss))(batch), wanted)
        torch.testing.assert_close(transform(loss)(batch[0]), wanted[0])


@compiles
@pytest.mark.parametrize("k", [3, 4])
def test_median_compiles_in_one_graph(k: int) -> None:
    torch._dynamo.reset()
    a = torch.randn(k, 5, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    found = torch.compile(medians.median, backend="aot_eager", fullgraph=True)(a)
    found.square().sum().backward()
    medians.median(b).square().sum().backward()
    torch.testing.assert_close(found, medians.median(b))
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("k, size", [(2, 0), (3, 1), (4, 1), (16, 1), (17, 4)])
def test_median_keeps_one_byte_a_value_for_its_gradient(k: int, size: int) -> None:
    kept: list[Tensor] = []
    rows = torch.randn(k, 10, 30, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        medians.median(rows).sum()
    assert sum(t.nbytes for t in kept) == size * 300


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("k", [3, 4])
def test_median_and_its_gradient_take_little_more_memory_than_the_rows(k: int, device: str) -> None:
    """Sorting took over three times the rows, and kept twice the rows until the gradient."""
    rows = torch.empty(k, 64, 2**14, device=device).normal_().requires_grad_()
    with track([rows]) as live:
        median = medians.median(rows)
        forward, kept = live.peak - rows.nbytes, live.now - rows.nbytes
        median.backward(median.detach())
    one = median.nbytes
    assert forward < 2 * one and kept == 1.25 * one
    assert live.peak - rows.nbytes < (k + 2) * one


def test_rows_have_keys_of_their_own() -> None:
    assert len(set(sketching.row_keys(5, 8))) == 8
    assert sketching.row_keys(5, 8)[:3] == sketching.row_keys(5, 3)


@pytest.mark.parametrize("kind", hashing.KINDS)
@pytest.mark.parametrize("scale", sketching.SCALES)
def test_first_and_second_derivatives_are_right(kind: str, scale: str) -> None:
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)

    def both_ways(t: Tensor) -> Tensor:
        s = sketching.sketch(t, 3, 4, hash=kind, scale=scale)
        return sketching.unsketch(s**2, 3, 7, hash=kind, scale=scale)

    assert torch.autograd.gradcheck(both_ways, (x,))
    assert torch.autograd.gradgradcheck(both_ways, (x,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_have_the_dtype_of_their_tensor(dtype: torch.dtype) -> None:
    x = torch.randn(9, 2, dtype=dtype, requires_grad=True)
    sketching.sketch(x, 3, 4).sum().backward()
    assert x.grad.dtype == dtype


@compiles
@pytest.mark.parametrize("scale", sketching.SCALES)
def test_sketch_and_unsketch_compile(scale: str) -> None:
    def recover(x: Tensor) -> Tensor:
        return sketching.unsketch(sketching.sketch(x, 7, 4, scale=scale), 7, 16, scale=scale)

    a = torch.randn(16, 3, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(recover, backend="aot_eager")
    weight = torch.randn(16, 3)
    (compiled(a) * weight).sum().backward()
    (recover(b) * weight).sum().backward()
    assert torch.equal(compiled(a), recover(b))
    assert torch.equal(a.grad, b.grad)


def test_sketch_on_the_meta_device_has_the_right_shape() -> None:
    s = sketching.sketch(torch.empty(16, 3, device="meta"), 7, 4)
    assert s.is_meta and s.shape == (4, 3)
    assert sketching.unsketch(s, 7, 16).shape == (16, 3)


@pytest.mark.parametrize("kind", hashing.KINDS)
def test_no_allocation_is_larger_than_the_tensor_and_its_hash(kind: str) -> None:
    """A dense hash matrix would have size × length elements: here 32 MB."""
    size, length, n = 4096, 2048, 16
    x = torch.randn(size, n)
    with track() as live:
        sketching.unsketch(sketching.sketch(x, 1, length, hash=kind), 1, size, hash=kind)
    assert live.largest <= x.nbytes
    assert live.peak <= 4 * x.nbytes


@pytest.mark.parametrize("function", ["sketch", "unsketch", "lift", "lift_gradient", "fold"])
def test_tensor_of_another_shape_is_refused(function: str) -> None:
    sketcher = sketching.sketcher(0, 8, 4)
    arguments = (2,) if function == "fold" else ()
    with pytest.raises(MismatchError, match="expected"):
        getattr(sketcher, function)(torch.zeros(1, 5, 3), *arguments)
    with pytest.raises(MismatchError, match="expected"):
        getattr(sketcher, function)(torch.zeros(8, 3), *arguments)


@pytest.mark.parametrize("length", [3, 0, 16])
def test_sketch_folds_only_to_divisors_of_its_length(length: int) -> None:
    with pytest.raises(OptionError, match="divide"):
        sketching.fold_sketch(torch.zeros(8, 2), 0, 20, length)


def test_unknown_scale_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="mean, isometric, count"):
        sketching.sketch(torch.zeros(4, 1), 0, 2, scale="sum")


def test_rows_below_one_are_refused() -> None:
    with pytest.raises(ComfetchError, match="rows=0"):
        sketching.sketch_rows(torch.zeros(4, 1), 0, 2, 0)


def test_empty_bucket_is_zero_in_every_scale() -> None:
    key = next(k for k in range(100) if (hashing.loads(hashing.draw([k], 6, 4, "random").index, 4) == 0).any())
    empty = hashing.loads(hashing.draw([key], 6, 4, "random").index, 4)[0] == 0
    for scale in sketching.SCALES:
        s = sketching.sketch(torch.ones(6, 1), key, 4, hash="random", scale=scale)
        assert torch.isfinite(s).all()
        assert (s[torch.from_numpy(empty)] == 0).all()
        assert torch.isfinite(sketching.lift(torch.ones(4, 1), key, 6, hash="random", scale=scale)).all()
