"""Training the full W through the sketch is training S with rates times loads (docs/paper.md)."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comfetch as cf
from comfetch.plan import Plan
from tests.oracle import close, expanding_matrix, hash_matrix, quiet_sketch, sketching_matrix

STEPS = 300
OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.003),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.003),
    "adam without eps": lambda p: torch.optim.Adam(p, lr=0.003, eps=1e-40),
}
RATE = {"sgd": 0.003, "momentum": 0.001, "adam": 0.003, "adam without eps": 0.003}


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3)
    ).double()


class ThroughSketch(nn.Module):
    """The full weights, used as E (A W): what the published experiments trained."""

    def __init__(self, model: nn.Sequential, plan: Plan) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.seen: dict[int, Tensor] = {}
        self.sketch: dict[str, Tensor] = {}
        for name, weight_plan in plan.items():
            index, sign = weight_plan.draw("output", 0)
            h = hash_matrix(index[0], sign[0], weight_plan.length[0])
            a, e = sketching_matrix(h, weight_plan.scale), expanding_matrix(h, weight_plan.scale)
            self.sketch[name] = torch.from_numpy(a)
            self.seen[int(name.split(".")[0])] = torch.from_numpy(e @ a)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.model):
            x = F.linear(x, self.seen[i] @ layer.weight, layer.bias) if i in self.seen else layer(x)
        return x

    def small_state(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {name: self.sketch[name] @ x if name in self.sketch else x for name, x in state.items()}


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: int = STEPS) -> None:
    data = torch.Generator().manual_seed(1)
    x = torch.randn(64, 12, dtype=torch.float64, generator=data)
    y = torch.randn(64, 3, dtype=torch.float64, generator=data)
    for step in range(steps):
        part = torch.arange(16) + 16 * (step % 4)
        optimiser.zero_grad()
        loss = (model(x[part]) - y[part]).square().mean()
        loss.backward()
        optimiser.step()


def check_equal_training(optimiser: str, groups: str, **options: Any) -> None:
    full = net()
    small = quiet_sketch(full, compression=3, blocks=1, policy="all", skip="6", **options)
    assert len(cf.plan_of(small)) == 3
    through = ThroughSketch(full, cf.plan_of(small))
    start = {k: v.clone() for k, v in small.state_dict().items()}
    make = OPTIMISERS[optimiser]
    train(through, make(through.parameters()))
    train(small, make(cf.parameter_groups(small, lr=RATE[optimiser]) if groups == "ready" else small.parameters()))
    wanted = through.small_state()
    for name, value in small.state_dict().items():
        close(value, wanted[name], 1e-6, name)
        assert float((value - start[name]).abs().max()) > 1e-4, f"{name} did not move"


@pytest.mark.parametrize("hash", ["random", "balanced"])
@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam"])
def test_training_the_full_weight_through_a_count_sketch_is_training_the_small_one(optimiser: str, hash: str) -> None:
    check_equal_training(optimiser, "ready", scale="count", hash=hash)


@pytest.mark.parametrize("hash", ["random", "balanced"])
@pytest.mark.parametrize("scale", ["isometric", "mean"])
def test_adam_through_a_projection_is_adam_on_the_small_weight(scale: str, hash: str) -> None:
    """Only Adam's eps is not scaled by the load, so it is left out."""
    check_equal_training("adam without eps", "ready", scale=scale, hash=hash)


@pytest.mark.parametrize("hash", ["random", "balanced"])
@pytest.mark.parametrize("optimiser", ["sgd", "momentum"])
def test_sgd_on_an_isometric_sketch_is_projected_sgd_without_any_multiplier(optimiser: str, hash: str) -> None:
    check_equal_training(optimiser, "plain", scale="isometric", hash=hash)


def test_without_the_multipliers_the_count_sketch_trains_differently() -> None:
    with pytest.raises(AssertionError, match="differs"):
        check_equal_training("adam", "plain", scale="count", hash="random")


