"""Building a model without its weights, and initialising it as its constructor would have."""

import copy
import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.init import orthogonal_

import comfetch as cf
from comfetch.blueprint import blueprint
from comfetch.errors import ModelError, OptionError


def net(change: Callable[[nn.Sequential], object] | None = None, width: int = 256, **options: object) -> nn.Sequential:
    """Make a net whose layer 1 is sketched by default, and whose layers 0 and 2 stay full."""
    model = nn.Sequential(
        nn.Linear(64, width, **options), nn.Linear(width, width, **options), nn.Linear(width, 10, **options)
    )
    if change is not None:
        change(model)
    return model


def std(tensor: Tensor) -> float:
    return float(tensor.detach().double().std())


def test_weights_are_on_the_meta_device_and_buffers_are_real() -> None:
    built = blueprint(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    assert all(p.is_meta for p in built.model.parameters())
    assert not any(b.is_meta for b in built.model.buffers())


@pytest.mark.parametrize("scale", ["mean", "isometric"])
@pytest.mark.parametrize(
    "change, expected",
    [
        (None, 1 / math.sqrt(3 * 256)),
        (lambda m: nn.init.normal_(m[1].weight, std=0.05), 0.05),
        (lambda m: nn.init.trunc_normal_(m[1].weight, std=0.02), 0.02),
        (lambda m: nn.init.xavier_uniform_(m[1].weight), math.sqrt(1 / 256)),
        (lambda m: nn.init.kaiming_normal_(m[1].weight), math.sqrt(2 / 256)),
        (lambda m: m[1].weight.data.normal_(0, 0.03), 0.03),
        (lambda m: nn.init.normal_(m[1].weight, std=0.05).data.mul_(2), 0.1),
    ],
)
def test_small_weight_starts_with_the_variance_of_the_full_one(change, expected: float, scale: str) -> None:
    full = cf.unsketch(cf.sketch(lambda: net(change), compression=4, scale=scale))
    assert std(full[1].weight) == pytest.approx(expected, rel=0.05)
    assert std(net(change)[1].weight) == pytest.approx(expected, rel=0.05)


def test_constant_initialisation_is_repeated() -> None:
    model = cf.sketch(lambda: net(lambda m: nn.init.zeros_(m[1].weight)), compression=4)
    assert torch.equal(model[1].weight, torch.zeros_like(model[1].weight))


def test_kept_weights_and_biases_are_initialised_as_by_the_constructor() -> None:
    def change(m: nn.Sequential) -> None:
        nn.init.trunc_normal_(m[0].weight, std=0.02)
        nn.init.constant_(m[1].bias, 3.0)
        m[2].bias.data[5:].fill_(7.0)

    model = cf.sketch(lambda: net(change), compression=4)
    assert std(model[0].weight) == pytest.approx(0.02, rel=0.05)
    assert (model[1].bias == 3).all()
    assert (model[2].bias[5:] == 7).all() and (model[2].bias[:5].abs() <= 1 / 16).all()


@pytest.mark.parametrize("init", [nn.init.orthogonal_, orthogonal_], ids=["attribute", "imported"])
def test_orthogonal_initialisation_of_a_kept_layer_is_repeated(init) -> None:
    """On the meta device torch's function silently does nothing."""
    weight = cf.sketch(lambda: net(lambda m: init(m[0].weight, gain=2.0)), compression=4)[0].weight
    assert torch.allclose(weight.T @ weight, 4 * torch.eye(64), atol=1e-4)


def test_initialisation_by_an_out_argument_is_repeated() -> None:
    weight = cf.sketch(lambda: net(lambda m: nn.init.eye_(m[0].weight)), compression=4)[0].weight
    assert torch.equal(weight, torch.eye(256, 64))


def test_sparse_initialisation_of_a_kept_layer_is_repeated() -> None:
    weight = cf.sketch(lambda: net(lambda m: nn.init.sparse_(m[0].weight, 0.5)), compression=4)[0].weight
    assert float((weight == 0).float().mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("init", [nn.init.orthogonal_, nn.init.eye_, lambda w: w.data.copy_(torch.ones(256, 256))])
def test_initialisation_that_has_no_small_form_warns_and_keeps_a_usable_variance(init) -> None:
    with pytest.warns(UserWarning, match="1.weight: not initialised as the constructor says"):
        full = cf.unsketch(cf.sketch(lambda: net(lambda m: init(m[1].weight)), compression=4))
    assert std(full[1].weight) == pytest.approx(1 / math.sqrt(3 * 256), rel=0.05)


def test_initialisation_that_cannot_be_repeated_is_refused_and_the_remedy_works() -> None:
    def change(m: nn.Sequential) -> None:
        m[0].weight.data.copy_(torch.linalg.qr(torch.empty(256, 64).normal_())[0]).mul_(2)

    with pytest.raises(ModelError, match="0.weight: its initialisation cannot be repeated.*Give sketch\\(\\) a model"):
        cf.sketch(lambda: net(change), compression=4)
    with pytest.warns(UserWarning, match="energy"):
        cf.sketch(net(change), compression=4)


def test_constructor_that_needs_its_weights_is_refused_and_the_remedy_works() -> None:
    def change(m: nn.Sequential) -> None:
        m[1].weight.data = torch.randn(256, 256)

    with pytest.raises(ModelError, match="cannot be called without the weights.*Give sketch\\(\\) a model"):
        cf.sketch(lambda: net(change), compression=4)
    with pytest.warns(UserWarning, match="energy"):
        cf.sketch(net(change), compression=4)


def test_weights_that_a_constructor_makes_for_real_keep_their_norm() -> None:
    def change(m: nn.Sequential) -> None:
        m[1].weight = nn.Parameter(torch.randn(256, 256))

    full = cf.unsketch(cf.sketch(lambda: net(change), compression=4))
    assert float(full[1].weight.detach().norm()) == pytest.approx(256, rel=0.02)


@pytest.mark.parametrize(
    "convert", [lambda m: m.double(), lambda m: m.to("cpu"), copy.deepcopy, lambda m: m.to(torch.bfloat16).float()]
)
def test_copied_and_converted_layers_are_initialised_like_the_original(convert) -> None:
    def build() -> nn.Module:
        return convert(net(lambda m: nn.init.normal_(m[1].weight, std=0.05)))

    model = cf.sketch(build, compression=4)
    assert model[1].weight.dtype == model[0].weight.dtype == build()[1].weight.dtype
    assert std(model[1].weight) == pytest.approx(0.05, rel=0.05)
    assert std(model[0].weight) == pytest.approx(1 / math.sqrt(3 * 64), rel=0.05)


def test_dtype_of_the_constructor_is_kept() -> None:
    model = cf.sketch(lambda: net(None, dtype=torch.float64), compression=4)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


class Buffers(nn.Module):
    """Buffers of every kind: made at once or bit by bit, persistent or not."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.empty(10, 256)
        position = torch.arange(10.0)[:, None]
        table[:, 0::2] = torch.sin(position)
        table[:, 1::2] = torch.cos(position)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("mask", torch.ones(4, 4).triu(), persistent=False)
        self.register_buffer("ids", torch.empty(3, dtype=torch.long).fill_(7), persistent=False)
        self.register_buffer("scale", torch.empty(2).fill_(5.0))
        self.a, self.b, self.c = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x + self.table)))


def test_buffers_are_real_after_building_from_a_constructor(tmp_path) -> None:
    full = dict(Buffers().named_buffers())
    model = cf.sketch(Buffers, compression=4)
    cf.save(model, tmp_path / "model.safetensors")
    for again in (model, cf.load(tmp_path / "model.safetensors", Buffers)):
        found = dict(again.named_buffers())
        for name, buffer in full.items():
            assert torch.equal(found[name], buffer), name


@pytest.mark.parametrize("policy", ["default", "all"])
def test_padding_row_of_an_embedding_is_zero_and_the_others_as_the_constructor_says(policy: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(500, 64, padding_idx=3), nn.Linear(64, 512), nn.Linear(512, 10))

    weight = cf.sketch(build, compression=4, policy=policy)[0].weight
    assert weight.shape == ((500, 64) if policy == "default" else (500, 16))
    assert (weight[3] == 0).all()
    assert std(weight) == pytest.approx(1, rel=0.05)


def test_models_can_be_built_in_several_threads_at_once() -> None:
    wrong: list[object] = []

    def build() -> None:
        for _ in range(15):
            try:
                model = cf.sketch(lambda: net(lambda m: nn.init.trunc_normal_(m[1].weight, std=0.2)), compression=4)
                wrong.extend([] if 0.17 < std(model[1].weight) < 0.23 else [std(model[1].weight)])
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_constructor_that_returns_no_module_is_refused() -> None:
    with pytest.raises(OptionError, match="returned a int, not a torch.nn.Module"):
        cf.sketch(lambda: 7, compression=4)  # type: ignore[arg-type, return-value]


def test_torch_is_as_before_after_a_constructor_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        cf.sketch(lambda: 1 / 0, compression=4)  # type: ignore[arg-type, return-value]
    assert not torch.empty(2).is_meta
    assert std(nn.init.trunc_normal_(torch.empty(1000))) > 0.5


def test_fresh_rows_have_a_median_with_the_variance_of_the_full_weight() -> None:
    for rows in (2, 3, 5):
        full = cf.unsketch(cf.sketch(net, compression=4, rows=rows))
        assert std(full[1].weight) == pytest.approx(1 / math.sqrt(3 * 256), rel=0.05)
