"""DoubleSqueeze (Tang et al. 2019): compression with error feedback on the way up and on the way down."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from comfetch import hashing
from comfetch.methods.base import Message, Server, State, Trained, Upload
from comfetch.methods.compressors import make_compressor
from comfetch.methods.flat import generator, prefixed
from comfetch.methods.replica import CHANGE, Replica, note_seen

ERROR = "error"


@dataclass
class DoubleSqueeze(Replica):
    """Compress both ways: each side adds what its compressor C lost before to what it sends next.

    Client: v_i = g_i + δ_i, send C(v_i), δ_i ← v_i − C(v_i). Server: v = mean C(v_i) + δ, send C(v), δ ← v − C(v).
    Both: W ← W − η C(v). Clients hold the full model, a copy of it and δ_i. A client that took part in the last round
    gets C(v); one that joins or was away gets the full weights. g is the change by local training, unless `uploads`
    asks for the paper's one gradient.

    Args:
        compressor: "top_k", "sign" (one bit, a scale for each weight tensor) or "quantise" (random rounding).
        fraction: part of the coordinates that top_k sends. levels, bucket: of quantise.
    """

    down: ClassVar[str] = "compressed update; full weights to who was away"
    up: ClassVar[str] = "compressed update"
    holds: ClassVar[str] = "full weights twice, and as many not yet sent"

    compressor: str = "sign"
    fraction: float = 0.05
    levels: int = 1
    bucket: int = 512
    name: str = field(default="doublesqueeze", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coder = make_compressor(self.compressor, self.fraction, self.levels, self.bucket)

    def direction(self, g: Tensor, memory: State) -> Tensor:
        """Return what a client sends of its update, before the error is added."""
        return g

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send C(v), v = g + δ, and keep δ ← v − C(v)."""
        v = self.direction(self.change(received, trained, memory), memory)
        v = v + memory[ERROR] if ERROR in memory else v
        code = self.coder.encode(v, self.layout.sizes, self.draws(memory))
        memory[ERROR] = v - self.coder.decode(code, self.layout.sizes)
        return self.answer(received, trained, code)

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← W − η C(v), v = mean + δ, and keep δ ← v − C(v)."""
        v, statistics = self.average(self.decoded(uploads))
        v = v + server.extra[ERROR] if ERROR in server.extra else v
        draws = generator(hashing.fold(self.key, "down", server.round))
        code = self.coder.encode(v, self.layout.sizes, draws)
        squeezed = self.coder.decode(code, self.layout.sizes)
        extra = {ERROR: v - squeezed, **prefixed(CHANGE, code), **note_seen(server, uploads)}
        return self.moved(server, self.rate * squeezed, statistics, extra, {})

    def changed(self, state: State, code: State, memory: State) -> State:
        """W ← W − η C(v)."""
        return self.layout.subtract(state, self.rate * self.coder.decode(code, self.layout.sizes))
