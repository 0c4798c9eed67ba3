"""What methods share whose clients train narrow sub-models: a part of the channels of every hidden layer."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from comfetch.blueprint import Blueprint, blueprint
from comfetch.errors import OptionError
from comfetch.hashing import check_key
from comfetch.methods.averaging import Averaging, step_from
from comfetch.methods.base import Build, Client, LocalData, Message, Server, State, Trained, Upload, start_server
from comfetch.methods.local import Local, train_locally
from comfetch.methods.once import part
from comfetch.settings import check_compression
from comfetch.transforms import Transform, chain
from comfetch.widths import Index, Widths, add_at, cut, plan_widths, shrink_empty
from comfetch.widths.axes import WEIGHTED

CLASSES, STATISTICS = "classes/", "statistics/"


@dataclass
class SubModel:
    """Train narrow sub-models of one full model, and average each of its coordinates over the clients that hold it.

    Running statistics of a channel depend on the width of the layers before it. So they are averaged over the clients
    of one width alone, and each width gets its own back; the full model has those of the widest. If nobody holds all
    of it, its own are not known: the accuracy of such a model with batch norm is too low.

    Args:
        compression: factor by which weights between hidden layers shrink: 1/√compression of the channels are kept.
        capacities: compressions of the classes of clients, instead of one for all; `Client.capacity` says which. A
            client that states none is in the smallest.
        scaled: divide the outputs of hidden linear layers and convolutions by the part of channels that is kept, so
            that they are as large as in the full model (HeteroFL's scaler).
        masked_loss: set the scores of classes that a client has no examples of to 0 in its loss, and leave it out of
            the average of their rows in the last layer. It tells the server which classes it has. This serves clients
            that are tested on their own classes alone, as in the paper; accuracy over all classes may be lower.
        local: how a client trains. averaging: weights of clients; its rule must be the mean.
        server: transforms of the averaged change. That is 0 for a coordinate that no client of the round holds: it
            stays, or is moved on by the momentum or the error that is left of rounds in which it was held.
        key: what random choices are drawn from.
    """

    compression: float = 4
    capacities: Sequence[float] | None = None
    scaled: bool = True
    masked_loss: bool = False
    local: Local = field(default_factory=Local)
    server: Transform = field(default_factory=chain)
    averaging: Averaging = field(default_factory=Averaging)
    key: int = 0
    name: str = "submodel"

    def __post_init__(self) -> None:
        check_key(self.key)
        self.capacities = check_classes(self.capacities)
        check_compression(self.compression)
        check_mean(self.averaging)
        self._cache: tuple[Build, Blueprint, Widths] | None = None

    @property
    def pools(self) -> bool:
        """Say that a step needs the means of each width alone; with `masked_loss` it needs each client's classes."""
        return not self.masked_loss

    def channels(self, channels: int, width: int, round: int, client: Client) -> Tensor:
        """Choose the channels of all layers that have so many."""
        raise NotImplementedError

    def start(self, build: Build, given: State | None = None, fresh: bool = True) -> Server:
        """Start with the full model as it is built, or with the weights given."""
        self._plan(build)
        return start_server(build, given)

    def audience(self, server: Server, client: Client) -> Hashable:
        """Send all of one width the same."""
        return self._capacity(client)

    def download(self, server: Server, client: Client) -> Message:
        """Send the client's part of the weights, with the statistics of its width, and its width."""
        index = self._index(server.round, client)
        weights = server.weights | part(server.extra, prefix(self._capacity(client)))
        state = {name: cut(tensor, index.get(name, ())) for name, tensor in weights.items()}
        return Message(state, {"round": str(server.round), "width": repr(self._ratio(client))})

    def client_model(self, build: Build, client: Client, message: Message) -> nn.Module:
        """Build the narrow model; the full weights never exist."""
        built, plan = self._plan(build)
        ratio = float(message.text["width"])
        model = shrink_empty(built, plan, ratio)
        for name in plan.hidden if self.scaled and ratio < 1 else []:
            model.get_submodule(name).register_forward_hook(Scaler(ratio))
        return model

    def train(self, model: nn.Module, data: LocalData, memory: State, seed: int) -> Trained:
        """Train as `local` says."""
        if self.masked_loss:
            data = OwnClasses(data, self.local.batch_size)
            memory[CLASSES] = data.present
        return train_locally(model, data, self.local, memory, seed)

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send the new weights of the sub-model, and with `masked_loss` which classes the client has."""
        state = {name: tensor.clone() for name, tensor in trained.state.items()}
        if self.masked_loss:
            held = torch.zeros(len(state[self._last + ".weight"]), dtype=torch.bool)
            held[memory.pop(CLASSES)] = True
            state[CLASSES] = held
        return Message(state, received.text)

    def expected(self, sent: Message) -> State:
        """Expect what was sent, and perhaps a bit for each class."""
        if not self.masked_loss:
            return sent.state
        held = torch.empty(len(sent.state[self._last + ".weight"]), dtype=torch.bool, device="meta")
        return {**sent.state, CLASSES: held}

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← W − transforms(W − mean), mean[i] = Σ_k n_k W_k[i] / Σ_k n_k over the clients k that hold coordinate i.

        Where nobody holds it, mean[i] is W[i].
        """
        ordered = sorted(uploads, key=lambda upload: upload.client.id)
        held: dict[Hashable, Holders] = {}
        for upload, weight in zip(ordered, self.averaging.weights(uploads), strict=True):
            audience = self.audience(server, upload.client)
            if audience not in held:
                held[audience] = Holders(self._capacity(upload.client), self._index(server.round, upload.client))
            held[audience].parts.append((upload.message.state, weight))
        mean, extra = dict(server.weights), dict(server.extra)
        statistics = self._statistics()
        for name, old in server.weights.items():
            if name in statistics:
                for capacity in {holders.capacity for holders in held.values()}:
                    own, alike = prefix(capacity) + name, [h for h in held.values() if h.capacity == capacity]
                    extra[own] = average_held(name, extra.get(own, old), alike)
            elif old.is_floating_point():
                mean[name] = average_held(name, old, list(held.values()), self._last if self.masked_loss else None)
        widest = min((float(name.split("/")[1]) for name in extra), default=1.0)
        mean |= part(extra, prefix(widest))
        weights = step_from(server.weights, mean, server.trained, self.server, server.transforms)
        return Server(weights, server.trained, server.round + 1, self.server.state_dict(), extra)

    def _capacity(self, client: Client) -> float:
        return class_of(client, self.capacities, self.compression)

    def _ratio(self, client: Client) -> float:
        return float(self._capacity(client) ** -0.5)

    def _index(self, round: int, client: Client) -> dict[str, Index]:
        assert self._cache is not None, "start() comes first"
        plan, ratio = self._cache[2], self._ratio(client)
        return plan.index(ratio, lambda channels, width: self.channels(channels, width, round, client))

    def _plan(self, build: Build) -> tuple[Blueprint, Widths]:
        if self._cache is None or self._cache[0] is not build:
            built = blueprint(build)
            self._cache = build, built, plan_widths(built.model)
        return self._cache[1:]

    @property
    def _model(self) -> nn.Module:
        assert self._cache is not None, "start() or client_model() comes first"
        return self._cache[1].model

    @property
    def _last(self) -> str:
        """Name the last layer."""
        return [name for name, layer in self._model.named_modules() if isinstance(layer, WEIGHTED)][-1]

    def _statistics(self) -> set[str]:
        """Name the buffers that are kept for each width; with one width there is nothing to tell apart."""
        if len(self.capacities or ()) < 2:
            return set()
        return {name for name, buffer in self._model.named_buffers() if buffer.is_floating_point()}


@dataclass
class Holders:
    """Clients of one width that hold the same coordinates: their states, and the weight of each."""

    capacity: float
    index: dict[str, Index]
    parts: list[tuple[State, float]] = field(default_factory=list)


def average_held(name: str, old: Tensor, groups: list[Holders], last: str | None = None) -> Tensor:
    """Average one tensor over those who hold its coordinates; rows of the last layer over those who have the class."""
    total, held = torch.zeros_like(old), torch.zeros_like(old)
    by_class = last is not None and name.rpartition(".")[0] == last
    for group in groups:
        shares: list[Any] = [weight for _, weight in group.parts]
        if by_class:
            shape = (-1, *[1] * (old.ndim - 1))
            shares = [weight * state[CLASSES].to(old.dtype).view(shape) for state, weight in group.parts]
        parts = zip(group.parts, shares, strict=True)
        add_at(total, group.index.get(name, ()), sum(share * state[name] for (state, _), share in parts))
        add_at(held, group.index.get(name, ()), sum(shares))
    return torch.where(held > 0, total / held.clamp(min=1e-12), old)


def prefix(capacity: float) -> str:
    """Return what names of the statistics of a width begin with in the server's notes."""
    return f"{STATISTICS}{capacity!r}/"


@dataclass(frozen=True)
class Scaler:
    """Divide a layer's outputs by the part of its channels that is kept: a forward hook."""

    ratio: float

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Scale."""
        return output / self.ratio


class OwnClasses:
    """A client's data whose loss sees the classes that occur in them alone: other scores count as 0."""

    def __init__(self, data: LocalData, batch_size: int) -> None:
        self.data = data
        targets = [targets.flatten() for _, targets in data.batches(batch_size, torch.Generator().manual_seed(0))]
        found = torch.cat(targets).unique()
        self.present = found[found >= 0]

    def __len__(self) -> int:
        """Count the examples."""
        return len(self.data)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Go once over the examples."""
        return self.data.batches(size, generator)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Average the loss with the scores of absent classes set to 0."""
        absent = torch.ones(outputs.shape[-1], dtype=torch.bool, device=outputs.device)
        absent[self.present] = False
        return self.data.loss(outputs.masked_fill(absent, 0.0), targets)


def check_classes(capacities: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return the capacities in order, or say what is wrong with them."""
    if capacities is None:
        return None
    if not capacities:
        raise OptionError("capacities is empty. Give at least one compression, for example 1,4,16.")
    for capacity in capacities:
        check_compression(capacity)
    return tuple(sorted({float(capacity) for capacity in capacities}))


def class_of(client: Client, capacities: Sequence[float] | None, compression: float) -> float:
    """Return the compression of a client: its own; if it states none, the smallest class's, or that of all."""
    if client.capacity is None:
        return float(compression) if capacities is None else max(capacities)
    if capacities is not None and client.capacity not in capacities:
        raise OptionError(f"capacity={client.capacity!r} is no class of this run: {capacities}.")
    check_compression(client.capacity)
    return float(client.capacity)


def check_mean(averaging: Averaging) -> None:
    """Refuse rules other than the mean where clients hold different coordinates."""
    if averaging.rule != "mean":
        raise OptionError(f"rule={averaging.rule!r}: clients hold different coordinates, so set rule='mean'.")
