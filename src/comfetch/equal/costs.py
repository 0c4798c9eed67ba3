"""Count what a run asks of one client: bytes on the wire, memory, and work.

All three follow from the method and the shapes of the model; nothing is trained for it but single steps on two
examples, which fill what clients keep.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from comfetch.data import Task
from comfetch.errors import ModelError, OptionError
from comfetch.experiment import Experiment
from comfetch.federation import Federation, make_federation
from comfetch.footprint import format_bytes, meta_model
from comfetch.methods import Client, Local, LocalTopK, Method, Server, Trained
from comfetch.methods.base import Build, LocalData, State

KINDS = ("bytes", "memory", "flops")
PERIOD = 10
"""Rounds after which what is sent is taken to repeat itself, for methods that do not say after how many it does."""
EXAMPLES = 2
NOISE = 0.01


class Meter:
    """Measure what experiments cost a client; what was measured once is remembered.

    - bytes: what one client gets and sends in one round, on average over the rounds of the run and over its clients.
      Methods that send the full model first, or to clients that were away, have it in this average.
    - memory: the predicted peak of a training step (weights, gradients, optimiser's state, buffers, activations and the
      batch), what the client keeps from round to round, and the download, if the upload is a difference to it.
    - flops: multiplications and additions of the products and convolutions of one training step, forward and backward.
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self.data_dir = data_dir
        self._tasks: dict[Any, tuple[Task, Build]] = {}
        self._costs: dict[tuple[Experiment, str], int] = {}

    def cost(self, experiment: Experiment, kind: str) -> int:
        """Return one of the costs, rounded up."""
        check_kind(kind)
        plain = dataclasses.replace(experiment, lr=0.001, server_lr=None, equal=None)
        if (plain, kind) not in self._costs:
            count = {"bytes": self._bytes, "memory": self._memory, "flops": self._flops}[kind]
            self._costs[plain, kind] = math.ceil(count(plain))
        return self._costs[plain, kind]

    def federation(self, experiment: Experiment) -> Federation:
        """Divide the experiment's task as its run does."""
        which = ("task", "limit", "seed", "validation", "model", "stem", "norm", "init")
        wanted = tuple(getattr(experiment, name) for name in which)
        if wanted not in self._tasks:
            self._tasks = {wanted: experiment.load(self.data_dir)}  # one at a time: a dataset may be large
        task, build = self._tasks[wanted]
        return make_federation(
            experiment.make_method(), task, build, experiment.clients, experiment.fraction, experiment.partition,
            experiment.alpha, experiment.unequal, experiment.seed, channel=experiment.channel(),
        )  # fmt: skip

    def _bytes(self, experiment: Experiment) -> float:
        """Play the first rounds; those that follow are taken to be like the last ones."""
        period = getattr(experiment.make_method(), "anchor_rounds", PERIOD)
        told, steady, _ = self._play(experiment, min(experiment.rounds, period + 2))
        rest = told[-1:] if steady else told[-period:]
        return (sum(told) + (experiment.rounds - len(told)) * statistics.fmean(rest)) / experiment.rounds

    def _memory(self, experiment: Experiment) -> float:
        _, _, kept = self._play(experiment, min(experiment.rounds, 3))
        federation = self.federation(experiment)
        server, found = federation.start(), []
        for client in _classes(federation):
            try:
                found.append(federation.predict(meta_model(_client_model(federation, server, client))).total)
            except ModelError:  # it runs with real values only
                model = federation.client_model(server, client)
                found.append(federation.measure(model, max(federation.data, key=len))[0])
        return max(found) + kept

    def _flops(self, experiment: Experiment) -> float:
        federation = self.federation(experiment)
        server = federation.start()
        local: Local | None = getattr(federation.method, "local", None)
        largest = max(federation.data, key=len)
        rows = torch.arange(min(len(largest), local.batch_size if local else 1))
        inputs, _ = federation.task.batch(largest.examples, rows)
        return max(
            step_flops(_client_model(federation, server, client), inputs) for client in _classes(federation)
        )  # fmt: skip

    def _play(self, experiment: Experiment, most: int) -> tuple[list[float], bool, int]:
        """Play rounds until they repeat themselves.

        Returns:
            The mean bytes of a client in each round; whether all later rounds are like the last one; and the bytes that
            a client holds besides its model.
        """
        federation = self.federation(experiment)
        federation.method = _quick(federation.method)
        together = federation.fraction == 1 and len(_classes(federation)) == 1
        if together and not (isinstance(federation.method, LocalTopK) and federation.method.changes):
            federation.clients = federation.clients[:1]  # all exchange the same
        rows = np.arange(min(EXAMPLES, len(federation.task.train)))
        federation.data = [dataclasses.replace(d, examples=federation.task.train.at(rows)) for d in federation.data]
        federation.memory_bytes = dict.fromkeys((client.capacity for client in federation.clients), (0, None))
        server, told, steady, kept = federation.start(), list[float](), False, 0
        while len(told) < most and not steady:
            server, record = federation.round(server)
            told.append((record["bytes_down"] + record["bytes_up"]) / max(1, record["clients"]))
            kept = max(kept, record["client_kept"])
            alike = together and told[-1:] == told[-2:-1] and not hasattr(federation.method, "anchor_rounds")
            steady = not server.extra or alike  # a server that notes nothing can but send the same again
        return told, steady, kept


