"""Optimiser groups: multipliers by scale and load."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comfetch as cf
from comfetch.errors import OptionError
from comfetch.footprint import track
from comfetch.groups import MULTIPLIER
from comfetch.methods.local import OPTIMISERS
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


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mode, blocks", [("output", 1), ("output", 4), ("input", 1), ("input", 4), ("both", 1)])
@pytest.mark.parametrize(
    "build",
    [lambda: nn.Linear(16, 24), lambda: nn.Conv2d(16, 32, 3), lambda: nn.Conv2d(32, 32, 3, groups=2),
     lambda: nn.ConvTranspose2d(32, 16, 3, groups=2), lambda: nn.Embedding(40, 16)],
)  # fmt: skip
def test_multipliers_are_the_loads_of_all_elements_in_few_numbers(
    build: Any, mode: str, blocks: int, rows: int
) -> None:
    for scale, power in (("count", 1.0), ("isometric", 0.5)):
        model = cf.sketch(
            build, compression=2, mode=mode, blocks=blocks, rows=rows, scale=scale, hash="random", policy="all", key=3
        )
        (group,) = [g for g in cf.parameter_groups(model, lr=0.1) if MULTIPLIER in g]
        found, (weight,) = group[MULTIPLIER], group["params"]
        wanted = cf.plan_of(model)["weight"].load_power(power).to(weight)
        assert torch.equal(found.expand(weight.shape), wanted.expand(weight.shape))
        if mode != "both" and (blocks, rows) == (1, 1) and weight.ndim == 2:
            assert found.numel() == cf.plan_of(model)["weight"].length[mode == "input"]


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


def varied() -> nn.Module:
    """Make a model with plain weights and with three of 64 kB whose loads differ."""
    layers = [nn.Linear(16, 256), *[nn.Linear(256, 256) for _ in range(3)], nn.Linear(256, 4)]
    return cf.sketch(lambda: nn.Sequential(*layers), compression=4, scale="count", hash="random", blocks=1)


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_moves_bit_for_bit_by_multiples_of_its_steps(name: str) -> None:
    model = varied()
    twin = copy.deepcopy(model)
    optimiser = OPTIMISERS[name](cf.parameter_groups(model, lr=0.01), lr=0.01)
    groups = cf.parameter_groups(twin, lr=0.01)
    multipliers = {g["params"][0]: g.pop(MULTIPLIER) for g in groups if MULTIPLIER in g}
    plain = OPTIMISERS[name](groups, lr=0.01)
    assert len(multipliers) == 3
    for seed in range(3):
        give_gradients(model, seed)
        give_gradients(twin, seed)
        optimiser.step()
        before = {p: p.detach().clone() for p in multipliers}
        plain.step()
        with torch.no_grad():
            for p, multiplier in multipliers.items():
                p.copy_(before[p] + multiplier * (p - before[p]))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_step_copies_no_more_than_one_weight_at_a_time() -> None:
    model = varied()
    optimiser = torch.optim.SGD(cf.parameter_groups(model, lr=0.01))
    give_gradients(model, 0)
    held = [t for p in model.parameters() for t in (p, p.grad)]
    held += [g[MULTIPLIER] for g in optimiser.param_groups if MULTIPLIER in g]
    with track(held) as live:
        optimiser.step()
    assert live.peak - sum(t.nbytes for t in held) == max(p.nbytes for p in model.parameters())


def test_a_step_leaves_groups_and_gradients_as_they_were() -> None:
    model = varied()
    optimiser = torch.optim.Adam(cf.parameter_groups(model, lr=0.01))
    groups = list(optimiser.param_groups)
    give_gradients(model, 0)
    gradients = [p.grad for p in model.parameters()]
    optimiser.step()
    assert all(a is b for a, b in zip(groups, optimiser.param_groups, strict=True))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_called_once_and_its_loss_returned(by_name: bool) -> None:
    model = varied()
    twin = copy.deepcopy(model)
    x, calls = torch.randn(8, 16), []
    optimiser, second = (torch.optim.Adam(cf.parameter_groups(m, lr=0.01)) for m in (model, twin))

    def closure() -> Tensor:
        calls.append(1)
        optimiser.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    loss = twin(x).square().mean()
    loss.backward()
    second.step()
    assert (optimiser.step(closure=closure) if by_name else optimiser.step(closure)) == loss
    assert len(calls) == 1
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_an_optimiser_that_calls_another_multiplies_once_and_one_that_fails_loses_nothing() -> None:
    class Outer(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails and len(self.param_groups) > 1:
                raise RuntimeError("out of memory")
            return super().step(closure)

    model = varied()
    twin = copy.deepcopy(model)
    outer, plain = Outer(cf.parameter_groups(model, lr=0.01)), torch.optim.SGD(cf.parameter_groups(twin, lr=0.01))
    groups = list(outer.param_groups)
    for seed in range(2):
        for m, optimiser in ((model, outer), (twin, plain)):
            give_gradients(m, seed)
            optimiser.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    outer.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        outer.step()
    outer.fails = False
    assert all(a is b for a, b in zip(groups, outer.param_groups, strict=True))
    model.load_state_dict(twin.state_dict())
    for m, optimiser in ((model, outer), (twin, plain)):
        give_gradients(m, 5)
        optimiser.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


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
