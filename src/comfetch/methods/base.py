"""The protocol of federated methods, and what all of them share.

A driver (the local simulation, Flower) calls a method at the same few seams, and counts bytes and memory there, the
same way for all. Everything that crosses a seam or outlives a round is a dictionary of tensors with a little text, so
it can be sent and saved as it is.
"""

import functools
import json
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from comfetch.errors import UploadError

State = dict[str, Tensor]
Build = Callable[[], nn.Module]

ABSURD = 1e4
"""An upload whose norm is so many times that of the download is no result of training."""
NAMED = 5
"""A message names so many wrong tensors, not thousands."""


_DTYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of types in safetensors files, in the order in which it writes them."""


@dataclass(frozen=True)
class Client:
    """Who takes part: its number, how many examples it has, and the compression of its capacity class, if any."""

    id: int
    examples: int
    capacity: float | None = None


@dataclass(frozen=True)
class Message:
    """What travels: tensors by name, and text such as the round and the key."""

    state: State
    text: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def norms(self) -> dict[str, float]:
        """Norm of each floating point tensor, not finite if one of its values is not.

        The last tensor goes first: after training it is the one that is still in the processor's cache.
        """
        names = [name for name in reversed(self.state) if _has_norm(self.state[name])]
        norms = torch._foreach_norm([self.state[name].float() for name in names]) if names else []
        return dict(zip(names, torch.stack(list(norms)).tolist() if names else [], strict=True))

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the message as a safetensors file, computed without writing it."""
        layout = tuple((name, tensor.dtype, tensor.shape) for name, tensor in self.state.items())
        return _file_bytes(layout, tuple(self.text.items()))


def _has_norm(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


@functools.lru_cache(maxsize=64)
def _file_bytes(layout: tuple[tuple[str, torch.dtype, torch.Size], ...], text: tuple[tuple[str, str], ...]) -> int:
    """Count the bytes of a safetensors file; the messages of a round are laid out alike, so this is done once."""
    header: dict[str, object] = {"__metadata__": dict(text)} if text else {}
    order, offset = list(_DTYPES), 0
    known = [entry for entry in layout if entry[1] in _DTYPES]
    others = [entry for entry in layout if entry[1] not in _DTYPES]  # a hostile upload's: counted, then refused
    for name, dtype, shape in sorted(known, key=lambda entry: (order.index(entry[1]), entry[0])) + others:
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES.get(dtype, ""), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + (length + 7) // 8 * 8 + offset


@dataclass(frozen=True)
class Upload:
    """What arrived from a client; or the mean of what `count` clients of one capacity have sent."""

    client: Client
    message: Message
    count: int = 1


@dataclass
class Server:
    """The server's state: the full weights, the state of its transforms, and what a method keeps besides."""

    weights: State
    trained: list[str]
    round: int = 0
    transforms: State = field(default_factory=dict)
    extra: State = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """What local training gave: the model's new state, or gradients, and how it went."""

    state: State
    loss: float
    steps: int


class LocalData(Protocol):
    """A client's own examples."""

    def __len__(self) -> int:
        """Count the examples."""

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Go once over the examples, shuffled and augmented."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Average the loss over a batch."""


class Method(Protocol):
    """A federated algorithm. Clients of one `audience` receive the same download and hold models of one structure.

    A method whose `step` uses uploads only through their `averaging`, within each capacity, may say `pools = True`:
    then they are averaged as they come, and none is kept. One whose clients hold other channels in each round says
    `rolls = True`. Two more functions are optional. `load(model, received, memory)` puts a download into a client's
    model, where it is not simply the model's state. `check(upload, sent)` raises UploadError for what `expected` cannot
    say, such as an index that is out of range.
    """

    name: str
    key: int

    def start(self, build: Build, given: State | None = None, fresh: bool = True) -> Server:
        """Make the server's first state, of weights that are given or of the model's own; `fresh` if untrained."""

    def audience(self, server: Server, client: Client) -> Hashable:
        """Say which clients get the same download."""

    def download(self, server: Server, client: Client) -> Message:
        """Make what goes to a client."""

    def client_model(self, build: Build, client: Client, message: Message) -> nn.Module:
        """Build what the client holds, ready to load the message's state."""

    def train(self, model: nn.Module, data: LocalData, memory: State, seed: int) -> Trained:
        """Train on a client; `memory` is what this client keeps from round to round."""

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Make what goes back to the server."""

    def expected(self, sent: Message) -> State:
        """Say what an upload must look like, name by name: only shapes and dtypes of the tensors matter."""

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """Make the server's next state of uploads that were checked."""


@runtime_checkable
class TwoPass(Protocol):
    """A method with a second exchange in each round: its `step` gets the second uploads."""

    def request(self, server: Server, uploads: list[Upload]) -> tuple[Server, Message]:
        """Make what the server asks of all whose first upload it took; it may note it in its state."""

    def respond(self, request: Message, memory: State) -> Message:
        """Answer on a client, with what `upload` has left in its memory."""


def start_server(build: Build, given: State | None = None) -> Server:
    """Build the full model and take its weights, or load those given."""
    model = build()
    if given is not None:
        model.load_state_dict(given)
    trained = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad]
    return Server({name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, trained)


def check_upload(upload: Upload, sent: Message, expected: State) -> None:
    """Refuse an upload that cannot be an answer to what was sent: names, shapes, dtypes, key, round, values, norm."""
    where, state = f"client {upload.client.id}", upload.message.state
    for word, value in sent.text.items():
        if upload.message.text.get(word) != value:
            raise UploadError(f"{where}: {word} is {upload.message.text.get(word)!r}, expected {value!r}.")
    if state.keys() != expected.keys():
        odd = [f"{name} is unknown" for name in sorted(state.keys() - expected.keys())]
        odd += [f"{name} is missing" for name in sorted(expected.keys() - state.keys())]
        raise UploadError(f"{where}: {'; '.join(odd[:NAMED])}{' and so on' if len(odd) > NAMED else ''}.")
    for name, tensor in state.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            found = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise UploadError(f"{where}: {name} is {found}, expected {wanted.dtype} of shape {tuple(wanted.shape)}.")
    norms = upload.message.norms
    for name, size in norms.items():
        if not math.isfinite(size):
            raise UploadError(f"{where}: {name} has NaN or infinite values.")
    total, limit = math.hypot(*norms.values()), ABSURD * (1 + math.hypot(*sent.norms.values()))
    if total > limit:
        raise UploadError(f"{where}: its norm is {total:.3g}, above {limit:.3g}.")
