"""Train a part of the weights, chosen before training: a random mask, or the largest weights (L1)."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from comfetch import hashing
from comfetch.blueprint import Blueprint, blueprint
from comfetch.errors import OptionError
from comfetch.layers import REGISTRY, Recipe, meta_copy
from comfetch.methods.averaging import Averaging, step_from
from comfetch.methods.base import Build, Client, LocalData, Message, Server, State, Trained, Upload, start_server
from comfetch.methods.factors import call_with, copy_options, rebuild
from comfetch.methods.local import Local, train_locally
from comfetch.methods.once import has_it, keep, note_holders, part
from comfetch.policy import make_plan
from comfetch.settings import Settings, check_compression
from comfetch.transforms import Transform, chain

KINDS = ("random", "l1")
MASK = "mask/"


@dataclass
class Mask:
    """Compress both directions and the optimiser's state: a client gets, trains and sends the kept weights alone.

    They are packed; all others are 0, on the server, too. Torch's kernels are dense, so each masked layer writes its
    kept values into a full weight in the forward pass, which lives until the backward pass: neither that memory nor the
    work is cut.

    Args:
        compression: factor by which each masked weight shrinks; the mask is fixed before training.
        kind: "random", drawn from the key, which alone travels; or "l1", the largest initial weights of each layer: its
            bits are sent to each client once, and kept there.
        scaled: scale the kept initial weights so that the norm of each W₀ stays, W₀ ← M∘W₀ · ‖W₀‖ / ‖M∘W₀‖, for random
            masks about √compression. Trained weights that are given are never scaled.
        policy: which layers are masked, as for sketching; "paper" is all but the final linear layer.
        local: how a client trains. averaging: how uploads become one. key: what random masks are drawn from.
        server: transforms of the averaged change of the kept weights; the others stay 0.
    """

    down: ClassVar[str] = "kept weights; L1: and the mask, once"
    up: ClassVar[str] = "kept weights"
    holds: ClassVar[str] = "kept weights; a full copy of each layer in training"

    compression: float = 4
    kind: str = "random"
    scaled: bool = True
    policy: str = "default"
    local: Local = field(default_factory=Local)
    server: Transform = field(default_factory=chain)
    averaging: Averaging = field(default_factory=Averaging)
    key: int = 0
    name: str = "mask"

    def __post_init__(self) -> None:
        hashing.check_key(self.key)
        check_compression(self.compression)
        if self.kind not in KINDS:
            raise OptionError(f"kind={self.kind!r} is not known. Choose one of: {', '.join(KINDS)}.")
        Settings(compression=1, policy=self.policy).check()
        self._cache: tuple[Build, Blueprint, dict[str, torch.Size]] | None = None
        self._own: State = {}
        self._drawn: State = {}

    @property
    def pools(self) -> bool:
        """Say that a step uses the mean of uploads alone; for L1 the server also notes who has the mask."""
        return self.kind == "random"

    def start(self, build: Build, given: State | None = None, fresh: bool = True) -> Server:
        """Start with the model as it is built, or with the weights given, masked and scaled if fresh."""
        shapes = self._plan(build)[1]
        server = start_server(build, given)
        for name in shapes:
            full = server.weights[name]
            kept = self._random(name, full.shape) if self.kind == "random" else largest(full, self._count(full.shape))
            masked = spread(full.flatten()[kept], kept, full.shape)
            norm = torch.linalg.vector_norm(masked)
            if self.scaled and fresh and norm > 0:
                masked *= torch.linalg.vector_norm(full) / norm
            server.weights[name] = masked
            if self.kind == "l1":
                server.extra[MASK + name] = pack_bits(kept, full.numel())
        return server

    def audience(self, server: Server, client: Client) -> Hashable:
        """Send everybody the same, but the mask only to those who do not have it."""
        return self.kind == "random" or has_it(server, client)

    def download(self, server: Server, client: Client) -> Message:
        """Send the kept weights of each masked layer, packed, the other weights as they are, and the key."""
        self._own = part(server.extra, MASK)
        state = self._packed(server.weights, self._kept(self._own))
        if not self.audience(server, client):
            state |= {MASK + name: bits for name, bits in self._own.items()}
        return Message(state, {"round": str(server.round), "key": f"{self.key:016x}", "kind": self.kind})

    def client_model(self, build: Build, client: Client, message: Message) -> nn.Module:
        """Build a model whose masked layers hold their kept weights; which these are is said by `load`."""
        built, shapes = self._plan(build)
        layers: dict[int, Any] = {}
        for name, layer in built.model.named_modules(remove_duplicate=False):
            recipe = REGISTRY[type(layer)](layer) if type(layer) in REGISTRY else ""
            prefix = f"{name}." if name else ""
            if isinstance(recipe, Recipe) and all(prefix + weight in shapes for weight in recipe.weights):
                counts = {weight: self._count(shapes[prefix + weight]) for weight in recipe.weights}
                layers.setdefault(id(layer), Masked(layer, counts))
        return rebuild(built, layers)

    def load(self, model: nn.Module, received: Message, memory: State) -> None:
        """Put the kept weights into a model, and say where they belong."""
        bits = {} if self.kind == "random" else keep(received.state, MASK, memory, self._own)
        kept = self._kept(bits)
        model.load_state_dict({name: x for name, x in received.state.items() if not name.startswith(MASK)})
        for name, layer in model.named_modules(remove_duplicate=False):
            if isinstance(layer, Masked):
                for weight in layer.masked:
                    layer.get_buffer(f"{weight}_index").copy_(kept[f"{name}.{weight}" if name else weight])

    def train(self, model: nn.Module, data: LocalData, memory: State, seed: int) -> Trained:
        """Train the kept weights."""
        return train_locally(model, data, self.local, memory, seed)

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send the new kept weights."""
        return Message({name: tensor.clone() for name, tensor in trained.state.items()}, received.text)

    def expected(self, sent: Message) -> State:
        """Expect what was sent, without the mask."""
        return {name: tensor for name, tensor in sent.state.items() if not name.startswith(MASK)}

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← W − transforms(W − mean of the uploads) of the kept weights, spread over the full shapes."""
        kept = self._kept(part(server.extra, MASK))
        sent, mean = self._packed(server.weights, kept), self.averaging(uploads)
        weights = step_from(sent, mean, server.trained, self.server, server.transforms)
        for name, index in kept.items():
            weights[name] = spread(weights[name], index, server.weights[name].shape)
        extra = note_holders(server, uploads) if self.kind == "l1" else {}
        return Server(weights, server.trained, server.round + 1, self.server.state_dict(), extra)

    def _plan(self, build: Build) -> tuple[Blueprint, dict[str, torch.Size]]:
        """Return the model without its weights, and the shapes of those that are masked."""
        if self._cache is None or self._cache[0] is not build:
            built = blueprint(build)
            plan = make_plan(built.model, Settings(compression=1, policy=self.policy))
            self._cache, self._drawn = (build, built, {name: torch.Size(plan[name].shape) for name in plan}), {}
        return self._cache[1:]

    def _count(self, shape: torch.Size) -> int:
        return max(1, int(shape.numel() / self.compression + 0.5))

    def _kept(self, bits: State) -> State:
        """Return the places of the kept weights, by name."""
        assert self._cache is not None, "start() or client_model() comes first"
        shapes = self._cache[2]
        if self.kind == "random":
            return {name: self._random(name, shape) for name, shape in shapes.items()}
        return {name: unpack_bits(bits[name], shape.numel()) for name, shape in shapes.items()}

    def _random(self, name: str, shape: torch.Size) -> Tensor:
        if name not in self._drawn:
            self._drawn[name] = draw_mask(hashing.fold(self.key, "mask", name), shape.numel(), self._count(shape))
        return self._drawn[name]

    def _packed(self, weights: State, kept: State) -> State:
        return {name: x.flatten()[kept[name]] if name in kept else x for name, x in weights.items()}


class Masked(nn.Module):
    """A layer of torch whose weights are kept as 1-D tensors under their own names, and spread in each forward pass."""

    def __init__(self, full: nn.Module, counts: dict[str, int]) -> None:
        super().__init__()
        copy_options(full, self)
        self._full = (meta_copy(full),)  # in a tuple, so that it is no submodule
        self.shapes = {name: parameter.shape for name, parameter in full.named_parameters()}
        self.masked = list(counts)
        for name, parameter in full.named_parameters():
            shape = (counts[name],) if name in counts else parameter.shape
            home, local = self._home(name)
            value = torch.full(shape, torch.nan, dtype=parameter.dtype)
            home.register_parameter(local, nn.Parameter(value, parameter.requires_grad))
            if name in counts:
                home.register_buffer(f"{local}_index", torch.zeros(shape, dtype=torch.int32), persistent=False)
        self.train(full.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run torch's layer with zeros where no weight is kept."""
        weights: State = dict(self.named_parameters())
        for name in self.masked:
            weights[name] = spread(weights[name], self.get_buffer(f"{name}_index"), self.shapes[name])
        return call_with(self._full[0], weights, self.training, *args, **kwargs)

    def _home(self, name: str) -> tuple[nn.Module, str]:
        """Return the module that holds a parameter, made if need be, and the parameter's last name."""
        path, _, local = name.rpartition(".")
        if path and not hasattr(self, path):
            self.add_module(path, nn.Module())
        return self.get_submodule(path), local


