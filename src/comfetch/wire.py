"""Encode messages for the way between server and clients: float32, float16, bfloat16, int8 or int4.

Only floating point tensors with two or more dimensions are encoded: the others are few, and the variance of a batch
norm does not survive 8 bits. With one scale for each row (dimension 0, the rest flattened), int8 and int4 are

    scale = max |x| / L,  code = floor(x / scale + u),  x̂ = scale · code,  L = 127 or 7,  u uniform in (0, 1),

so that E x̂ = x. The code −L − 1 stands for a row with values that are not finite, and decodes to NaN.

A packed message has the data under the tensor's name, in its shape; for int4 as bytes (rows, ⌈rest / 2⌉), the first
half of a row in the low bits. The scales, float32 (rows), are beside it as `name..scale`: modules of torch have no
empty names, hence no state has two dots in a row. Its text says the format (`wire`), and type and shape of all that
was encoded (`wire.layout`, in JSON).
"""

import json
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comfetch import hashing
from comfetch.errors import MismatchError, OptionError, UploadError
from comfetch.methods.base import Message, State

STORED = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}
FORMATS, LOSSY = ("float32", *STORED), " or ".join(STORED)
LEVELS = {"int8": 127, "int4": 7}
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
FORMAT, LAYOUT, DOTS = "wire", "wire.layout", ".."
BLOCK = 2**18
"""Values that are encoded at a time: they stay in the processor's cache."""


@dataclass(frozen=True)
class Wire:
    """Name the formats of the way down and up.

    Args:
        down, up: one of FORMATS. Beware of float16 for small gradients: it has no numbers below 6e-8.
        feedback: a client keeps what a lossy `up` loses, and adds it to its next upload.
    """

    down: str = "float32"
    up: str = "float32"
    feedback: bool = False

    def __post_init__(self) -> None:
        _check_format("down", self.down)
        _check_format("up", self.up)
        if self.feedback and self.up == "float32":
            raise OptionError(f"feedback: up='float32' loses nothing. Leave it out, or set up to {LOSSY}.")


