"""Low-rank clients as in FedHM (Yao et al. 2021): the server keeps W, clients train factors of its truncated SVD."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from comfetch.blueprint import Blueprint, blueprint
from comfetch.errors import ModelError, OptionError
from comfetch.hashing import check_key
from comfetch.methods.averaging import Averaging, step_from
from comfetch.methods.base import Build, Client, LocalData, Message, Server, State, Trained, Upload, start_server
from comfetch.methods.factors import IN, OUT, Factored, Factoring, Factorings, build_factored, flat, plan_factors
from comfetch.methods.local import Local, train_locally
from comfetch.methods.submodel import check_classes, class_of
from comfetch.settings import Settings, check_compression
from comfetch.transforms import Transform, chain


@dataclass
class LowRank:
    """Compress both directions, memory and work: a client holds, gets and sends U and V of W ≈ U V in place of W.

    Each round the server truncates the singular values of every W, U = P √S and V = √S Qᵀ; it averages the products
    U V of its clients in full space, so these may have different ranks. A k × k convolution becomes one of k × 1, with
    rank channels, and one of 1 × k. Recurrent layers multiply the factors out, since torch's kernels take full weights.
    It does not compress what the policy leaves full, nor the rank of the server's own W. FedHM can also give clients of
    higher rank more weight in the average, and put a norm between the factors; here is neither.

    Args:
        compression: factor by which each factored weight shrinks: rank = ⌊m n / (compression (m + n))⌋ of m × n.
        capacities: compressions of the classes of clients, instead of one for all; `Client.capacity` says which.
        decay: λ of the Frobenius decay, which adds λ/2 · ‖U V‖² to the loss.
        scaled: start with the largest client's U V, scaled so that the norm of each fresh W₀ stays. Truncation takes
            most of a random W₀, which FedHM's models make up for by batch norm, and others do not. Trained weights that
            are given are never scaled.
        policy: which layers are factored, as for sketching. (FedHM leaves the first layers and the last one full.)
        local: how a client trains. averaging: how the products become one. key: unused, nothing here is random.
        server: transforms of the averaged change in full space, from the products sent to those that came back. What
            truncation took is no change of the clients': it is lost, and the transforms do not see it.
    """

    down: ClassVar[str] = "factors of truncated singular values"
    up: ClassVar[str] = "trained factors"
    holds: ClassVar[str] = "low-rank model"

    compression: float = 4
    capacities: Sequence[float] | None = None
    decay: float = 0.0
    scaled: bool = True
    policy: str = "default"
    local: Local = field(default_factory=Local)
    server: Transform = field(default_factory=chain)
    averaging: Averaging = field(default_factory=Averaging)
    key: int = 0
    name: str = "lowrank"

    def __post_init__(self) -> None:
        check_key(self.key)
        check_compression(self.compression)
        self.capacities = check_classes(self.capacities)
        Settings(compression=1, policy=self.policy).check()
        if not (isinstance(self.decay, int | float) and 0 <= self.decay < float("inf")):
            raise OptionError(f"decay={self.decay!r} is not a number of at least 0.")
        self._built: tuple[Build, Blueprint] | None = None
        self._plans: dict[float, dict[str, Factorings]] = {}
        self._svd: dict[str, tuple[Tensor, tuple[Tensor, Tensor, Tensor]]] = {}

    def plan(self, build: Build, compression: float) -> dict[str, Factorings]:
        """Return, by layer, how each weight is factored at a compression; not at all at 1."""
        if self._built is None or self._built[0] is not build:
            self._built, self._plans, self._svd = (build, blueprint(build)), {}, {}
        if compression > 1 and compression not in self._plans:
            model = self._built[1].model
            plans = plan_factors(model, self.policy, lambda m, n: max(1, int(m * n / (compression * (m + n)))), True)
            if not plans:
                why = "no layer has smaller factors. Raise it, or set policy='all'."
                raise ModelError(f"compression={compression:g}: {why}")
            self._plans[compression] = plans
        return self._plans.get(compression, {})

    def start(self, build: Build, given: State | None = None, fresh: bool = True) -> Server:
        """Start with the full model as it is built, or with the weights given, truncated and scaled if fresh."""
        classes = self.capacities or [self.compression]
        for compression in classes:
            self.plan(build, compression)
        server = start_server(build, given)
        for name, plan in self._flat(min(classes)).items() if self.scaled and fresh else ():
            full = server.weights[name]
            low = self._truncated(name, full, plan)
            server.weights[name] = low * (full.norm() / low.norm().clamp(min=torch.finfo(low.dtype).tiny))
        return server

    def audience(self, server: Server, client: Client) -> Hashable:
        """Send all of one class the same."""
        return class_of(client, self.capacities, self.compression)

    def download(self, server: Server, client: Client) -> Message:
        """Send the factors of the best approximation of each W, the other weights as they are, and the compression."""
        compression = class_of(client, self.capacities, self.compression)
        plans, state = self._flat(compression), dict(server.weights)
        for name, plan in plans.items():
            state[name + IN], state[name + OUT] = plan.truncate(*self._decomposed(name, state.pop(name), plan))
        return Message(state, {"round": str(server.round), "compression": repr(compression)})

    def client_model(self, build: Build, client: Client, message: Message) -> nn.Module:
        """Build the low-rank model; the full weights never exist."""
        plans = self.plan(build, float(message.text["compression"]))
        assert self._built is not None
        return build_factored(self._built[1], plans)

    def train(self, model: nn.Module, data: LocalData, memory: State, seed: int) -> Trained:
        """Train the factors, with the Frobenius decay if there is one."""
        if self.decay:
            data = Decayed(data, [m for m in model.modules() if isinstance(m, Factored)], self.decay)
        return train_locally(model, data, self.local, memory, seed)

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send the new factors."""
        return Message({name: tensor.clone() for name, tensor in trained.state.items()}, received.text)

    def expected(self, sent: Message) -> State:
        """Expect what was sent."""
        return sent.state

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← S − transforms(S − mean of the products U V), S the mean of those that were sent; others as they are."""
        classes = [class_of(upload.client, self.capacities, self.compression) for upload in uploads]
        plans = {compression: self._flat(compression) for compression in classes}
        parts = list(zip(uploads, classes, strict=True))
        sent, mean = dict(server.weights), dict(server.weights)
        for name, full in server.weights.items():  # one by one: all products of all clients would be many full models
            mean |= self.averaging([_lifted(upload, name, plans[k].get(name)) for upload, k in parts])
            truncated = {k: self._truncated(name, full, plan[name]) for k, plan in plans.items() if name in plan}
            if truncated:
                got = [replace(upload, message=Message({name: truncated.get(k, full)})) for upload, k in parts]
                sent |= self.averaging(got)
        weights = step_from(sent, mean, server.trained, self.server, server.transforms)
        return Server(weights, server.trained, server.round + 1, self.server.state_dict())

    def _truncated(self, name: str, weight: Tensor, plan: Factoring) -> Tensor:
        """Return the product of the factors that are sent for a weight."""
        return plan.lift(*plan.truncate(*self._decomposed(name, weight, plan)))

    def _flat(self, compression: float) -> Factorings:
        assert self._built is not None, "start() comes first"
        return flat(self.plan(self._built[0], compression))

    def _decomposed(self, name: str, weight: Tensor, plan: Factoring) -> tuple[Tensor, Tensor, Tensor]:
        """Return the singular values and vectors of a weight, computed once for all classes and for the evaluation."""
        known = self._svd.get(name)
        if known is None or known[0] is not weight:
            u, s, v = torch.linalg.svd(plan.matrices(weight), full_matrices=False)
            self._svd[name] = known = weight, (u, s, v)
        return known[1]


def _lifted(upload: Upload, name: str, plan: Factoring | None) -> Upload:
    """Return an upload of one weight alone, in full shape."""
    state = upload.message.state
    weight = state[name] if plan is None else plan.lift(state[name + IN], state[name + OUT])
    return replace(upload, message=Message({name: weight}))


@dataclass(frozen=True)
class Decayed:
    """A client's data whose loss has the Frobenius decay of a model's factored layers added."""

    data: LocalData
    layers: list[Factored]
    decay: float

    def __len__(self) -> int:
        """Count the examples."""
        return len(self.data)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Go once over the examples."""
        return self.data.batches(size, generator)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Average the loss, and add λ/2 · Σ ‖U V‖²."""
        norms = torch.stack([layer.squared_norm() for layer in self.layers])
        return self.data.loss(outputs, targets) + self.decay / 2 * norms.sum()