def step_flops(model: nn.Module, inputs: Tensor) -> int:
    """Count the operations of one training step: 2 for each multiplication of products and convolutions.

    It runs on the meta device, where recurrent layers take torch's plain path: the fused one of CPUs is not counted.
    """
    twin = meta_model(model)
    try:
        return _count(twin, inputs.to("meta"))
    except (NotImplementedError, RuntimeError):
        return _count(model, inputs)


def _count(model: nn.Module, inputs: Tensor) -> int:
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _backward_flops})
    model.train()
    with counter:
        outputs = [t for t in tree_leaves(model(inputs)) if isinstance(t, Tensor) and t.requires_grad]
        torch.stack([t.float().mean() for t in outputs]).sum().backward()
    return int(counter.get_total_flops())


def _backward_flops(
    grad: Sequence[int], inputs: Sequence[int], weight: Sequence[int], _bias: Any, _stride: Any, _padding: Any,
    _dilation: Any, transposed: bool, _output_padding: Any, _groups: Any, wanted: Sequence[bool], *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Count a convolution's gradients, each as much as the convolution; torch's own formula forgets the groups."""
    places = math.prod((inputs if transposed else grad)[2:])
    return (bool(wanted[0]) + bool(wanted[1])) * 2 * inputs[0] * places * math.prod(weight)


def _classes(federation: Federation) -> list[Client]:
    """Return the first client of each capacity."""
    return list({client.capacity: client for client in reversed(federation.clients)}.values())


def _client_model(federation: Federation, server: Server, client: Client) -> nn.Module:
    """Build what a client holds, without loading the download."""
    method = federation.method
    return method.client_model(federation.build, client, method.download(server, client))


def _quick(method: Method) -> Method:
    """Let a method's clients take one step on two examples, and change all weights at random.

    The bytes of some methods depend on how many weights have changed, and one step leaves those of dead units.
    """
    train = method.train

    def shaken(model: nn.Module, data: LocalData, memory: State, seed: int) -> Trained:
        trained = train(model, data, memory, seed)
        draws = torch.Generator().manual_seed(seed & (2**63 - 1))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    noise = torch.empty_like(trained.state[name]).normal_(0, NOISE, generator=draws)
                    trained.state[name].add_(noise)
        return trained

    made: Any = method
    made.local = Local("sgd", steps=1, batch_size=EXAMPLES)
    made.train = shaken
    return method


def check_kind(kind: str) -> None:
    """Raise if a kind of cost is not known."""
    if kind not in KINDS:
        raise OptionError(f"equal={kind!r} is not known. Choose one of: {', '.join(KINDS)}.")


def format_cost(kind: str, cost: float) -> str:
    """Write a cost for people.

    >>> format_cost("memory", 2_345_000), format_cost("flops", 2_345_000)
    ('2.35 MB', '2.35 MFLOP')
    """
    text = format_bytes(cost)
    return text if kind != "flops" else f"{text.removesuffix('B')}FLOP"
