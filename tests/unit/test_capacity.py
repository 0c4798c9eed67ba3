"""Capacity classes: nested plans, and averages level by level."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from comfetch.capacity import average_levels, capacity_plans, nearest_chain, parse_capacities
from comfetch.errors import OptionError
from comfetch.methods import Client, Comfetch, FedAvg, Local, Message, Upload


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 64), nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 128), nn.Linear(128, 10)
    )


def plans(capacities=(1, 2, 4, 8), **sketch):
    method = Comfetch(capacities=capacities, sketch={"policy": "all", **sketch})
    return {k: method.plan(build, 0, k) for k in method.capacities}


@pytest.mark.parametrize("mode", ["output", "input"])
@pytest.mark.parametrize("scale", ["mean", "isometric"])
def test_the_sketch_of_a_class_is_a_fold_of_that_of_a_larger_one(mode, scale):
    classes = plans(mode=mode, scale=scale)
    for name in classes[8]:
        full = torch.randn(classes[8][name].shape, dtype=torch.float64)
        small = {k: plan[name].sketch(full) for k, plan in classes.items() if k > 1}
        assert len({plan[name].blocks for k, plan in classes.items() if k > 1}) == 1
        for large, less in ((2, 4), (4, 8), (2, 8)):
            folded = classes[large][name].fold(small[large], classes[less][name].length)
            torch.testing.assert_close(folded, small[less])


def test_two_sided_sketches_fold_where_each_side_does():
    classes = plans((4, 16), mode="both")
    for name in classes[16]:
        full = torch.randn(classes[16][name].shape, dtype=torch.float64)
        folded = classes[4][name].fold(classes[4][name].sketch(full), classes[16][name].length)
        torch.testing.assert_close(folded, classes[16][name].sketch(full))


@pytest.mark.parametrize(
    ("capacities", "mode", "works"),
    [
        ((2, 3), "output", "2,4"),
        ((1, 3, 10), "input", "1,3,9"),
        ((4, 8), "both", "4,16"),
        ((1, 2.5, 6), "output", "1,2.5,5"),
    ],
)
def test_capacities_that_do_not_fold_are_refused_with_the_nearest_that_do(capacities, mode, works):
    with pytest.raises(OptionError, match=f"nearest that work: {works}") as error:
        Comfetch(capacities=capacities, sketch={"mode": mode})
    proposed = parse_capacities(str(error.value).rpartition(": ")[2].rstrip("."))
    assert Comfetch(capacities=proposed, sketch={"mode": mode}).plan(build, 0, max(proposed))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sketch": {"scale": "count"}}, "scale='count'.*'mean' or 'isometric'"),
        ({"sketch": {"hash": "random"}}, "hash='random'"), ({"sketch": {"rows": 2}}, "rows=2"),
        ({"space": "sketch"}, "one length for all"), ({"capacities": ()}, "capacities is empty"),
        ({"capacities": (0.5, 2)}, "compression=0.5 is below 1"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_classes_is_refused(options, complaint):
    with pytest.raises(OptionError, match=complaint):
        Comfetch(**{"capacities": (1, 2, 4), **options})


@given(st.lists(st.floats(1, 200), min_size=1, max_size=5))
def test_the_nearest_chain_is_a_chain(capacities):
    chain = nearest_chain(sorted(set(capacities)))
    assert nearest_chain(chain) == chain


def projection(plan, name):
    """The dense matrix of unsketch(sketch(·)) on the flattened weight."""
    size = int(np.prod(plan[name].shape))
    rows = [
        plan[name].unsketch(plan[name].sketch(e.view(plan[name].shape))).flatten() for e in torch.eye(size).double()
    ]
    return torch.stack(rows).numpy()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_levels_are_averaged_over_the_clients_that_cover_them(data):
    """Against dense matrices: on the part of class k's subspace that class k+1 lacks, only classes up to k count."""
    small = capacity_plans(Comfetch(8, sketch={"policy": "all", "blocks": 2}).plan(tiny), (1.0, 2.0, 4.0, 8.0))
    name = "weight"
    identity = np.eye(16 * 6)
    dense = {1.0: identity, **{k: projection(small[k], name) for k in (2.0, 4.0, 8.0)}}
    present = data.draw(st.lists(st.sampled_from([1.0, 2.0, 4.0, 8.0]), min_size=1, unique=True))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    updates = {k: (dense[k] @ rng.normal(size=96), float(rng.integers(1, 9))) for k in present}
    wanted, levels = np.zeros(96), [1.0, 2.0, 4.0, 8.0]
    for level, following in zip(levels, [*levels[1:], None], strict=True):
        covering = [updates[k] for k in present if k <= level]
        if covering:
            mean = sum(w * u for u, w in covering) / sum(w for _, w in covering)
            wanted += (dense[level] - (0 if following is None else dense[following])) @ mean
    lifted = {k: (torch.from_numpy(u).view(16, 6), w) for k, (u, w) in updates.items()}
    np.testing.assert_allclose(average_levels(name, small, lifted).flatten().numpy(), wanted, atol=1e-12)


