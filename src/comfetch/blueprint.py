"""Build a model without its weights: uninitialised tensors go to the meta device, everything else is real.

Layers of torch make their weights with `torch.empty` and then initialise them in place. Inside `blueprint`,
`torch.empty` gives meta tensors, and each in-place write to one is noted, to be played again later on a tensor that
really exists: on the kept parameters as they are, on the sketched ones in their small shape. Copies take the notes
along. Buffers such as masks and rotary tables come from other functions (`arange`, `ones`, …), so they are real,
persistent or not.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from comfetch.errors import ModelError, OptionError

aten = torch.ops.aten
_EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.empty_like.default}
_COPY = {aten.clone.default, aten._to_copy.default}
_OVERWRITE = {"uniform_", "normal_", "fill_", "zero_", "copy_", "bernoulli_", "exponential_"}
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


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
    lost: set[int] = field(default_factory=set)  # storages that hold something that cannot be played again
    alive: list[Any] = field(default_factory=list)

    def initialise(self, like: Tensor, target: Tensor) -> bool:
        """Initialise `target` as the meta tensor `like` would have been; say whether that could be done.

        A target of another shape than `like`, a small weight, takes only writes that treat all elements alike.
        """
        writes = self.writes.get(_storage(like), [])
        same = like.shape == target.shape
        if (
            not writes
            or _storage(like) in self.lost
            or not (same or all(w.elementwise and w.size == tuple(like.shape) for w in writes))
        ):
            return False
        with torch.no_grad():
            for write in writes:
                write.apply(target.as_strided(write.size, write.stride, write.offset) if same else target)
        return True

    def forget_row(self, like: Tensor, row: int) -> None:
        """Forget what was written to one row alone (the zeros of a padding index)."""
        writes = self.writes.get(_storage(like), [])
        writes[:] = [w for w in writes if (w.size, w.offset) != (tuple(like.shape[1:]), row * like.stride(0))]


class _Recorder(TorchDispatchMode):
    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.blueprint = blueprint

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        copies = func in _COPY and args[0].is_meta
        if func in _EMPTY or (copies and kwargs.get("device") is not None):
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        if copies:
            self.inherit(args[0], result)
        name = func._schema.name.split("::")[-1]
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], Tensor) and args[0].is_meta:
            others = [*args[1:], *kwargs.values()]
            elementwise = not any(isinstance(x, Tensor) and x.ndim for x in others)
            self.note(
                args[0], lambda t: func(t, *args[1:], **kwargs), name in _OVERWRITE, elementwise, _all_real(others)
            )
        out = kwargs.get("out")
        if isinstance(out, Tensor) and out.is_meta:
            self.note(out, lambda t: func(*args, **{**kwargs, "out": t}), True, False, _all_real(args))
        return result

    def note(
        self, tensor: Tensor, apply: Callable[[Tensor], Any], overwrites: bool, elementwise: bool = True,
        replayable: bool = True,
    ) -> None:  # fmt: skip
        """Note one write; after one that cannot be played again, the tensor is lost until it is overwritten."""
        writes, lost = self.writes(tensor), self.blueprint.lost
        whole = _is_whole(tensor)
        if not replayable:
            lost.add(_storage(tensor))
            return
        if overwrites and whole:
            writes.clear()
            lost.discard(_storage(tensor))
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        writes.append(Write(apply, size, stride, int(tensor.storage_offset()), elementwise and whole))

    def inherit(self, tensor: Tensor, copy: Tensor) -> None:
        """Take the notes along to a copy. Random values will be drawn anew for it: alike, not the same."""
        if _is_whole(tensor) and tensor.stride() == copy.stride():
            self.writes(copy).extend(self.writes(tensor))
            if _storage(tensor) in self.blueprint.lost:
                self.blueprint.lost.add(_storage(copy))

    def writes(self, tensor: Tensor) -> list[Write]:
        """Return the notes on a tensor's storage."""
        storage = _storage(tensor)
        if storage not in self.blueprint.writes:
            self.blueprint.alive.append(tensor.untyped_storage())  # else its address could be used again
        return self.blueprint.writes.setdefault(storage, [])


class _Initialisers(TorchFunctionMode):
    """Note the functions of `nn.init` that ask a tensor for `is_meta`, and then do nothing."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        if result is True and func == _IS_META and caller.f_globals is vars(nn.init):
            name, names = caller.f_code.co_name, caller.f_code.co_varnames[1 : caller.f_code.co_argcount]
            arguments = {n: caller.f_locals[n] for n in names}
            elementwise = name == "_no_grad_trunc_normal_"
            self.recorder.note(args[0], lambda t: getattr(nn.init, name)(t, **arguments), True, elementwise)
        return result


def blueprint(constructor: Callable[[], nn.Module]) -> Blueprint:
    """Call a model's constructor without its weights coming into existence."""
    result = Blueprint(nn.Module())
    recorder = _Recorder(result)
    try:
        with recorder, _Initialisers(recorder):
            model = constructor()
    except (NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"The constructor cannot be called without the weights coming into existence. ({error}) "
            "Give sketch() a model instead."
        ) from error
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


def _all_real(values: Any) -> bool:
    return not any(isinstance(x, Tensor) and x.is_meta for x in values)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
