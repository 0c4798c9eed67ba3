"""Narrow models: which channels are hidden, what is cut, and that the narrow model runs."""

import math

import pytest
import torch
from torch import Tensor, nn

from comfetch.blueprint import blueprint
from comfetch.errors import ModelError, OptionError
from comfetch.models import lstm_tagger, mlp, resnet9, resnet18, vit
from comfetch.widths import (
    Axis,
    add_at,
    count_weights,
    cut,
    first_channels,
    narrow,
    narrow_to,
    plan_widths,
    shrink_empty,
)

IMAGE = torch.randn(2, 3, 32, 32)


class Encoder(nn.Module):
    """A bit of everything: embedding, attention with a widening, a recurrent layer in two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        self.recurrent = nn.GRU(32, 16, 2, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(32, 7)

    def forward(self, words: Tensor) -> Tensor:
        x = self.encoder(self.embedding(words) + self.token)
        scores: Tensor = self.classifier(self.recurrent(x)[0][:, -1])
        return scores


def flattened() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 32, 1), nn.MaxPool2d(8),
        nn.Flatten(), nn.Linear(32 * 16, 64), nn.LayerNorm(64), nn.Linear(64, 10),
    )  # fmt: skip


MODELS = {
    "mlp": (mlp, torch.randn(2, 1, 8, 8)),
    "resnet9": (resnet9, IMAGE),
    "resnet18": (resnet18, IMAGE),
    "resnet18 with group norm": (lambda: resnet18(norm="group"), IMAGE),
    "lstm-tagger": (lstm_tagger, torch.randint(10000, (2, 5))),
    "vit": (vit, IMAGE),
    "encoder": (Encoder, torch.randint(50, (2, 5))),
    "flattened": (flattened, IMAGE),
}


@pytest.mark.parametrize("ratio", [0.5, 0.13])
@pytest.mark.parametrize("name", MODELS)
def test_narrow_models_run_and_keep_names_inputs_and_outputs(name, ratio):
    build, inputs = MODELS[name]
    full, small = build(), narrow(build, ratio)()
    assert small.state_dict().keys() == full.state_dict().keys()
    for mode in (True, False):
        small.train(mode)
        assert small(inputs).shape == full.train(mode)(inputs).shape
    sizes = [sum(p.numel() for p in model.parameters()) for model in (small, full)]
    assert sizes[0] < 1.6 * ratio * sizes[1]
    small.train()(inputs).square().mean().backward()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_full_width_is_the_model(name):
    build, inputs = MODELS[name]
    torch.manual_seed(1)
    full = build().eval()
    built = blueprint(build)
    plan = plan_widths(built.model)
    index = plan.index(1.0, first_channels)
    same = shrink_empty(built, plan, 1.0).eval()
    same.load_state_dict({n: cut(t, index.get(n, ())) for n, t in full.state_dict().items()})
    torch.testing.assert_close(same(inputs), full(inputs))


@pytest.mark.parametrize("name", MODELS)
def test_a_narrow_model_loads_what_is_cut_from_the_full_one_whichever_channels_are_chosen(name):
    build, inputs = MODELS[name]
    built = blueprint(build)
    plan = plan_widths(built.model)
    small = shrink_empty(built, plan, 0.3)
    rolled = plan.index(0.3, lambda channels, width: (3 + torch.arange(width)) % channels)
    small.load_state_dict({n: cut(t, rolled.get(n, ())) for n, t in build().state_dict().items()})
    assert bool(small.eval()(inputs).isfinite().all())


def test_only_hidden_dimensions_are_cut():
    plan = plan_widths(resnet18())
    shape = {n: plan.shape(n, t.shape, 0.5) for n, t in resnet18().state_dict().items()}
    assert shape["conv1.weight"] == (32, 3, 7, 7)
    assert shape["layer4.0.downsample.0.weight"] == (256, 128, 1, 1)
    assert shape["layer4.1.bn2.running_var"] == (256,)
    assert shape["fc.weight"] == (10, 256)
    assert shape["fc.bias"] == (10,)
    assert shape["bn1.num_batches_tracked"] == ()


def test_heads_and_gates_are_cut_each_for_itself():
    plan = plan_widths(Encoder())
    index = plan.index(0.5, first_channels)
    packed = index["encoder.layers.0.self_attn.in_proj_weight"][0]
    starts = [8 * head for head in range(12)]  # three times four heads of eight
    assert packed.tolist() == [start + i for start in starts for i in range(4)]
    gates = index["recurrent.weight_hh_l1_reverse"][0]
    assert gates.tolist() == [16 * gate + i for gate in range(3) for i in range(8)]
    assert index["classifier.weight"][1].tolist() == [*range(8), *range(16, 24)]  # two directions
    assert plan.shape("token", torch.Size((1, 1, 32)), 0.5) == (1, 1, 16)


def test_flattened_channels_take_their_positions_along():
    index = plan_widths(flattened()).index(0.25, first_channels)
    assert index["7.weight"][1].tolist() == list(range(8 * 16))


def test_widths_of_attention_are_multiples_of_its_heads():
    assert Axis(128, multiple=4).width(0.1) == 16
    assert Axis(32, outer=12).width(0.1) == 4
    assert Axis(5).width(1e-9) == 1
    assert Axis(64).width(1 / 8) == 8


@pytest.mark.parametrize("index", [(None, None), (torch.tensor([2, 0]), None), (None, torch.tensor([1]))])
def test_adding_undoes_cutting(index):
    full = torch.randn(4, 3, 2)
    target = torch.zeros_like(full)
    add_at(target, (*index, None), cut(full, index))
    held = torch.zeros_like(full)
    add_at(held, (*index, None), 2.0)
    torch.testing.assert_close(target, torch.where(held > 0, full, 0))
    assert int((held == 2).sum()) == cut(full, index).numel()


def test_fresh_narrow_weights_keep_the_variance_of_outputs():
    torch.manual_seed(0)
    x = torch.randn(64, 1, 8, 8)
    full, small = mlp()(x).std(), narrow(mlp, 0.25)()(x).std()
    assert 0.7 < float(small.detach() / full.detach()) < 1.4
    weight = narrow(resnet18, 0.25)().get_parameter("layer4.1.conv2.weight")
    assert math.isclose(float(weight.detach().std()), math.sqrt(2 / (128 * 9)), rel_tol=0.02)


def test_a_narrow_constructor_makes_no_full_weights_and_can_be_built_without_any():
    built = blueprint(narrow(lambda: mlp(width=64), 0.5))
    assert all(p.is_meta for p in built.model.parameters())
    assert built.model[3].weight.shape == (32, 32)


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.body = nn.Linear(8, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight

    small = narrow(Tied, 0.5)()
    assert small.head.weight is small.embedding.weight
    assert small.head.weight.shape == (20, 4)


@pytest.mark.parametrize("compression", [2, 8, 50])
@pytest.mark.parametrize("build", [mlp, resnet9, vit])
def test_a_budget_is_met_by_the_widest_model_that_fits(build, compression):
    state = build().state_dict()
    plan = plan_widths(build())
    budget = count_weights(plan, state, 1.0) / compression
    ratio = narrow_to(build, budget).ratio
    assert 0.8 * budget < count_weights(plan, state, ratio) <= budget
    assert count_weights(plan, state, ratio + 1e-5) in (count_weights(plan, state, ratio),) or (
        count_weights(plan, state, ratio + 1e-5) > budget
    )


def test_budgets_beyond_the_model_give_the_model_and_budgets_below_its_floor_are_refused():
    assert narrow_to(mlp, 1e9).ratio == 1.0
    with pytest.raises(OptionError, match="below the floor of this model: one channel a layer needs"):
        narrow_to(mlp, 20)


@pytest.mark.parametrize("ratio", [0, -1, 1.5, True, "half", float("nan")])
def test_ratios_that_cannot_be_meant_are_refused(ratio):
    with pytest.raises(OptionError, match="is not in"):
        narrow(mlp, ratio)


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: nn.Linear(4, 4), "no hidden channels"),
        (lambda: nn.Sequential(nn.ReLU()), "between its first layer and its last"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4)), "between its first layer and its last"),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 2, 1)), "2 groups"),
        (lambda: nn.Sequential(nn.LSTM(4, 8, proj_size=2), nn.Linear(2, 2)), "projection"),
        (lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2), nn.Linear(8, 2)), "width of the model's inputs"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(build, complaint):
    with pytest.raises(ModelError, match=complaint):
        plan_widths(build())
