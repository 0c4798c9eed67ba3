"""Optimiser groups: multipliers by scale and load."""

import copy

import pytest
import torch
from torch import nn

import comfetch as cf
from comfetch.errors import OptionError
from comfetch.groups import MULTIPLIER
from tests.oracle import quiet_sketch


def layer(**options: object) -> nn.Module:
    return cf.sketch(lambda: nn.Linear(64, 64), compression=4, **{"blocks": 1, **options})


@pytest.mark.parametrize("scale, factor", [("mean", 1), ("isometric", 2), ("count", 4)])
def test_equal_loads_give_plain_groups(scale: str, factor: float) -> None:
    model = layer(scale=scale)
    groups = cf.parameter_groups(model, lr=0.5)
    rates = {id(p): g["lr"] for g in groups for p in g["params"]}
    assert rates == {id(model.bias): 0.5, id(model.weight): 0.5 * factor}
    assert not any(MULTIPLIER in g for g in groups)


def test_two_sides_multiply_their_loads() -> None:
    model = cf.sketch(lambda: nn.Linear(64, 64), compression=16, mode="both", scale="count")
    assert {g["lr"] for g in cf.parameter_groups(model, lr=1.0)} == {1.0, 16.0}


@pytest.mark.parametrize("scale, power", [("isometric", 0.5), ("count", 1.0)])
@pytest.mark.parametrize("mode", ["output", "input"])
def test_unequal_loads_are_multipliers_of_each_element(scale: str, power: float, mode: str) -> None:
    model = layer(scale=scale, hash="random", mode=mode)
    (group,) = [g for g in cf.parameter_groups(model, lr=0.1) if MULTIPLIER in g]
    plan = cf.plan_of(model)["weight"]
    index = plan.draw(mode, 0).index[0]
    load = torch.bincount(torch.from_numpy(index), minlength=16).float() ** power
    wanted = load[:, None].expand(16, 64) if mode == "output" else load.expand(64, 16)
    assert torch.allclose(group[MULTIPLIER].expand(wanted.shape), wanted)


def test_every_parameter_is_in_one_group() -> None:
    model = cf.sketch(
        lambda: nn.Sequential(nn.Linear(16, 128), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.Linear(128, 4)),
        scale="count", hash="random",
    )  # fmt: skip
    found = [id(p) for g in cf.parameter_groups(model, lr=0.1) for p in g["params"]]
    assert sorted(found) == sorted(id(p) for p in model.parameters())


def test_full_model_has_one_plain_group() -> None:
    model = nn.Linear(4, 4)
    assert [g["lr"] for g in cf.parameter_groups(model, lr=0.1)] == [0.1]


def test_multiplied_step_moves_each_element_by_its_load() -> None:
    model = layer(scale="count", hash="random")
    optimiser = torch.optim.SGD(cf.parameter_groups(model, lr=0.1), lr=0.1)
    before = model.weight.detach().clone()
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    bias = model.bias.detach().clone()
    optimiser.step()
    moved = (before - model.weight.detach()) / 0.1
    load = cf.plan_of(model)["weight"].load_power(1).float()
    assert torch.allclose(moved, load, atol=1e-4) and len(load.unique()) > 2
    assert torch.allclose(bias - model.bias, torch.full_like(bias, 0.1))


def test_other_optimisers_are_left_alone() -> None:
    layer_groups = cf.parameter_groups(layer(scale="count", hash="random"), lr=0.1)
    torch.optim.Adam(layer_groups)  # installs what multiplies
    weight = nn.Parameter(torch.zeros(3))
    other = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(3)
    other.step()
    assert torch.equal(weight.detach(), -torch.ones(3))


@pytest.mark.parametrize("hash", ["balanced", "random"])
def test_optimiser_with_multipliers_can_be_saved_and_reopened(hash: str) -> None:
    x = torch.randn(8, 64)

    def train(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimiser.zero_grad()
            model(x).square().mean().backward()
            optimiser.step()

    model = layer(scale="count", hash=hash)
    optimiser = torch.optim.Adam(cf.parameter_groups(model, lr=0.01))
    train(model, optimiser)
    other = copy.deepcopy(model)
    second = torch.optim.Adam(cf.parameter_groups(other, lr=0.01))
    second.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    train(model, optimiser)
    train(other, second)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("lr", [0, -0.1, float("nan")])
def test_rate_that_is_not_above_zero_is_refused(lr: float) -> None:
    with pytest.raises(OptionError, match="lr="):
        cf.parameter_groups(nn.Linear(2, 2), lr=lr)


def test_empty_buckets_do_not_move() -> None:
    model = quiet_sketch(nn.Linear(8, 16), compression=1.2, scale="isometric", hash="random", blocks=1)
    load = cf.plan_of(model)["weight"].load_power(1)
    assert (load == 0).any()
    before = model.weight.detach().clone()
    optimiser = torch.optim.Adam(cf.parameter_groups(model, lr=0.1))
    model(torch.randn(4, 8)).square().sum().backward()
    optimiser.step()
    assert torch.equal(model.weight[load == 0], before[load == 0])
    assert torch.isfinite(model.weight).all()
