"""Sketched recurrent layers against torch's, with the unsketched weights."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from comfetch import medians
from comfetch.errors import MismatchError
from tests.oracle import SCHEMES, half_sketched

KINDS = (nn.LSTM, nn.GRU, nn.RNN)


def flat(result: Any) -> list[Tensor]:
    """List the tensors of outputs and state."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, PackedSequence):
        return [result.data]
    return [x for part in result for x in flat(part)]


def assert_same(layer: Any, *args: Any) -> None:
    """Compare outputs, states and all gradients with those of the full layer with weights Ŵ."""
    full = layer.unsketched()
    weights = {n: layer.plans[n].unsketch(p) if n in layer.plans else p for n, p in layer.named_parameters()}
    mine, theirs = layer(*args), torch.func.functional_call(full, weights, args)
    assert type(mine[0]) is type(theirs[0]) and type(mine[1]) is type(theirs[1])
    if isinstance(mine[0], PackedSequence):
        for a, b in zip(mine[0][1:], theirs[0][1:], strict=True):
            assert a is b or torch.equal(a, b)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if layer.plans["weight_ih_l0"].scale == "isometric" else {}
    mine, theirs = flat(mine), flat(theirs)
    weigh = [torch.randn_like(y) for y in mine]
    sources = [x for x in flat(args) if x.requires_grad] + list(layer.parameters())
    for ys in (mine, theirs):
        ys += torch.autograd.grad(sum((y * w).sum() for y, w in zip(ys, weigh, strict=True)), sources)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def draw_input(layout: str, batch: int, time: int, features: int) -> Tensor | PackedSequence:
    """Draw an input; a packed one of sequences of all lengths up to `time`."""
    if layout == "padded":
        return torch.randn(time, batch, features, dtype=torch.float64, requires_grad=True)
    if layout == "unbatched":
        return torch.randn(time, features, dtype=torch.float64, requires_grad=True)
    lengths = [1 + (7 * i + 2) % time for i in range(batch)]
    if layout == "sorted":
        lengths.sort(reverse=True)
    sequences = [torch.randn(n, features, dtype=torch.float64, requires_grad=True) for n in lengths]
    return pack_sequence(sequences, enforce_sorted=layout == "sorted")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), scheme=SCHEMES)
