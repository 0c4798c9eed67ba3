"""EF21-BC (Fatkhullin et al. 2021): both sides send compressed differences to estimates that both sides keep."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from comfetch import hashing
from comfetch.errors import OptionError
from comfetch.methods.base import Message, Server, State, Trained, Upload
from comfetch.methods.compressors import make_compressor
from comfetch.methods.flat import generator, prefixed
from comfetch.methods.replica import CHANGE, SHARES, Replica, note_seen, shared_sum, wait

OWN, SUM, ESTIMATE = "own", "sum", "estimate"
CONTRACTIONS = ("top_k", "sign")


@dataclass
class EF21(Replica):
    """Compress both ways: a client sends C(g_i − e_i), the server C(mean of all e_i − e), and W moves by e.

    Client: e_i ← e_i + C(g_i − e_i). Server: b = C(mean e_i − e). Both: e ← e + b, W ← W − η e. All estimates begin at
    0. Clients hold the full model, a copy of it, e_i and e; the server does not keep each e_i but their sum, over
    clients that it has seen, to which those that are away contribute what they sent before. A client that took part in
    the last round gets b; one that joins or was away gets the full weights and e, twice the model. It is told which of
    its uploads was taken last, so that e_i moves only if the server's sum does. g is the change by local training,
    unless `uploads` asks for the paper's one gradient.

    Args:
        compressor: a contraction, "top_k" or "sign". fraction: part of the coordinates that top_k sends.
    """

    down: ClassVar[str] = "compressed difference of estimates; full weights and estimate to who was away"
    up: ClassVar[str] = "compressed difference of estimates"
    holds: ClassVar[str] = "full weights twice, and two estimates of as many"
    tells: ClassVar[bool] = True

    compressor: str = "top_k"
    fraction: float = 0.05
    name: str = field(default="ef21", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coder = make_compressor(self.compressor, self.fraction, 1, 1, CONTRACTIONS)
        if self.averaging.rule != "mean":
            raise OptionError(f"rule={self.averaging.rule!r}: the sum of estimates needs the mean. Set rule='mean'.")

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send c = C(g − e_i); e_i ← e_i + c once it is taken."""
        g = self.change(received, trained, memory)
        own = memory.get(OWN, torch.zeros_like(g))
        code = self.coder.encode(g - own, self.layout.sizes, self.draws(memory))
        wait(memory, received, {OWN: own + self.coder.decode(code, self.layout.sizes)})
        return self.answer(received, trained, code)

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← W − η e, e ← e + C(mean e_i − e)."""
        decoded = self.decoded(uploads)
        _, statistics = self.average(decoded)
        notes = note_seen(server, uploads, self.averaging.weights(uploads))
        total = shared_sum(notes, decoded)
        total = total + server.extra[SUM] if SUM in server.extra else total
        estimate = server.extra.get(ESTIMATE, torch.zeros_like(total))
        draws = generator(hashing.fold(self.key, "down", server.round))
        code = self.coder.encode(total / float(notes[SHARES].sum()) - estimate, self.layout.sizes, draws)
        estimate = estimate + self.coder.decode(code, self.layout.sizes)
        extra = {SUM: total, ESTIMATE: estimate, **prefixed(CHANGE, code), **notes}
        return self.moved(server, self.rate * estimate, statistics, extra, {})

    def besides(self, server: Server) -> State:
        """Send e with the full weights, once it is not 0."""
        return {ESTIMATE: server.extra[ESTIMATE]} if ESTIMATE in server.extra else {}

    def changed(self, state: State, code: State, memory: State) -> State:
        """Change e by b, and W by η e."""
        b = self.coder.decode(code, self.layout.sizes)
        memory[ESTIMATE] = memory[ESTIMATE] + b if ESTIMATE in memory else b
        return self.layout.subtract(state, self.rate * memory[ESTIMATE])
