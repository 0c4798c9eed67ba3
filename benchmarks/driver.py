"""Measure what the local driver costs beside the training itself: CPU milliseconds per client beyond a bare loop.

    python -m benchmarks.driver            # run, print, and write benchmarks/results/driver.json
    python -m benchmarks.driver --table    # print the Markdown table of the committed results

The bare loop does the same work with nothing around it: it copies the weights into one model, draws the same batches in
the same order, takes the same optimiser steps, and adds the results to their mean as they come; for Comfetch it also
sketches and lifts, once a round. It checks, counts and keeps nothing. If `pfl` (0.6) can be imported, its driver does
the same work in the same process: FedAvg of the full model, or of the small one. After two rounds all three must have
the same weights. Rounds are interleaved in changing order on one thread, all of it is made anew several times, CPU time
is that of the process, and the median of the differences is reported. Exit code 1 means that a bound is missed.

The bound holds for a tiny model, for a convolutional one of 168,000 parameters, and for the default model of the task
digits (0.56 million), where reading every upload once, to refuse what is not finite or absurdly large, takes its time.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comfetch import hashing
from comfetch.data import Examples, Task
from comfetch.federation import Federation, make_federation
from comfetch.methods import Comfetch, FedAvg, Local
from comfetch.models import mlp

RESULTS = Path(__file__).parent / "results" / "driver.json"
BOUND = 0.5
"""CPU milliseconds per client that the driver may take beyond the bare loop."""
COMPRESSION = 4
BATCH, STEPS, RATE = 16, 3, 0.05
SETUPS = 6
"""Times that all is made anew: where a loop's weights lie in memory makes a difference, too."""
WARM_UP = 2
"""Rounds before the clock runs; our driver measures a client's memory in the first one."""
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "MLP 64-128-128-10": (lambda: mlp(width=128, depth=2), 20),
    "CNN of 168k parameters": (lambda: cnn(), 10),
    "MLP 64-512-512-512-10": (lambda: mlp(width=512, depth=3), 10),
}
"""Name -> constructor and number of clients. The last is the default model of the task digits."""


def cnn() -> nn.Module:
    """Build two convolutions and two linear layers for 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 144), nn.ReLU(), nn.Linear(144, 10),
    )  # fmt: skip


State = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Rounds = Iterator[State]


@dataclass
class Work:
    """The same work for all: a federation, and its batches by round and client, their seeds drawn ahead of time."""

    federation: Federation
    rounds: int

    def __post_init__(self) -> None:
        clients = self.federation.clients
        self.seeds = [
            [hashing.fold(self.federation.seed, "train", round, client.id) & (2**63 - 1) for client in clients]
            for round in range(self.rounds)
        ]

    def batches(self, round: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw the batches of a client in a round."""
        generator = torch.Generator().manual_seed(self.seeds[round][client])
        return self.federation.task.batches(self.federation.data[client].examples, BATCH, generator)


def make_work(build: Callable[[], nn.Module], clients: int, method: FedAvg | Comfetch, rounds: int) -> Work:
    """Make a federation of equal clients on random data in the shape of digits."""
    generator = torch.Generator().manual_seed(0)
    train, test = (
        Examples(torch.randn(n, 1, 8, 8, generator=generator), torch.randint(0, 10, (n,), generator=generator))
        for n in (clients * BATCH * STEPS, BATCH)
    )
    task = Task("random", build, train, test, (1, 8, 8), 10)
    return Work(make_federation(method, task, clients=clients), rounds)


def run_comfetch(work: Work) -> Rounds:
    """Run rounds of our driver."""
    federation = work.federation
    server = federation.start()
    while True:
        server, _ = federation.round(server)
        yield server.weights


def run_bare(work: Work) -> Rounds:
    """Run rounds of the bare loop."""
    federation = work.federation
    weights = federation.start().weights
    model, sketch, lift = small_form(federation)
    for round in itertools.count():
        sent = sketch(weights)
        mean = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
        for client in range(len(federation.clients)):
            train(model, sent, work.batches(round, client), federation.task.loss)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    mean[name].add_(parameter, alpha=1 / len(federation.clients))
        update = lift({name: sent[name] - mean[name] for name in sent})
        weights = {name: weights[name] - update[name] for name in weights}
        yield weights


def train(model: nn.Module, received: State, batches: Iterator[tuple[Tensor, Tensor]], loss: Loss) -> None:
    """Train a model from the weights received, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(received[name])
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, targets in batches:
        optimiser.zero_grad()
        loss(model(inputs), targets).backward()
        optimiser.step()


def small_form(federation: Federation) -> tuple[nn.Module, Callable[[State], State], Callable[[State], State]]:
    """Return the client's model, and the maps of weights to it and of updates back; for FedAvg they change nothing."""
    method, build = federation.method, federation.build
    if not isinstance(method, Comfetch):
        return build(), dict, dict
    client = federation.clients[0]
    model = method.client_model(build, client, method.download(federation.start(), client))
    plan = method.plan(build, 0)

    def lift(update: State) -> State:
        return {name: plan[name].lift(x) if name in plan.weights else x for name, x in update.items()}

    return model, plan.sketch, lift


