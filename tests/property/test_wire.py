"""The wire format against a transcription in numpy, and against messages that were tampered with."""

import json
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import safetensors.torch
import torch
from hypothesis import given, settings
from torch import Tensor

from comfetch.errors import UploadError
from comfetch.methods.base import Message
from comfetch.wire import FORMATS, LEVELS, STORED, Wire, pack, pack_upload, unpack, unpack_upload

SEEDS = st.integers(0, 2**64 - 1)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])
SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple)
INTEGER = st.sampled_from(list(LEVELS))
LOSSY = st.sampled_from(list(STORED))


@st.composite
def tensors(draw: Any, shapes: Any = SHAPES, dtypes: Any = DTYPES) -> Tensor:
    """Draw tensors whose rows are of very different sizes, some of them zero."""
    shape, dtype = draw(shapes), draw(dtypes)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    if shape and shape[0]:
        sizes = draw(st.lists(st.sampled_from([0.0, 1e-4, 1.0, 300.0]), min_size=shape[0], max_size=shape[0]))
        x *= torch.tensor(sizes, dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))
    return x.to(dtype)


@st.composite
def messages(draw: Any) -> Message:
    """Draw states with several tensors, integers among them, and some text."""
    state = {name: draw(tensors()) for name in draw(st.lists(st.sampled_from("abcdé"), max_size=4, unique=True))}
    state |= {"steps": torch.tensor(3), "table": torch.arange(6).view(2, 3)} if draw(st.booleans()) else {}
    return Message(state, draw(st.dictionaries(st.sampled_from(["key", "round"]), st.text("0ü", max_size=3))))


def step_of(x: Tensor, format: str) -> Tensor:
    """Compute the largest error of each value: a step of its row's scale, or half the spacing of the format."""
    if x.ndim < 2 or not x.numel():
        return torch.zeros(())
    if format in LEVELS:
        largest = x.double().flatten(1).abs().amax(1) / LEVELS[format]
        return largest.view(-1, *[1] * (x.ndim - 1)) * (1 + 1e-4)
    info = torch.finfo(STORED[format])
    return x.double().abs() * info.eps / 2 + info.smallest_normal * info.eps


@given(messages(), st.sampled_from(FORMATS), SEEDS)
@settings(max_examples=100)
def test_round_trip_keeps_all_but_one_step(message, format, seed) -> None:
    back = unpack(pack(message, format, seed))
    assert back.text == message.text
    assert list(back.state) == list(message.state)
    for name, x in message.state.items():
        y = back.state[name]
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        if format == "float32" or not x.is_floating_point():
            assert torch.equal(x, y)
        else:
            own = x.double().abs() * torch.finfo(x.dtype).eps + 1e-7 * (x.dtype == torch.float16)
            assert ((y.double() - x.double()).abs() <= step_of(x, format) + own).all()


@given(messages(), LOSSY, SEEDS)
@settings(max_examples=60)
def test_bytes_are_those_of_the_file(message, format, seed) -> None:
    packed = pack(message, format, seed)
    assert packed.nbytes == len(safetensors.torch.save(packed.state, packed.text))


@given(messages(), LOSSY, SEEDS)
def test_the_same_seed_gives_the_same_bytes(message, format, seed) -> None:
    one, two = pack(message, format, seed), pack(message, format, seed)
    assert one.text == two.text
    assert safetensors.torch.save(one.state) == safetensors.torch.save(two.state)


