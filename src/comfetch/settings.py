"""What a user asks of a sketch, and what of it cannot be meant."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from comfetch import hashing, sketching
from comfetch.errors import OptionError
from comfetch.plan import MODES

POLICIES = ("default", "all", "paper")
Length = int | Mapping[str, int | tuple[int, int]]


@dataclass(frozen=True)
class Settings:
    """What the user asks of a sketch. Exactly one of compression and length is given."""

    compression: float | None = None
    length: Length | None = None
    key: int = 0
    mode: str = "output"
    rows: int = 1
    blocks: int | str = "auto"
    hash: str = "balanced"
    scale: str = "mean"
    policy: str = "default"
    spread: float = 0.0
    only: str | Iterable[str] | None = None
    skip: str | Iterable[str] | None = None

    def check(self) -> None:
        """Raise if a setting cannot be meant."""
        hashing.check_key(self.key)
        sketching.check_scale(self.scale)
        for name, value, known in (
            ("mode", self.mode, MODES), ("hash", self.hash, hashing.KINDS), ("policy", self.policy, POLICIES),
        ):  # fmt: skip
            if value not in known:
                raise OptionError(f"{name}={value!r} is not known. Choose one of: {', '.join(known)}.")
        if not is_count(self.rows):
            raise OptionError(f"rows={self.rows!r} is not a whole number of at least 1.")
        if self.blocks != "auto" and not is_count(self.blocks):
            raise OptionError(f"blocks={self.blocks!r} is neither 'auto' nor a whole number of at least 1.")
        if self.compression is not None:
            check_compression(self.compression)
        if self.length is not None and not isinstance(self.length, Mapping) and not is_count(self.length):
            raise OptionError(
                f"length={self.length!r} is not a whole number of at least 1, nor a mapping from layer name to one."
            )
        if isinstance(self.spread, bool) or not isinstance(self.spread, int | float) or not 0 <= self.spread <= 1:
            raise OptionError(
                f"spread={self.spread!r} is not between 0, where all layers shrink alike, and 1, where all become "
                "equally large."
            )


def check_compression(compression: float) -> None:
    """Raise if a compression is not a factor of at least 1."""
    if isinstance(compression, bool) or not isinstance(compression, int | float) or not math.isfinite(compression):
        raise OptionError(f"compression={compression!r} is not a number.")
    if compression < 1:
        raise OptionError(f"compression={compression:g} is below 1. It is a factor: 4 means four times smaller.")


def is_count(value: object) -> bool:
    """Tell a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
