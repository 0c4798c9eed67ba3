"""A task divided among clients: their data, their models, a round of all of them, and what it is measured by."""

import copy
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from comfetch.convert import unsketch
from comfetch.data import Examples, Task, load_task, partition
from comfetch.driver import (
    Channel,
    Record,
    Round,
    check_channel,
    kept_bytes,
    sample,
    settle,
    train_client,
    train_seed,
)
from comfetch.errors import ModelError, OptionError
from comfetch.footprint import Bytes, count, meta_model, track
from comfetch.groups import multiply_steps
from comfetch.layers import SketchedLayer
from comfetch.methods.base import Build, Client, Message, Method, Server, State, TwoPass
from comfetch.models import constructor

CPU = torch.device("cpu")
ROUNDING = 1e-5
"""Part of the largest weight up to which weights are the same."""
MODELS_KEPT = 16
"""Models of different audiences that are kept for the next round; more than that are made anew."""


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
class Federation:
    """A method, a task divided among clients, and all that a run needs: made once, then run round by round."""

    method: Method
    task: Task
    build: Build
    parts: list[np.ndarray]
    fraction: float = 1.0
    seed: int = 0
    device: torch.device = CPU
    channel: Channel = field(default_factory=Channel)
    models: dict[Any, nn.Module] = field(default_factory=dict)
    states: dict[Any, State] = field(default_factory=dict)
    memories: dict[int, State] = field(default_factory=dict)
    memory_bytes: dict[float | None, tuple[int, int | None]] = field(default_factory=dict)
    full: nn.Module | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.fraction, int | float) and 0 < self.fraction <= 1):
            raise OptionError(f"fraction={self.fraction!r} is not in (0, 1]. It is the part of clients in a round.")
        classes = getattr(self.method, "capacities", None) or [None]
        self.clients = [Client(i, len(part), classes[i % len(classes)]) for i, part in enumerate(self.parts)]
        self.data = [Local(self.task, self.task.train.at(part), self.device) for part in self.parts]
        check_channel(self.method, self.channel)

    @functools.cached_property
    def tests(self) -> list[Examples]:
        """Divide the test examples equally among the clients, for evaluation there."""
        order = np.random.default_rng(self.seed).permutation(len(self.task.test))
        return [self.task.test.at(rows) for rows in np.array_split(order, len(self.clients))]

    def start(self) -> Server:
        """Make the server's first state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.method.start(self.build)

    def sample(self, round: int) -> list[Client]:
        """Draw the clients of a round, by key and round alone."""
        return sample(self.method.key, round, self.clients, self.fraction)

    def round(self, server: Server) -> tuple[Server, Record]:
        """Run one round: download, local training, upload, server step."""
        started = time.perf_counter()
        clients, kept = self.sample(server.round), 0
        play = Round(self.method, server, self.channel, clients)
        with torch.random.fork_rng(devices=[]):
            for client in clients:
                audience, _, received = play.post(client)
                model = self.model(client, audience, received)
                if client.capacity not in self.memory_bytes:
                    self.memory_bytes[client.capacity] = self.measure(model, max(self.data, key=len))
                memory = self.memories.setdefault(client.id, {})
                trained, answer = train_client(
                    self.method, self.channel, model, self.data[client.id], received, memory,
                    train_seed(self.seed, server.round, client),
                )  # fmt: skip
                kept = max(kept, kept_bytes(self.method, self.channel, received, memory))
                if not play.pooling:  # the next client trains the same model
                    answer = Message({name: tensor.clone() for name, tensor in answer.state.items()}, answer.text)
                play.take(client, answer, self.channel.told(trained.loss))
            request = play.ask()
            for client in play.asked:
                assert isinstance(self.method, TwoPass) and request is not None
                play.take(client, self.method.respond(request, self.memories[client.id]), None)
        self.models = {k: model for k, model in self.models.items() if k in play.sent}
        self.states = {k: state for k, state in self.states.items() if k in play.sent}
        server, record = play.close()
        record.update(memory_record(self.memory_bytes.values()), client_kept=kept)
        record["seconds"] = time.perf_counter() - started
        return server, record

    def model(self, client: Client, audience: Any, received: Message) -> nn.Module:
        """Return the client's model with the download in it; one object serves all clients of an audience in turn."""
        load = getattr(self.method, "load", None)
        if audience not in self.models:
            for old in list(self.models)[: 1 - MODELS_KEPT]:
                del self.models[old], self.states[old]
            self.models[audience] = model = self.method.client_model(self.build, client, received).to(self.device)
            self.states[audience] = {} if load else model.state_dict()
            if load is None:
                model.load_state_dict(received.state)
        for name, tensor in self.states[audience].items():  # load_state_dict checks again what was checked once
            tensor.copy_(received.state[name])
        if load is not None:
            load(self.models[audience], received, self.memories.setdefault(client.id, {}))
        return self.models[audience]

    def final_models(self, server: Server) -> tuple[nn.Module, nn.Module]:
        """Return the model that clients run, the smallest of them, and the server's own full one, never sketched."""
        client = max(self.clients, key=lambda client: client.capacity or 0)
        sketched, sent = self.settled(self.client_model(server, client)), self.method.download(server, client).state
        if sent is server.weights and self.channel.wire.down == "float32":
            return sketched, sketched
        if self.full is None:
            self.full = copy.deepcopy(sketched) if sent is server.weights else self.build().to(self.device)
        self.full.load_state_dict(server.weights)
        return sketched, self.settled(self.full)

    def settled(self, model: nn.Module) -> nn.Module:
        """Make a model ready for a test, where the method needs data of clients for it."""
        return settle(self.method, self.channel, model, self.data)

    def client_model(self, server: Server, client: Client) -> nn.Module:
        """Return what a client would run now."""
        audience, _, received = Round(self.method, server, self.channel).post(client)
        return self.model(client, audience, received)

    def evaluate(self, server: Server) -> Record:
        """Test on the server: `accuracy` is what clients run, on average, `accuracy_full` the server's own weights."""
        found: dict[float | None, tuple[float, float]] = {}
        for client in self.clients:
            if client.capacity not in found:
                found[client.capacity] = self.test(self.settled(self.client_model(server, client)), self.task.test)
        loss, accuracy = (statistics.fmean(found[c.capacity][i] for c in self.clients) for i in (0, 1))
        sketched, full = self.final_models(server)
        alike = full is sketched or (len(found) == 1 and stands_for(sketched, full))
        accuracy_full = accuracy if alike else self.test(full, self.task.test)[1]
        record: Record = {"test_loss": loss, "accuracy": accuracy, "accuracy_full": accuracy_full}
        if len(found) > 1:
            record["accuracy_by_capacity"] = {f"{k:g}": accuracy for k, (_, accuracy) in found.items() if k is not None}
        return record

    def evaluate_clients(self, server: Server) -> Record:
        """Test on the clients: each its own model on its own part of the test examples, averaged by their number."""
        post, tested = Round(self.method, server, self.channel), []
        for client, examples in zip(self.clients, self.tests, strict=True):
            audience, _, received = post.post(client)
            if len(examples):
                model = settle(
                    self.method, self.channel, self.model(client, audience, received), [self.data[client.id]]
                )
                tested.append((len(examples), *self.test(model, examples)))
        return evaluation_record(tested, post.bytes_down)

    @torch.no_grad()
    def test(self, model: nn.Module, examples: Examples) -> tuple[float, float]:
        """Return the mean loss and the accuracy on examples."""
        model.eval()
        right = counted = 0
        loss = 0.0
        for inputs, targets in self.task.batches(examples, 512):
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
            made: torch.optim.Optimizer = local.make_optimiser(model)
            if local.is_fused:  # beyond its state, which its first step makes, it takes no memory
                made.register_step_post_hook(
                    lambda *_: setattr(made, "step", lambda: multiply_steps(made, lambda: None))
                )
            return made

        counted = count(model, inputs, optimiser)
        batch = inputs.numel() * inputs.element_size()
        return dataclasses.replace(counted, activations=counted.activations + batch)


