"""Artemis (Philippenko and Dieuleveut 2020): random rounding both ways, of differences to a memory on the way up."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from comfetch import hashing
from comfetch.errors import OptionError
from comfetch.methods.base import Message, Server, State, Trained, Upload
from comfetch.methods.compressors import Quantise
from comfetch.methods.flat import generator, prefixed
from comfetch.methods.replica import CHANGE, SHARES, Replica, note_seen, shared_sum, wait

MEMORY, MEMORIES = "memory", "memories"


@dataclass
class Artemis(Replica):
    """Compress both ways without bias: a client sends Q(g_i − h_i), the server Q(ĝ).

    Client: q_i = Q(g_i − h_i), h_i ← h_i + α q_i. Server: ĝ = mean of all h_i + mean q_i over who took part, and its
    sum of the h_i follows theirs (the paper's second way of partial participation). Both: W ← W − η Q(ĝ). Clients hold
    the full model, a copy of it and h_i; the server does not keep each h_i but their sum, over clients that it has
    seen. A client that took part in the last round gets Q(ĝ); one that joins or was away gets the full weights. It is
    told which of its uploads was taken last, so that h_i moves only if the server's sum does. g is the change by local
    training, unless `uploads` asks for the paper's one gradient.

    Args:
        levels, bucket: of Q, as in `compressors.Quantise`.
        memory_rate: α; None is the paper's 1 / (2 (ω + 1)), ω the variance of Q. 0 is without memory.
    """

    down: ClassVar[str] = "update rounded to a few bits; full weights to who was away"
    up: ClassVar[str] = "update rounded to a few bits"
    holds: ClassVar[str] = "full weights twice, and a memory of as many"
    tells: ClassVar[bool] = True

    levels: int = 7
    bucket: int = 512
    memory_rate: float | None = None
    name: str = field(default="artemis", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coder = self.quantise = Quantise(self.levels, self.bucket)
        if self.memory_rate is not None and not 0 <= self.memory_rate <= 1:
            raise OptionError(f"memory_rate={self.memory_rate!r} is not in [0, 1].")
        if self.averaging.rule != "mean":
            raise OptionError(
                f"rule={self.averaging.rule!r}: the server's sum of memories needs the mean. Set rule='mean'."
            )

    @property
    def alpha(self) -> float:
        """α, the part of a difference that goes into the memory."""
        return 1 / (2 * (self.quantise.variance + 1)) if self.memory_rate is None else self.memory_rate

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send q = Q(g − h); h ← h + α q once it is taken."""
        g = self.change(received, trained, memory)
        h = memory.get(MEMORY, torch.zeros_like(g))
        code = self.coder.encode(g - h, self.layout.sizes, self.draws(memory))
        wait(memory, received, {MEMORY: h + self.alpha * self.coder.decode(code, self.layout.sizes)})
        return self.answer(received, trained, code)

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← W − η Q(ĝ), ĝ = mean of all h + mean q."""
        decoded = self.decoded(uploads)
        mean, statistics = self.average(decoded)
        notes = note_seen(server, uploads, self.averaging.weights(uploads))
        memories = server.extra.get(MEMORIES, torch.zeros_like(mean))
        estimate = memories / float(notes[SHARES].sum()) + mean
        draws = generator(hashing.fold(self.key, "down", server.round))
        code = self.coder.encode(estimate, self.layout.sizes, draws)
        memories = memories + self.alpha * shared_sum(notes, decoded)
        delta = self.rate * self.coder.decode(code, self.layout.sizes)
        return self.moved(server, delta, statistics, {MEMORIES: memories, **prefixed(CHANGE, code), **notes}, {})

    def changed(self, state: State, code: State, memory: State) -> State:
        """W ← W − η Q(ĝ)."""
        return self.layout.subtract(state, self.rate * self.coder.decode(code, self.layout.sizes))
