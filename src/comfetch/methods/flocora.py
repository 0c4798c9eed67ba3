"""FLoCoRA (Grativol Ribeiro et al. 2024): train low-rank adapters of a frozen random model, and send them in int8."""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from comfetch import hashing
from comfetch.blueprint import Blueprint, blueprint
from comfetch.errors import ModelError, OptionError
from comfetch.methods.averaging import Averaging, step_from
from comfetch.methods.base import (
    Build,
    Client,
    LocalData,
    Message,
    Server,
    State,
    Trained,
    Upload,
    check_upload,
    start_server,
)
from comfetch.methods.factors import BASE, IN, OUT, Factoring, Factorings, build_factored, flat, plan_factors
from comfetch.methods.local import Local, train_locally
from comfetch.methods.once import has_it, keep, note_holders, part
from comfetch.settings import Settings
from comfetch.transforms import Transform, chain

FROZEN, ADAPTER, SCALE, LEAST = "base/", "adapter/", "/scale", "/least"


@dataclass
class FLoCoRA:
    """Compress both directions: adapters B and A of W = W₀ + scale · B A travel in int8, norms and biases in float32.

    A client holds the full frozen W₀ and the adapters, and does the full layers' work and the adapters'; it needs no
    gradient of W₀ and no optimiser state for it. W₀ is drawn from the key, so that the key alone travels; weights that
    are given instead are sent to each client once, and kept there. The adapter of a k × k convolution is one of k × k
    with rank channels and one of 1 × 1. It differs from the paper in what else is trained in full: the layers that the
    policy of sketching leaves full, not only norms and the final linear layer; and in W₀, which is uniform with
    variance 2 / inputs whatever the model.

    Args:
        rank: of the adapters.
        scale: their factor, α / rank in the paper, which takes 16 with SGD. Adam's steps do not depend on it, so with
            Adam it multiplies the learning rate of the adapters, and of nothing else.
        quantised: send int8, one affine scale for each row; or float32.
        policy: which layers are frozen, as for sketching; "paper" is all but the final linear layer.
        local: how a client trains. averaging: how uploads become one. key: what W₀ and A are drawn from.
        server: transforms of the averaged change of the adapters and of what is trained in full, from what was sent,
            decoded, to what came back.
    """

    down: ClassVar[str] = "adapters in int8; given base weights once"
    up: ClassVar[str] = "adapters in int8"
    holds: ClassVar[str] = "full frozen weights and adapters"

    rank: int = 32
    scale: float = 16.0
    quantised: bool = True
    policy: str = "default"
    local: Local = field(default_factory=Local)
    server: Transform = field(default_factory=chain)
    averaging: Averaging = field(default_factory=Averaging)
    key: int = 0
    name: str = "flocora"

    def __post_init__(self) -> None:
        hashing.check_key(self.key)
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise OptionError(f"rank={self.rank!r} is not a whole number of at least 1.")
        if not (isinstance(self.scale, int | float) and 0 < self.scale < math.inf):
            raise OptionError(f"scale={self.scale!r} is not a number above 0.")
        Settings(compression=1, policy=self.policy).check()
        self._cache: tuple[Build, Blueprint, dict[str, Factorings]] | None = None
        self._own: State = {}

    def start(self, build: Build, given: State | None = None, fresh: bool = True) -> Server:
        """Start with a base drawn from the key, or with the weights given, and adapters that change nothing yet."""
        self._plan(build)
        server = start_server(build, given)
        for name, plan in self._flat().items():
            weight = server.weights[name]
            if given is None:
                server.weights[name] = draw_base(hashing.fold(self.key, "base", name), plan).to(weight.dtype)
            else:
                server.extra[FROZEN + name] = weight.clone()
            small, out = (torch.zeros(shape, dtype=weight.dtype) for shape in plan.shapes)
            generator = torch.Generator().manual_seed(hashing.fold(self.key, "adapter", name) >> 1)
            small.uniform_(-1, 1, generator=generator).mul_(plan.size[1] ** -0.5)
            server.extra |= {ADAPTER + name + IN: small, ADAPTER + name + OUT: out}
        return server

    def audience(self, server: Server, client: Client) -> Hashable:
        """Send everybody the same, but a given base only to those who do not have it."""
        return not part(server.extra, FROZEN) or has_it(server, client)

    def download(self, server: Server, client: Client) -> Message:
        """Send the adapters and what is trained in full, quantised, and the key."""
        self._own = part(server.extra, FROZEN)
        state = self._code({**self._rest(server.weights), **part(server.extra, ADAPTER)})
        if not self.audience(server, client):
            state |= {FROZEN + name: tensor for name, tensor in self._own.items()}
        base = "given" if self._own else "key"
        return Message(state, {"round": str(server.round), "key": f"{self.key:016x}", "base": base})

    def client_model(self, build: Build, client: Client, message: Message) -> nn.Module:
        """Build the model with adapters beside each frozen weight, which `load` fills."""
        built, plans = self._plan(build)
        return build_factored(built, plans, self.scale, based=True)

    def load(self, model: nn.Module, received: Message, memory: State) -> None:
        """Draw the base or take the one sent, and put the decoded adapters into a model."""
        given = keep(received.state, FROZEN, memory, self._own) if received.text["base"] == "given" else {}
        sent = {name: x for name, x in received.state.items() if not name.startswith(FROZEN)}
        model.load_state_dict(decode(sent))
        for name, plan in self._flat().items():
            base = model.get_buffer(name + BASE)
            if name in given:
                base.copy_(given[name])
            elif bool(base.isnan().any()):  # it never changes, so it is drawn once for a model
                base.copy_(draw_base(hashing.fold(self.key, "base", name), plan))

    def train(self, model: nn.Module, data: LocalData, memory: State, seed: int) -> Trained:
        """Train the adapters, and what is trained in full."""
        return train_locally(model, data, self.local, memory, seed)

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send the adapters and what is trained in full, quantised."""
        return Message(self._code(trained.state), received.text)

    def expected(self, sent: Message) -> State:
        """Expect what was sent, without the base."""
        return {name: tensor for name, tensor in sent.state.items() if not name.startswith(FROZEN)}

    def check(self, upload: Upload, sent: Message) -> None:
        """Refuse codes whose decoded values cannot be an answer."""
        received = decode(self.expected(sent))
        check_upload(replace(upload, message=Message(decode(upload.message.state))), Message(received), received)

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """X ← S − transforms(S − mean of the uploads), for each B, each A, and what is trained in full.

        S is what was sent; both are decoded. W = W₀ + scale · B A.
        """
        mean = self.averaging([replace(u, message=Message(decode(u.message.state))) for u in uploads])
        adapters, weights = part(server.extra, ADAPTER), self._rest(server.weights)
        trained = [*adapters, *(name for name in server.trained if name in weights)]
        sent = decode(self._code({**weights, **adapters}))
        state = step_from(sent, mean, trained, self.server, server.transforms)
        given = part(server.extra, FROZEN)
        extra = note_holders(server, uploads) if given else dict(server.extra)
        for name, plan in self._flat().items():
            small, out = state.pop(name + IN), state.pop(name + OUT)
            extra |= {ADAPTER + name + IN: small, ADAPTER + name + OUT: out}
            base = given[name] if given else draw_base(hashing.fold(self.key, "base", name), plan).to(small.dtype)
            state[name] = base + self.scale * plan.lift(small, out)
        return Server({**server.weights, **state}, server.trained, server.round + 1, self.server.state_dict(), extra)

    def _plan(self, build: Build) -> tuple[Blueprint, dict[str, Factorings]]:
        if self._cache is None or self._cache[0] is not build:
            built = blueprint(build)
            plans = plan_factors(built.model, self.policy, lambda m, n: self.rank)
            if not plans:
                raise ModelError(f"rank={self.rank}: no layer has smaller adapters. Lower it, or set policy='all'.")
            self._cache = build, built, plans
        return self._cache[1:]

    def _flat(self) -> Factorings:
        assert self._cache is not None, "start() or client_model() comes first"
        return flat(self._cache[2])

    def _rest(self, weights: State) -> State:
        return {name: x for name, x in weights.items() if name not in self._flat()}

    def _code(self, state: State) -> State:
        """Quantise all that has two dimensions or more."""
        coded: State = {}
        for name, tensor in state.items():
            if self.quantised and tensor.is_floating_point() and tensor.ndim > 1:
                coded[name], coded[name + SCALE], coded[name + LEAST] = quantise(tensor)
            else:
                coded[name] = tensor.clone()
        return coded


def quantise(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode each row x in int8: scale = (max x − min x) / 255, code = round((x − min x) / scale) − 128.

    Returns:
        The codes, and for each row its scale and its least value.
    """
    rows = tensor.detach().flatten(1)
    least = rows.amin(1)
    scale = (rows.amax(1) - least) / 255
    steps = (rows - least[:, None]) / torch.where(scale > 0, scale, 1)[:, None]
    return (steps.round().clamp_(0, 255) - 128).to(torch.int8).view(tensor.shape), scale, least


def decode(state: State) -> State:
    """Decode what `quantise` has encoded, x̂ = (code + 128) · scale + least; other tensors are left as they are."""
    decoded: State = {}
    for name, tensor in state.items():
        if name + SCALE in state:
            scale, least = state[name + SCALE], state[name + LEAST]
            rows = (tensor.flatten(1).to(scale.dtype) + 128) * scale[:, None] + least[:, None]
            decoded[name] = rows.view(tensor.shape)
        elif not name.endswith((SCALE, LEAST)):
            decoded[name] = tensor
    return decoded


def draw_base(key: int, plan: Factoring) -> Tensor:
    """Draw a weight uniformly with variance 2 / inputs, by integer arithmetic on a key: the same on every machine."""
    count = math.prod(plan.shape)
    with np.errstate(over="ignore"):
        words = hashing.mix(np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    unit = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - 1
    return torch.from_numpy(unit * np.float32(math.sqrt(6 / plan.size[1]))).view(plan.shape)
