"""FetchSGD (Rothchild et al. 2020): clients send a count sketch of the whole gradient."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from comfetch.errors import OptionError
from comfetch.methods.base import Message, Server, State, Trained, Upload
from comfetch.methods.compressors import (
    CountSketch,
    TopK,
    check_sketch,
    count,
    count_sketch,
    largest,
    scatter,
    table_length,
)
from comfetch.methods.flat import SEED, UPDATE, server_momentum
from comfetch.methods.replica import SparseChanges

CLEARINGS = ("subtract", "zero")


@dataclass
class FetchSGD(SparseChanges):
    """Compress the way up: a client sends the count sketch of one vector g, a table of `rows` × length.

    The server keeps momentum and error as tables, u and e, and finds in them what to apply:
    u ← ρ u + mean S(g) ; e ← e + η u ; Δ = top-k(U(e)) ; e ← e − S(Δ) ; W ← W − Δ, where U is the median of the rows.
    Clients hold the full model. g is the change by local training, unless `uploads` asks for the paper's one gradient;
    the way down is full, or with `changes` the coordinates that changed, of which there are at most k a round.

    Args:
        compression: size of the model by size of the table. rows: independent rows of the table.
        fraction: part of the coordinates that is applied in a round, k/d. The authors take below 0.01, over
            many rounds; in few rounds of dense changes, as Adam makes them, most of a model never moves unless it is
            much larger.
        momentum: ρ; None is the paper's 0.9 for gradients, and 0 for changes by local training.
        masked: set the cells of u to 0 that Δ touches (factor masking).
        clear: how Δ leaves the error: "subtract" its sketch, as above, or set to "zero" the cells that it touches, as
            the paper's experiments do; where k is large for the table, only the second is stable.
    """

    up: ClassVar[str] = "count sketch of the update"
    holds: ClassVar[str] = "full weights"

    compression: float = 5
    rows: int = 5
    fraction: float = 0.05
    momentum: float | None = None
    masked: bool = True
    clear: str = "zero"
    name: str = field(default="fetchsgd", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sketch(self.compression, self.rows)
        TopK(self.fraction)
        self.rho = server_momentum(self.momentum, self.uploads)
        if self.clear not in CLEARINGS:
            raise OptionError(f"clear={self.clear!r} is not known. Choose one of: {', '.join(CLEARINGS)}.")

    @property
    def sketcher(self) -> CountSketch:
        """The sketch that all share."""
        size = self.layout.size
        return count_sketch(self.key, size, self.rows, table_length(size, self.compression, self.rows))

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send S(g)."""
        memory.pop(SEED)
        return self.answer(received, trained, {"table": self.sketcher.sketch(self.change(received, trained, memory))})

    def expected(self, sent: Message) -> State:
        """Expect a table."""
        return self.expected_code({"table": torch.empty(self.sketcher.shape, dtype=self.layout.dtype, device="meta")})

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """Add to momentum and error, apply the largest estimates, and clear them from both."""
        mean = self.averaging(uploads)
        table = mean.pop(UPDATE + "table")
        u = self.rho * server.extra.get("momentum", torch.zeros_like(table)) + table
        e = server.extra.get("error", torch.zeros_like(table)) + self.rate * u
        estimate = self.sketcher.unsketch(e)
        index = largest(estimate, count(self.fraction, self.layout.size))
        delta = scatter(estimate[index], index, self.layout.size)
        applied = self.sketcher.sketch(delta)
        e = e - applied if self.clear == "subtract" else torch.where(applied != 0, 0, e)
        if self.masked:
            u = torch.where(applied != 0, 0, u)
        extra = {"momentum": u, "error": e, **self.note_changes(server, uploads, delta)}
        return self.moved(server, delta, mean, extra, {})