def tiny() -> nn.Module:
    return nn.Linear(6, 16)


def answers(method, server, clients, change=0.1):
    """Let clients answer with weights moved at random, by client."""
    found = []
    for client in clients:
        message = method.download(server, client)
        generator = torch.Generator().manual_seed(client.id)
        state = {
            n: t + change * torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
            for n, t in message.state.items()
        }
        found.append(Upload(client, Message(state, message.text)))
    return found


def test_a_single_class_is_comfetch_bit_for_bit():
    one, plain = Comfetch(capacities=(4,)), Comfetch(4)
    torch.manual_seed(0)
    weights = build().state_dict()
    servers = [method.start(build, weights) for method in (one, plain)]
    for _ in range(2):
        servers = [
            method.step(server, answers(method, server, [Client(i, 5 + i, 4.0) for i in range(3)]))
            for method, server in zip((one, plain), servers, strict=True)
        ]
    assert all(torch.equal(servers[0].weights[n], servers[1].weights[n]) for n in servers[0].weights)


def test_a_full_class_alone_is_federated_averaging():
    full, plain = Comfetch(capacities=(1, 4)), FedAvg()
    torch.manual_seed(0)
    weights = build().state_dict()
    server, other = full.start(build, weights, fresh=False), plain.start(build, weights)
    clients = [Client(i, 5 + i, 1.0) for i in range(3)]
    server, other = full.step(server, answers(full, server, clients)), plain.step(other, answers(plain, other, clients))
    for name, tensor in other.weights.items():
        torch.testing.assert_close(server.weights[name], tensor, msg=name)


def test_statistics_of_batch_norm_are_kept_for_each_class():
    method = Comfetch(capacities=(1, 2, 4))
    server = method.start(build)
    clients = [Client(0, 10, 1.0), Client(1, 10, 4.0), Client(2, 30, 4.0)]
    uploads = answers(method, server, clients)
    server = method.step(server, uploads)
    mean = "2.running_mean"
    now = {k: method.download(server, Client(9, 1, k)).state[mean] for k in (1.0, 2.0, 4.0)}
    torch.testing.assert_close(now[1.0], uploads[0].message.state[mean])
    torch.testing.assert_close(now[4.0], 0.25 * uploads[1].message.state[mean] + 0.75 * uploads[2].message.state[mean])
    torch.testing.assert_close(now[2.0], server.weights[mean])  # nobody has measured it there: that of the largest
    torch.testing.assert_close(server.weights[mean], now[1.0])


def test_each_class_gets_its_own_sketch_under_one_key_and_none_a_larger_one():
    method = Comfetch(capacities=(1, 2, 4, 8))
    server = method.start(build)
    sent = {k: method.download(server, Client(0, 1, k)) for k in (1.0, 2.0, 4.0, 8.0)}
    assert len({message.text["key"] for message in sent.values()}) == 1
    sizes = {k: sum(t.numel() for n, t in m.state.items() if n in method.plan(build, 0, 8.0)) for k, m in sent.items()}
    assert sizes[1.0] == 2 * sizes[2.0] == 4 * sizes[4.0] == 8 * sizes[8.0]
    undeclared = method.download(server, Client(0, 1))
    assert undeclared.text["capacity"] == "8"


def test_all_classes_start_with_the_same_function():
    method = Comfetch(capacities=(1, 2, 8))
    server = method.start(build)
    inputs, outputs = torch.randn(4, 20), []
    for capacity in (1.0, 2.0, 8.0):
        client = Client(0, 1, capacity)
        message = method.download(server, client)
        model = method.client_model(build, client, message)
        model.load_state_dict(message.state)
        outputs.append(model.eval()(inputs))
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])


def test_classes_train_together_with_gradients_too():
    method = Comfetch(capacities=(1, 4), uploads="gradient", local=Local(lr=0.1))
    server = method.start(build)
    after = method.step(server, answers(method, server, [Client(0, 1, 1.0), Client(1, 1, 4.0)]))
    assert all(torch.isfinite(t).all() for t in after.weights.values())
