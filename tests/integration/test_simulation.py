"""The local driver on the embedded task: reproducible, resumable, accounted."""

import json
import tomllib

import pytest
import torch
from torch import nn

from comfetch.data import load_task
from comfetch.errors import OptionError, RunError
from comfetch.experiment import Experiment
from comfetch.federation import make_federation, stands_for
from comfetch.files import load_state
from comfetch.methods import Comfetch, FedAvg, Local, Message
from comfetch.records import finished, read_rounds
from comfetch.simulation import simulate

FAST = Local(lr=0.003, batch_size=64)


@pytest.fixture(scope="module")
def digits():
    return load_task("digits")


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def run(method, digits, rounds=2, **options):
    return simulate(method, digits, model=small, clients=4, rounds=rounds, **options)


def weights_equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_learns_and_its_records_are_complete(digits):
    history = run(Comfetch(4, local=FAST), digits, rounds=4)
    first, last = history.records[0], history.records[-1]
    assert last["accuracy"] > 0.8 > 0.1
    assert last["loss"] < first["loss"]
    wanted = {"round", "loss", "accuracy", "accuracy_full", "bytes_down", "bytes_up", "client_memory", "seconds"}
    assert wanted <= last.keys()
    assert [r["round"] for r in history.records] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "alike"),
    [
        ({}, True), ({"sketch": {"scale": "isometric", "hash": "random"}}, True), ({"redraw": 1}, False),
        ({"sketch": {"scale": "count"}}, False), ({"sketch": {"rows": 3}}, False),
    ],
)  # fmt: skip
def test_one_test_serves_both_models_only_where_they_compute_alike(digits, options, alike):
    federation = make_federation(Comfetch(4, local=FAST, **options), digits, small, clients=4)
    server = federation.start()
    for _ in range(3):
        server, _ = federation.round(server)
    sketched, full = federation.final_models(server)
    assert stands_for(sketched, full) is alike
    record = federation.evaluate(server)
    assert record["accuracy_full"] == pytest.approx(federation.test(full, digits.test)[1], abs=0.003)
    assert (record["accuracy_full"] == record["accuracy"]) or not alike


def test_the_same_key_and_seed_give_the_same_run_bit_for_bit(digits):
    one = run(Comfetch(4, key=1, local=FAST), digits, fraction=0.5)
    two = run(Comfetch(4, key=1, local=FAST), digits, fraction=0.5)
    other = run(Comfetch(4, key=2, local=FAST), digits, fraction=0.5)
    assert weights_equal(one.server.weights, two.server.weights)
    assert not weights_equal(one.server.weights, other.server.weights)


def test_bytes_are_those_of_the_files_that_would_be_sent(digits):
    method = Comfetch(4, local=FAST)
    federation = make_federation(method, digits, small, clients=4)
    server = federation.start()
    sent = method.download(server, federation.clients[0])
    _, record = federation.round(server)
    assert record["bytes_down"] == 4 * sent.nbytes
    assert record["bytes_up"] == 4 * sent.nbytes
    full = run(FedAvg(local=FAST), digits, rounds=1).records[0]
    assert record["bytes_down"] < 0.6 * full["bytes_down"]
    assert record["client_memory"] < full["client_memory"]


@pytest.mark.parametrize("method", [FedAvg(local=FAST), Comfetch(4, local=FAST)])
def test_measured_and_predicted_client_memory_agree(digits, method):
    record = run(method, digits, rounds=1).records[0]
    assert record["client_memory"] == pytest.approx(record["client_memory_predicted"], rel=0.1)


def test_clients_are_drawn_by_key_and_round(digits):
    federation = make_federation(Comfetch(4), digits, small, clients=20, fraction=0.25)
    draws = [tuple(c.id for c in federation.sample(round)) for round in range(20)]
    assert all(len(draw) == 5 for draw in draws)
    assert len(set(draws)) > 10
    assert set().union(*draws) == set(range(20))


def method_with_everything():
    return Comfetch(4, local=Local("adam", 0.003, batch_size=64, keep_optimiser=True), redraw=2)


def test_a_cut_run_goes_on_bit_for_bit(digits, tmp_path):
    whole = run(method_with_everything(), digits, rounds=4)
    run(method_with_everything(), digits, rounds=2, out=tmp_path / "run")
    with open(tmp_path / "run" / "rounds.jsonl", "a") as log:
        log.write('{"round": 3, "loss"')
    cut = run(method_with_everything(), digits, rounds=4, out=tmp_path / "run", resume=True)
    assert weights_equal(cut.server.weights, whole.server.weights)
    strip = [{k: v for k, v in r.items() if k != "seconds"} for r in read_rounds(tmp_path / "run")]
    assert strip == [{k: v for k, v in r.items() if k != "seconds"} for r in whole.records]
    final, _ = load_state(tmp_path / "run" / "full.safetensors")
    assert weights_equal(final, whole.server.weights)


