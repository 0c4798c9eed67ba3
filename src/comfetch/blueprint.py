"""Build a model without its weights: uninitialised tensors go to the meta device, everything else is real.

Layers of torch make their weights with `torch.empty` and then initialise them in place. Inside `blueprint`, `torch.empty`
gives meta tensors, and each in-place write to one is noted, to be played again later on a tensor that really exists: on the
kept parameters as they are, on the sketched ones in their small shape. Buffers such as masks and rotary tables come from
other functions (`arange`, `ones`, …), so they are real, persistent or not.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from comfetch.errors import OptionError

aten = torch.ops.aten
_EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.empty_like.default}
_OVERWRITE = {"uniform_", "normal_", "fill_", "zero_", "copy_", "bernoulli_", "exponential_"}


@dataclass
class Write:
    """One in-place write: a function of the tensor written to, and the part of the storage that it wrote."""

    apply: Callable[[Tensor], Any]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    elementwise: bool


@dataclass
class Blueprint:
    """A model whose weights do not exist, and how they would have been initialised."""

    model: nn.Module
    writes: dict[int, list[Write]] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)

    def initialise(self, like: Tensor, target: Tensor) -> bool:
        """Initialise `target` as the meta tensor `like` would have been; say whether that could be done.

        A target of another shape than `like`, a small weight, takes only writes that treat all elements alike.
        """
        writes = self.writes.get(_storage(like), [])
        same = like.shape == target.shape
        if not writes or not (same or all(w.elementwise and w.size == tuple(like.shape) for w in writes)):
            return False
        with torch.no_grad():
            for write in writes:
                write.apply(target.as_strided(write.size, write.stride, write.offset) if same else target)
        return True


class _Recorder(TorchDispatchMode):
    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.blueprint = blueprint

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _EMPTY:
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], Tensor) and args[0].is_meta:
            others = [*args[1:], *kwargs.values()]
            replayable = not any(isinstance(x, Tensor) and x.is_meta for x in others)
            elementwise = not any(isinstance(x, Tensor) and x.ndim for x in others)
            self.note(args[0], lambda t: func(t, *args[1:], **kwargs), name in _OVERWRITE, elementwise, replayable)
        return result

    def note(
        self, tensor: Tensor, apply: Callable[[Tensor], Any], overwrites: bool, elementwise: bool = True,
        replayable: bool = True,
    ) -> None:  # fmt: skip
        """Note one write; one that cannot be played again leaves the tensor without a history."""
        storage = _storage(tensor)
        if storage not in self.blueprint.writes:
            self.blueprint.alive.append(tensor.untyped_storage())  # else its address could be used again
        writes = self.blueprint.writes.setdefault(storage, [])
        size = tuple(tensor.shape)
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if (overwrites and whole) or not replayable:
            writes.clear()
        if replayable:
            write = Write(apply, size, tuple(tensor.stride()), tensor.storage_offset(), elementwise and whole)
            writes.append(write)

    def truncated_normal(
        self, tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        """Stand in for torch's, which does nothing at all on the meta device."""
        original = self.original_truncated_normal
        if not tensor.is_meta:
            return original(tensor, mean, std, a, b, generator)
        self.note(tensor, lambda t: original(t, mean, std, a, b, generator), overwrites=True)
        return tensor

    original_truncated_normal = staticmethod(nn.init._no_grad_trunc_normal_)


def blueprint(constructor: Callable[[], nn.Module]) -> Blueprint:
    """Call a model's constructor without its weights coming into existence."""
    result = Blueprint(nn.Module())
    with _recording(result):
        model = constructor()
    if not isinstance(model, nn.Module):
        raise OptionError(f"{constructor!r} returned a {type(model).__name__}, not a torch.nn.Module.")
    result.model = model
    return result


def materialise(plan: Blueprint, parameter: Tensor, name: str, problems: list[str]) -> Tensor:
    """Return a real tensor, initialised as the constructor would have, for a meta tensor that stays full."""
    value = torch.empty_like(parameter, device="cpu")
    if not plan.initialise(parameter, value):
        problems.append(
            f"{name}: its initialisation cannot be repeated without the full model. "
            "Give sketch() a model instead of a constructor."
        )
    return value


@contextlib.contextmanager
def _recording(result: Blueprint) -> Iterator[None]:
    recorder = _Recorder(result)
    init: Any = nn.init
    init._no_grad_trunc_normal_ = recorder.truncated_normal
    try:
        with recorder:
            yield
    finally:
        init._no_grad_trunc_normal_ = _Recorder.original_truncated_normal


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
