"""Top-k: only the largest coordinates of the update are applied, chosen by the server, or by each client for itself."""

from dataclasses import dataclass, field
from typing import ClassVar

from comfetch.methods.base import Message, Server, State, Trained, Upload
from comfetch.methods.compressors import TopK
from comfetch.methods.flat import UPDATE, server_momentum
from comfetch.methods.replica import SparseChanges
from comfetch.transforms import Transform, chain, error_feedback, momentum, scale, top_k

ERROR = "error"


@dataclass
class TrueTopK(SparseChanges):
    """Compress the way down only: the server applies the k largest coordinates of the averaged update.

    u ← ρ u + mean g ; e ← e + η u ; Δ = top-k(e) ; e ← e − Δ ; W ← W − Δ. Clients hold the full model and send the
    full update: this is the bound that sketches of the update try to reach (Rothchild et al. 2020). A download has at
    most k new coordinates a round, which `changes` makes use of.

    Args:
        fraction: part of all coordinates that is applied in a round, k/d.
        momentum: ρ; None is the paper's 0.9 for gradients, and 0 for changes by local training.
        masked: set u to 0 where Δ ≠ 0 (factor masking).
    """

    up: ClassVar[str] = "full update"
    holds: ClassVar[str] = "full weights"

    fraction: float = 0.05
    momentum: float | None = None
    masked: bool = True
    changes: bool = field(default=True, kw_only=True)
    name: str = field(default="true-top-k", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        TopK(self.fraction)
        self.rho = server_momentum(self.momentum, self.uploads)
        self.server: Transform = chain(
            momentum(self.rho, self.masked), scale(self.rate), error_feedback(top_k(self.fraction, "global"))
        )

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← W − Δ, Δ by the transforms above."""
        update, statistics = self.average(self.decoded(uploads))
        self.server.load_state_dict(server.transforms)
        applied = self.server({UPDATE: update})
        self.server.applied(applied)
        extra = self.note_changes(server, uploads, applied[UPDATE])
        return self.moved(server, applied[UPDATE], statistics, extra, self.server.state_dict())


@dataclass
class LocalTopK(TrueTopK):
    """Compress the way up: each client sends the k largest coordinates of v = e + g and keeps e ← v − top-k(v).

    The server averages what it gets: u ← ρ u + mean top-k(v_i) ; W ← W − η u. Clients hold the full model and their
    error e. As clients choose different coordinates, many change in a round, and all do with momentum: `changes` helps
    little.
    """

    up: ClassVar[str] = "largest coordinates of the update, with their places"
    holds: ClassVar[str] = "full weights, and as many not yet sent"

    momentum: float | None = 0.0
    masked: bool = field(default=False, init=False)
    changes: bool = field(default=False, kw_only=True)
    name: str = field(default="local-top-k", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coder = TopK(self.fraction)
        self.server = chain(momentum(self.rho, self.masked), scale(self.rate))

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send top-k(v), v = e + g, and keep the rest."""
        v = self.change(received, trained, memory)
        v = v + memory[ERROR] if ERROR in memory else v
        code = self.coder.encode(v, self.layout.sizes, self.draws(memory))
        memory[ERROR] = v - self.coder.decode(code, self.layout.sizes)
        return self.answer(received, trained, code)
