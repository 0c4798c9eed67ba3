"""Count the bytes of training a model: weights, gradients, optimiser state, buffers, activations, traffic.

Predicted and measured numbers come from one instrument: `track` follows every tensor storage from its birth to its
death while one training step runs. Measuring runs the step for real; predicting runs it on the meta device, where
nothing is allocated. (CPU torch has no counter of peak memory; workspaces inside a kernel are not seen by either.)
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from comfetch.errors import ModelError, OptionError
from comfetch.layers import SketchedLayer
from comfetch.plan import format_table

MakeOptimiser = Callable[[Any], torch.optim.Optimizer]
OPTIMISERS: dict[str, MakeOptimiser] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.0),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.0),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.0),
}
KEY_BYTES = 8


@dataclass(frozen=True)
class Bytes:
    """Bytes by kind. `activations` is what the step's peak holds beyond weights, gradients, state and buffers."""

    weights: int = 0
    gradients: int = 0
    optimiser: int = 0
    buffers: int = 0
    activations: int = 0
    download: int = 0
    upload: int = 0

    @property
    def total(self) -> int:
        """Bytes in the client's memory at the peak of a training step."""
        return self.weights + self.gradients + self.optimiser + self.buffers + self.activations


@dataclass(frozen=True)
class Footprint:
    """The bytes of a model, full against sketched. `str()` is the table."""

    full_bytes: Bytes
    sketched_bytes: Bytes
    layers: list[tuple[str, int, int]] = field(default_factory=list)
    with_activations: bool = False

    @property
    def full(self) -> int:
        """Total bytes of the full model's training step."""
        return self.full_bytes.total

    @property
    def sketched(self) -> int:
        """Total bytes of the sketched model's training step."""
        return self.sketched_bytes.total

    def __str__(self) -> str:
        rows = [(name, *_cells(full, small)) for name, full, small in self.layers]
        kinds = ["weights", "gradients", "optimiser", "buffers", "activations", "total", "download", "upload"]
        if not self.with_activations:
            kinds.remove("activations")
        rows += [(k, *_cells(getattr(self.full_bytes, k), getattr(self.sketched_bytes, k))) for k in kinds]
        return format_table(("", "full", "sketched", "factor"), rows)


def footprint(model: nn.Module, batch: Any = None, *, optimiser: str = "adam", measured: bool = False) -> Footprint:
    """Count the bytes of training `model` and its full twin; without `batch`, all but the activations.

    Args:
        model: a sketched model, or a full one, which then stands on both sides.
        batch: example input: a tensor, or a tuple or dictionary of arguments.
        optimiser: one of OPTIMISERS.
        measured: run one step for real, instead of on the meta device. The full twin is always predicted.
    """
    check_optimiser(optimiser)
    full = meta_model(model, full=True)
    with_activations = batch is not None
    return Footprint(
        full_bytes=count(full, batch, optimiser),
        sketched_bytes=count(copy.deepcopy(model) if measured else meta_model(model), batch, optimiser),
        layers=[*_by_layer(model)],
        with_activations=with_activations,
    )


def count(model: nn.Module, batch: Any, optimiser: str | MakeOptimiser = "adam") -> Bytes:
    """Count the bytes of a model where it is: predicted on the meta device, measured elsewhere. Changes its weights."""
    make = OPTIMISERS[optimiser] if isinstance(optimiser, str) else optimiser
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    weights, gradients = _nbytes(parameters), _nbytes(trained)
    buffers = _nbytes(model.buffers())
    wire = _nbytes(model.state_dict().values()) + KEY_BYTES
    activations = 0
    if batch is None:
        state = _state_bytes(trained, make)
    else:
        peak, state = step_bytes(model, batch, make)
        activations = max(0, peak - weights - gradients - state - buffers)
    return Bytes(weights, gradients, state, buffers, activations, download=wire, upload=wire)


