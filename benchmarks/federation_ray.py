"""Rounds of 100 small clients in Flower's simulation, and in our own driver: the part `ray` of benchmarks.federation.

    python -m benchmarks.federation_ray OUT

A process of its own, since Ray takes it over. Rounds of the strategies alternate in one simulation; CPU time is that of
all its processes, Ray's own included. What both Flower's FedAvg and ours train is the full model.
"""

import contextlib
import json
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as flower
from flwr.simulation import run_simulation

from benchmarks.federation_app.federation_app.task import answer, make_batches, perceptron
from comfetch.data import Examples, Task
from comfetch.federation import Federation, make_federation
from comfetch.flower import Strategy
from comfetch.methods import Comfetch, FedAvg, Local
from examples.federation import MARK, processes

CLIENTS, WIDTH, STEPS, BATCH = 100, 128, 5, 16
COMPRESSION = 10.0
ROUNDS, WARM_UP = 12, 2
COSTS = ("seconds", "cpu_ms", "server_cpu_ms")
BUILD = perceptron(WIDTH)
client = ClientApp()


@client.train()
def handle(msg: Message, context: Context) -> Message:
    """Train."""
    torch.set_num_threads(1)
    return answer(msg, BUILD, make_batches(int(context.node_config["partition-id"]), STEPS, BATCH))


def cpu_seconds() -> float:
    """Add up the CPU time of all processes of this simulation."""
    total = 0.0
    for process in processes(Path(os.environ[MARK].removesuffix(":ray")), "ray"):
        with contextlib.suppress(OSError):  # it has ended since
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def race(rounds: dict[str, Callable[[], None]]) -> dict[str, dict[str, float]]:
    """Run rounds of each in changing order, and return medians: seconds, and CPU ms per client, in all and here."""
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in rounds}
    for _ in range(WARM_UP + ROUNDS):
        for name in random.sample(list(rounds), len(rounds)):
            before = time.perf_counter(), cpu_seconds(), time.process_time()
            rounds[name]()
            after = time.perf_counter(), cpu_seconds(), time.process_time()
            seconds, all_cpu, own_cpu = (b - a for a, b in zip(before, after, strict=True))
            taken[name].append((seconds, all_cpu * 1e3 / CLIENTS, own_cpu * 1e3 / CLIENTS))
    return {
        name: dict(zip(COSTS, map(statistics.median, zip(*found[WARM_UP:], strict=True)), strict=True))
        for name, found in taken.items()
    }


def run_ray() -> dict[str, Any]:
    """Race Flower's FedAvg and ours in one simulation."""
    server, found = ServerApp(), {}

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        theirs = flower.FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
        arrays = ArrayRecord(BUILD().state_dict())

        def play_theirs() -> None:
            nonlocal arrays
            arrays = theirs.start(grid, arrays, 1, 600, ConfigRecord({"method": "flower"})).arrays

        def ours(method: FedAvg | Comfetch) -> Callable[[], None]:
            strategy = Strategy(method, BUILD, fraction_evaluate=0.0, min_nodes=CLIENTS)
            state = method.start(BUILD)

            def play() -> None:
                nonlocal state
                state, record = strategy.play(grid, state, ConfigRecord({"method": method.name}))
                assert record["clients"] == CLIENTS, record["refused"]

            return play

        found.update(race({"flower": play_theirs, "fedavg": ours(FedAvg()), "comfetch": ours(Comfetch(COMPRESSION))}))

    logging.getLogger("flwr").setLevel(logging.ERROR)
    backend: dict[str, Any] = {
        "init_args": {"log_to_driver": False, "logging_level": "error", "include_dashboard": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, client, CLIENTS, backend_config=backend)
    return found


def run_driver() -> dict[str, Any]:
    """Race FedAvg and Comfetch in our own driver."""
    batches = [make_batches(number, STEPS, BATCH) for number in range(CLIENTS)]
    inputs = torch.cat([x for client in batches for x, _ in client])
    targets = torch.cat([y for client in batches for _, y in client])
    examples = Examples(inputs, targets)
    task = Task("random", BUILD, examples, examples.at(torch.arange(BATCH).numpy()), (1, 8, 8), 10)
    local = Local(optimiser="sgd", lr=0.02, batch_size=BATCH)

    def play(method: FedAvg | Comfetch) -> Callable[[], None]:
        federation: Federation = make_federation(method, task, clients=CLIENTS)
        state = federation.start()

        def play() -> None:
            nonlocal state
            state, _ = federation.round(state)

        return play

    return race({"fedavg": play(FedAvg(local)), "comfetch": play(Comfetch(COMPRESSION, local=local))})


def main() -> None:
    """Run both, and write what was found."""
    torch.set_num_threads(1)
    random.seed(0)
    found = {
        "clients": CLIENTS, "compression": COMPRESSION, "steps": STEPS, "batch": BATCH, "rounds": ROUNDS,
        "parameters": sum(p.numel() for p in BUILD().parameters()), "driver": run_driver(), "ray": run_ray(),
    }  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
