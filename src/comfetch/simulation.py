"""Run a federated method in one process: the embedded driver."""

import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from comfetch import hashing, records
from comfetch.convert import plan_of
from comfetch.data import Examples, Task, label_counts, load_task, partition
from comfetch.errors import ModelError, OptionError, RunError, UploadError
from comfetch.files import PLAN, save_state
from comfetch.footprint import Bytes, count, meta_model, track
from comfetch.methods.base import Build, Client, Message, Method, Server, State, Trained, Upload, check_upload
from comfetch.methods.local import OPTIMISERS
from comfetch.models import constructor

Record = dict[str, Any]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Local:
    """One client's examples of a task."""

    task: Task
    examples: Examples
    device: torch.device = CPU

    def __len__(self) -> int:
        """Count the examples."""
        return len(self.examples)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Go once over the examples, shuffled and augmented."""
        for inputs, targets in self.task.batches(self.examples, size, generator):
            yield inputs.to(self.device), targets.to(self.device)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Average the task's loss."""
        return self.task.loss(outputs, targets)


@dataclass(frozen=True)
class FirstBatches(Local):
    """The first batches only: enough to measure a client's memory."""

    most: int = 2

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Go over the first batches."""
        return itertools.islice(super().batches(size, generator), self.most)


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


@dataclass
class Federation:
    """A method, a task divided among clients, and all that a run needs: made once, then run round by round."""

    method: Method
    task: Task
    build: Build
    parts: list[np.ndarray]
    fraction: float = 1.0
    seed: int = 0
    device: torch.device = CPU
    models: dict[Any, nn.Module] = field(default_factory=dict)
    states: dict[Any, State] = field(default_factory=dict)
    memories: dict[int, State] = field(default_factory=dict)
    memory_bytes: tuple[int, int | None] | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.fraction, int | float) and 0 < self.fraction <= 1):
            raise OptionError(f"fraction={self.fraction!r} is not in (0, 1]. It is the part of clients in a round.")
        self.clients = [Client(i, len(part)) for i, part in enumerate(self.parts)]
        self.data = [Local(self.task, self.task.train.at(part), self.device) for part in self.parts]

    def start(self) -> Server:
        """Make the server's first state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.method.start(self.build)

    def sample(self, round: int) -> list[Client]:
        """Draw the clients of a round, by key and round alone."""
        wanted = max(1, math.floor(self.fraction * len(self.clients) + 0.5))
        rank = hashing.draw([hashing.fold(self.method.key, "sample", round)], len(self.clients), len(self.clients))
        return [client for client, place in zip(self.clients, rank.index[0], strict=True) if place < wanted]

    def round(self, server: Server) -> tuple[Server, Record]:
        """Run one round: download, local training, upload, server step."""
        started = time.perf_counter()
        sent: dict[Any, Message] = {}
        uploads: list[Upload] = []
        refused: list[str] = []
        down = up = 0
        losses: list[tuple[float, int]] = []
        with torch.random.fork_rng(devices=[]):
            for client in self.sample(server.round):
                audience = self.method.audience(server, client)
                if audience not in sent:
                    sent[audience] = self.method.download(server, client)
                message = sent[audience]
                down += message.nbytes
                trained, answer = self.train(client, audience, message, server.round)
                up += answer.nbytes
                upload = Upload(client, answer)
                try:
                    check_upload(upload, message, server.trained)
                    uploads.append(upload)
                    losses.append((trained.loss, client.examples))
                except UploadError as error:
                    refused.append(str(error))
        if not uploads:
            raise RunError(
                f"Round {server.round + 1}: every upload was refused, so there is nothing to average. "
                f"First: {refused[0]} If the loss is NaN, lower the learning rate."
            )
        server = self.method.step(server, uploads)
        measured, predicted = self.memory_bytes or (0, 0)
        record = {
            "round": server.round, "loss": sum(x * n for x, n in losses) / sum(n for _, n in losses),
            "bytes_down": down, "bytes_up": up, "client_memory": measured, "client_memory_predicted": predicted,
            "clients": len(uploads), "refused": refused, "seconds": time.perf_counter() - started,
        }  # fmt: skip
        return server, record

    def train(self, client: Client, audience: Any, message: Message, round: int) -> tuple[Trained, Message]:
        """Let a client train on its download, and return how that went and its upload."""
        model = self.model(client, audience, message)
        if self.memory_bytes is None:
            self.memory_bytes = self.measure(model, max(self.data, key=len))
        memory = self.memories.setdefault(client.id, {})
        seed = hashing.fold(self.seed, "train", round, client.id)
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed & (2**63 - 1))  # 0.3 ms less than to seed absent accelerators, too
        else:
            torch.manual_seed(seed & (2**63 - 1))
        trained = self.method.train(model, self.data[client.id], memory, seed)
        return trained, self.method.upload(message, trained, memory)

    def model(self, client: Client, audience: Any, message: Message) -> nn.Module:
        """Return the client's model with the download in it; one object serves all clients of an audience in turn."""
        if audience not in self.models:
            self.models = {k: m for k, m in self.models.items() if k == "full"}
            self.states = {}
            model = self.method.client_model(self.build, client, message).to(self.device)
            model.load_state_dict(message.state)
            self.models[audience] = model
            self.states[audience] = model.state_dict()
        for name, tensor in self.states[audience].items():  # load_state_dict checks again what was checked once
            tensor.copy_(message.state[name])
        return self.models[audience]

    def final_models(self, server: Server) -> tuple[nn.Module, nn.Module]:
        """Return the model that clients run and the server's own full one, never sketched."""
        client = self.clients[0]
        message = self.method.download(server, client)
        sketched = self.model(client, self.method.audience(server, client), message)
        if message.state is server.weights:
            return sketched, sketched
        if "full" not in self.models:
            self.models["full"] = self.build().to(self.device)
        self.models["full"].load_state_dict(server.weights)
        return sketched, self.models["full"]

    def evaluate(self, server: Server) -> Record:
        """Test both models: `accuracy` is what clients run, `accuracy_full` the server's own weights."""
        sketched, full = self.final_models(server)
        loss, accuracy = self.test(sketched)
        accuracy_full = accuracy if full is sketched else self.test(full)[1]
        return {"test_loss": loss, "accuracy": accuracy, "accuracy_full": accuracy_full}

    @torch.no_grad()
    def test(self, model: nn.Module) -> tuple[float, float]:
        """Return the mean loss and the accuracy on the task's test examples."""
        model.eval()
        right = counted = 0
        loss = 0.0
        for inputs, targets in self.task.batches(self.task.test, 512):
            outputs = model(inputs.to(self.device))
            met, seen = self.task.metric(outputs, targets.to(self.device))
            right, counted = right + met, counted + seen
            loss += float(self.task.loss(outputs, targets.to(self.device))) * seen
        return loss / counted, right / counted

    def measure(self, model: nn.Module, data: Local) -> tuple[int, int | None]:
        """Measure and predict the peak bytes of a client's training, on the largest client and a copy of its model.

        There is no prediction for a model that cannot run without values, on the meta device.
        """
        few = FirstBatches(data.task, data.examples, data.device)
        twin, memory = copy.deepcopy(model), dict[str, Tensor]()
        with torch.random.fork_rng(devices=[]), track([*twin.parameters(), *twin.buffers()]) as live:
            self.method.train(twin, few, memory, 0)
        try:
            return live.peak, self.predict(meta_model(model)).total
        except ModelError:
            return live.peak, None

    def predict(self, model: nn.Module) -> Bytes:
        """Predict the bytes of the largest client's training step, batch included, with a model on the meta device."""
        data, local = max(self.data, key=len), getattr(self.method, "local", None)
        inputs, _ = self.task.batch(data.examples, torch.arange(min(len(data), getattr(local, "batch_size", 1))))

        def optimiser(parameters: Any) -> torch.optim.Optimizer:
            if local is None or getattr(self.method, "uploads", "weights") == "gradient":
                return torch.optim.SGD(parameters, lr=0.0)
            made: torch.optim.Optimizer = OPTIMISERS[local.optimiser](parameters, lr=local.lr, **local.settings)
            return made

        counted = count(model, inputs, optimiser)
        batch = inputs.numel() * inputs.element_size()
        return dataclasses.replace(counted, activations=counted.activations + batch)


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
        options: what `run.toml` keeps besides, to tell runs apart. on_start: called before the first round, with the
            federation, the server's state and the records of rounds run before. on_round: called with each record.
    """
    federation = make_federation(
        method, task, model, clients, fraction, partition, alpha, unequal, seed, device, data_dir
    )
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise OptionError(f"rounds={rounds!r} is not a whole number of at least 1.")
    folder = None if out is None else Path(out)
    server, history = _begin(federation, folder, resume, {**(options or {}), "rounds": rounds})
    if on_start is not None:
        on_start(federation, server, history)
    while server.round < rounds:
        server, record = federation.round(server)
        record.update(federation.evaluate(server))
        if not math.isfinite(record["loss"] + record["test_loss"]):
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
        _save_models(folder, sketched, server)
    return History(history, server, sketched, full, folder)


def make_federation(
    method: Method, task: Task | str, model: str | Build | None = None, clients: int = 10, fraction: float = 1.0,
    kind: str = "iid", alpha: float = 1.0, unequal: bool = False, seed: int = 0, device: str = "cpu",
    data_dir: str | None = None,
) -> Federation:  # fmt: skip
    """Load the task, divide it among clients and check that the model fits it."""
    task = load_task(task, data_dir) if isinstance(task, str) else task
    model = task.model if model is None else model
    build = constructor(model, task.inputs, task.classes) if isinstance(model, str) else model
    task.check(build)
    groups = None if task.train.groups is None else task.train.groups.numpy()
    parts = partition(
        task.train.targets.numpy(), clients, kind, alpha=alpha, seed=seed, groups=groups, equal=not unequal
    )
    try:
        place = torch.device(device)
        torch.zeros(1, device=place).item()
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device={device!r} cannot be used here: {error}") from error
    return Federation(method, task, build, parts, fraction, seed, place)


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


def _save_models(folder: Path, sketched: nn.Module, server: Server) -> None:
    """Save the server's W, and the sketched model with its plan."""
    save_state(server.weights, folder / "full.safetensors", {})
    plan = plan_of(sketched)
    save_state(sketched.state_dict(), folder / "sketched.safetensors", {PLAN: plan.to_json()} if plan else {})
