"""What methods share whose clients hold the full model, and compress its change as one vector."""

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from comfetch import hashing
from comfetch.errors import OptionError, RunError, UploadError
from comfetch.methods.averaging import Averaging
from comfetch.methods.base import (
    Build,
    Client,
    LocalData,
    Message,
    Server,
    State,
    Trained,
    Upload,
    start_server,
)
from comfetch.methods.compressors import Compressor, Plain
from comfetch.methods.local import Local, one_gradient, train_locally
from comfetch.transforms import Transform

UPLOADS = ("weights", "gradient")
MOMENTUM = 0.9
UPDATE, SEED = "update/", "seed"


@dataclass(frozen=True)
class Layout:
    """How the trained weights of a model lie in one vector, and what else its state holds.

    Args:
        trained: the trained weights in their order; those that are tied count once. tied: the other names of these.
        buffers: names of the buffers. statistics: those of them that are averaged. All tensors here have no values.
    """

    trained: State
    tied: dict[str, str]
    buffers: list[str]
    statistics: State

    @classmethod
    def of(cls, model: nn.Module) -> "Layout":
        """Find the layout of a model."""
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        state = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad and first.setdefault(id(parameter), name) != name:
                tied[name] = first[id(parameter)]
        buffers = [name for name, _ in model.named_buffers(remove_duplicate=False) if name in state]
        statistics = {name: state[name] for name in buffers if state[name].is_floating_point()}
        return cls({name: state[name] for name in first.values()}, tied, buffers, statistics)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Numbers of weights, tensor by tensor."""
        return [tensor.numel() for tensor in self.trained.values()]

    @functools.cached_property
    def size(self) -> int:
        """Number of all trained weights."""
        return sum(self.sizes)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Type of the vector: that of the weights, but at least float32."""
        return functools.reduce(torch.promote_types, (tensor.dtype for tensor in self.trained.values()), torch.float32)

    def flatten(self, state: State) -> Tensor:
        """Lay the trained weights of a state into one vector."""
        return torch.cat([state[name].detach().reshape(-1).to(self.dtype) for name in self.trained])

    def split(self, vector: Tensor) -> State:
        """Take a vector apart into the trained weights, under all their names."""
        parts = zip(self.trained.items(), vector.split(self.sizes), strict=True)
        state = {name: part.view(like.shape).to(like.dtype) for (name, like), part in parts}
        return {**state, **{name: state[other] for name, other in self.tied.items()}}

    def subtract(self, state: State, vector: Tensor) -> State:
        """Return W − Δ: the state with a vector taken off its trained weights."""
        return {**state, **{name: state[name] - part for name, part in self.split(vector).items()}}