def run_pfl(work: Work) -> Rounds:
    """Run rounds of Apple's pfl: FedAvg of the model that clients hold."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    asyncio.set_event_loop(asyncio.new_event_loop())
    federation = work.federation

    class Client(Dataset):
        """A client's examples, shuffled as in the other loops: pfl's own data sets go in order."""

        round = 0

        def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
            self.round += 1
            return work.batches(self.round - 1, self.user_id)

    class Model(nn.Module):
        """A model with the two functions that pfl asks for."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return federation.task.loss(self.inner(inputs), targets)

        def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(inputs, targets)) * len(targets), len(targets))}

    inner, sketch, _ = small_form(federation)
    inner.load_state_dict(sketch(federation.start().weights))
    module = Model(inner)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    people = {
        c.id: Client((local.examples.inputs, local.examples.targets), user_id=c.id)
        for c, local in zip(federation.clients, federation.data, strict=True)
    }
    data = FederatedDataset(people.__getitem__, MinimizeReuseUserSampler(list(people)))
    backend, algorithm = SimulatedBackend(data, data), FederatedAveraging()
    settings = NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE)
    algorithm._current_central_iteration = 1  # in iteration 0 pfl evaluates on all clients; `run` goes on from here
    for iteration in itertools.count(2):
        params = NNAlgorithmParams(
            central_num_iterations=iteration,
            evaluation_frequency=10**9,
            train_cohort_size=len(people),
            val_cohort_size=0,
        )
        algorithm.run(params, backend, model, settings, send_metrics_to_platform=False)
        yield inner.state_dict()


def race(runs: dict[str, Rounds], clients: int, repeats: int) -> dict[str, list[float]]:
    """Return CPU milliseconds per client of each round, from interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name in random.sample(list(runs), len(runs)):
            started = time.process_time()
            next(runs[name])
            times[name].append((time.process_time() - started) * 1e3 / clients)
    return times


def check_same(federation: Federation, found: dict[str, State]) -> None:
    """Make sure that all loops have done the same work: after the warm-up their weights agree, in the clients' form."""
    _, sketch, _ = small_form(federation)
    wanted = sketch(found["bare"])
    for name, weights in found.items():
        weights = weights if name == "pfl" else sketch(weights)
        for key, tensor in wanted.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def measure(repeats: int, with_pfl: bool) -> list[dict[str, Any]]:
    """Measure every model with both methods."""
    rows: list[dict[str, Any]] = []
    local = Local(optimiser="sgd", lr=RATE, batch_size=BATCH)
    for model, (build, clients) in MODELS.items():
        for method in (FedAvg(local), Comfetch(COMPRESSION, local=local)):
            times: dict[str, list[float]] = {}
            for _ in range(SETUPS):
                work = make_work(build, clients, method, repeats + WARM_UP)
                runs = {"bare": run_bare(work), "comfetch": run_comfetch(work)}
                if with_pfl:
                    runs["pfl"] = run_pfl(work)
                for _ in range(WARM_UP):
                    found = {name: next(rounds) for name, rounds in runs.items()}
                check_same(work.federation, found)
                for name, told in race(runs, clients, repeats).items():
                    times.setdefault(name, []).extend(told)
            beyond = {
                name: statistics.median(a - b for a, b in zip(told, times["bare"], strict=True))
                for name, told in times.items()
            }
            rows.append(
                {
                    "model": model, "method": method.name, "clients": clients, "steps": STEPS,
                    "bare_ms": statistics.median(times["bare"]), "beyond_ms": beyond["comfetch"],
                    "pfl_beyond_ms": beyond.get("pfl"), "bound_ms": BOUND,
                }
            )  # fmt: skip
            print(format_row(rows[-1]), flush=True)
    return rows


def is_missed(row: dict[str, Any]) -> bool:
    """Tell whether the driver is above its bound."""
    return bool(row["beyond_ms"] > row["bound_ms"])


def format_row(row: dict[str, Any]) -> str:
    """Write one result for people."""
    theirs = "" if row["pfl_beyond_ms"] is None else f", pfl {row['pfl_beyond_ms']:+.2f}"
    return (
        f"{row['model']}, {row['method']}: bare loop {row['bare_ms']:.2f} ms CPU per client, "
        f"comfetch {row['beyond_ms']:+.2f}{theirs}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Write results as Markdown."""
    head = ["model", "method", "bare loop", "comfetch beyond it", "bound", "pfl beyond it"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        numbers = [row[name] for name in ("bare_ms", "beyond_ms", "bound_ms", "pfl_beyond_ms")]
        cells = ["" if number is None else f"{number:.2f}" for number in numbers]
        lines.append(f"| {' | '.join([row['model'], row['method'], *cells])} |")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark, or print the table of the committed results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the committed results as Markdown")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved rounds of each loop in each set-up")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(RESULTS.read_text())["rows"]))
        return 0
    torch.set_num_threads(1)
    random.seed(0)
    with_pfl = util.find_spec("pfl") is not None
    if not with_pfl:
        print("pfl cannot be imported (pip install pfl): compared with the bare loop only, and no record is written.")
    rows = measure(options.repeats, with_pfl)
    if with_pfl:
        versions = {"torch": torch.__version__, "pfl": metadata.version("pfl")}
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        results = {**versions, "threads": 1, "setups": SETUPS, "repeats": options.repeats, "rows": rows}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    missed = [row for row in rows if is_missed(row)]
    for row in missed:
        print(f"MISSED: {format_row(row)}; the bound is {row['bound_ms']:+.2f}.")
    print(f"{len(missed)} of {len(rows)} results miss their bound.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
