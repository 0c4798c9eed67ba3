"""torch's transformers reach into their children: sketched, they must still equal their unsketched twins."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comfetch as cf
from comfetch.layers import SketchedLayer
from tests.oracle import close, quiet_sketch


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, **{"batch_first": True, **options})


def encoder(nested: bool = True, **options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(**options), 2, enable_nested_tensor=nested and options.get("batch_first", True))


def padding(batch: int, length: int) -> Tensor:
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[0, length - 2 :] = True
    return mask


def compare(sketched: nn.Module, x: Tensor, mask: Tensor | None, **options: Any) -> None:
    """Compare with the unsketched twin in training, in eval mode, and there without gradients (the fast path)."""
    full = cf.unsketch(sketched)
    for training, grad in ((True, True), (False, True), (False, False)):
        sketched.train(training)
        full.train(training)
        with torch.set_grad_enabled(grad):
            a, b = sketched(x, src_key_padding_mask=mask, **options), full(x, src_key_padding_mask=mask, **options)
        if mask is not None:  # the fast path leaves padded positions out
            a, b = a[~mask], b[~mask]
        close(a, b, 1e-5, f"training={training}, grad={grad}")


@pytest.mark.parametrize("mode", ["output", "input", "both"])
@pytest.mark.parametrize("skip", [None, "*self_attn", "*linear1"], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_encoder_layer_equals_its_unsketched_twin(mode: str, skip: str | None, masked: bool) -> None:
    sketched = quiet_sketch(layer(), policy="all", compression=4, mode=mode, skip=skip)
    assert any(isinstance(m, SketchedLayer) for m in sketched.modules())
    compare(sketched, torch.randn(3, 6, 32), padding(3, 6) if masked else None)


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}, {"bias": False}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_encoder_equals_its_unsketched_twin(options: dict, masked: bool) -> None:
    for skip in (None, "*self_attn"):
        sketched = quiet_sketch(encoder(**options), policy="all", compression=4, skip=skip)
        compare(sketched, torch.randn(3, 6, 32), padding(3, 6) if masked else None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True")
def test_encoder_from_a_constructor_equals_its_unsketched_twin() -> None:
    sketched = cf.sketch(encoder, policy="all", compression=4)
    assert len(cf.plan_of(sketched)) == 2 * 4  # in_proj, out_proj, linear1, linear2
    compare(sketched, torch.randn(3, 6, 32), padding(3, 6))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_causal_encoder_equals_its_unsketched_twin() -> None:
    sketched = quiet_sketch(encoder(nested=False), policy="all", compression=4)
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    full = cf.unsketch(sketched)
    for training in (True, False):
        a, b = (m.train(training)(torch.ones(2, 6, 32), mask=causal, is_causal=True) for m in (sketched, full))
        close(a, b, 1e-5, f"training={training}")


def test_decoder_and_whole_transformer_equal_their_unsketched_twins() -> None:
    model = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
    sketched = quiet_sketch(model, policy="all", compression=4)
    full = cf.unsketch(sketched)
    source, target = torch.randn(2, 5, 32), torch.randn(2, 4, 32)
    for training in (True, False):
        close(sketched.train(training)(source, target), full.train(training)(source, target), 1e-5, "output")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fast_path_is_switched_on_again_by_unsketch() -> None:
    model = encoder()
    full = cf.unsketch(quiet_sketch(model, policy="all", compression=4))
    assert full.use_nested_tensor == model.use_nested_tensor
    for before, after in zip(model.layers, full.layers, strict=True):
        assert after.activation_relu_or_gelu == before.activation_relu_or_gelu == 1
        assert set(vars(after)) == set(vars(before))


def test_gradients_of_an_encoder_are_transposed_expansions_of_the_full_ones() -> None:
    sketched = quiet_sketch(encoder(nested=False), policy="all", compression=4).double()
    full = cf.unsketch(sketched)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    for model in (sketched, full):
        model(x).square().sum().backward()
    plan = cf.plan_of(sketched)
    for name, parameter in sketched.named_parameters():
        wanted = full.get_parameter(name).grad
        if name in plan:
            small = torch.zeros(plan[name].small_shape, dtype=torch.float64, requires_grad=True)
            (plan[name].unsketch(small) * wanted).sum().backward()  # Eᵀ times the full gradient
            wanted = small.grad
        close(parameter.grad, wanted, 1e-9, name)
