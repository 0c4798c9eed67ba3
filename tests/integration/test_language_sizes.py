"""The language experiment has the sizes that the paper counts, and its runs are those that its files ask for."""

import math

import pytest
import torch
from torch import nn

from benchmarks import language
from comfetch import records
from comfetch.data import IGNORED, Examples, Task
from comfetch.experiment import Experiment, read_experiment
from comfetch.methods import Client, Comfetch, FedAvg, Local
from comfetch.models import constructor
from comfetch.simulation import simulate

COUNTS = {
    "fedavg-32": 9607, "fedavg-16": 3799, "fedavg-8": 1663, "fedavg-4": 787, "fetchsgd": 9607,
    "comfetch-1": 9607, "comfetch-2": 5511, "comfetch-4": 3463, "comfetch-8": 2439,
}  # fmt: skip
PAIRS = [(task, name) for name, row in language.ROWS.items() for task in row.tasks]
WRITTEN = [(task, name) for task, name in PAIRS if (language.EXPERIMENTS / f"{task}-{name}.toml").exists()]
RUNS = [(*pair, seed) for pair in WRITTEN for seed in language.SEEDS if language.folder_of(*pair, seed).exists()]


@pytest.mark.parametrize(("name", "expected"), COUNTS.items())
def test_rows_have_the_parameters_of_the_paper_with_39_tags(name: str, expected: int) -> None:
    assert language.parameters(language.ROWS[name].experiment("mnli-pos"), 39) == expected


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_sketched_rows_follow_the_papers_formula(k: int) -> None:
    assert language.parameters(language.ROWS[f"comfetch-{k}"].experiment("mnli-pos"), 39) == 8192 // k + 1415


@pytest.mark.parametrize(("hidden", "printed"), [(16, 4423), (8, 2599), (4, 1879)])
def test_the_papers_small_counts_have_a_classifier_of_32_inputs(hidden: int, printed: int) -> None:
    real = language.parameters(language.ROWS[f"fedavg-{hidden}"].experiment("mnli-pos"), 39)
    assert real - hidden * 39 + 32 * 39 == printed


@pytest.mark.parametrize(("task", "classes"), [("mnli-pos", 44), ("ewt-pos", 17)])
@pytest.mark.parametrize("name", language.ROWS)
def test_counts_are_those_of_the_models_that_clients_hold(name: str, task: str, classes: int) -> None:
    options = language.ROWS[name].experiment(task)
    hidden = int(name.rpartition("-")[2]) if name.startswith("fedavg") else 32
    build = constructor("lstm-tagger", (50,), classes, hidden=hidden)
    method, client = Experiment.of(options).make_method(), Client(0, 1)
    model = method.client_model(build, client, method.download(method.start(build), client))
    held = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    assert held.pop("embedding.weight") == 50 * 32
    assert sum(held.values()) == language.parameters(options, classes)


@pytest.mark.parametrize("name", ["comfetch-2", "comfetch-8", "papers-4"])
def test_only_the_gates_are_sketched(name: str) -> None:
    method = Experiment.of(language.ROWS[name].experiment("mnli-pos")).make_method()
    assert isinstance(method, Comfetch)
    plan = method.plan(constructor("lstm-tagger", (50,), 44))
    assert set(plan) == {"lstm.weight_ih_l0", "lstm.weight_hh_l0"}
    assert {p.shape for p in plan.values()} == {(128, 32)}


def test_compression_1_trains_the_very_model_of_fedavg() -> None:
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(2, 30, (60, 9), generator=draw)
    examples = Examples(words, torch.where(words % 7 > 0, words % 5, IGNORED))
    task = Task("words", "lstm-tagger", examples, examples, (30,), 5, padded=True)
    local = Local("adam", 0.03, batch_size=8)
    found = [simulate(method, task, clients=3, rounds=3) for method in (FedAvg(local), Comfetch(1, local=local))]
    losses = [[record["test_loss"] for record in history.records] for history in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0]


def test_a_narrow_task_has_the_smaller_lstm(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Examples(torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))
    task = Task("words", "lstm-tagger", examples, examples, (30,), 5, padded=True)
    monkeypatch.setattr(language, "load_task", lambda name: task)
    made = language.mnli_8().model
    assert not isinstance(made, str)
    lstm = made().get_submodule("lstm")
    assert isinstance(lstm, nn.LSTM)
    assert (lstm.input_size, lstm.hidden_size) == (32, 8)


def test_all_rows_have_the_same_trials() -> None:
    trials = language.read_search()
    for task, name in WRITTEN:
        of_row = [t["options"] for t in trials if t["row"] == name and t["options"] == {
            **language.ROWS[name].experiment(task, lr=t["options"]["lr"], **language.TRIAL)
        }]  # fmt: skip
        assert sorted(options["lr"] for options in of_row) == list(language.RATES)
        assert all(options["validation"] == 0.1 for options in of_row)


@pytest.mark.parametrize(("task", "name"), WRITTEN)
def test_experiments_have_the_rates_that_the_search_found(task: str, name: str) -> None:
    row = language.ROWS[name]
    written = records.read_options(language.EXPERIMENTS / f"{task}-{name}.toml")
    assert written == row.experiment(task, lr=language.best_rate(language.read_search(), row, task))


@pytest.mark.parametrize(("task", "name", "seed"), RUNS)
def test_records_are_those_of_the_experiments(task: str, name: str, seed: int) -> None:
    folder = language.folder_of(task, name, seed)
    changes = {"seed": seed, "key": seed}
    experiment = read_experiment(language.EXPERIMENTS / f"{task}-{name}.toml", changes)
    found = records.read_options(folder / records.OPTIONS)
    assert Experiment.of(found) == experiment
    rounds = records.read_rounds(folder)
    assert [record["round"] for record in rounds] == list(range(1, experiment.rounds + 1))
    assert all(math.isfinite(record["test_loss"]) for record in rounds)
