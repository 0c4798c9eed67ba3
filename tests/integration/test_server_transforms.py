"""The server's transforms in every method that averages what clients have trained."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from comfetch.methods import Client, FedAvg, Local, Upload
from comfetch.methods.fedrolex import FederatedDropout, FedRolex
from comfetch.methods.flocora import FLoCoRA
from comfetch.methods.heterofl import HeteroFL
from comfetch.methods.lowrank import LowRank
from comfetch.methods.mask import Mask
from comfetch.methods.narrow import Narrow
from comfetch.methods.qsgd import QSGD
from comfetch.transforms import adaptive, chain, error_feedback, momentum, scale, top_k
from tests.integration import test_rivals_small as small
from tests.integration import test_rivals_traffic as traffic

SGD = Local("sgd", lr=0.05, steps=3, batch_size=100)
RULES = {
    "none": chain,
    "momentum": lambda: chain(momentum(0.5), scale(0.8)),
    "adaptive": lambda: chain(momentum(0.5), adaptive("yogi", 0.01)),
    "top-k": lambda: chain(momentum(0.5, masked=True), error_feedback(top_k(0.25))),
}
METHODS = {
    **small.METHODS, "qsgd": lambda **options: QSGD(**options),
    "heterofl-classes": lambda **options: HeteroFL(capacities=(1, 16), **options),
    "lowrank-classes": lambda **options: LowRank(capacities=(1, 4), policy="all", **options),
}  # fmt: skip


def run(method, rounds, server=None, memories=None):
    capacities = getattr(method, "capacities", None) or (None,)
    server = small.started(method) if server is None else server
    return small.run(method, small.small_net, small.images(), rounds, capacities, server, memories)


@pytest.mark.parametrize("rule", ["none", "momentum", "adaptive"])
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: HeteroFL(1, **options), lambda **options: FedRolex(1, **options),
        lambda **options: FederatedDropout(1, **options), lambda **options: LowRank(1, **options),
        lambda **options: Mask(1, policy="all", **options), lambda **options: Narrow(compression=1, **options),
    ],
)  # fmt: skip
def test_without_compression_every_method_is_federated_averaging_with_the_same_rule(make, rule):
    ours, theirs = (run(kind(local=SGD, server=RULES[rule]()), 4) for kind in (make, FedAvg))
    for name, tensor in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], tensor, rtol=1e-4, atol=1e-4)
    assert {n: t.numel() for n, t in ours.transforms.items()} == {n: t.numel() for n, t in theirs.transforms.items()}


@pytest.mark.parametrize("mode", traffic.MODES)
def test_qsgd_with_momentum_equals_its_transcription(mode):
    method = QSGD(3, 10, rate=0.4, uploads=mode, local=traffic.local(mode), key=4, server=chain(momentum(0.5)))
    play = traffic.run(method, traffic.SOME)
    theta, u = traffic.first(), np.zeros(traffic.SIZE)
    for round, present in enumerate(traffic.SOME):
        updates = {i: traffic.problems()[i].update(theta, mode) for i in present}
        sent = {i: traffic.rounded(g, 3, 10, traffic.up_seed(round, i, 4), "max") for i, g in updates.items()}
        u = 0.5 * u + 0.4 * traffic.mean(sent)
        theta = theta - u
    traffic.close(play, theta)


@pytest.mark.parametrize("kind", ["random", "l1"])
@pytest.mark.parametrize("rule", RULES)
def test_masked_weights_stay_zero_and_the_rule_counts_the_kept_ones_alone(rule, kind):
    method = Mask(4, kind=kind, policy="all", local=SGD, server=RULES[rule]())
    before = small.started(method)
    after = run(method, 3, before)
    kept = before.weights["8.weight"] != 0
    assert bool((after.weights["8.weight"][~kept] == 0).all())
    assert not torch.equal(after.weights["8.weight"], before.weights["8.weight"])
    assert all(after.transforms[name].shape == (kept.sum(),) for name in after.transforms if "8.weight" in name)
    if rule == "top-k":
        once = run(method, 1, before).weights["8.weight"] != before.weights["8.weight"]
        assert int(once.sum()) == round(0.25 * int(kept.sum()))


@pytest.mark.parametrize("rule", RULES)
def test_what_no_client_ever_holds_stays_bit_for_bit(rule):
    method = HeteroFL(4, local=SGD, server=RULES[rule]())
    before = small.started(method)
    after = run(method, 3, before).weights["8.weight"]
    assert torch.equal(after[16:], before.weights["8.weight"][16:])
    assert not torch.equal(after[:16], before.weights["8.weight"][:16])


def test_momentum_acts_on_where_nobody_holds_a_coordinate_any_more():
    method = FedRolex(4, local=SGD, server=chain(momentum(0.5)))
    weights = []
    server = method.start(small.two_layers)
    for _ in range(4):
        weights.append(server.weights["0.weight"])
        server = small.run(method, small.two_layers, small.problems(), 1, server=server)
    first, second, third = (after[0] - before[0] for before, after in itertools.pairwise(weights))
    assert float(first.norm()) > 0  # unit 0 is in the window of the first round, and in none of the next two
    torch.testing.assert_close(second, 0.5 * first)
    torch.testing.assert_close(third, 0.25 * first)


def test_what_truncation_takes_is_no_change_that_momentum_repeats():
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(16, 12, bias=False).double()

    method = LowRank(3, scaled=False, policy="all", server=chain(momentum(0.5)))
    server, client = method.start(build), Client(0, 1)
    u, s, v = np.linalg.svd(server.weights["weight"].numpy(), full_matrices=False)
    for _ in range(2):  # clients that send back what they got
        sent = method.download(server, client)
        server = method.step(server, [Upload(client, sent)])
    rank = int(16 * 12 / (3 * 28))
    np.testing.assert_allclose(server.weights["weight"].numpy(), u[:, :rank] * s[:rank] @ v[:rank], atol=1e-12)


def test_rounding_to_int8_on_the_way_down_is_no_change_that_momentum_repeats():
    method = FLoCoRA(rank=2, policy="all", server=chain(momentum(0.5)))
    server = small.started(method)
    after = method.step(server, [Upload(Client(0, 1), method.download(server, Client(0, 1)))])
    assert after.transforms
    assert all(not bool(u.any()) for u in after.transforms.values())


@pytest.mark.parametrize("rule", ["momentum", "adaptive", "top-k"])
@pytest.mark.parametrize("name", METHODS)
def test_a_run_goes_on_with_the_transforms_that_the_server_has_kept(name, rule):
    method = METHODS[name](local=SGD, server=RULES[rule]())
    memories: list[dict[str, Tensor]] = [{}, {}, {}]
    half = run(method, 2, memories=memories)
    assert half.transforms
    kept, kept_memories = copy.deepcopy(half), copy.deepcopy(memories)
    whole = run(method, 2, half, memories)
    fresh = METHODS[name](local=SGD, server=RULES[rule]())
    small.started(fresh)
    again = run(fresh, 2, kept, kept_memories)
    for tensors in ("weights", "transforms", "extra"):
        first, second = getattr(whole, tensors), getattr(again, tensors)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[n], second[n]) for n in first)
