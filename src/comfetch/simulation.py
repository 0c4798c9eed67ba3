"""Run a federated method in one process: the embedded driver."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from comfetch import records
from comfetch.convert import plan_of
from comfetch.data import Task, label_counts
from comfetch.driver import Channel, Record
from comfetch.errors import OptionError, RunError
from comfetch.federation import Federation, make_federation
from comfetch.files import PLAN, save_state
from comfetch.methods.base import Build, Method, Server

EVALUATIONS = ("server", "clients", "both")


@dataclass
class History:
    """What a run gave: a record for each round, the server's last state, and the two models it stands for."""

    records: list[Record]
    server: Server
    sketched: nn.Module
    full: nn.Module
    folder: Path | None = None

    @property
    def accuracy(self) -> float:
        """Accuracy after the last round."""
        return float(self.records[-1]["accuracy"])


class Engine(Protocol):
    """What carries the messages of a run: `Federation` itself, in this process, or Flower."""

    def round(self, server: Server) -> tuple[Server, Record]:
        """Run one round."""

    def evaluate_clients(self, server: Server) -> Record:
        """Test on the clients."""


def simulate(
    method: Method,
    task: Task | str,
    *,
    model: str | Build | None = None,
    clients: int = 10,
    rounds: int = 10,
    fraction: float = 1.0,
    partition: str = "iid",
    alpha: float = 1.0,
    unequal: bool = False,
    seed: int = 0,
    device: str = "cpu",
    data_dir: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    options: dict[str, Any] | None = None,
    channel: Channel | None = None,
    evaluation: str = "server",
    engine: Callable[["Federation"], Engine] | None = None,
    on_start: Callable[[Federation, Server, list[Record]], None] | None = None,
    on_round: Callable[[Record], None] | None = None,
) -> History:
    """Train a task federatedly in this process, and return its history.

    Args:
        method: such as `comfetch.methods.Comfetch(compression=4)`. task: a Task, or the name of one.
        model: a name in `comfetch.models.MODELS`, or a constructor; the task's own if not given.
        fraction: part of the clients that is drawn in each round.
        partition, alpha, unequal: how examples are divided (see `comfetch.data.partition`).
        seed: for data and initial weights; the hashes and the choice of clients follow the method's key.
        out: folder for records and checkpoints; with `resume`, a run that was cut goes on there, bit for bit.
        options: what `run.toml` keeps besides, to tell runs apart. channel: wire format, privacy, largest change.
        evaluation: test on the "server", on the "clients", or "both". engine: what carries the messages, instead of
            this process. on_start: called before the first round, with the
            federation, the server's state and the records of rounds run before. on_round: called with each record.
    """
    federation = make_federation(
        method, task, model, clients, fraction, partition, alpha, unequal, seed, device, data_dir, channel
    )
    if evaluation not in EVALUATIONS:
        raise OptionError(f"evaluation={evaluation!r} is not known. Choose one of: {', '.join(EVALUATIONS)}.")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise OptionError(f"rounds={rounds!r} is not a whole number of at least 1.")
    folder = None if out is None else Path(out)
    server, history = _begin(federation, folder, resume, {**(options or {}), "rounds": rounds})
    if on_start is not None:
        on_start(federation, server, history)
    carrier: Engine = federation if engine is None else engine(federation)
    privacy_record(federation, rounds)  # what cannot be accounted for is refused before anything is trained
    while server.round < rounds:
        server, record = carrier.round(server)
        record.update(evaluate(federation, carrier, server, evaluation), **privacy_record(federation, server.round))
        if not all(math.isfinite(record[name] or 0) for name in ("loss", "test_loss")):
            losses = f"{record['loss']} in training and {record['test_loss']} in the test"
            raise RunError(f"Round {server.round}: the loss is {losses}. Lower the learning rate.")
        if folder is not None:
            records.append_round(folder, record)
            records.save_checkpoint(folder, server, federation.memories)
        history.append(record)
        if on_round is not None:
            on_round(record)
    sketched, full = federation.final_models(server)
    if folder is not None:
        _save_models(folder, sketched, full)
    return History(history, server, sketched, full, folder)


def evaluate(federation: Federation, engine: Engine, server: Server, where: str) -> Record:
    """Test on the server, on the clients, or both; without the server's test, `accuracy` is that of the clients."""
    record = federation.evaluate(server) if where != "clients" else {}
    if where != "server":
        found = engine.evaluate_clients(server)
        first = {"test_loss": found["loss_clients"], "accuracy": found["accuracy_clients"], "accuracy_full": None}
        record = {**first, **record, **found}
    return record


def privacy_record(federation: Federation, rounds: int) -> Record:
    """Account for the privacy that the client drawn most often has left after some rounds, if there is any."""
    privacy = federation.channel.privacy
    if privacy.where == "none":
        return {}
    from comfetch.accounting import epsilon, participations

    schedule = [[client.id for client in federation.sample(round)] for round in range(rounds)]
    return {"epsilon": epsilon(privacy, participations(schedule))}


def _begin(
    federation: Federation, folder: Path | None, resume: bool, options: dict[str, Any]
) -> tuple[Server, list[Record]]:
    """Start anew, or from the checkpoint in the folder."""
    if folder is None:
        return federation.start(), []
    records.open_folder(folder, options, resume)
    server = federation.start()
    kept = records.load_checkpoint(folder) if resume else None
    if kept is not None:
        server, federation.memories = kept
        return server, records.cut_rounds(folder, server.round)
    records.cut_rounds(folder, 0)
    records.write_json(folder / records.ENVIRONMENT, records.environment(federation.task.checksum))
    counts = label_counts(federation.parts, federation.task.train.targets.numpy())
    records.write_json(folder / "partition.json", {"counts": counts.tolist(), "labels": federation.task.labels})
    return server, []


def _save_models(folder: Path, sketched: nn.Module, full: nn.Module) -> None:
    """Save the server's own model, and the sketched one with its plan."""
    save_state(full.state_dict(), folder / "full.safetensors", {})
    plan = plan_of(sketched)
    save_state(sketched.state_dict(), folder / "sketched.safetensors", {PLAN: plan.to_json()} if plan else {})