def encode(x: np.ndarray, levels: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Transcribe the quantiser row by row, with numbers drawn before."""
    rows = x.reshape(len(x), math.prod(x.shape[1:]))
    u = numbers[: rows.size].reshape(rows.shape)
    scales, codes = np.zeros(len(rows), np.float32), np.zeros(rows.shape, np.int8)
    for i, row in enumerate(rows):
        if row.size and np.abs(row).max() > 0:
            scales[i] = np.abs(row).max() / np.float32(levels)
            codes[i] = np.clip(np.floor(row / scales[i] + u[i]), -levels, levels)
    return codes, scales


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Transcribe the packing of two codes into a byte."""
    half = -(-codes.shape[1] // 2)
    packed = np.zeros((len(codes), half), np.uint8)
    for i, row in enumerate(codes.astype(int)):
        for j in range(half):
            high = row[half + j] % 16 if half + j < len(row) else 0
            packed[i, j] = row[j] % 16 + 16 * high
    return packed


@given(st.lists(tensors(st.lists(st.integers(0, 7), min_size=2, max_size=4).map(tuple)), max_size=3), INTEGER, SEEDS)
@settings(max_examples=80)
def test_integers_are_those_of_the_transcription(given_tensors, format, seed) -> None:
    message = Message({str(i): x for i, x in enumerate(given_tensors)})
    packed = pack(message, format, seed)
    generator = torch.Generator().manual_seed(seed & (2**63 - 1))
    for name, x in message.state.items():
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
        numbers = (bits.numpy().view(np.int16).astype(np.float32) + np.float32(32768.5)) / np.float32(65536)
        codes, scales = encode(x.float().numpy(), LEVELS[format], numbers)
        stored = codes.reshape(x.shape) if format == "int8" else nibbles(codes)
        np.testing.assert_array_equal(packed.state[f"{name}..scale"].numpy(), scales)
        np.testing.assert_array_equal(packed.state[name].numpy(), stored)
        wanted = (codes * scales[:, None]).reshape(x.shape)
        assert torch.equal(unpack(packed).state[name], torch.from_numpy(wanted).to(x.dtype))


@given(tensors(st.just((3, 5))), INTEGER)
@settings(max_examples=6)
def test_rounding_is_unbiased_over_seeds(x, format) -> None:
    seeds = 300
    mean = (
        sum(unpack(pack(Message({"w": x.float()}), format, seed)).state["w"].double() for seed in range(seeds)) / seeds
    )
    assert ((mean - x.double()).abs() <= step_of(x, format) * 0.5 / math.sqrt(seeds) * 5 + 1e-12).all()


@given(messages(), messages(), LOSSY, SEEDS, st.booleans(), st.booleans())
@settings(max_examples=60)
def test_any_upload_arrives_with_its_names_types_shapes_and_text(upload, received, format, seed, feedback, relative):
    wire, memory = Wire(up=format, feedback=feedback), {"wire/a": torch.ones(2, 3)}
    packed = pack_upload(upload, received, wire, seed, memory, relative)
    back = unpack_upload(packed, received, wire, relative)
    assert back.text == upload.text
    assert [(n, x.shape, x.dtype) for n, x in back.state.items()] == [
        (n, x.shape, x.dtype) for n, x in upload.state.items()
    ]


# ------------------------------------------------------------------------------------------------ tampered messages

SIZES = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**40, 2**62, 2**63, 2**64, 10**30, -(2**63)]))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), SIZES, st.floats(), st.text(max_size=3), st.sampled_from(["float32", "a"])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=8,
)
ENTRIES = st.one_of(JSON, st.tuples(st.sampled_from(["float64", "float16", "int8"]), st.lists(SIZES, max_size=5)))
NAMES = st.sampled_from(["a", "b", "a..scale", "b..scale", "..scale", "a..b", "steps", "é"])
ANY = st.builds(
    lambda shape, dtype, value: torch.full(shape, value).to(dtype),
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from(
        [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64]
    ),
    st.sampled_from([0.0, 1.0, -3.0, 1e38, math.nan, math.inf]),
)


@st.composite
def tampered(draw: Any) -> Message:
    """Draw a packed message, and change it in one to three places."""
    packed = pack(draw(messages()), draw(LOSSY), 0)
    state, text = dict(packed.state), dict(packed.text)
    for _ in range(draw(st.integers(1, 3))):
        name, names = draw(NAMES), sorted(state)
        kind = draw(st.sampled_from(["add", "remove", "rename", "replace", "scale", "text", "layout", "entry"]))
        if kind == "add":
            state[name] = draw(ANY)
        elif kind == "text":
            word = draw(st.sampled_from(["wire", "wire.layout"]))
            text.pop(word, None) if draw(st.booleans()) else text.update(
                {word: draw(st.text(max_size=9) | st.sampled_from(FORMATS))}
            )
        elif kind == "layout":
            text["wire.layout"] = json.dumps(draw(JSON))
        elif kind == "entry":
            layout = json.loads(text["wire.layout"]) if text.get("wire.layout", "").startswith('{"') else {}
            known = draw(st.sampled_from([*sorted(layout), name]))
            text["wire.layout"] = json.dumps({**layout, known: draw(ENTRIES)})
        elif names:
            old = draw(st.sampled_from(names))
            if kind == "remove":
                del state[old]
            elif kind == "rename":
                state[name] = state.pop(old)
            elif kind == "replace":
                state[old] = draw(ANY)
            else:
                state[old] = torch.full_like(state[old], draw(st.sampled_from([0, 1, 8, 127])))
    return Message(state, text)


def size(message: Message) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in message.state.values())


@given(tampered(), messages(), st.sampled_from(FORMATS), st.booleans())
@settings(max_examples=150)
def test_tampered_messages_are_decoded_or_refused_and_never_grow_much(packed, received, format, relative) -> None:
    for decode in (unpack, lambda message: unpack_upload(message, received, Wire(up=format), relative)):
        try:
            message = decode(packed)
        except UploadError as error:
            assert ": found " in str(error)
            assert ", expected " in str(error)
        else:
            assert size(message) <= 16 * size(packed)
            assert not any(".." in name for name in message.state) or "wire" not in packed.text
