"""DoCoFL (Dorfman et al. 2023): clients keep an anchor of the model, and get compressed corrections to it."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

from comfetch import hashing
from comfetch.errors import OptionError, RunError
from comfetch.methods.base import Build, Client, Message, Server, State, Upload
from comfetch.methods.compressors import Plain, Quantise
from comfetch.methods.eden import Eden
from comfetch.methods.flat import FullModel, generator, prefixed, unprefixed
from comfetch.methods.replica import note_seen, seen
from comfetch.transforms import Transform, chain

ANCHOR, CORRECTION, FROZEN, ROUND = "anchor/", "correction/", "frozen/", "anchor-round"


@dataclass
class DoCoFL(FullModel):
    """Compress both ways: down go an anchor A, a rounded copy of the weights, at times, and corrections Q(W − A).

    A client trains from Ŵ = A + Q(W − A) and sends Q(g): W ← W − transforms(η mean Q(g_i)). The anchor is renewed
    every so many rounds. A client downloads it once, with the first correction that it needs; the paper lets it
    come beforehand, when bandwidth is cheap, which saves time and no bytes. Clients hold the full model and the
    anchor, and nothing has to be caught up: who joins or was away gets the anchor. Corrections and updates are in
    the code of EDEN, as in the paper. The anchor is rounded at random to a few levels, where the paper has an
    entropy-coded quantiser; all clients of a round get the same correction; and there is one anchor at a time,
    where the paper keeps some older ones for clients that have those. g is the change by local training, unless
    `uploads` asks for one gradient.

    Args:
        anchor_rounds: rounds for which an anchor is kept.
        anchor_levels: levels of the anchor, as in `compressors.Quantise`. bucket: its coordinates that share a norm.
        down_levels, up_levels: bits of a coordinate of correction and update, as many as such levels take there: 1, 7
            and 127 are 2, 4 and 8 bits. EDEN uses all values of these. None sends anchor or update as they are.
        server: transforms of η mean Q(g).
    """

    down: ClassVar[str] = "correction of a few bits; every so many rounds an anchor of all weights"
    up: ClassVar[str] = "update rounded to a few bits"
    holds: ClassVar[str] = "full weights, and an anchor of as many"

    anchor_rounds: int = 10
    anchor_levels: int | None = 127
    down_levels: int = 7
    up_levels: int | None = 7
    bucket: int = 512
    server: Transform = field(default_factory=chain, kw_only=True)
    name: str = field(default="docofl", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.anchor_rounds, int) or self.anchor_rounds < 1:
            raise OptionError(f"anchor_rounds={self.anchor_rounds!r} is not a whole number of at least 1.")
        self.anchors = Plain() if self.anchor_levels is None else Quantise(self.anchor_levels, self.bucket)
        self.corrections = Eden(Quantise(self.down_levels, self.bucket).width)
        self.coder = Plain() if self.up_levels is None else Eden(Quantise(self.up_levels, self.bucket).width)

    def start(self, build: Build, given: State | None = None, fresh: bool = True) -> Server:
        """Start with the model as it is built, or with the weights given, and with its anchor."""
        server = super().start(build, given, fresh)
        return replace(server, extra=self._anchor(server))

    def _anchor(self, server: Server) -> State:
        draws = generator(hashing.fold(self.key, "anchor", server.round))
        return prefixed(ANCHOR, self.anchors.encode(self.layout.flatten(server.weights), self.layout.sizes, draws))

    def _anchor_round(self, server: Server) -> int:
        return server.round - server.round % self.anchor_rounds

    def audience(self, server: Server, client: Client) -> Hashable:
        """Tell clients that have the anchor from those that do not."""
        return seen(server, client) >= self._anchor_round(server)

    def download(self, server: Server, client: Client) -> Message:
        """Send Q(W − A) and all buffers; to a client that has not got A, send A before."""
        code, layout = unprefixed(ANCHOR, server.extra), self.layout
        away = layout.flatten(server.weights) - self.anchors.decode(code, layout.sizes)
        draws = generator(hashing.fold(self.key, "down", server.round))
        state = {name: server.weights[name] for name in layout.buffers}
        state |= prefixed(CORRECTION, self.corrections.encode(away, layout.sizes, draws))
        if not self.audience(server, client):
            moving = {*layout.buffers, *layout.trained, *layout.tied}
            state |= {name: tensor for name, tensor in server.weights.items() if name not in moving}
            state |= prefixed(ANCHOR, code)
        return Message(state, {"round": str(server.round), "anchor": str(self._anchor_round(server))})

    def load(self, model: nn.Module, received: Message, memory: State) -> None:
        """Keep the anchor, if it is there, and put Ŵ = A + Q(W − A) into the model."""
        code, round = unprefixed(ANCHOR, received.state), int(received.text["anchor"])
        if code:
            moving = {*self.layout.buffers, *prefixed(ANCHOR, code)}
            kept = {n: t for n, t in received.state.items() if n not in moving and not n.startswith(CORRECTION)}
            memory.update(prefixed(FROZEN, kept))
            memory[ANCHOR] = self.anchors.decode(code, self.layout.sizes)
            memory[ROUND] = torch.tensor(round)
        elif ROUND not in memory or int(memory[ROUND]) != round:
            raise RunError(f"The client has lost the anchor of round {round + 1}. Start it anew.")
        buffers = {name: received.state[name] for name in self.layout.buffers}
        model.load_state_dict({**unprefixed(FROZEN, memory), **buffers, **self.received_state(received, memory)})

    def received_state(self, received: Message, memory: State) -> State:
        """Return Ŵ."""
        correction = self.corrections.decode(unprefixed(CORRECTION, received.state), self.layout.sizes)
        return self.layout.split(memory[ANCHOR] + correction)

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← W − transforms(η mean Q(g)); renew the anchor when it is time."""
        update, statistics = self.average(self.decoded(uploads))
        delta, transforms = self.transformed(server, self.rate * update, self.server)
        after = self.moved(server, delta, statistics, {}, transforms)
        due = after.round % self.anchor_rounds == 0
        anchor = self._anchor(after) if due else prefixed(ANCHOR, unprefixed(ANCHOR, server.extra))
        return replace(after, extra={**anchor, **note_seen(server, uploads)})
