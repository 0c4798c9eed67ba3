"""What every driver does in a round, on the server and on a client, whatever carries the messages between them.

The local simulation calls both sides in turn; Flower calls them in different processes. Neither knows more of a method
than its protocol, so both give the same weights for the same keys.
"""

import logging
import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from comfetch import hashing
from comfetch.batchnorm import take_statistics
from comfetch.errors import OptionError, RunError, UploadError
from comfetch.methods.averaging import ANEW, Averaging
from comfetch.methods.base import (
    Client,
    LocalData,
    Message,
    Method,
    Server,
    State,
    Trained,
    TwoPass,
    Upload,
    check_upload,
)
from comfetch.methods.flat import FullModel
from comfetch.methods.replica import KEPT
from comfetch.privacy import Privacy, clip_upload
from comfetch.privacy import check as check_privacy
from comfetch.wire import Wire, pack, pack_upload, unpack, unpack_upload

Record = dict[str, Any]
MOST_EXAMPLES = 1000
"""A client that claims so many times the median of all is taken for a liar: its weight would be the average."""
EMPTY = Message({})
log = logging.getLogger("comfetch")


@dataclass(frozen=True)
class Channel:
    """How messages travel: the wire format both ways, privacy, and the largest norm of a change the server takes."""

    wire: Wire = field(default_factory=Wire)
    privacy: Privacy = field(default_factory=Privacy)
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise OptionError(f"clip_updates={self.clip!r} is not a number above 0.")

    def told(self, loss: float) -> float | None:
        """Return the loss as the server gets to know it: under a client's own privacy, not at all."""
        return None if self.privacy.where == "client" else loss


def check_channel(method: Method, channel: Channel) -> None:
    """Refuse options that do not go together."""
    if channel.wire.feedback and (getattr(method, "redraw", None) is not None or getattr(method, "rolls", False)):
        raise OptionError(
            f"wire_feedback: what {method.name} sends means something else in a later round (new hashes, or other "
            "channels), so that what was lost cannot be added there. Leave it out."
        )
    if channel.clip is not None and not getattr(method, "pools", False):
        raise OptionError(
            f"clip_updates={channel.clip:g}: {method.name} counts on the server using what its clients have sent. "
            "Leave it out, or use comfetch or fedavg."
        )
    if channel.privacy.where == "none":
        return
    if not getattr(method, "pools", False):
        raise OptionError(
            f"privacy={channel.privacy.where!r}: {method.name} uses uploads otherwise than through their mean, so that "
            "clipping and noise do not cover it. Use comfetch or fedavg."
        )
    averaging: Averaging = method.averaging  # type: ignore[attr-defined]
    if averaging.statistics == ANEW:
        raise OptionError(
            f"privacy={channel.privacy.where!r}: statistics={ANEW!r} would take them from examples without noise. "
            "Leave it out."
        )
    classes = len(getattr(method, "capacities", None) or [None])
    check_privacy(channel.privacy, averaging.weighting, averaging.rule, classes)


def is_relative(method: Method) -> bool:
    """Tell whether uploads are new weights, to be compared with those received; gradients are not."""
    return getattr(method, "uploads", "weights") == "weights"


def new_values(method: Method, upload: Message, trained: Iterable[str]) -> bool | list[str]:
    """Name the tensors of an upload that are new values, and not changes themselves; True means all."""
    return is_relative(method) or sorted(upload.state.keys() - set(trained))


def sample(key: int, round: int, clients: Iterable[Client], fraction: float) -> list[Client]:
    """Draw the clients of a round, by key and round alone: who is away changes nothing for the others."""
    present = sorted(clients, key=lambda client: client.id)
    wanted = max(1, math.floor(fraction * len(present) + 0.5))
    if wanted < len(present):
        drawn = sorted(present, key=lambda client: hashing.fold(key, "sample", round, client.id))[:wanted]
        present = sorted(drawn, key=lambda client: client.id)
    return present


def settle(method: Method, channel: Channel, model: nn.Module, data: Sequence[LocalData]) -> nn.Module:
    """Make a model ready for a test: running statistics anew, where asked; what is private has no say in them."""
    asked = getattr(method, "averaging", Averaging()).statistics
    if channel.privacy.where == "none" and (asked == ANEW or (asked is None and getattr(method, "rolls", False))):
        take_statistics(model, data)
    return model


def train_seed(seed: int, round: int, client: Client) -> int:
    """Derive the seed of a client's training in a round."""
    return hashing.fold(seed, "train", round, client.id)


