"""Run experiments on Flower: ready apps for a deployment, and Ray on one machine."""

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from torch import nn

from comfetch.driver import Record
from comfetch.errors import OptionError, RunError
from comfetch.experiment import Experiment
from comfetch.federation import Federation, make_federation
from comfetch.flower.client import Site, client_app
from comfetch.flower.strategy import Strategy, describe, tell
from comfetch.methods.base import Server
from comfetch.simulation import History

RUNNING: dict[str, Any] = {
    "out": "", "resume": False, "data_dir": "", "device": "cpu", "timeout": 3600.0, "min_nodes": 0, "wait": 600.0,
}  # fmt: skip
"""Options of an app besides those of an experiment, with their defaults; no minimum means all clients."""


@dataclass
class Carrier:
    """Carry the messages of a federation over a grid of nodes."""

    federation: Federation
    grid: Grid
    strategy: Strategy

    def round(self, server: Server) -> tuple[Server, Record]:
        """Run one round on the nodes."""
        began = time.perf_counter()
        server, record = self.strategy.play(self.grid, server)
        return server, {**record, "seconds": time.perf_counter() - began}

    def evaluate_clients(self, server: Server) -> Record:
        """Test on the nodes."""
        self.strategy.server = server
        found = self.strategy.test(self.grid)
        if not found:
            raise RunError(f"Round {server.round}: no node has tested its model. Their logs say why.")
        return {
            "loss_clients": found["loss"],
            "accuracy_clients": found["accuracy"],
            "bytes_evaluation": self.strategy.bytes_evaluation,
        }


def server_app() -> ServerApp:
    """Make the ServerApp that runs the experiment of its run config, and keeps its records in `out`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        experiment, running = read_config(context.run_config)
        run_on(grid, experiment, running, on_start=_tell_start, on_round=_tell_round)

    return app


def _tell_start(federation: Federation, history: list[Record]) -> None:
    log(INFO, "Method: %s", describe(federation.method))
    if history:
        log(INFO, "Going on after round %d.", history[-1]["round"])


def _tell_round(record: Record) -> None:
    log(INFO, "Round %d: %s", record["round"], tell(record))


def experiment_client_app() -> ClientApp:
    """Make the ClientApp that takes part in the experiment of its run config, with the part of its data it is given.

    `partition-id` in the node config says which client this is.
    """

    def site(context: Context) -> Site:
        experiment, running = read_config(context.run_config)
        return site_of(experiment, context, running["data_dir"] or None, running["device"])

    return client_app(site)


def run_on(
    grid: Grid, experiment: Experiment, running: Mapping[str, Any],
    on_start: Callable[[Federation, list[Record]], None] | None = None,
    on_round: Callable[[Record], None] | None = None,
) -> History:  # fmt: skip
    """Run an experiment over a grid, with the same records as in one process."""

    def engine(federation: Federation) -> Carrier:
        strategy = Strategy(
            federation.method, federation.build, fraction_train=federation.fraction,
            min_nodes=running["min_nodes"] or len(federation.clients), wait=running["wait"],
            ask=True, channel=federation.channel, predict=lambda model: federation.predict(model).total,
            seed=federation.seed,
        )  # fmt: skip
        strategy.timeout = running["timeout"]
        return Carrier(federation, grid, strategy)

    out = Path(running["out"]) if running["out"] else None
    resume = bool(running["resume"]) and out is not None and out.exists()
    return experiment.run(
        out, data_dir=running["data_dir"] or None, device=running["device"], resume=resume, engine=engine,
        on_start=on_start, on_round=on_round,
    )  # fmt: skip


def run_on_ray(
    experiment: Experiment, out: Path | None = None, *, data_dir: str | None = None, device: str = "cpu",
    resume: bool = False, timeout: float = 3600.0,
    on_start: Callable[[Federation, list[Record]], None] | None = None,
    on_round: Callable[[Record], None] | None = None,
) -> History:  # fmt: skip
    """Run an experiment with Flower's simulation: clients are processes of Ray on this machine, one thread each."""
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    running = {
        **RUNNING, "out": "" if out is None else str(out), "resume": resume, "data_dir": data_dir or "",
        "device": device, "timeout": timeout,
    }  # fmt: skip
    histories: list[History] = []
    problems: list[BaseException] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            histories.append(run_on(grid, experiment, running, on_start, on_round))
        except BaseException as error:
            problems.append(error)

    clients = client_app(functools.partial(_ray_site, experiment, data_dir, device))
    cores = os.cpu_count() or 1
    backend: dict[str, Any] = {
        "init_args": {"num_cpus": cores, "log_to_driver": False, "logging_level": "error", "include_dashboard": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, clients, experiment.clients, backend_config=backend)
    if problems:
        raise problems[0]
    if not histories:
        raise RunError("Flower's simulation has ended before the run was done. Its messages above say why.")
    return histories[0]


def _ray_site(experiment: Experiment, data_dir: str | None, device: str, context: Context) -> Site:
    torch.set_num_threads(1)
    return site_of(experiment, context, data_dir, device)


def read_config(config: Mapping[str, Any]) -> tuple[Experiment, dict[str, Any]]:
    """Split a run config into the experiment and how it is run; empty text means that an option is not given."""
    given = {name.replace("-", "_"): value for name, value in config.items() if value != ""}
    running = {name: given.pop(name, default) for name, default in RUNNING.items()}
    return Experiment.of(given), running


def site_of(experiment: Experiment, context: Context, data_dir: str | None, device: str) -> Site:
    """Return what a node has in an experiment: the part of the task's examples that its partition-id says."""
    federation = _federation(experiment, data_dir, device)
    number = context.node_config.get("partition-id")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(federation.clients):
        raise OptionError(
            f"partition-id={number!r} in the node config is no client from 0 to {len(federation.clients) - 1}. "
            "Start the SuperNode with --node-config 'partition-id=0'."
        )

    def test(model: nn.Module) -> tuple[int, float, float]:
        examples = federation.tests[number]
        return (len(examples), *federation.test(model, examples))

    largest = max(federation.data, key=len)
    return Site(
        federation.method, federation.build, number, federation.data[number], federation.channel,
        federation.clients[number].capacity, test,
        functools.partial(federation.measure, data=largest),
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _federation(experiment: Experiment, data_dir: str | None, device: str) -> Federation:
    """Load the task and divide it as the server does; once for all clients of this process."""
    task, build = experiment.load(data_dir)
    return make_federation(
        experiment.make_method(), task, build, experiment.clients, experiment.fraction, experiment.partition,
        experiment.alpha, experiment.unequal, experiment.seed, device, data_dir, experiment.channel(),
    )  # fmt: skip