@torch.no_grad()
def pack(message: Message, format: str, seed: int) -> Message:
    """Encode a message; as float32 it stays as it is. The seed is for the rounding of int8 and int4.

    >>> packed = pack(Message({"w": torch.tensor([[0.0, 7.0, -3.0]])}), "int4", seed=0)
    >>> packed.state["w"].shape, unpack(packed).state["w"]
    (torch.Size([1, 2]), tensor([[ 0.,  7., -3.]]))
    """
    _check_format("format", format)
    if format == "float32":
        return message
    clashes = [*(n for n in message.state if DOTS in n), *(w for w in message.text if w in (FORMAT, LAYOUT))]
    if clashes:
        raise MismatchError(f"{', '.join(clashes)}: names of the wire format. Was this message packed before?")
    generator = torch.Generator().manual_seed(seed & (2**63 - 1))
    state, scales, layout = dict(message.state), State(), {}
    for name, tensor in message.state.items():
        if _is_encoded(tensor):
            layout[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            if format in LEVELS:
                state[name], scales[f"{name}{DOTS}scale"] = _quantise(tensor, format, generator)
            else:
                state[name] = _cast(tensor, STORED[format])
    text = {FORMAT: format, LAYOUT: json.dumps(layout, separators=(",", ":"))}
    return Message({**state, **scales}, {**message.text, **text})


def unpack(packed: Message) -> Message:
    """Decode a message to the types, shapes and text that it had; UploadError if it is malformed."""
    if FORMAT not in packed.text:
        return packed
    format = packed.text[FORMAT]
    if format not in STORED:
        raise _refusal(FORMAT, reprlib.repr(format), LOSSY)
    layout = _read_layout(packed, format)
    scales = {f"{name}{DOTS}scale": shape[:1] for name, (_, shape) in layout.items() if format in LEVELS}
    for name, rows in scales.items():
        scale = _expect(packed, name, torch.float32, rows)
        if not bool(((scale >= 0) & (scale < math.inf)).all()):
            raise _refusal(name, "NaN, infinite or negative values", "scales of at least 0")
    state: State = {}
    for name, tensor in packed.state.items():
        if name in layout:
            dtype, shape = layout[name]
            if format in LEVELS:
                state[name] = _restore(tensor, packed.state[f"{name}{DOTS}scale"], format, dtype, shape)
            else:
                state[name] = _cast(tensor, dtype)
        elif name not in scales:
            if DOTS in name or _is_encoded(tensor):
                raise _refusal(name, _kind(tensor.dtype, tensor.shape), f"no such tensor that is not in {LAYOUT}")
            state[name] = tensor
    return Message(state, {word: value for word, value in packed.text.items() if word not in (FORMAT, LAYOUT)})


@torch.no_grad()
def pack_upload(upload: Message, received: Message, wire: Wire, seed: int, memory: State, relative: bool) -> Message:
    """Encode an upload: as float32 it stays as it is; in other formats, if `relative`, its change is sent.

    With feedback v = change + e is encoded, and what that loses is kept in `memory` as `wire/name`: e ← v − v̂.

    Args:
        received: what the client has got, decoded. relative: False for gradients.
    """
    if wire.up == "float32":
        return upload
    state = _add(upload.state, received.state, -1) if relative else dict(upload.state)
    lossy = [name for name, tensor in state.items() if wire.feedback and _is_encoded(tensor)]
    for name in lossy:
        kept = memory.pop(f"wire/{name}", None)
        if kept is not None and kept.shape == state[name].shape:
            state[name] = state[name] + kept.to(state[name])
    packed = pack(Message(state, upload.text), wire.up, hashing.fold(seed, "wire"))
    decoded = unpack(packed).state if lossy else {}
    for name in lossy:
        lost = state[name] - decoded[name]
        if bool(lost.isfinite().all()):  # a round that went wrong must not spoil all that follow
            memory[f"wire/{name}"] = lost
    return packed


def unpack_upload(packed: Message, received: Message, wire: Wire, relative: bool) -> Message:
    """Decode what `pack_upload` made, with what the client had got; UploadError if it is malformed."""
    found = packed.text.get(FORMAT, "float32")
    if found != wire.up:
        raise _refusal(FORMAT, reprlib.repr(found), repr(wire.up))
    upload = unpack(packed)
    if wire.up == "float32" or not relative:
        return upload
    return Message(_add(upload.state, received.state, 1), upload.text)


def _add(state: State, other: State, factor: int) -> State:
    """Add factor · other to the floating point tensors whose name, shape and type are in `other`, too."""
    result = dict(state)
    for name in state.keys() & other.keys():
        a, b = state[name], other[name]
        if a.is_floating_point() and a.shape == b.shape and a.dtype == b.dtype:
            result[name] = a.add(b.to(a.device), alpha=factor)
    return result


def _is_encoded(tensor: Tensor) -> bool:
    return tensor.ndim >= 2 and tensor.dtype in DTYPES.values()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest value of a type, and finite values beyond its range to its largest."""
    x, limit = x.to(torch.promote_types(x.dtype, dtype)), torch.finfo(dtype).max  # bfloat16 and float16 meet in float32
    if not x.numel() or limit >= torch.finfo(x.dtype).max or bool((x.amax() <= limit) & (x.amin() >= -limit)):
        return x.to(dtype)
    return torch.where(x.isfinite(), x.clamp(-limit, limit), x).to(dtype)


def _quantise(tensor: Tensor, format: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Encode a tensor as codes and scales; a row counts as zeros if its scale is no normal float32."""
    rows, levels = tensor.flatten(1), LEVELS[format]
    data = torch.empty(_stored_shape(rows.shape, format), dtype=STORED[format], device=tensor.device)
    scales = torch.zeros(len(rows), dtype=torch.float32, device=tensor.device)
    for part in _blocks(rows):
        x = rows[part].float()
        scale = torch.maximum(x.amax(1), -x.amin(1)) / levels
        finite = scale.isfinite()
        scales[part] = torch.where(finite & (scale >= torch.finfo(torch.float32).tiny), scale, 0)
        x = x / torch.where(scales[part] > 0, scales[part], math.inf)[:, None]
        # Sixteen random bits a value are as fine as a float32 near 127, and three times as fast as torch.rand.
        bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None, generator=generator)
        u = bits.view(torch.int16)[: x.numel()].float().add_(2**15 + 0.5).view(x.shape)
        codes = x.add_(u.to(x.device), alpha=2**-16).floor_().clamp_(-levels, levels).to(torch.int8)
        if not bool(finite.all()):
            codes[~finite] = -levels - 1
        if format == "int4":
            half = data.shape[1]
            codes = torch.nn.functional.pad(codes, (0, 2 * half - codes.shape[1]))
            codes = ((codes[:, :half] & 15) | (codes[:, half:] << 4)).view(torch.uint8)
        data[part] = codes
    return data.view(_stored_shape(tensor.shape, format)), scales


