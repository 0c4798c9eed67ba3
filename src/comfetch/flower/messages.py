"""Carry our messages in Flower's records, and read what comes back: hostile until it is checked."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from comfetch.errors import UploadError
from comfetch.methods.base import Message, State

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
"""Flower's own names of records, so that its apps and mods find them."""
OURS = "comfetch."
"""What the names begin with, in the config, of the text of our messages and of what else a client must know.

They have no record of their own: mods of Flower expect a single ConfigRecord.
"""
BFLOAT16 = "bfloat16"
"""Names of the tensors that travel as int16, since numpy has no such type."""
HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|=][a-zA-Z]\d{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18},? ?)*)\), \} *\n", re.DOTALL,
)  # fmt: skip
"""What stands before the values in version 1 of numpy's format."""


def to_arrays(state: State) -> tuple[ArrayRecord, list[str]]:
    """Turn tensors into Flower's arrays; also return the names of those that travel as int16."""
    odd = [name for name, tensor in state.items() if tensor.dtype == torch.bfloat16]
    arrays = {
        name: Array((tensor.view(torch.int16) if name in odd else tensor).detach().cpu().numpy())
        for name, tensor in state.items()
    }
    return ArrayRecord(arrays), odd


def to_config(told: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> ConfigRecord:
    """Put what we tell beside the config of an app."""
    return ConfigRecord({**(config or {}), **{OURS + name: value for name, value in told.items()}})


def read_config(content: RecordDict) -> dict[str, Any]:
    """Read what the other side tells; nothing if it knows nothing of us."""
    config = content.get(CONFIG)
    if not isinstance(config, ConfigRecord):
        return {}
    return {name.removeprefix(OURS): value for name, value in config.items() if name.startswith(OURS)}


def to_content(message: Message, config: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Turn a message into records, beside the config of an app; `more` goes beside the message's text."""
    arrays, odd = to_arrays(message.state)
    told = {**message.text, **({BFLOAT16: json.dumps(odd)} if odd else {}), **more}
    return {ARRAYS: arrays, CONFIG: to_config(told, config)}


def to_message(content: RecordDict, most: float = math.inf) -> Message:
    """Read a message of at most so many bytes; UploadError says what is wrong with it.

    An app that knows nothing of us replies without a config of ours: its message has no text.
    """
    arrays = content.get(ARRAYS)
    if not isinstance(arrays, ArrayRecord):
        raise UploadError(f"its records are {', '.join(content) or 'none'}; an ArrayRecord {ARRAYS!r} was expected.")
    size = sum(len(array.data) for array in arrays.values())
    if size > most:
        raise UploadError(f"it has {size} bytes of arrays, above {most:.0f}.")
    text = {name: value for name, value in read_config(content).items() if isinstance(value, str)}
    return Message(to_state(arrays, _names(text.pop(BFLOAT16, "[]"))), text)


def to_state(arrays: ArrayRecord, bfloat16: list[str] | None = None) -> State:
    """Read tensors; memory is taken only for bytes that are there."""
    state = {name: _tensor(name, array) for name, array in arrays.items()}
    for name in bfloat16 or []:
        if name not in state or state[name].dtype != torch.int16:
            raise UploadError(f"{name} is said to be bfloat16, but is not there as int16.")
        state[name] = state[name].view(torch.bfloat16)
    return state


def _tensor(name: str, array: Array) -> torch.Tensor:
    """Read one array as `numpy.save` writes it; its header may lie about its shape.

    numpy's own reader tries to make sense of damaged headers, and raises what it likes.
    """
    header = HEADER.match(array.data)
    if header is None:
        raise UploadError(f"{name} is no array of numpy.")
    kind, fortran, sizes = (text.decode() for text in header.groups())
    shape = tuple(int(size) for size in sizes.replace(",", " ").split())
    try:
        dtype = np.dtype(kind)
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError) as error:
        raise UploadError(f"{name} has the type {kind}, which no tensor has.") from error
    there, claimed = len(array.data) - header.end(), math.prod(shape) * dtype.itemsize
    if there != claimed:
        raise UploadError(f"{name} has {there} bytes, but its shape {shape} needs {claimed}.")
    values = np.frombuffer(array.data, dtype, offset=header.end()).reshape(
        shape, order="F" if fortran == "True" else "C"
    )
    return torch.from_numpy(values.copy(order="C"))


def _names(text: str) -> list[str]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UploadError(f"{BFLOAT16} is {text[:40]!r}, not a list of names.") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UploadError(f"{BFLOAT16} is {text[:40]!r}, not a list of names.")
    return names
