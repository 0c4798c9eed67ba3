"""Blockwise momentum with error feedback (Zheng, Huang and Kwok 2019, dist-EF-blockSGDM)."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from comfetch.errors import OptionError
from comfetch.methods.base import State
from comfetch.methods.doublesqueeze import DoubleSqueeze

MOMENTUM = "momentum"


@dataclass
class Blockwise(DoubleSqueeze):
    """Compress both ways to one bit a weight and one scale a block, with Nesterov's momentum on the clients.

    Client: m_i ← μ m_i + g_i, p_i = μ m_i + g_i + e_i, send C(p_i), e_i ← p_i − C(p_i). Server: p = mean C(p_i) + e,
    send C(p), e ← p − C(p). Both: W ← W − η C(p), with C(x) = (‖x_B‖₁ / |B|) sign(x) on each block B, a weight tensor.
    η does not change, so the paper's factor on the error is 1. Clients hold the full model, a copy of it, m_i and e_i.
    A client that was away gets the full weights. g is the change by local training, unless `uploads` asks for the
    paper's one gradient.

    Args:
        momentum: μ. Of a constant g it makes g / (1 − μ) in time: a smaller `rate` makes up for it.
    """

    down: ClassVar[str] = "signs and scales of the update; full weights to who was away"
    up: ClassVar[str] = "signs and scales of the update"
    holds: ClassVar[str] = "full weights twice, momentum, and as many not yet sent"

    momentum: float = 0.9
    compressor: str = field(default="sign", init=False)
    fraction: float = field(default=1.0, init=False)
    levels: int = field(default=1, init=False)
    bucket: int = field(default=1, init=False)
    name: str = field(default="blockwise", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise OptionError(f"momentum={self.momentum!r} is not in [0, 1).")

    def direction(self, g: Tensor, memory: State) -> Tensor:
        """Return μ m + g after m ← μ m + g."""
        memory[MOMENTUM] = self.momentum * memory[MOMENTUM] + g if MOMENTUM in memory else g
        return self.momentum * memory[MOMENTUM] + g