def step_bytes(model: nn.Module, batch: Any, optimiser: MakeOptimiser) -> tuple[int, int]:
    """Run two training steps, and return the peak of live bytes in the second one and the optimiser's bytes.

    The first step only makes the optimiser's state. Where a gradient is freed early or a state is not there yet, the
    peak of the steady state is still what a client must have.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = pytree.tree_map_only(Tensor, lambda t: t.to(device), batch)
    step = optimiser(model.parameters())
    model.train()
    try:
        _train_step(model, batch, step)
        held = _nbytes(_state_tensors(step))
        with track(_everything(model, step, batch)) as live:
            _train_step(model, batch, step)
    except (NotImplementedError, RuntimeError) as error:
        where = "without running it for real: measured=True may help" if device.type == "meta" else "one step"
        raise ModelError(f"Cannot count the activations of {type(model).__name__} {where}. ({error})") from error
    return live.peak - _nbytes(t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)), held


@dataclass
class Live:
    """Live bytes of tensor storages, now and at their peak, and the largest single one."""

    now: int = 0
    peak: int = 0
    largest: int = 0
    seen: dict[int, Any] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        """Follow a tensor's storage until it dies."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self.seen or not size:
            return
        self.seen[address] = weakref.finalize(storage, self._drop, address, size)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)

    def _drop(self, address: int, size: int) -> None:
        del self.seen[address]
        self.now -= size


class _Tracker(TorchDispatchMode):
    def __init__(self, live: Live) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.live.add(leaf)
        return result


@contextmanager
def track(tensors: Any = ()) -> Iterator[Live]:
    """Follow the storages of `tensors` and of every tensor made inside the block."""
    live = Live()
    for tensor in tensors:
        live.add(tensor)
    live.largest = 0
    try:
        with _Tracker(live):
            yield live
    finally:
        for finalizer in list(live.seen.values()):
            finalizer.detach()


def meta_model(model: nn.Module, full: bool = False) -> nn.Module:
    """Copy a model onto the meta device; with `full`, its full twin. No values are copied."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        twin = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    if full:
        for module in model.modules():
            if isinstance(module, SketchedLayer):
                memo[id(module)] = copy.deepcopy(module.full).train(module.training)
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


def check_optimiser(optimiser: str) -> None:
    """Raise if `optimiser` is not one of OPTIMISERS."""
    if optimiser not in OPTIMISERS:
        raise OptionError(f"optimiser={optimiser!r} is not known. Choose one of: {', '.join(OPTIMISERS)}.")


def format_bytes(n: float) -> str:
    """Write a number of bytes for people.

    >>> format_bytes(512), format_bytes(44_900_000)
    ('512 B', '44.9 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError("unreachable")


def _train_step(model: nn.Module, batch: Any, optimiser: torch.optim.Optimizer) -> None:
    """Run one step on the mean of all outputs, as a training loop does it."""
    optimiser.zero_grad()
    output = _call(model, batch)
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise ModelError(f"{type(model).__name__} returned nothing that depends on its weights.")
    loss = torch.stack([t.mean() for t in leaves]).sum()
    del output, leaves
    loss.backward()
    optimiser.step()


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _everything(model: nn.Module, optimiser: torch.optim.Optimizer, batch: Any) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from (p.grad for p in model.parameters() if p.grad is not None)
    yield from model.buffers()
    yield from _state_tensors(optimiser)
    yield from (t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor))


def _state_bytes(parameters: Sequence[Tensor], make: MakeOptimiser) -> int:
    """Let the optimiser make its state for parameters and gradients on the meta device."""
    twins = [nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters]
    for twin in twins:
        twin.grad = torch.empty_like(twin)
    optimiser = make(twins)
    optimiser.step()
    return _nbytes(_state_tensors(optimiser))


def _state_tensors(optimiser: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield what the optimiser holds, and what its groups carry beside their parameters."""
    return (
        t for s in (*optimiser.state.values(), *optimiser.param_groups) for t in s.values() if isinstance(t, Tensor)
    )


def _by_layer(model: nn.Module) -> Iterator[tuple[str, int, int]]:
    for name, module in model.named_modules():
        if isinstance(module, SketchedLayer):
            yield name or type(module).__name__, _nbytes(module.full.parameters()), _nbytes(module.parameters())


def _nbytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _cells(full: int, small: int) -> tuple[str, str, str]:
    return format_bytes(full), format_bytes(small), f"{full / small:.2f}" if small else "-"
