"""QSGD (Alistarh et al. 2017) and FedPAQ (Reisizadeh et al. 2020): clients send randomly rounded updates."""

from dataclasses import dataclass, field
from typing import ClassVar

from comfetch.methods.base import Server, Upload
from comfetch.methods.compressors import Quantise
from comfetch.methods.flat import FullModel
from comfetch.transforms import Transform, chain


@dataclass
class QSGD(FullModel):
    """Compress the way up: a client sends its update g rounded at random to s levels of a bucket's norm.

    W ← W − transforms(η mean Q(g_i)), with Q as in `compressors.Quantise`. Clients hold and get the full model. With
    the change by local training as g, the default, this is FedPAQ; with `uploads="gradient"` it is QSGD. Codes have a
    fixed width; the paper's Elias code, which shortens frequent small levels, is not used. Nothing is fed back: Q has
    no bias.

    Args:
        levels: s; 1, 7 or 127 levels take 2, 4 or 8 bits a coordinate. bucket: coordinates that share a norm.
        norm: "l2", as in the definition, or "max", as in the paper's experiments.
        server: transforms of η mean Q(g).
    """

    up: ClassVar[str] = "update rounded to a few bits"
    holds: ClassVar[str] = "full weights"

    levels: int = 7
    bucket: int = 512
    norm: str = "max"
    server: Transform = field(default_factory=chain, kw_only=True)
    name: str = field(default="qsgd", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coder = Quantise(self.levels, self.bucket, self.norm)

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← W − transforms(η mean Q(g))."""
        update, statistics = self.average(self.decoded(uploads))
        delta, transforms = self.transformed(server, self.rate * update, self.server)
        return self.moved(server, delta, statistics, {}, transforms)
