"""Save and load sketched models: one safetensors file with the weights, the plan and the keys."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from comfetch.blueprint import blueprint
from comfetch.convert import plan_of, swap_empty
from comfetch.errors import FileError, MismatchError, ModelError
from comfetch.plan import Plan

PLAN = "comfetch.plan"


def save(sketched: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save a sketched model with its plan, so that the file and the model's constructor suffice to reopen it.

    The file is complete or absent: it is written beside and then renamed.
    """
    plan = plan_of(sketched)
    if not plan:
        raise ModelError(f"This {type(sketched).__name__} has no sketched layers. Save it as any torch model.")
    save_state(sketched.state_dict(), path, {PLAN: plan.to_json()})


def load(path: str | os.PathLike[str], constructor: Callable[[], nn.Module]) -> nn.Module:
    """Reopen a sketched model from its file and the constructor of the full model, whose weights never exist."""
    state, metadata = load_state(path)
    if PLAN not in metadata:
        raise FileError(f"{path}: no sketched model, it has no plan. Was it written by comfetch.save?")
    try:
        model = swap_empty(blueprint(constructor), Plan.from_json(metadata[PLAN]))
    except MismatchError as error:
        raise FileError(f"{path}: does not fit this constructor. {error}") from error
    problems = misfits(state, model.state_dict())
    if problems:
        raise FileError(f"{path}: does not fit this constructor. " + " ".join(problems))
    model.load_state_dict(state)
    return model


def misfits(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Say how a state differs from the one wanted: names, shapes and dtypes."""
    problems = [f"{name} is missing." for name in wanted.keys() - state.keys()]
    problems += [f"{name} is not in the model." for name in state.keys() - wanted.keys()]
    for name in wanted.keys() & state.keys():
        found, expected = state[name], wanted[name]
        if found.shape != expected.shape:
            problems.append(f"{name} has shape {tuple(found.shape)}, not {tuple(expected.shape)}.")
        elif found.dtype != expected.dtype:
            problems.append(f"{name} has dtype {found.dtype}, not {expected.dtype}.")
    return sorted(problems)


def save_state(state: dict[str, Tensor], path: str | os.PathLike[str], metadata: dict[str, str]) -> None:
    """Write tensors and text to a safetensors file, atomically."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    tensors = {name: _own(tensor) for name, tensor in state.items()}
    try:
        save_file(tensors, beside, metadata)
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        beside.unlink(missing_ok=True)
        raise FileError(f"{path}: cannot be written. {error}") from error


def load_state(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the text of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            names: list[str] = file.keys()
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path}: cannot be read as a safetensors file. {error}") from error


def _own(tensor: Tensor) -> Tensor:
    """Give a tensor storage of its own: safetensors refuses tied weights and views."""
    return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
