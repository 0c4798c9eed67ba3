"""What stands between server and clients: wire formats, clipping, privacy, robust averages, classes, evaluation."""

import math

import pytest
import torch
from torch import nn

from comfetch.data import load_task
from comfetch.driver import Channel, Round, sample
from comfetch.errors import OptionError
from comfetch.experiment import Experiment
from comfetch.federation import make_federation
from comfetch.methods import EF21, Averaging, Client, Comfetch, FedAvg, FedRolex, Local, Message
from comfetch.models import mlp
from comfetch.privacy import Privacy
from comfetch.simulation import simulate
from comfetch.wire import Wire

BUILD = lambda: mlp(width=128, depth=2)  # noqa: E731


@pytest.fixture(scope="module")
def digits():
    return load_task("digits").limited(500)


def run(digits, method=None, rounds=3, **options):
    method = method or Comfetch(8, local=Local(lr=0.005))
    return simulate(method, digits, model=BUILD, clients=4, rounds=rounds, **options)


@pytest.mark.parametrize(("format", "ratio"), [("bfloat16", 0.5), ("int8", 0.25), ("int4", 0.125)])
def test_a_lossy_wire_saves_bytes_and_still_learns(digits, format, ratio):
    plain = run(digits, FedAvg(Local(lr=0.005)))
    packed = run(digits, FedAvg(Local(lr=0.005)), channel=Channel(Wire(format, format, feedback=True)))
    for way in ("bytes_down", "bytes_up"):
        assert ratio < packed.records[-1][way] / plain.records[-1][way] < 1.25 * ratio  # scales and biases beside
    assert packed.accuracy > plain.accuracy - 0.08
    assert not packed.records[-1]["refused"]


def test_the_same_key_gives_the_same_quantised_run(digits):
    first, again = (run(digits, channel=Channel(Wire("int4", "int8"))) for _ in range(2))
    assert all(torch.equal(t, again.server.weights[n]) for n, t in first.server.weights.items())


def test_evaluation_on_clients_covers_the_test_set_once(digits):
    history = run(digits, evaluation="both")
    record = history.records[-1]
    assert record["accuracy_clients"] == pytest.approx(record["accuracy"])
    assert record["loss_clients"] == pytest.approx(record["test_loss"], rel=1e-5)
    alone = run(digits, evaluation="clients").records[-1]
    assert alone["accuracy"] == record["accuracy_clients"] and alone["accuracy_full"] is None


def test_uploads_averaged_as_they_come_are_those_averaged_at_the_end(digits):
    class Unpooled(Comfetch):
        pools = False

    pooled, kept = (run(digits, kind(8, capacities=(1, 2, 8))) for kind in (Comfetch, Unpooled))
    assert all(torch.equal(t, kept.server.weights[n]) for n, t in pooled.server.weights.items())


def test_classes_train_together_and_each_is_told(digits):
    history = run(digits, Comfetch(capacities=(1, 2, 4, 8), local=Local(lr=0.005)), rounds=8)
    found = history.records[-1]["accuracy_by_capacity"]
    assert list(found) == ["1", "2", "4", "8"]
    assert min(found.values()) > 0.6
    assert history.accuracy == pytest.approx(sum(found.values()) / 4)


def test_mixed_classes_are_no_worse_than_their_smallest_alone(digits):
    """Small clients gain from the larger ones, or at least do not lose much: the levels they share are averaged."""
    mixed = run(digits, Comfetch(capacities=(1, 8), local=Local(lr=0.005)), rounds=8)
    alone = run(digits, Comfetch(8, local=Local(lr=0.005)), rounds=8)
    assert mixed.records[-1]["accuracy_by_capacity"]["8"] > alone.accuracy - 0.05


def test_a_clients_change_is_clipped_to_the_norm_asked_for(digits):
    free = make_federation(FedAvg(Local(lr=0.01)), digits, BUILD, clients=1)
    bound = make_federation(FedAvg(Local(lr=0.01)), digits, BUILD, clients=1, channel=Channel(clip=0.1))
    moved = []
    for federation in (free, bound):
        before = federation.start()
        after, _ = federation.round(before)
        moved.append(math.sqrt(sum(float((after.weights[n] - t).square().sum()) for n, t in before.weights.items())))
    assert moved[0] > 0.2 and moved[1] == pytest.approx(0.1, rel=1e-3)