@pytest.mark.parametrize("mode", ["output", "input", "both"])
@pytest.mark.parametrize("scale", ["count", "isometric", "mean"])
def test_convolutions_with_blocks_and_groups_train_as_the_full_ones_through_the_sketch(scale: str, mode: str) -> None:
    """The same for every mode, with blocks and groups; here the sketch itself is the library's."""

    def build() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(4, 12, 3), nn.Tanh(), nn.Conv2d(12, 12, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)
        ).double()

    full = build()
    small = quiet_sketch(full, compression=4, policy="all", mode=mode, scale=scale, hash="random")
    plan = cf.plan_of(small)
    weights = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(v.clone()) for k, v in full.state_dict().items()})

    def through(x: Tensor) -> Tensor:
        w = {k: weights[k.replace(".", "_")] for k in full.state_dict()}
        w = {k: plan[k].unsketch(plan[k].sketch(v)) if k in plan else v for k, v in w.items()}
        return torch.func.functional_call(full, w, (x,))

    x, y = torch.randn(20, 4, 6, 6, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
    for forward, parameters in ((through, weights.parameters()), (small, cf.parameter_groups(small, lr=0.003))):
        optimiser = torch.optim.Adam(parameters, lr=0.003, eps=1e-40)
        for _ in range(60):
            optimiser.zero_grad()
            (forward(x) - y).square().mean().backward()
            optimiser.step()
    for name, value in small.state_dict().items():
        full_value = weights[name.replace(".", "_")].detach()
        close(value, plan[name].sketch(full_value) if name in plan else full_value, 1e-6, name)


# ------------------------------------------------------------------------------------------------ fresh weights


def deep(width: int = 256) -> nn.Sequential:
    """Eight ReLU layers without normalisation, with the initialisation that keeps their variance."""
    layers: list[nn.Module] = []
    for _ in range(8):
        layer = nn.Linear(width, width, bias=False)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def output_variance(build: Callable[[int], nn.Module], seeds: int = 8) -> float:
    total = 0.0
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = build(seed)
        with torch.no_grad():
            total += float(model(torch.randn(64, 256)).var()) / seeds
    return total


@pytest.fixture(scope="module")
def full_variance() -> float:
    return output_variance(lambda _: deep(), seeds=24)


@pytest.mark.parametrize("compression", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("mode", ["output", "input", "both"])
def test_fresh_deep_net_keeps_the_output_variance_of_its_full_twin(
    mode: str, compression: float, full_variance: float
) -> None:
    for scale, hash in (("mean", "balanced"), ("isometric", "random")):
        found = output_variance(
            lambda seed, s=scale, h=hash: cf.sketch(
                deep, policy="all", compression=compression, mode=mode, scale=s, hash=h, key=seed
            )
        )
        assert 0.5 < found / full_variance < 2, (scale, hash, found / full_variance)


@pytest.mark.parametrize("compression", [2, 32])
def test_fresh_weights_on_the_server_keep_the_output_variance_too(compression: float, full_variance: float) -> None:
    def build(seed: int) -> nn.Module:
        full = deep()
        small = quiet_sketch(full, policy="all", compression=compression, key=seed)
        plan = cf.plan_of(small)
        small.load_state_dict({k: plan[k].sketch(plan[k].fresh(v)) for k, v in full.state_dict().items()})
        return small

    assert 0.5 < output_variance(build) / full_variance < 2


def test_weights_given_are_only_projected_so_their_output_shrinks(full_variance: float) -> None:
    found = output_variance(lambda seed: quiet_sketch(deep(), policy="all", compression=8, key=seed))
    assert found < full_variance / 1000


def test_sketched_net_learns() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 12, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = cf.sketch(lambda: net().double(), policy="all", skip="6", compression=4)
    optimiser = torch.optim.Adam(cf.parameter_groups(model, lr=0.01))
    for _ in range(300):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    assert float((model(x).argmax(1) == y).double().mean()) > 0.95