def train_client(
    method: Method, channel: Channel, model: nn.Module, data: LocalData, received: Message, memory: State, seed: int
) -> tuple[Trained, Message]:
    """Train on a client that has loaded what it received, and return how that went and what goes on the wire."""
    torch.default_generator.manual_seed(seed & (2**63 - 1))
    if next(model.parameters()).device.type != "cpu":  # 0.3 ms that absent accelerators need not cost
        torch.manual_seed(seed & (2**63 - 1))
    trained = method.train(model, data, memory, seed)
    upload, relative = method.upload(received, trained, memory), is_relative(method)
    if channel.privacy.where == "client":
        names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad]
        upload = channel.privacy.protect(upload, received, relative=new_values(method, upload, names))
    return trained, pack_upload(upload, received, channel.wire, seed, memory, relative)


def kept_bytes(method: Method, channel: Channel, received: Message, memory: State) -> int:
    """Count what a client holds besides its training step: its memory, and a download that its upload differs from.

    The state of an optimiser that is kept is a part of the training step already, and so is not counted again.
    """
    kept = sum(tensor.nbytes for name, tensor in memory.items() if not name.startswith("optimiser."))
    difference = channel.wire.up != "float32"
    if isinstance(method, FullModel) and method.uploads == "weights":
        difference = difference or not any(name.startswith(KEPT) for name in memory)
    return kept + (sum(tensor.nbytes for tensor in received.state.values()) if difference else 0)


@dataclass
class Pool:
    """The sum of what clients of one capacity have sent, each times its part of the whole weight."""

    client: Client
    text: dict[str, str]
    sums: State
    part: float
    count: int = 1

    def mean(self) -> Upload:
        """Return the mean as one upload of all these clients."""
        if abs(self.part - 1) > 1e-9:
            torch._foreach_div_(list(self.sums.values()), self.part)
        return Upload(self.client, Message(self.sums, self.text), self.count)


