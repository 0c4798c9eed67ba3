"""Run the paper's language experiment: an LSTM tagger, its gates sketched, against smaller LSTMs and FetchSGD.

    python -m benchmarks.language search    # find each row's learning rate on a validation split, write the experiments
    comfetch compare benchmarks/experiments/language --seeds 3 --out benchmarks/results/language
    python -m benchmarks.language sizes     # print the parameters of each row, for the paper's 39 tags and for ours

The search takes row names to search only some, and skips the trials that are on record. The data is found by
COMFETCH_DATA.

**The search** is the same for all rows: Adam with five learning rates, one seed, a tenth of the training sentences held
out to test on, three of the ten clients in each round; the rate with the best accuracy after the last round wins. So a
trial takes as many local steps and rounds as a run of the table. The test set is not touched. One line a trial is in
`benchmarks/results/language/search.jsonl`; the winning rates are in `benchmarks/experiments/language/*.toml`.

A seed stands for the initial weights, the order and division of the data, and (as key) for the hashes.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from comfetch import records
from comfetch.data import Task, load_task
from comfetch.errors import RunError
from comfetch.experiment import Experiment
from comfetch.methods import Comfetch
from comfetch.models import constructor

HERE = Path(__file__).parent
EXPERIMENTS = HERE / "experiments" / "language"
RESULTS = HERE / "results" / "language"
SEARCH = RESULTS / "search.jsonl"
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
SEEDS = (0, 1, 2)
TASKS = ("mnli-pos", "ewt-pos")
FEDERATION: dict[str, Any] = {
    "clients": 10, "rounds": 10, "local_epochs": 1, "batch_size": 64, "optimiser": "adam", "server_momentum": 0.0,
    "spread": 0.0,
}  # fmt: skip
"""The same for all rows: plain averages, as in the paper; the gates are one layer, so there is nothing to spread."""
TRIAL: dict[str, Any] = {"validation": 0.1, "fraction": 0.3, "seed": 0, "key": 0}
PAPERS_SKETCH: dict[str, Any] = {"preset": "paper", "policy": "default"}
"""Random hash, one block, scale `count`, rates times loads, kept Adam; but only the gates are sketched."""
EMBEDDING = "embedding."


def narrow(task: str, hidden: int) -> Task:
    """Load a tagging task whose own model is the tagger with a smaller LSTM."""
    loaded = load_task(task)
    return replace(loaded, model=constructor("lstm-tagger", loaded.inputs, loaded.classes, hidden=hidden))


mnli_16, mnli_8, mnli_4 = (partial(narrow, "mnli-pos", hidden) for hidden in (16, 8, 4))
ewt_16, ewt_8, ewt_4 = (partial(narrow, "ewt-pos", hidden) for hidden in (16, 8, 4))
"""Tasks for `comfetch run benchmarks.language:mnli_16`: an experiment has no option for the size of the LSTM."""


@dataclass(frozen=True)
class Row:
    """A row of the table: its method, the hidden size of the server's LSTM, and further options."""

    label: str
    method: str
    hidden: int = 32
    options: dict[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = TASKS

    def experiment(self, task: str, **changes: Any) -> dict[str, Any]:
        """Return the options of a run on a task."""
        source = task if self.hidden == 32 else f"benchmarks.language:{task.removesuffix('-pos')}_{self.hidden}"
        return {"task": source, "method": self.method, **FEDERATION, **self.options, **changes}


ROWS: dict[str, Row] = {
    **{f"fedavg-{hidden}": Row(f"FedAvg, hidden size {hidden}", "fedavg", hidden) for hidden in (32, 16, 8, 4)},
    "fetchsgd": Row("FetchSGD", "fetchsgd", options={"compression": 5.0, "method_options": "fraction = 0.5"}),
    **{
        f"comfetch-{k}": Row(
            f"Comfetch, compression {k}", "comfetch", options={"compression": float(k), "blocks": "auto"}
        ) for k in (1, 2, 4, 8)
    },
    **{
        f"papers-{k}": Row(
            f"Comfetch with the paper's sketch, compression {k}", "comfetch",
            options={"compression": float(k), **PAPERS_SKETCH}, tasks=("mnli-pos",),
        ) for k in (2, 4, 8)
    },
}  # fmt: skip
"""Name -> row. FedAvg at hidden size 32 and Comfetch at compression 1 are one model."""


def parameters(options: dict[str, Any], classes: int) -> int:
    """Count the trained parameters that a client holds, its embedding aside, as the paper counts them."""
    source, experiment = options["task"], Experiment.of(options)
    hidden = int(source.rpartition("_")[2]) if ":" in source else 32
    build = constructor("lstm-tagger", (2,), classes, hidden=hidden)
    with torch.device("meta"):
        trained = {name: p.shape for name, p in build().named_parameters() if p.requires_grad}
    method = experiment.make_method()
    if isinstance(method, Comfetch):
        trained |= {name: torch.Size(plan.small_shape) for name, plan in method.plan(build).items()}
    return sum(math.prod(shape) for name, shape in trained.items() if not name.startswith(EMBEDDING))


def search(names: Iterable[str], say: Callable[[str], None]) -> None:
    """Run the trials that are missing, then write the experiments of all rows whose trials are complete."""
    for task, name, row in _pairs(names):
        for rate in RATES:
            options = row.experiment(task, lr=rate, **TRIAL)
            if trial_of(read_search(), options) is None:
                found = _try(options)
                _append({"row": name, "options": options, **found})
                say(f"{task} {name} lr {rate:g}: {found['accuracy'][-1] if found['accuracy'] else found['failed']}")
        path = EXPERIMENTS / f"{task}-{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        records.write_text(path, records.format_toml(row.experiment(task, lr=best_rate(read_search(), row, task))))


def _try(options: dict[str, Any]) -> dict[str, Any]:
    """Run one trial; a rate at which training fails loses."""
    history: list[dict[str, Any]] = []
    try:
        Experiment.of(options).run(on_round=history.append)
    except RunError as error:
        return {"accuracy": [], "failed": str(error)}
    return {"accuracy": [round(record["accuracy"], 6) for record in history]}


def read_search() -> list[dict[str, Any]]:
    """Read the trials."""
    return [json.loads(line) for line in SEARCH.read_text().splitlines()] if SEARCH.exists() else []


def trial_of(trials: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any] | None:
    """Find the trial with these options."""
    return next((trial for trial in trials if trial["options"] == options), None)


def best_rate(trials: list[dict[str, Any]], row: Row, task: str) -> float:
    """Return the rate with the best accuracy after the last round; of equal ones the smaller."""
    found = {rate: trial_of(trials, row.experiment(task, lr=rate, **TRIAL)) for rate in RATES}
    return max(found, key=lambda rate: (_last(found[rate]), -rate))


def _last(trial: dict[str, Any] | None) -> float:
    assert trial is not None
    return trial["accuracy"][-1] if trial["accuracy"] else 0.0


def _append(trial: dict[str, Any]) -> None:
    SEARCH.parent.mkdir(parents=True, exist_ok=True)
    with open(SEARCH, "a", encoding="utf-8") as file:
        file.write(json.dumps(trial) + "\n")


def folder_of(task: str, name: str, seed: int) -> Path:
    """Return the folder of a run."""
    return RESULTS / f"{task}-{name}-seed{seed}"


def _pairs(names: Iterable[str]) -> list[tuple[str, str, Row]]:
    wanted = list(names) or list(ROWS)
    return [(task, name, ROWS[name]) for name in wanted for task in ROWS[name].tasks]


def sizes() -> None:
    """Print the parameters of each row."""
    print(f"{'row':12} {'39 tags':>8} {'44 (MNLI)':>10} {'17 (EWT)':>9}")
    for name, row in ROWS.items():
        counts = [parameters(row.experiment("mnli-pos"), classes) for classes in (39, 44, 17)]
        print(f"{name:12} {counts[0]:8} {counts[1]:10} {counts[2]:9}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "sizes"))
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"only these: {', '.join(ROWS)}")
    given = parser.parse_args()
    if unknown := [name for name in given.rows if name not in ROWS]:
        parser.error(f"no row {', '.join(unknown)}. Rows: {', '.join(ROWS)}.")
    if given.what == "sizes":
        sizes()
    else:
        search(given.rows, partial(print, flush=True))


if __name__ == "__main__":
    main()
