"""Sketched multi-head attention against torch's, with the unsketched weights."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from comfetch import medians
from comfetch.errors import MismatchError
from tests.oracle import SCHEMES, half_sketched

EMBED, HEADS = 8, 2


def attention(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options)


def assert_same(layer: Any, *inputs: Tensor, **options: Any) -> None:
    """Compare output, attention weights and all gradients with those of the full layer with weights Ŵ."""
    weights = {n: layer.plans[n].unsketch(p) if n in layer.plans else p for n, p in layer.named_parameters()}
    full = torch.func.functional_call(layer.unsketched(), weights, inputs, options)
    mine, theirs = ([x for x in result if x is not None] for result in (layer(*inputs, **options), full))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if layer.plans["out_proj.weight"].scale == "isometric" else {}
    weigh = [torch.randn_like(y) for y in mine]
    sources = [*{id(x): x for x in inputs}.values(), *layer.parameters()]
    for ys in (mine, theirs):
        ys += torch.autograd.grad(sum((y * w).sum() for y, w in zip(ys, weigh, strict=True)), sources)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def hide(shape: tuple[int, ...], kind: str) -> Tensor | None:
    """Make a mask that hides some positions, never the first of a row."""
    if kind == "none":
        return None
    hidden = torch.rand(shape) < 0.3
    hidden[..., 0] = False
    return hidden if kind == "bool" else torch.randn(shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), scheme=SCHEMES)
def test_sketched_attention_equals_the_full_one_with_unsketched_weights(data: Any, scheme: dict[str, Any]) -> None:
    torch.manual_seed(0)
    flag = st.booleans()
    kdim, vdim = data.draw(st.sampled_from(((EMBED, EMBED), (6, EMBED), (EMBED, 4), (6, 4))))
    options = {name: data.draw(flag) for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")}
    layer = half_sketched(attention(kdim=kdim, vdim=vdim, **options), **scheme).train(data.draw(flag))
    batch, target, source = (data.draw(st.integers(1, 3)) for _ in range(3))
    which = data.draw(st.sampled_from(("self", "cross", "three")))
    if which == "self" and kdim == vdim == EMBED:
        source = target
    batched = data.draw(flag)

    def draw(length: int, width: int) -> Tensor:
        if not batched:
            return tensor(length, width)
        return tensor(batch, length, width) if layer.batch_first else tensor(length, batch, width)

    query, key, value = draw(target, EMBED), draw(source, kdim), draw(source, vdim)
    if which != "three" and kdim == vdim:
        value = key
    if which == "self" and kdim == vdim == EMBED:
        key = value = query
    batch = batch if batched else 1
    kind = data.draw(st.sampled_from(("bool", "float")))
    shape = data.draw(st.sampled_from(((target, source), (batch * HEADS, target, source))))
    attn = hide(shape, data.draw(st.sampled_from(("none", kind))))
    padding = hide((batch, source) if batched else (source,), data.draw(st.sampled_from(("none", kind))))
    assert_same(
        layer, query, key, value, attn_mask=attn, key_padding_mask=padding,
        need_weights=data.draw(flag), average_attn_weights=data.draw(flag),
    )  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_causal_mask_may_come_with_its_hint(need_weights: bool, padded: bool) -> None:
    layer, x = half_sketched(attention(batch_first=True)), tensor(3, 4, EMBED)
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    padding = torch.zeros(3, 4, dtype=torch.float64) if padded else None
    options = {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding}
    assert_same(layer, x, x, x, need_weights=need_weights, **options)
    with pytest.raises(MismatchError, match="give that mask, too"):
        layer(x, x, x, is_causal=True)


@pytest.mark.parametrize("batch_first", [False, True])
def test_an_empty_batch_gives_an_empty_output(batch_first: bool) -> None:
    layer = half_sketched(attention(batch_first=batch_first))
    x = tensor(0, 3, EMBED) if batch_first else tensor(3, 0, EMBED)
    output, weights = layer(x, x, x)
    assert output.shape == x.shape and weights.shape == (0, 3, 3)


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_acts_in_training_alone(need_weights: bool) -> None:
    # With probability 1 all weights are dropped, in torch's layer too: nothing is left to chance.
    layer, x = half_sketched(attention(dropout=1.0)), tensor(3, 2, EMBED)
    assert_same(layer, x, x, x, need_weights=need_weights)
    dropped = layer(x, x, x, need_weights=need_weights)[0]
    layer.eval()
    assert_same(layer, x, x, x, need_weights=need_weights)
    assert not torch.allclose(dropped, layer(x, x, x, need_weights=need_weights)[0])


@pytest.mark.parametrize("rows", [2, 3, 4])
@pytest.mark.parametrize("mode", ["output", "input", "both"])
def test_with_more_rows_every_product_is_a_median(mode: str, rows: int) -> None:
    torch.manual_seed(0)
    layer, x = half_sketched(attention(), mode, rows), tensor(3, 2, EMBED)
    packed = layer.plans["in_proj_weight"].unsketch_rows(layer.in_proj_weight)

    def multiply(weights: Tensor, bias: Tensor, y: Tensor) -> Tensor:
        return medians.median(torch.stack([y @ w.t() for w in weights])) + bias

    q, k, v = (
        multiply(w, b, x).unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)
        for w, b in zip(packed.chunk(3, dim=1), layer.in_proj_bias.chunk(3), strict=True)
    )
    heads = nn.functional.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
    out = layer.out_proj
    theirs = multiply(layer.plans["out_proj.weight"].unsketch_rows(out.weight), out.bias, heads)
    mine = layer(x, x, x)[0]
    torch.testing.assert_close(mine, theirs)
    weigh, sources = torch.randn_like(mine), [x, *layer.parameters()]
    gradients = [torch.autograd.grad((y * weigh).sum(), sources) for y in (mine, theirs)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{}, {"kdim": 6}, {"add_bias_kv": True}, {"bias": False}])
def test_names_are_those_of_the_full_layer(options: dict[str, Any]) -> None:
    full = attention(**options)
    small = half_sketched(full)
    assert list(small.state_dict()) == list(full.state_dict())
    assert set(small.plans) == {name for name in full.state_dict() if name.endswith("weight")}
    unsketched = small.unsketched()
    assert type(unsketched) is type(full) and type(unsketched.out_proj) is type(full.out_proj)
    assert {n: p.shape for n, p in unsketched.named_parameters()} == {n: p.shape for n, p in full.named_parameters()}


@pytest.mark.parametrize("parent", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_transformer_layers_train_with_sketched_attention(parent: Any) -> None:
    layer = parent(EMBED, HEADS, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    twin = copy.deepcopy(layer)
    layer.self_attn = half_sketched(layer.self_attn)
    twin.self_attn = layer.self_attn.unsketched()
    x = tensor(2, 3, EMBED)
    inputs = (x,) if parent is nn.TransformerEncoderLayer else (x, tensor(2, 4, EMBED))
    torch.testing.assert_close(layer(*inputs), twin(*inputs))


def test_a_copy_computes_the_same_and_shares_nothing() -> None:
    layer, x = half_sketched(attention()), tensor(3, 2, EMBED)
    twin = copy.deepcopy(layer)
    assert torch.equal(layer(x, x, x)[0], twin(x, x, x)[0])
    with torch.no_grad():
        twin.out_proj.weight.zero_()
    assert not torch.equal(layer(x, x, x)[0], twin(x, x, x)[0])


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_meta_device_gives_shapes(need_weights: bool) -> None:
    layer = half_sketched(attention(add_bias_kv=True)).to("meta")
    x = torch.empty(3, 2, EMBED, dtype=torch.float64, device="meta")
    output, weights = layer(x, x, x, need_weights=need_weights)
    assert output.shape == x.shape and output.is_meta
    assert weights.shape == (2, 3, 4) if need_weights else weights is None


@pytest.mark.parametrize("need_weights", [False, True])
def test_autocast_trains_in_bfloat16(need_weights: bool) -> None:
    torch.manual_seed(0)
    layer = half_sketched(nn.MultiheadAttention(EMBED, HEADS))
    x = torch.randn(5, 4, EMBED, requires_grad=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    options = {"attn_mask": mask, "need_weights": need_weights}
    exact = layer(x, x, x, **options)[0]
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x, x, x, **options)[0]
    torch.testing.assert_close(output.float(), exact, rtol=0, atol=0.1)
    sources = [x, layer.in_proj_weight, layer.out_proj.weight]
    gradients = [torch.autograd.grad(y.square().sum(), sources) for y in (output, exact)]
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == b.dtype and (a - b).norm() <= 0.05 * b.norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, when it compiles
def test_compiled_attention_agrees() -> None:
    layer, x = half_sketched(attention(), "input"), tensor(3, 2, EMBED)
    compiled = torch.compile(layer, backend="aot_eager")
    sources = [x, *layer.parameters()]
    gradients = [torch.autograd.grad(f(x, x, x)[0].sum(), sources) for f in (layer, compiled)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_masks_that_do_not_fit_are_refused_by_shape() -> None:
    layer, x = half_sketched(attention()), tensor(3, 2, EMBED)
    with pytest.raises(MismatchError, match=r"attn_mask has shape \(3, 4\); expected \(3, 3\) or \(4, 3, 3\)"):
        layer(x, x, x, attn_mask=torch.zeros(3, 4))
    with pytest.raises(MismatchError, match=r"key_padding_mask has shape \(3, 2\); expected \(2, 3\)"):
        layer(x, x, x, key_padding_mask=torch.zeros(3, 2))