def test_a_run_folder_holds_options_environment_and_models(tmp_path):
    experiment = Experiment.of({"rounds": 1, "clients": 3, "model": "mlp", "compression": 8.0})
    experiment.run(tmp_path)
    assert tomllib.loads((tmp_path / "run.toml").read_text())["compression"] == 8.0
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert {"torch", "threads", "data", "commit"} <= environment.keys()
    found = {p.name for p in tmp_path.iterdir()}
    assert {"full.safetensors", "sketched.safetensors", "checkpoint.safetensors"} <= found


def test_a_folder_of_another_configuration_is_never_overwritten(tmp_path):
    Experiment.of({"rounds": 1, "clients": 3}).run(tmp_path)
    before = (tmp_path / "rounds.jsonl").read_bytes()
    with pytest.raises(RunError, match="lr: 0.001 there, 0.5 now"):
        Experiment.of({"rounds": 1, "clients": 3, "lr": 0.5}).run(tmp_path, resume=True)
    with pytest.raises(RunError, match="--resume"):
        Experiment.of({"rounds": 1, "clients": 3}).run(tmp_path)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before


class Poisoner(FedAvg):
    """A method every third of whose uploads is NaN."""

    count = 0

    def upload(self, received, trained, memory):
        message = super().upload(received, trained, memory)
        self.count += 1
        if self.count % 3:
            return message
        state = {n: t * torch.nan if t.is_floating_point() else t for n, t in message.state.items()}
        return Message(state, message.text)


@pytest.mark.parametrize("resume", [False, True])
def test_records_without_a_checkpoint_are_finished_and_never_run_over(digits, tmp_path, resume):
    run(FedAvg(FAST), digits, rounds=2, out=tmp_path / "run")
    for model in (tmp_path / "run").glob("*.safetensors"):
        model.unlink()
    kept = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    assert finished(tmp_path / "run", 2) and not finished(tmp_path / "run", 3)
    with pytest.raises(RunError, match="2 rounds of this run, but no checkpoint.safetensors to go on from"):
        run(FedAvg(FAST), digits, rounds=3, out=tmp_path / "run", resume=resume)
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == kept
    run(FedAvg(FAST), digits, rounds=2, out=tmp_path / "another", resume=False)


def test_a_run_that_lacks_its_final_models_only_is_not_finished(digits, tmp_path):
    run(FedAvg(FAST), digits, rounds=1, out=tmp_path / "run")
    (tmp_path / "run" / "full.safetensors").unlink()
    assert not finished(tmp_path / "run", 1)
    run(FedAvg(FAST), digits, rounds=1, out=tmp_path / "run", resume=True)
    assert finished(tmp_path / "run", 1)


def test_a_hostile_upload_is_refused_and_the_round_goes_on(digits):
    records = run(Poisoner(local=FAST), digits, rounds=3).records
    refused = [line for r in records for line in r["refused"]]
    assert len(refused) == 4
    assert all("NaN" in line and line.startswith("client ") for line in refused)
    assert all(r["clients"] + len(r["refused"]) == 4 for r in records)


class NeedsValues(nn.Module):
    """A model whose way depends on its values: it cannot run on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small()

    def forward(self, x):
        return self.layers(x) * (2 if float(x.detach().sum()) < 0 else 1)


def test_a_model_that_needs_values_runs_without_a_prediction(tmp_path):
    (tmp_path / "own.py").write_text(
        "from comfetch.data import load_task\nfrom tests.integration.test_simulation import NeedsValues\n\n"
        "def task():\n    digits = load_task('digits')\n"
        "    pair = lambda side: (side.inputs.float(), side.targets)\n"
        "    return NeedsValues, pair(digits.train), pair(digits.test)\n"
    )
    history = Experiment.of({"task": str(tmp_path / "own.py"), "rounds": 1}).run(tmp_path / "run")
    assert history.records[0]["client_memory_predicted"] is None
    assert history.records[0]["client_memory"] > 0


def test_a_diverging_run_says_so(digits):
    with pytest.raises(RunError, match="learning rate"):
        run(FedAvg(local=Local("sgd", lr=1e30)), digits, rounds=3)


@pytest.mark.parametrize(
    "options", [{"rounds": 0}, {"fraction": 0.0}, {"fraction": 1.5}, {"device": "warp"}, {"rounds": 2.5}]
)
def test_options_that_cannot_be_meant_are_refused(digits, options):
    with pytest.raises(OptionError):
        run(FedAvg(local=FAST), digits, **{"rounds": 1, **options})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"compresion": 4}, "Did you mean 'compression'"), ({"preset": "best"}, "preset='best'"),
        ({"method": "magic"}, "method='magic'"), ({"lr": "fast"}, "lr='fast' is not of type float"),
        ({"rounds": True}, "rounds=True"), ({"blocks": "many"}, "blocks='many'"),
    ],
)  # fmt: skip
def test_an_experiment_refuses_what_it_does_not_know(options, complaint):
    with pytest.raises(OptionError, match=complaint):
        Experiment.of(options).make_method()


def test_algorithm_1_runs_on_a_task(digits):
    experiment = Experiment.of({"uploads": "gradient", "server_momentum": 0.9, "top_k": 0.3, "lr": 0.05, "rounds": 3})
    history = simulate(experiment.make_method(), digits, model=small, clients=4, rounds=3)
    assert history.records[-1]["loss"] < history.records[0]["loss"]