def _restore(data: Tensor, scales: Tensor, format: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Decode codes and their scales."""
    tensor = torch.empty(shape, dtype=dtype, device=data.device)
    rows, coded, lowest = tensor.flatten(1), data.flatten(1), -LEVELS[format]
    for part in _blocks(rows):
        codes = coded[part].view(torch.int8)
        if format == "int4":
            codes = torch.cat([(codes << 4) >> 4, codes >> 4], 1)[:, : rows.shape[1]]
        x = codes.float().mul_(scales[part, None])
        if int(codes.amin()) < lowest:
            x[codes < lowest] = math.nan
        rows[part] = _cast(x, dtype)
    return tensor


def _blocks(rows: Tensor) -> list[slice]:
    step = max(1, BLOCK // max(1, rows.shape[1]))
    return [slice(i, i + step) for i in range(0, len(rows), step)] if rows.numel() else []


def _stored_shape(shape: Sequence[int], format: str) -> list[int]:
    return [shape[0], (math.prod(shape[1:]) + 1) // 2] if format == "int4" else list(shape)


def _read_layout(packed: Message, format: str) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Read type and shape of the encoded tensors, and check that the data fit: nothing much larger is ever made."""
    try:
        entries = json.loads(packed.text.get(LAYOUT, ""))
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        raise _refusal(LAYOUT, reprlib.repr(packed.text.get(LAYOUT)), "JSON with type and shape of each encoded tensor")
    layout = {}
    for name, entry in entries.items():
        match entry:
            case [str(dtype), [*shape]] if dtype in DTYPES and _is_shape(shape) and DOTS not in name:
                layout[name] = (DTYPES[dtype], shape)
            case _:
                raise _refusal(f"{LAYOUT} of {name}", reprlib.repr(entry), f"[{' or '.join(DTYPES)}, shape]")
        _expect(packed, name, STORED[format], _stored_shape(shape, format))
    return layout


def _is_shape(shape: list[object]) -> bool:
    """Tell whether torch has tensors of this shape, with two dimensions or more; they may be empty."""
    sizes = [size for size in shape if type(size) is int and size >= 0]
    return 2 <= len(sizes) == len(shape) <= 64 and math.prod(max(size, 1) for size in sizes) < 2**63


def _expect(packed: Message, name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
    tensor = packed.state.get(name)
    if tensor is None or tensor.dtype != dtype or list(tensor.shape) != shape:
        raise _refusal(name, "nothing" if tensor is None else _kind(tensor.dtype, tensor.shape), _kind(dtype, shape))
    return tensor


def _kind(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{dtype} of shape {tuple(shape)}"


def _refusal(what: str, found: str, expected: str) -> UploadError:
    return UploadError(f"{what[:200]}: found {found}, expected {expected}.")  # a name may be megabytes


def _check_format(option: str, value: str) -> None:
    if value not in FORMATS:
        raise OptionError(f"{option}={value!r} is not known. Choose one of: {', '.join(FORMATS)}.")