@dataclass(kw_only=True)
class FullModel:
    """Send the full weights; take from each client one vector g that points uphill, and statistics as they are.

    A method sets `coder` to what encodes g on its way up.

    Args:
        uploads: g is minus the change of the "weights" by local training, or one "gradient" as in the papers.
        local: how a client trains. rate: the server's learning rate η.
        averaging: how the clients' vectors become one.
        key: what random numbers are drawn from.
    """

    down: ClassVar[str] = "full weights"

    local: Local = field(default_factory=Local)
    uploads: str = "weights"
    rate: float = 1.0
    averaging: Averaging = field(default_factory=Averaging)
    key: int = 0

    def __post_init__(self) -> None:
        if self.uploads not in UPLOADS:
            raise OptionError(f"uploads={self.uploads!r} is not known. Choose one of: {', '.join(UPLOADS)}.")
        if not (isinstance(self.rate, int | float) and 0 < self.rate < math.inf):
            raise OptionError(f"rate={self.rate!r} is not a number above 0. It is the server's learning rate.")
        hashing.check_key(self.key)
        self.coder: Compressor = Plain()
        self._layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        """Layout of the model that was built last."""
        if self._layout is None:
            raise RunError("The method knows no model yet: call `start` on the server, `client_model` on a client.")
        return self._layout

    def start(self, build: Build, given: State | None = None, fresh: bool = True) -> Server:
        """Start with the model as it is built, or with the weights given."""
        model = build()
        self._layout = Layout.of(model)
        return start_server(lambda: model, given)

    def audience(self, server: Server, client: Client) -> Hashable:
        """Send everybody the same."""
        return 0

    def download(self, server: Server, client: Client) -> Message:
        """Send the full weights."""
        return Message(server.weights, {"round": str(server.round)})

    def client_model(self, build: Build, client: Client, message: Message) -> nn.Module:
        """Build the full model."""
        model = build()
        self._layout = Layout.of(model)
        return model

    def train(self, model: nn.Module, data: LocalData, memory: State, seed: int) -> Trained:
        """Train as `local` says, or take one gradient."""
        memory[SEED] = torch.tensor(seed & (2**63 - 1))
        if self.uploads == "gradient":
            return one_gradient(model, data, self.local, seed)
        return train_locally(model, data, self.local, memory, seed)

    def received_state(self, received: Message, memory: State) -> State:
        """Return what the client's model started from."""
        return received.state

    def change(self, received: Message, trained: Trained, memory: State) -> Tensor:
        """Return g: the gradient, or minus the change of the weights."""
        new = self.layout.flatten(trained.state).cpu()
        if self.uploads == "gradient":
            return new
        return self.layout.flatten(self.received_state(received, memory)) - new

    def draws(self, memory: State) -> torch.Generator:
        """Return the random numbers of a client's upload, from the key and from the seed of its training."""
        return generator(hashing.fold(self.key, "upload", int(memory.pop(SEED))))

    def answer(self, received: Message, trained: Trained, code: State) -> Message:
        """Make an upload of a code, with the statistics of normalisation as they are."""
        statistics = {name: trained.state[name].cpu().clone() for name in self.layout.statistics}
        return Message({**statistics, **prefixed(UPDATE, code)}, received.text)

    def expected_code(self, code: State) -> State:
        """Expect a code and the statistics."""
        return {**self.layout.statistics, **prefixed(UPDATE, code)}

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send g in the code of `coder`."""
        change = self.change(received, trained, memory)
        return self.answer(received, trained, self.coder.encode(change, self.layout.sizes, self.draws(memory)))

    def expected(self, sent: Message) -> State:
        """Expect that code."""
        return self.expected_code(self.coder.expected(self.layout.sizes, self.layout.dtype))

    def check(self, upload: Upload, sent: Message) -> None:
        """Refuse codes that cannot be decoded."""
        try:
            self.coder.check(unprefixed(UPDATE, upload.message.state), self.layout.sizes)
        except UploadError as error:
            raise UploadError(f"client {upload.client.id}: {UPDATE}{error}") from error

    def decoded(self, uploads: list[Upload]) -> list[Upload]:
        """Return the uploads with their vectors decoded."""
        found = []
        for upload in uploads:
            state = {name: upload.message.state[name] for name in self.layout.statistics}
            state[UPDATE] = self.coder.decode(unprefixed(UPDATE, upload.message.state), self.layout.sizes)
            found.append(Upload(upload.client, Message(state)))
        return found

    def average(self, decoded: list[Upload]) -> tuple[Tensor, State]:
        """Average the vectors, and the statistics."""
        mean = self.averaging(decoded)
        return mean.pop(UPDATE), mean

    def transformed(self, server: Server, update: Tensor, transform: Transform) -> tuple[Tensor, State]:
        """Return Δ = transform(update), layer by layer, and the transform's state after it."""
        transform.load_state_dict(server.transforms)
        delta = transform(self.layout.split(update))
        transform.applied(delta)
        return self.layout.flatten(delta), transform.state_dict()

    def moved(self, server: Server, delta: Tensor, statistics: State, extra: State, transforms: State) -> Server:
        """Return the server after W ← W − Δ, in its next round."""
        weights = self.layout.subtract({**server.weights, **statistics}, delta)
        return Server(weights, server.trained, server.round + 1, transforms, extra)


def server_momentum(given: float | None, uploads: str) -> float:
    """Return ρ as given; by default the papers' 0.9 for gradients, and 0 for changes by local training.

    Such a change is a whole step. Momentum takes it up to 1 / (1 − ρ) times, and late, in a run of few rounds.
    """
    momentum = (MOMENTUM if uploads == "gradient" else 0.0) if given is None else given
    if not 0 <= momentum < 1:
        raise OptionError(f"momentum={momentum!r} is not in [0, 1).")
    return momentum


def generator(seed: int) -> torch.Generator:
    """Make a generator of a key."""
    return torch.Generator().manual_seed(seed & (2**63 - 1))


def prefixed(prefix: str, state: State) -> State:
    """Put a prefix before all names."""
    return {prefix + name: tensor for name, tensor in state.items()}


def unprefixed(prefix: str, state: State) -> State:
    """Return the tensors whose names have a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