class Round:
    """The server's side of one round: post downloads, take uploads as they come, close with the server's step.

    Uploads of a method that pools are added to their mean at once: the server holds one of them, not all.

    Args:
        clients: who is asked in this round.
    """

    def __init__(self, method: Method, server: Server, channel: Channel, clients: Sequence[Client] = ()) -> None:
        self.method, self.server, self.channel = method, server, channel
        self.sent: dict[Hashable, tuple[Message, Message]] = {}
        self.uploads: dict[int, Upload] = {}
        self.pools: dict[float | None, Pool] = {}
        self.taken: dict[int, Client] = {}
        self.refused: list[str] = []
        self.losses: dict[int, float] = {}
        self.bytes_down = self.bytes_up = 0
        self.request: Message | None = None
        self.asked: list[Client] = []
        self.usual = statistics.median(client.examples for client in clients) if clients else 0
        self.pooling = (
            getattr(method, "pools", False) and method.averaging.rule == "mean"  # type: ignore[attr-defined]
            and channel.privacy.where != "central" and all(client.examples for client in clients)
        )  # fmt: skip
        self.whole: dict[float | None, float] = {}
        for client in clients if self.pooling else ():
            self.whole[client.capacity] = self.whole.get(client.capacity, 0.0) + self._weight(client)

    def post(self, client: Client) -> tuple[Hashable, Message, Message]:
        """Return a client's audience, what goes to it, and what it will receive of that after a lossy wire."""
        audience = self.method.audience(self.server, client)
        if audience not in self.sent:
            message = self.method.download(self.server, client)
            seed = hashing.fold(self.method.key, "down", self.server.round, str(audience))
            packed = pack(message, self.channel.wire.down, seed)
            self.sent[audience] = packed, unpack(packed)
        packed, received = self.sent[audience]
        self.bytes_down += packed.nbytes
        return audience, packed, received

    def take(self, client: Client, packed: Message, loss: float | None, where: str = "") -> None:
        """Take an upload, or refuse it and say why, and where it came from; one that comes twice is counted once."""
        self.bytes_up += packed.nbytes
        try:
            if client.id in self.taken:
                raise UploadError(f"client {client.id}: it has answered in this round already.")
            if self.usual and client.examples > MOST_EXAMPLES * self.usual:
                raise UploadError(_lie(client))
            upload = self._checked(client, packed)
        except UploadError as error:
            who = f"client {client.id}"
            self.refuse(str(error).replace(who, who + where, 1))
            return
        self.taken[client.id] = client
        if self.pooling:
            self._pool(upload)
        else:
            self.uploads[client.id] = upload
        if loss is not None:
            self.losses[client.id] = loss

    def refuse(self, why: str) -> None:
        """Note that a client's answer is not used."""
        log.warning("Round %d: refused: %s", self.server.round + 1, why)
        self.refused.append(why)

    def ask(self) -> Message | None:
        """Return what the server asks in a second exchange, if the method has one; `take` then takes the answers."""
        if not isinstance(self.method, TwoPass):
            return None
        self._expect_uploads()
        self.server, self.request = self.method.request(self.server, self._in_order())
        self.asked = [self.taken[i] for i in sorted(self.taken)]
        self.uploads, self.taken = {}, {}
        self.bytes_down += self.request.nbytes * len(self.asked)
        return self.request

    def close(self) -> tuple[Server, Record]:
        """Let the method make the server's next state, and record the round."""
        if not self.usual:  # how many examples clients have was not known before
            self._refuse_liars()
        self._expect_uploads()
        uploads = [pool.mean() for pool in self.pools.values()] if self.pooling else self._in_order()
        if self.channel.privacy.where == "central":
            received = [self.sent[self.method.audience(self.server, u.client)][1] for u in uploads]
            messages = [upload.message for upload in uploads]
            hidden = self.channel.privacy.protect_centrally(
                messages, received, relative=new_values(self.method, messages[0], self.server.trained)
            )
            uploads = [replace(upload, message=message) for upload, message in zip(uploads, hidden, strict=True)]
        server = self.method.step(self.server, uploads)
        return server, self.record(server.round)

    def record(self, round: int) -> Record:
        """Record what the round has given so far."""
        examples = {i: self.taken[i].examples for i in sorted(self.losses) if i in self.taken}
        loss = sum(self.losses[i] * n for i, n in examples.items()) / sum(examples.values()) if examples else None
        return {
            "round": round, "loss": loss, "bytes_down": self.bytes_down, "bytes_up": self.bytes_up,
            "clients": len(self.taken), "refused": self.refused,
        }  # fmt: skip

    def _checked(self, client: Client, packed: Message) -> Upload:
        """Unpack and check an upload."""
        if self.request is not None:
            upload = Upload(client, packed)
            check_upload(upload, self.request, self.method.expected(self.request))
        else:
            received, relative = self.sent[self.method.audience(self.server, client)][1], is_relative(self.method)
            try:
                upload = Upload(client, unpack_upload(packed, received, self.channel.wire, relative))
            except UploadError as error:
                raise UploadError(f"client {client.id}: {error}") from error
            check_upload(upload, received, self.method.expected(received))
            if self.channel.clip is not None:
                values = new_values(self.method, upload.message, self.server.trained)
                upload = replace(upload, message=clip_upload(upload.message, received, self.channel.clip, values))
        check = getattr(self.method, "check", None)
        if check is not None:
            check(upload, self.request or received)
        return upload

    def _refuse_liars(self) -> None:
        """Refuse clients whose number of examples would make the average theirs."""
        usual = statistics.median(client.examples for client in self.taken.values()) if self.taken else 0
        for client in [c for c in self.taken.values() if c.examples > MOST_EXAMPLES * usual]:
            del self.uploads[client.id], self.taken[client.id]
            self.refuse(_lie(client))

    def _weight(self, client: Client) -> float:
        averaging: Averaging = self.method.averaging  # type: ignore[attr-defined]
        return averaging.weights([Upload(client, EMPTY)])[0]

    def _pool(self, upload: Upload) -> None:
        """Add an upload to the mean of its class."""
        client, state = upload.client, upload.message.state
        part, names = self._weight(client) / self.whole[client.capacity], [*reversed(upload.message.norms)]
        pool, tensors = self.pools.get(client.capacity), [state[name] for name in names]
        if pool is None:
            sums = dict(zip(names, torch._foreach_mul(tensors, part), strict=True))
            self.pools[client.capacity] = Pool(client, upload.message.text, sums, part)
        else:
            torch._foreach_add_([pool.sums[name] for name in names], tensors, alpha=part)
            pool.part += part
            pool.count += 1
            pool.client = replace(pool.client, examples=pool.client.examples + client.examples)

    def _expect_uploads(self) -> None:
        if not self.taken:
            first = f" First: {self.refused[0]} If the loss is NaN, lower the learning rate." if self.refused else ""
            raise RunError(f"Round {self.server.round + 1}: no upload could be used: nothing to average.{first}")

    def _in_order(self) -> list[Upload]:
        return [self.uploads[i] for i in sorted(self.uploads)]


def _lie(client: Client) -> str:
    return f"client {client.id}: it claims {client.examples} examples, over {MOST_EXAMPLES} times the median."
