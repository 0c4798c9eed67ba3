"""What of the Flower adapter needs no federation: records, capacity classes, what a client makes of a message."""

import dataclasses
import io
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import comfetch.flower
from comfetch.errors import MismatchError, OptionError, UploadError
from comfetch.experiment import PRESETS, Experiment
from comfetch.flower.apps import RUNNING, read_config
from comfetch.flower.client import method_of
from comfetch.flower.messages import to_content, to_message
from comfetch.flower.nodes import Nodes
from comfetch.methods import Client, Comfetch, Message
from comfetch.wire import FORMATS, pack

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@given(
    st.sampled_from(
        [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    ),
    st.lists(st.integers(0, 5), max_size=4),
)
def test_tensors_travel_unchanged_whatever_their_type_and_shape(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    message = Message({"a.b": tensor, "c": torch.arange(3)}, {"round": "3", "key": "ff"})
    found = to_message(RecordDict(to_content(message, {"lr": 0.1}, client=4)))
    assert found.text == message.text
    assert all(torch.equal(found.state[n], t) and found.state[n].dtype == t.dtype for n, t in message.state.items())


@pytest.mark.parametrize("format", FORMATS)
def test_packed_messages_travel_in_every_format(format):
    packed = pack(Message({"w": torch.randn(5, 7), "b": torch.randn(5)}, {"round": "0"}), format, seed=1)
    found = to_message(RecordDict(to_content(packed)))
    assert found.text == packed.text and found.state.keys() == packed.state.keys()
    assert all(torch.equal(found.state[n].view(torch.uint8), t.view(torch.uint8)) for n, t in packed.state.items())


def array(data: bytes) -> Array:
    return Array("float32", (1,), "numpy.ndarray", data)


def saved(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


@given(st.data())
def test_damaged_arrays_are_refused_and_nothing_else_is_raised(data):
    good = saved(np.arange(12, dtype=np.float32).reshape(3, 4))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 6))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(bad)))
    try:
        found = to_message(RecordDict({"arrays": ArrayRecord({"w": array(bytes(bad[:cut]))})}))
        assert found.state["w"].numel() * found.state["w"].element_size() <= len(bad)
    except UploadError:
        pass


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({}, "its records are none"),
        ({"arrays": ConfigRecord({})}, "an ArrayRecord 'arrays' was expected"),
        ({"arrays": ArrayRecord({"w": array(saved(np.zeros(3, ">f4")))})}, "which no tensor has"),
        ({"arrays": ArrayRecord({"w": array(saved(np.array(["x"])))})}, "which no tensor has"),
        (
            {"arrays": ArrayRecord({}), "config": ConfigRecord({"comfetch.bfloat16": "[" * 10**5})},
            "not a list of names",
        ),
        ({"arrays": ArrayRecord({}), "config": ConfigRecord({"comfetch.bfloat16": '["w"]'})}, "not there as int16"),
    ],
)
def test_records_that_are_no_message_are_refused(content, told):
    with pytest.raises(UploadError, match=told):
        to_message(RecordDict(content))


def test_more_bytes_than_can_be_meant_are_refused_unread():
    content = RecordDict(to_content(Message({"w": torch.zeros(100)})))
    with pytest.raises(UploadError, match="bytes of arrays, above 100"):
        to_message(content, most=100)


CLASSES = (1.0, 2.0, 8.0)
NEEDS = {1.0: 800, 2.0: 400, 8.0: 100}


@pytest.mark.parametrize(
    ("memory", "compression", "wanted"),
    [
        ("1kB", None, 1.0), ("500", None, 2.0), ("399", None, 8.0), (None, None, 8.0), (None, 1, 1.0), (None, 3, 8.0),
        ("1kB", 2, 2.0), (250, None, 8.0),
    ],
)  # fmt: skip
def test_a_node_gets_the_largest_class_that_fits_what_it_states(memory, compression, wanted):
    assert Nodes(capacities=CLASSES, predict=NEEDS.__getitem__).classify(memory, compression) == wanted


@pytest.mark.parametrize(
    ("memory", "compression", "told"),
    [
        ("99", None, "memory='99' is too little: a training step needs 100 bytes"),
        ("plenty", None, "budget='plenty' is not a number of bytes"), (None, 9, "the classes of this run are 1,2,8"),
        (None, "x", "compression='x' is not a number"),
    ],
)  # fmt: skip
def test_a_node_that_fits_no_class_is_refused(memory, compression, told):
    with pytest.raises(OptionError, match=told):
        Nodes(capacities=CLASSES, predict=NEEDS.__getitem__).classify(memory, compression)


def test_without_a_prediction_memory_cannot_be_judged():
    with pytest.raises(OptionError, match="Give Strategy a predict"):
        Nodes(capacities=CLASSES).classify("1GB", None)


@pytest.mark.parametrize("capacities", [None, (1, 2, 8)])
def test_a_download_tells_a_client_all_it_needs(capacities):
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 128), nn.Linear(128, 256), nn.Linear(256, 4))

    method = Comfetch(8, key=2**63 + 5, sketch={"mode": "input", "policy": "all"}, capacities=capacities)
    server = method.start(build)
    client = Client(3, 1, 2.0 if capacities else None)
    message = method.download(server, client)
    other = method_of(message.text)
    model = other.client_model(build, client, message)
    model.load_state_dict(message.state)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    mine = method.client_model(build, client, message)
    mine.load_state_dict(message.state)
    inputs = torch.randn(3, 16)
    torch.testing.assert_close(model(inputs), mine(inputs))


def test_a_message_of_another_method_says_what_to_do():
    with pytest.raises(MismatchError, match="Give client_model the method"):
        method_of({"round": "0"})


def test_the_example_app_lists_every_option():
    text = (EXAMPLES / "flower_experiment" / "pyproject.toml").read_text()
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    left = {name for preset in PRESETS.values() for name in preset}  # to the preset
    fields = {
        f.name.replace("_", "-"): "" if f.default is None or f.name in left else f.default
        for f in dataclasses.fields(Experiment)
    }
    running = {name.replace("_", "-"): value for name, value in RUNNING.items()}
    assert json.loads(json.dumps(config)) == {**fields, **running}
    assert read_config(config) == (Experiment.of({}), RUNNING)
    assert read_config({**config, "preset": "paper"}) == (Experiment.of({"preset": "paper"}), RUNNING)


def test_the_public_names_are_there():
    assert all(getattr(comfetch.flower, name) is not None for name in comfetch.flower.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = comfetch.flower.nothing
