"""Swapping layers and swapping them back: what is kept, what is shared, what is untouched."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comfetch as cf
from comfetch.blueprint import blueprint
from comfetch.convert import swap_empty
from comfetch.errors import MismatchError, ModelError
from comfetch.layers import Recipe, SketchedLayer
from comfetch.plan import Geometry, Plan
from tests.oracle import assert_same_outputs, close, quiet_sketch
from tests.unit.test_policy import Language, Residual


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))


def test_model_given_stays_as_it_is() -> None:
    model = net()
    before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    parameters = list(map(id, model.parameters()))
    sketched = quiet_sketch(model, policy="all", compression=4)
    with torch.no_grad():
        for p in sketched.parameters():
            p.zero_()
    assert [type(m) for m in model.modules()] == kinds
    assert list(map(id, model.parameters())) == parameters
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_refused_model_stays_as_it_is() -> None:
    model = net()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ModelError):
        cf.sketch(model, only=["2", "nothing"])
    assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize("mode", ["output", "input", "both"])
@pytest.mark.parametrize("rows", [1, 2])
def test_state_dict_has_the_names_of_the_full_model_in_the_same_order(mode: str, rows: int) -> None:
    for model in (net(), Language(tied=False), nn.LSTM(16, 16, 2, bidirectional=True), nn.MultiheadAttention(16, 2)):
        sketched = quiet_sketch(model, policy="all", compression=4, mode=mode, rows=rows)
        assert list(sketched.state_dict()) == list(model.state_dict())
        assert [n for n, _ in sketched.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_biases_and_normalisation_stay_full_and_keep_their_values() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3))
    model[2].running_mean.normal_()
    sketched = quiet_sketch(model, compression=4)
    for name, value in sketched.state_dict().items():
        if not name.endswith("weight") or name.startswith("2"):
            assert torch.equal(value, model.state_dict()[name]), name


def test_sketched_weight_is_the_sketch_of_the_weight_given() -> None:
    model = net()
    sketched = quiet_sketch(model, compression=4)
    plan = cf.plan_of(sketched)
    assert torch.equal(sketched[2].weight, plan["2.weight"].sketch(model[2].weight.detach()))
    again = plan.sketch(model.state_dict())
    assert all(torch.equal(v, again[k]) for k, v in sketched.state_dict().items())


def test_warning_says_how_much_energy_of_given_weights_is_lost_and_the_remedy_works() -> None:
    with pytest.warns(UserWarning, match="Sketching lost (7[3-7])% of the energy.*give sketch\\(\\) its constructor"):
        cf.sketch(net(), compression=4)
    cf.sketch(net, compression=4)  # the remedy: no warning
    cf.sketch(net(), compression=1)  # nothing is lost


@pytest.mark.parametrize("scale", ["mean", "isometric", "count"])
@pytest.mark.parametrize("hash", ["balanced", "random"])
def test_unsketched_model_has_the_outputs_of_the_sketched_one(scale: str, hash: str) -> None:
    sketched = quiet_sketch(net(), compression=4, policy="all", scale=scale, hash=hash)
    assert_same_outputs(sketched, torch.randn(5, 16))


def test_unsketched_model_is_an_independent_copy_of_torch_layers() -> None:
    sketched = quiet_sketch(net(), compression=4)
    full = cf.unsketch(sketched)
    assert [type(m) for m in full.modules()] == [type(m) for m in net().modules()]
    before = full(torch.ones(1, 16))
    with torch.no_grad():
        for p in sketched.parameters():
            p.zero_()
    assert torch.equal(full(torch.ones(1, 16)), before)
    assert isinstance(sketched[2], SketchedLayer)


def test_sketching_what_was_unsketched_loses_nothing_more() -> None:
    sketched = quiet_sketch(net(), compression=4, key=3)
    again = cf.sketch(cf.unsketch(sketched), compression=4, key=3)  # no warning
    for name, value in sketched.state_dict().items():
        close(again.state_dict()[name], value, 1e-6, name)


def test_unsketching_a_full_model_is_refused() -> None:
    with pytest.raises(ModelError, match="no sketched layers"):
        cf.unsketch(net())


def test_sketching_a_sketched_model_is_refused_and_unsketching_it_first_helps() -> None:
    sketched = quiet_sketch(net(), compression=4)
    with pytest.raises(ModelError, match="sketched already.*unsketch it first"):
        cf.sketch(sketched, compression=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cf.sketch(cf.unsketch(sketched), compression=8)


def test_training_mode_and_frozen_weights_are_kept() -> None:
    model = net().eval()
    model[2].weight.requires_grad_(False)
    for changed in (quiet_sketch(model, compression=4), cf.unsketch(quiet_sketch(model, compression=4))):
        assert not any(m.training for m in changed.modules())
        assert not changed[2].weight.requires_grad and changed[2].bias.requires_grad


def test_shared_layer_stays_shared() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(128, 128)
            self.b = self.a
            self.layers = [self.a]  # a plain list refers to it, too

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](self.b(self.a(x)))

    for sketched in (quiet_sketch(Twice(), compression=4, policy="all"), cf.sketch(Twice, compression=4, policy="all")):
        assert isinstance(sketched.a, SketchedLayer)
        assert sketched.a is sketched.b is sketched.layers[0]
        assert len(list(sketched.parameters())) == 2
        full = cf.unsketch(sketched)
        assert full.a is full.b is full.layers[0]
        assert_same_outputs(sketched, torch.randn(3, 128))


@pytest.mark.parametrize("build", [lambda: quiet_sketch(Language(), compression=4), lambda: cf.sketch(Language)])
def test_tied_weights_that_stay_full_stay_tied(build: Any) -> None:
    sketched = build()
    assert isinstance(sketched.inner, SketchedLayer)
    assert sketched.embedding.weight is sketched.head.weight
    full = cf.unsketch(sketched)
    assert full.embedding.weight is full.head.weight


def test_depthwise_layers_stay_full_in_the_model_too() -> None:
    sketched = quiet_sketch(Residual(), policy="all", compression=4)
    assert type(sketched.depthwise) is nn.Conv2d
    assert "depthwise" in cf.plan_of(sketched).kept["depthwise"]


def test_embedding_with_max_norm_can_be_skipped() -> None:
    model = nn.Sequential(
        nn.Embedding(100, 64, max_norm=1.0), nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 2)
    )
    assert type(quiet_sketch(model, skip=["0"])[0]) is nn.Embedding


def test_lazy_model_can_be_sketched_after_one_batch() -> None:
    model = nn.Sequential(nn.LazyLinear(128), nn.LazyLinear(128), nn.Linear(128, 2))
    with pytest.raises(ModelError, match="Run one batch"):
        cf.sketch(model, policy="all")
    with pytest.raises(ModelError, match="lazy parameter"):
        cf.sketch(lambda: nn.Sequential(nn.LazyLinear(128), nn.Linear(128, 2)), policy="all")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.zeros(1, 16))
    assert_same_outputs(quiet_sketch(model, policy="all", compression=2), torch.randn(3, 16))


def test_model_that_awaits_its_weights_is_all_nan_so_that_a_forgotten_load_is_loud() -> None:
    plan = cf.plan_of(quiet_sketch(net(), compression=4))
    empty = swap_empty(blueprint(net), plan)
    assert all(torch.isnan(p).all() for p in empty.parameters())
    sketched = cf.sketch(net, compression=4)
    empty.load_state_dict(sketched.state_dict())
    x = torch.randn(2, 16)
    assert torch.equal(empty(x), sketched(x))


def test_plan_that_names_other_weights_or_shapes_is_refused() -> None:
    plan = cf.plan_of(quiet_sketch(net(), compression=4))
    with pytest.raises(MismatchError, match="does not have: 9.weight"):
        swap_empty(blueprint(net), Plan({"9.weight": plan["2.weight"]}))
    with pytest.raises(MismatchError, match="4.weight is .*\\(4, 128\\).* but .*\\(128, 128\\)"):
        swap_empty(blueprint(net), Plan({"4.weight": plan["2.weight"]}))


def test_users_layer_is_sketched_by_one_decorated_function(registry: dict) -> None:
    class Scaled(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(outputs, inputs))
            self.gain = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * x @ self.weight.T

    class SketchedScaled(SketchedLayer):
        def forward(self, x: Tensor) -> Tensor:
            return self.gain * self.product("weight").multiply(self.weight, x.t()).t()

    @cf.register_layer(Scaled)
    def scaled(layer: Scaled) -> Recipe:
        return Recipe({"weight": Geometry(tuple(layer.weight.shape))}, SketchedScaled)

    sketched = quiet_sketch(Scaled(32, 64), compression=4)
    assert isinstance(sketched, SketchedScaled) and sketched.weight.shape == (16, 32)
    assert_same_outputs(sketched, torch.randn(3, 32))
    with pytest.raises(cf.ComfetchError, match="Scaled is registered already"):
        cf.register_layer(Scaled)(scaled)


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), int, "Linear"])
def test_only_module_types_can_be_registered(thing: object) -> None:
    with pytest.raises(cf.ComfetchError, match="expected a subclass of torch.nn.Module"):
        cf.register_layer(thing)  # type: ignore[arg-type]


def test_sketched_layer_keeps_the_plain_attributes_of_torchs() -> None:
    conv = quiet_sketch(nn.Conv2d(8, 16, 3, stride=2), compression=2)
    assert (conv.in_channels, conv.out_channels, conv.stride) == (8, 16, (2, 2))
    assert not isinstance(conv, nn.Conv2d)
    assert "weight: (16, 8, 3, 3) -> (8, 8, 3, 3) output" in repr(conv)