def spread(values: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Write values to their places in a tensor of zeros."""
    return values.new_zeros(shape.numel()).index_put((index,), values).view(shape)


def draw_mask(key: int, size: int, count: int) -> Tensor:
    """Draw `count` of `size` places by a key, in ascending order.

    >>> draw_mask(3, size=100, count=2).shape
    torch.Size([2])
    """
    rank = hashing.draw([key], size, size).index[0]
    return _places(rank < count)


def largest(full: Tensor, count: int) -> Tensor:
    """Return the places of the largest magnitudes, in ascending order; of equal ones the first.

    >>> largest(torch.tensor([[1.0, -3.0], [2.0, 0.0]]), 2)
    tensor([1, 2], dtype=torch.int32)
    """
    return full.flatten().abs().sort(descending=True, stable=True).indices[:count].sort().values.int()


def pack_bits(index: Tensor, size: int) -> Tensor:
    """Pack a set of places into bits, eight a byte."""
    bits = np.zeros(size, dtype=bool)
    bits[index.numpy()] = True
    return torch.from_numpy(np.packbits(bits))


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """Return the places that `pack_bits` has packed, in ascending order."""
    return _places(np.unpackbits(packed.cpu().numpy(), count=size))


def _places(mask: np.ndarray) -> Tensor:
    return torch.from_numpy(mask.nonzero()[0].astype(np.int32))