def stands_for(sketched: nn.Module, full: nn.Module) -> bool:
    """Tell whether a sketched model has just the weights of the full one: to test one is then to test both.

    So it is while hashes are kept and sketches project: the server's weights never leave the space of the sketch.
    """
    layers = [module for module in sketched.modules() if isinstance(module, SketchedLayer)]
    if not layers or any(plan.rows > 1 for layer in layers for plan in layer.plans.values()):
        return False
    weights = full.state_dict()
    return all(_same(x, weights[name]) for name, x in unsketch(sketched).state_dict().items())


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or (x.is_floating_point() and bool((x - y).abs().max() <= ROUNDING * x.abs().max()))


def make_federation(
    method: Method, task: Task | str, model: str | Build | None = None, clients: int = 10, fraction: float = 1.0,
    kind: str = "iid", alpha: float = 1.0, unequal: bool = False, seed: int = 0, device: str = "cpu",
    data_dir: str | None = None, channel: Channel | None = None,
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
    return Federation(method, task, build, parts, fraction, seed, place, channel or Channel())


def evaluation_record(tested: Iterable[tuple[int, float, float]], sent: int) -> Record:
    """Average loss and accuracy over clients by their number of test examples; `sent` are the bytes of the models."""
    rows = list(tested)
    total = sum(count for count, _, _ in rows)
    loss, accuracy = (sum(row[0] * row[i] for row in rows) / total for i in (1, 2))
    return {"loss_clients": loss, "accuracy_clients": accuracy, "bytes_evaluation": sent}


def memory_record(found: Iterable[tuple[int, int | None]]) -> Record:
    """Record the largest client's peak bytes, measured and predicted."""
    rows = list(found)
    predicted = [p for _, p in rows if p is not None]
    return {
        "client_memory": max((m for m, _ in rows), default=0),
        "client_memory_predicted": max(predicted, default=None),
    }
