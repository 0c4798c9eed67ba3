"""Sketched-SGD (Ivkin et al. 2019): clients send a sketch, and then the exact values of what the server found in it."""

import math
from dataclasses import dataclass, field, replace
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
from comfetch.methods.flat import SEED, UPDATE
from comfetch.methods.replica import SparseChanges

CANDIDATES, ERROR, VALUES = "candidates", "error", "values"


@dataclass
class SketchedSGD(SparseChanges):
    """Compress the way up in two exchanges: a count sketch, then exact values of the P·k largest estimates.

    Client i adds to what it has not sent yet, v_i = a_i + η g_i, and sends S(v_i); the server asks for the places C of
    the P·k largest |U(mean S(v_i) + S(a))|; the client sends v_i[C] and keeps a_i, which is v_i without C. The server
    applies the k largest of mean v_i[C] + a[C] and keeps the others in its own a. The paper leaves these on the
    clients; the sum of all that is kept, and so the weights, are the same, but a client need not be told what was
    applied, and may stay away. Clients hold the full model and a_i. Momentum, which the paper's experiments add on the
    clients, is left to the local optimiser. g is the change by local training, unless `uploads` asks for one gradient.

    Args:
        compression: size of the model by size of the table. rows: independent rows of the table.
        fraction: part of the coordinates that is applied in a round, k/d. candidates: P.
    """

    up: ClassVar[str] = "count sketch of the update, then exact values of the largest"
    holds: ClassVar[str] = "full weights, and as many not yet sent"

    compression: float = 10
    rows: int = 5
    fraction: float = 0.05
    candidates: float = 2
    changes: bool = field(default=True, kw_only=True)
    name: str = field(default="sketched-sgd", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sketch(self.compression, self.rows)
        TopK(self.fraction)
        if not (isinstance(self.candidates, int | float) and 1 <= self.candidates < math.inf):
            raise OptionError(f"candidates={self.candidates!r} is below 1. So many times k values are asked for.")

    @property
    def sketcher(self) -> CountSketch:
        """The sketch that all share."""
        size = self.layout.size
        return count_sketch(self.key, size, self.rows, table_length(size, self.compression, self.rows))

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send S(v) with v = a + η g, and keep v."""
        memory.pop(SEED)
        change = self.rate * self.change(received, trained, memory)
        memory[ERROR] = memory[ERROR] + change if ERROR in memory else change
        return self.answer(received, trained, {"table": self.sketcher.sketch(memory[ERROR])})

    def expected(self, sent: Message) -> State:
        """Expect a table, or the values that were asked for."""
        if CANDIDATES in sent.state:
            return {VALUES: torch.empty(len(sent.state[CANDIDATES]), dtype=self.layout.dtype, device="meta")}
        return self.expected_code({"table": torch.empty(self.sketcher.shape, dtype=self.layout.dtype, device="meta")})

    def request(self, server: Server, uploads: list[Upload]) -> tuple[Server, Message]:
        """Ask for the places of the largest estimates; statistics are averaged now."""
        mean = self.averaging(uploads)
        table = mean.pop(UPDATE + "table")
        if ERROR in server.extra:
            table = table + self.sketcher.sketch(server.extra[ERROR])
        wanted = min(self.layout.size, math.floor(self.candidates * count(self.fraction, self.layout.size)))
        index = largest(self.sketcher.unsketch(table), wanted).to(torch.int32)
        noted = replace(server, weights={**server.weights, **mean}, extra={**server.extra, CANDIDATES: index})
        return noted, Message({CANDIDATES: index}, {"round": str(server.round)})

    def respond(self, request: Message, memory: State) -> Message:
        """Send the values asked for, and keep the others."""
        index = request.state[CANDIDATES].long()
        values = memory[ERROR][index]
        memory[ERROR] = memory[ERROR].index_fill(0, index, 0)
        return Message({VALUES: values}, request.text)

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """Apply the largest of the exact values, and keep the others as the server's own error."""
        index, size = server.extra[CANDIDATES].long(), self.layout.size
        values = self.averaging(uploads)[VALUES]
        error = server.extra.get(ERROR, values.new_zeros(size))
        total = error.index_add(0, index, values)
        applied = index[largest(total[index], count(self.fraction, size))]
        delta = scatter(total[applied], applied, size)
        extra = {ERROR: total - delta, **self.note_changes(server, uploads, delta)}
        return self.moved(server, delta, {}, extra, {})
