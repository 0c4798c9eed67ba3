"""Load a user's own task from a Python file or an import path.

The function named by the path takes no argument and returns either a `Task`, or three things: a model
constructor, training data, test data. Data is a torch Dataset of (input, target), a pair of tensors, or
`Examples`. It is held in memory. See examples/own_task.py.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from comfetch.data.task import IGNORED, Constructor, Examples, Task
from comfetch.errors import ComfetchError, DataError

DEFAULT = "task"
"""The function that is called when a file is given without one."""


def is_own(name: str) -> bool:
    """Tell whether a name means a file or an import path: `task.py`, `task.py:make`, `module:make`."""
    return name.endswith(".py") or ":" in name


def load_own(name: str) -> Task:
    """Run the function that a path names, and make a task of what it returns."""
    make = import_function(name)
    with _told(f"Task {name}"):
        made = make()
        if isinstance(made, Task):
            return made
        return task_of(name, *_three(name, made))


def import_function(name: str) -> Callable[[], Any]:
    """Import what a path names: `file.py`, `file.py:function` or `module:function`."""
    source, _, function = (name, "", DEFAULT) if name.endswith(".py") else name.rpartition(":")
    with _told(f"Task {name}"):
        module = _module_of_file(Path(source)) if source.endswith(".py") else _module(source)
        found: Callable[[], Any] | None = getattr(module, function, None)
        if not callable(found):
            raise DataError(f"Task {name}: {source} has no function {function}. Write it, or name another.")
        return found


def _three(name: str, made: Any) -> tuple[Constructor, Any, Any]:
    if isinstance(made, tuple) and len(made) == 3 and callable(made[0]):
        return made
    found = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
    raise DataError(f"Task {name}: its function returned {found}. Return (model constructor, train, test) or a Task.")


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Turn whatever the user's code raises into an error that says where."""
    try:
        yield
    except ComfetchError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"{where} failed: {type(error).__name__}: {error}. Mend its file.") from error


def _module_of_file(path: Path) -> ModuleType:
    """Import a file; it may import its neighbours, as a script may."""
    if not path.is_file():
        raise DataError(f"Task file {path} does not exist. Give the path of a Python file.")
    name = f"comfetch_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be pickled
    with _importing_from(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    """Import a module by name, also from the current folder (which a console script does not search)."""
    with _importing_from(Path.cwd()):
        return importlib.import_module(name)


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, os.fspath(folder))
    try:
        yield
    finally:
        sys.path.remove(os.fspath(folder))


def task_of(
    name: str, model: str | Constructor, train: Any, test: Any, *, classes: int | None = None, **more: Any
) -> Task:
    """Make a task of a model constructor and data; further options are those of `Task`.

    `classes` defaults to the largest target plus one.
    """
    sides = {side: examples_of(f"{name}, {side}", data) for side, data in (("train", train), ("test", test))}
    if classes is None:
        targets = [side.targets[side.targets != IGNORED] for side in sides.values()]
        classes = max((int(side.max()) + 1 for side in targets if side.numel()), default=0)
    shape = tuple(sides["train"].inputs.shape[1:])
    return Task(name, model, sides["train"], sides["test"], shape, classes, **more)


def examples_of(where: str, data: Any) -> Examples:
    """Hold data in memory: a pair of tensors, a torch Dataset or another iterable of (input, target)."""
    if isinstance(data, Examples):
        return data
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
        if len(data) != 2:
            raise DataError(f"{where}: {len(data)} tensors found. Give two, inputs and targets.")
        inputs, targets = data
    else:
        inputs, targets = _stacked(where, _items(where, data))
    if inputs.is_floating_point() and not bool(inputs.isfinite().all()):
        raise DataError(f"{where}: the inputs hold NaN or infinite values. Remove or replace them.")
    return Examples(inputs, targets.long() if not targets.is_floating_point() else targets)


def _items(where: str, data: Any) -> list[tuple[Any, Any]]:
    """Go through a dataset: by index if it has a length, else by iteration."""
    if isinstance(data, Dataset) and hasattr(data, "__len__"):
        return [data[index] for index in range(len(data))]
    if isinstance(data, Iterable):
        return list(data)
    raise DataError(f"{where}: {type(data).__name__} found. Give a torch Dataset of (input, target) or two tensors.")


def _stacked(where: str, items: list[tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
    """Stack all inputs and all targets."""

    def stack(part: int) -> Tensor:
        return torch.stack([torch.as_tensor(item[part]) for item in items])

    try:
        return stack(0), stack(1)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{where}: the examples cannot be stacked ({error}). Give tensors of one shape.") from error