def test_a_sketched_layer_equals_the_full_layer_with_unsketched_weights(data: Any, scheme: dict[str, Any]) -> None:
    torch.manual_seed(0)
    kind = data.draw(st.sampled_from(KINDS))
    options = {
        "num_layers": data.draw(st.sampled_from((1, 2))),
        "bias": data.draw(st.booleans()),
        "batch_first": data.draw(st.booleans()),
        "bidirectional": data.draw(st.booleans()),
    }
    if kind is nn.LSTM:
        options["proj_size"] = data.draw(st.sampled_from((0, 4)))
    if kind is nn.RNN:
        options["nonlinearity"] = data.draw(st.sampled_from(("tanh", "relu")))
    layer = half_sketched(kind(6, 8, dtype=torch.float64, **options), **scheme)
    layout = data.draw(st.sampled_from(("padded", "unbatched", "sorted", "unsorted")))
    batch, time = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    x = draw_input(layout, batch, time, 6)
    if not data.draw(st.booleans()):
        assert_same(layer, x)
        return
    if layout == "padded" and layer.batch_first:
        batch = time
    count = options["num_layers"] * (2 if options["bidirectional"] else 1)
    widths = (options["proj_size"] or 8, 8) if kind is nn.LSTM else (8,)
    shapes = [(count, width) if layout == "unbatched" else (count, batch, width) for width in widths]
    state = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    assert_same(layer, x, state if kind is nn.LSTM else state[0])


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_gives_an_empty_output(kind: Any) -> None:
    layer = half_sketched(kind(6, 8, num_layers=2, dtype=torch.float64))
    assert_same(layer, torch.randn(3, 0, 6, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_between_layers_and_in_training_alone(kind: Any) -> None:
    # With probability 1 the second layer sees zeros, in torch's layer too: nothing is left to chance.
    layer = half_sketched(kind(6, 8, num_layers=2, dropout=1.0, dtype=torch.float64))
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    trained = layer(x)[0]
    torch.testing.assert_close(trained, layer.unsketched()(x)[0])
    layer.eval()
    assert_same(layer, x)
    assert not torch.allclose(trained, layer(x)[0])


def reference(layer: Any, x: Tensor) -> Tensor:
    """Run an LSTM with projection or a GRU over (time, batch, inputs): every product is the median over the rows."""

    def multiply(name: str, rows: Tensor) -> Tensor:
        estimates = layer.plans[name].unsketch_rows(getattr(layer, name))
        return medians.median(torch.stack([rows @ w.t() for w in estimates]))

    h = x.new_zeros(x.shape[1], layer.proj_size or layer.hidden_size)
    c = x.new_zeros(x.shape[1], layer.hidden_size)
    outputs = []
    for x_t in x:
        a, b = multiply("weight_ih_l0", x_t) + layer.bias_ih_l0, multiply("weight_hh_l0", h) + layer.bias_hh_l0
        if layer.mode == "LSTM":
            i, f, g, o = (a + b).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = multiply("weight_hr_l0", o.sigmoid() * c.tanh())
        else:
            (ar, az, an), (br, bz, bn) = a.chunk(3, 1), b.chunk(3, 1)
            r, z = (ar + br).sigmoid(), (az + bz).sigmoid()
            h = (1 - z) * (an + r * bn).tanh() + z * h
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize("rows", [2, 3, 4])
@pytest.mark.parametrize("mode", ["output", "input", "both"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_with_more_rows_every_product_is_a_median(kind: Any, mode: str, rows: int) -> None:
    torch.manual_seed(0)
    options = {"proj_size": 4} if kind is nn.LSTM else {}
    layer = half_sketched(kind(6, 8, dtype=torch.float64, **options), mode, rows)
    x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    mine, theirs = layer(x)[0], reference(layer, x)
    torch.testing.assert_close(mine, theirs)
    weigh, sources = torch.randn_like(mine), [x, *layer.parameters()]
    gradients = [torch.autograd.grad((y * weigh).sum(), sources) for y in (mine, theirs)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_the_full_layer(kind: Any) -> None:
    full = kind(6, 8, num_layers=2, bidirectional=True)
    small = half_sketched(full)
    assert list(small.state_dict()) == list(full.state_dict())
    small.flatten_parameters()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_computes_the_same_and_shares_nothing(kind: Any) -> None:
    layer = half_sketched(kind(6, 8))
    twin = copy.deepcopy(layer)
    x = torch.randn(3, 2, 6)
    assert torch.equal(layer(x)[0], twin(x)[0])
    with torch.no_grad():
        twin.weight_ih_l0.zero_()
    assert not torch.equal(layer(x)[0], twin(x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_meta_device_gives_shapes(kind: Any) -> None:
    layer = half_sketched(kind(6, 8, bidirectional=True)).to("meta")
    output, state = layer(torch.empty(3, 2, 6, device="meta"))
    assert output.shape == (3, 2, 16) and output.is_meta
    assert all(s.shape == (2, 2, 8) for s in flat(state))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_trains_in_bfloat16(kind: Any, rows: int) -> None:
    torch.manual_seed(0)
    layer = half_sketched(kind(6, 8, bias=False, num_layers=2), rows=rows)
    x = torch.randn(5, 4, 6, requires_grad=True)
    exact = torch.autograd.grad(layer(x)[0].sum(), [x, *layer.parameters()])
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)[0]
    rough = torch.autograd.grad(output.sum(), [x, *layer.parameters()])
    torch.testing.assert_close(output.float(), layer(x)[0], rtol=0, atol=0.03)
    for a, b in zip(rough, exact, strict=True):
        assert a.dtype == b.dtype
        if rows == 1:  # another rounding may pick another median
            assert (a - b).norm() <= 0.05 * b.norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, when it compiles
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_checkpointed_and_repeated_backward_agree(kind: Any, rows: int) -> None:
    layer = half_sketched(kind(6, 8, bidirectional=True), rows=rows)
    x = torch.randn(3, 2, 6, requires_grad=True)
    sources = [x, *layer.parameters()]
    output = layer(x)[0]
    expected = torch.autograd.grad(output.sum(), sources, retain_graph=True)
    again = torch.autograd.grad(output.sum(), sources)
    compiled = torch.compile(layer, backend="aot_eager")
    others = [compiled(x)[0], checkpoint(lambda y: layer(y)[0], x, use_reentrant=False)]
    for gradients in [again, *(torch.autograd.grad(y.sum(), sources) for y in others)]:
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b)


class Largest(TorchDispatchMode):
    """Note the largest result of any operation."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("mode", ["output", "input", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_size_of_a_full_weight_is_made(kind: Any, mode: str) -> None:
    full = kind(64, 64, num_layers=2)
    layer = half_sketched(full, mode)
    with Largest() as largest:
        layer(torch.randn(2, 3, 64))[0].sum().backward()
    assert largest.numel < full.weight_ih_l0.numel()


def test_what_does_not_fit_is_refused_by_name() -> None:
    layer = half_sketched(nn.LSTM(6, 8))
    with pytest.raises(MismatchError, match="the input has 5 features, the layer takes 6"):
        layer(torch.randn(3, 2, 5))
    with pytest.raises(MismatchError, match="the input has 4 dimensions; expected 2 or 3"):
        layer(torch.randn(1, 3, 2, 6))
    with pytest.raises(MismatchError, match="no time step"):
        layer(torch.randn(0, 2, 6))
    with pytest.raises(MismatchError, match="the input is torch.float64, the weights are torch.float32"):
        layer(torch.randn(3, 2, 6, dtype=torch.float64))
    with pytest.raises(MismatchError, match="the initial state has shapes .* expected .*1, 2, 8"):
        layer(torch.randn(3, 2, 6), (torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)))