def test_robust_rules_learn_where_the_mean_is_destroyed(digits):
    """One client of five sends large nonsense within what is plausible."""

    def accuracy(rule):
        federation = make_federation(FedAvg(Local(lr=0.01), averaging=Averaging(rule=rule, trim=0.2)), digits, BUILD, 5)
        server = federation.start()
        for _ in range(4):
            play = Round(federation.method, server, Channel(), federation.clients)
            for client in federation.clients:
                audience, _, received = play.post(client)
                model = federation.model(client, audience, received)
                trained = federation.method.train(model, federation.data[client.id], {}, client.id)
                state = {n: t.clone() for n, t in trained.state.items()}
                if client.id == 2:
                    state = {
                        n: 30 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1))
                        for n, t in state.items()
                    }
                play.take(client, Message(state, received.text), trained.loss)
            server, record = play.close()
            assert record["clients"] == 5
        return federation.evaluate(server)["accuracy"]

    assert accuracy("mean") < 0.4
    assert accuracy("median") > 0.6
    assert accuracy("trimmed-mean") > 0.6


@pytest.mark.parametrize("where", ["client", "central"])
def test_privacy_is_accounted_for_in_the_records(digits, where):
    method = Comfetch(8, local=Local(lr=0.005), averaging=Averaging("uniform"))
    history = run(digits, method, channel=Channel(privacy=Privacy(where, clip=1.0, noise=0.05, delta=1e-4)))
    spent = [record["epsilon"] for record in history.records]
    assert spent == sorted(spent) and spent[0] > 0
    assert (history.records[-1]["loss"] is None) == (where == "client")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"privacy": "central"}, "weighting='examples' must be 'uniform'"),
        ({"privacy": "client", "method": "qsgd"}, "otherwise than through their mean"),
        ({"clip_updates": 1.0, "method": "ef21"}, "counts on the server using"),
        ({"wire_feedback": True}, "float32"),
        ({"wire_feedback": True, "wire_up": "int8", "redraw": 2}, "means something else in a later round"),
        ({"wire_feedback": True, "wire_up": "int8", "method": "fedrolex"}, "means something else in a later round"),
        ({"wire_up": "int3"}, "wire_up='int3'"), ({"aggregation": "mode"}, "aggregation='mode'"),
        ({"capacities": "1,x"}, "not a list of numbers"), ({"capacities": "2,3"}, "2,4"),
        ({"clip_updates": -1.0}, "clip_updates=-1.0"), ({"privacy": "client", "privacy_noise": 0.0}, "noise=0.0"),
        ({"method_options": "levels=3"}, "comfetch has no levels"), ({"method_options": "x"}, "not like"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused_before_anything_runs(options, told, tmp_path):
    with pytest.raises(OptionError, match=told):
        Experiment.of({"task": "digits", "limit": 60, "clients": 2, **options}).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_client_that_claims_most_examples_is_refused(digits):
    federation = make_federation(FedAvg(), digits, BUILD, clients=3)
    clients = [Client(c.id, c.examples if c.id else 10**9) for c in federation.clients]
    for known in (clients, [Client(c.id, 0) for c in clients]):  # told before, or only with the upload
        play = Round(federation.method, federation.start(), Channel(), known)
        for client in clients:
            _, _, received = play.post(client)
            play.take(client, Message(received.state, received.text), 1.0)
        _, record = play.close()
        assert record["clients"] == 2
        assert "client 0: it claims 1000000000 examples" in record["refused"][0]


def test_an_upload_that_comes_twice_is_counted_once(digits):
    federation = make_federation(FedAvg(), digits, BUILD, clients=2)
    play = Round(federation.method, federation.start(), Channel(), federation.clients)
    client = federation.clients[0]
    _, _, received = play.post(client)
    for _ in range(2):
        play.take(client, Message(received.state, received.text), 1.0)
    assert play.close()[1]["clients"] == 1
    assert "answered in this round already" in play.refused[0]


def test_sampling_does_not_depend_on_who_is_away():
    clients = [Client(i, 1) for i in range(40)]
    chosen = {c.id for c in sample(7, 3, clients, 0.5)}
    away = next(iter(chosen))
    left = {c.id for c in sample(7, 3, [c for c in clients if c.id != away], 0.5)}
    assert chosen - {away} <= left


def test_a_rolling_method_and_one_with_memory_run_over_a_quantised_wire(digits):
    for method in (FedRolex(4, local=Local(lr=0.005)), EF21(local=Local(lr=0.005))):
        assert not run(digits, method, channel=Channel(Wire("float16", "int8"))).records[-1]["refused"]


def test_given_weights_are_projected_and_fresh_ones_scaled():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10))

    given = build().state_dict()
    method = Comfetch(8)
    trained, fresh = method.start(build, given, fresh=False), method.start(build, given)
    assert torch.equal(trained.weights["1.weight"], given["1.weight"])
    assert torch.linalg.vector_norm(
        method.download(fresh, Client(0, 1)).state["1.weight"]
    ) > 1.5 * torch.linalg.vector_norm(method.download(trained, Client(0, 1)).state["1.weight"])
