"""What goes over the wire: formats, bytes, uploads with feedback, and what is refused."""

import dataclasses
import json
import math

import pytest
import safetensors.torch
import torch
from torch import nn

from comfetch import hashing, wire
from comfetch.errors import MismatchError, OptionError, UploadError
from comfetch.methods.base import Message
from comfetch.wire import FORMATS, STORED, Wire, pack, pack_upload, unpack, unpack_upload


def model_message(width: int = 40) -> Message:
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Linear(width, 7))
    model[1].num_batches_tracked.fill_(5)
    return Message(model.state_dict(), {"round": "3", "key": "00ff"})


def same(a: Message, b: Message) -> bool:
    """Compare bit for bit, NaN included, and in order."""
    files = [safetensors.torch.save(m.state) for m in (a, b)]
    return files[0] == files[1] and list(a.state) == list(b.state) and a.text == b.text


# ------------------------------------------------------------------------------------------------ options


def test_a_wire_is_float32_both_ways_unless_asked() -> None:
    assert Wire() == Wire("float32", "float32", False)


@pytest.mark.parametrize("option", ["down", "up"])
def test_an_unknown_format_is_refused_with_those_known(option: str) -> None:
    with pytest.raises(OptionError, match=f"{option}='int2' is not known. Choose one of: {', '.join(FORMATS)}."):
        Wire(**{option: "int2"})
    with pytest.raises(OptionError, match="format='int2' is not known"):
        pack(Message({}), "int2", 0)


def test_feedback_needs_a_format_that_loses_something() -> None:
    with pytest.raises(
        OptionError, match="feedback: up='float32' loses nothing. Leave it out, or set up to float16 or"
    ):
        Wire(down="int8", feedback=True)
    assert Wire()
    for format in STORED:
        assert Wire(up=format, feedback=True).feedback


# ------------------------------------------------------------------------------------------------ pack and unpack


def test_float32_is_the_message_itself() -> None:
    message = Message({"w": torch.randn(2, 3, dtype=torch.float64), "odd..name": torch.zeros(2, 2)})
    assert pack(message, "float32", 0) is message
    assert unpack(message) is message


@pytest.mark.parametrize("format", STORED)
def test_only_floating_point_tensors_with_two_dimensions_or_more_are_encoded(format: str) -> None:
    message = model_message()
    message.state["table"] = torch.arange(6).view(2, 3)
    packed = pack(message, format, 0)
    encoded = {name for name, tensor in message.state.items() if packed.state[name] is not tensor}
    assert encoded == {"0.weight", "2.weight"}
    assert packed.text["wire"] == format
    assert {name for name in packed.state if name not in message.state} == (
        {"0.weight..scale", "2.weight..scale"} if format in ("int8", "int4") else set()
    )


@pytest.mark.parametrize("format", STORED)
def test_a_packed_message_is_a_file_that_describes_itself(format: str) -> None:
    message = model_message()
    packed = pack(message, format, 0)
    file = safetensors.torch.save(packed.state, packed.text)
    assert packed.nbytes == len(file)
    text = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"]
    again = unpack(Message(safetensors.torch.load(file), text))
    first = unpack(packed)
    assert first.text == again.text == message.text
    assert list(first.state) == list(message.state)
    assert all(torch.equal(first.state[name], again.state[name]) for name in message.state)


@pytest.mark.parametrize(
    ("format", "part"), [("float16", 1 / 2), ("bfloat16", 1 / 2), ("int8", 1 / 4), ("int4", 1 / 8)]
)
def test_large_weights_take_their_part_of_the_bytes(format: str, part: float) -> None:
    message = Message({"w": torch.randn(512, 512), "c": torch.randn(128, 128, 3, 3)})
    assert pack(message, format, 0).nbytes / message.nbytes == pytest.approx(part, rel=0.02)


def test_no_module_of_torch_has_names_with_two_dots_in_a_row() -> None:
    for name in ("", "a.b", "."):
        with pytest.raises(KeyError):
            nn.Module().add_module(name, nn.Linear(1, 1))
        with pytest.raises(KeyError):
            nn.Module().register_parameter(name, None)
        with pytest.raises(KeyError):
            nn.Module().register_buffer(name, None)


def test_names_and_text_of_the_wire_are_not_packed_again() -> None:
    packed = pack(model_message(), "int8", 0)
    with pytest.raises(MismatchError, match="0.weight..scale, 2.weight..scale, wire, wire.layout: names of the wire"):
        pack(packed, "int8", 0)


def test_float16_rounds_to_the_nearest_and_saturates() -> None:
    x = torch.tensor([[1e6, -1e6, 65519.0, 1 + 2**-11 + 2**-20, math.inf, -math.inf, math.nan]])
    back = unpack(pack(Message({"w": x}), "float16", 0)).state["w"]
    assert back[0, :4].tolist() == [65504, -65504, 65504, 1 + 2**-10]
    assert not back[0, 4:].isfinite().any()


def test_bfloat16_saturates_where_it_comes_from_and_where_it_goes() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16):
        x = torch.tensor([[1.0, -1.0]], dtype=dtype) * torch.finfo(dtype).max
        back = unpack(pack(Message({"w": x}), "bfloat16", 0)).state["w"]
        assert back.isfinite().all()
        assert torch.equal(back.sign(), x.sign())


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_rows_of_zeros_and_of_almost_nothing_come_back_as_zeros(format: str) -> None:
    x = torch.zeros(4, 5)
    x[1], x[2], x[3, 1:4] = 1e-45, 2e-43, torch.tensor([7.0, -7.0, 7.0])
    packed = pack(Message({"w": x}), format, 0)
    assert packed.state["w..scale"][:3].tolist() == [0, 0, 0]
    back = unpack(packed).state["w"]
    assert torch.equal(back[:3], torch.zeros(3, 5))
    assert torch.equal(back[3] != 0, x[3] != 0)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_largest_values_stay_within_the_levels_however_they_are_rounded(format: str) -> None:
    levels = wire.LEVELS[format]
    candidates = torch.rand(1000)
    largest = candidates[candidates / (candidates / levels) > levels][0]
    x = largest.expand(4, 2**18)
    assert torch.equal(
        unpack(pack(Message({"w": x}), format, 0)).state["w"], (largest / levels * levels).expand(x.shape)
    )


@pytest.mark.parametrize("format", STORED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_stays_so_that_the_server_sees_it(format: str, bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5).to(dtype)
    x[1, 2] = bad
    back = unpack(pack(Message({"w": x}), format, 0))
    assert not back.state["w"][1, 2].isfinite()
    assert back.state["w"][[0, 2]].isfinite().all()
    assert not math.isfinite(back.norms["w"])


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_float64_beyond_float32_is_refused_rather_than_wrong(format: str) -> None:
    back = unpack(pack(Message({"w": torch.tensor([[1e300, 1.0], [1e-300, 0.0]], dtype=torch.float64)}), format, 0))
    assert back.state["w"][0].isnan().all()
    assert back.state["w"][1].tolist() == [0, 0]


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_rounding_is_unbiased_to_a_thousandth_of_a_step(format: str) -> None:
    levels = wire.LEVELS[format]
    x = torch.full((4, 10**6), 0.3)
    x[1:] = torch.tensor([[-0.5], [2.75], [levels - 0.01]])
    x[:, 0] = levels
    back = unpack(pack(Message({"w": x}), format, 5)).state["w"]
    assert (back.double().mean(1) - x.double().mean(1)).abs().max() < 0.0025  # five standard deviations


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_blocks_are_rounded_each_by_its_own_numbers(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BLOCK", 50)
    x = torch.randn(1, 7).expand(100, 7).clone()
    packed = pack(Message({"w": x}), format, 0)
    back = unpack(packed).state["w"]
    assert ((back - x).abs() <= packed.state["w..scale"][:, None] * 1.0001).all()
    assert len({tuple(row) for row in back.tolist()}) > 20


def test_seeds_may_be_any_integers() -> None:
    message = model_message()
    for seed in (-1, 2**64 - 1, 2**63):
        assert same(pack(message, "int8", seed), pack(message, "int8", seed & (2**63 - 1)))
    assert not same(pack(message, "int8", 1), pack(message, "int8", 2))


def test_packing_needs_no_gradient_and_leaves_the_message_alone() -> None:
    weight = nn.Linear(4, 3).weight
    before = weight.detach().clone()
    for format in STORED:
        packed = pack(Message({"w": weight}), format, 0)
        assert not any(tensor.requires_grad for tensor in packed.state.values())
    assert torch.equal(weight, before)
    memory: dict[str, torch.Tensor] = {}
    pack_upload(Message({"w": weight}), Message({}), Wire(up="int8", feedback=True), 0, memory, relative=True)
    assert not memory["wire/w"].requires_grad


def test_the_default_type_of_torch_does_not_matter() -> None:
    message = model_message()
    wanted = pack(message, "int8", 0)
    torch.set_default_dtype(torch.float64)
    try:
        assert same(pack(message, "int8", 0), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------------------------ uploads


def trained(received: Message, size: float = 0.01) -> Message:
    """Change all that training changes."""
    state = {n: x + size * torch.randn_like(x) if x.is_floating_point() else x + 1 for n, x in received.state.items()}
    return Message(state, received.text)


@pytest.mark.parametrize("relative", [True, False])
def test_float32_uploads_are_sent_as_they_are(relative: bool) -> None:
    received = model_message()
    upload, memory = trained(received), {}
    assert pack_upload(upload, received, Wire(down="int4"), 0, memory, relative) is upload
    assert unpack_upload(upload, received, Wire(down="int4"), relative) is upload
    assert not memory


@pytest.mark.parametrize("format", STORED)
@pytest.mark.parametrize("down", FORMATS)
def test_the_change_is_sent_and_added_to_what_the_client_had_got(format: str, down: str) -> None:
    received = unpack(pack(model_message(), down, 1))
    upload = trained(received)
    packed = pack_upload(upload, received, Wire(down, format), 0, {}, relative=True)
    assert torch.equal(packed.state["1.bias"], upload.state["1.bias"] - received.state["1.bias"])
    assert torch.equal(packed.state["1.num_batches_tracked"], upload.state["1.num_batches_tracked"])
    back = unpack_upload(packed, received, Wire(down, format), relative=True)
    assert back.text == upload.text
    assert list(back.state) == list(upload.state)
    for name, tensor in upload.state.items():
        change = (tensor - received.state[name]).abs().max()
        step = {"float16": 2**-10, "bfloat16": 2**-7, "int8": 1 / 127, "int4": 1 / 7}[format] if tensor.ndim > 1 else 0
        assert (back.state[name] - tensor).abs().max() <= step * change + 1e-6, name


def test_the_change_loses_less_than_the_weights() -> None:
    received = model_message()
    upload = trained(received)
    lost = {}
    for relative in (True, False):
        packed = pack_upload(upload, received, Wire(up="int8"), 0, {}, relative)
        back = unpack_upload(packed, received, Wire(up="int8"), relative)
        lost[relative] = (back.state["0.weight"] - upload.state["0.weight"]).norm()
    assert lost[True] < lost[False] / 5


def test_gradients_are_encoded_as_they_are() -> None:
    received = model_message()
    upload = trained(received)
    packed = pack_upload(upload, received, Wire(up="int8"), 4, {}, relative=False)
    assert same(packed, pack(upload, "int8", hashing.fold(4, "wire")))
    assert same(unpack_upload(packed, received, Wire(up="int8"), relative=False), unpack(packed))


def test_tensors_without_a_counterpart_are_sent_as_they_are() -> None:
    received = Message({"a": torch.ones(2, 2), "b": torch.ones(3), "c": torch.ones(2, 2, dtype=torch.float64)})
    upload = Message(
        {"a": torch.ones(2, 3), "b": torch.ones(3, dtype=torch.float64), "c": torch.ones(2, 2), "d": torch.ones(1)}
    )
    packed = pack_upload(upload, received, Wire(up="float16"), 0, {}, relative=True)
    assert same(unpack_upload(packed, received, Wire(up="float16"), relative=True), upload)
    assert all(bool((tensor == 1).all()) for tensor in packed.state.values())


def sums(wire: Wire, rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the changes of many rounds, those made and those that arrived."""
    draw = torch.Generator().manual_seed(7)
    memory: dict[str, torch.Tensor] = {}
    base = torch.randn(8, 200, dtype=torch.float64, generator=draw)
    made, arrived = torch.zeros_like(base), torch.zeros_like(base)
    zero = Message({"w": torch.zeros_like(base)})
    for round in range(rounds):
        change = base + 0.1 * torch.randn(base.shape, dtype=torch.float64, generator=draw)
        packed = pack_upload(Message({"w": change}), zero, wire, round, memory, relative=True)
        made += change
        arrived += unpack_upload(packed, zero, wire, relative=True).state["w"]
    return made, arrived


@pytest.mark.parametrize("format", STORED)
def test_with_feedback_the_sum_of_what_arrives_is_off_by_one_rounding(format: str) -> None:
    for rounds in (4, 64):
        made, arrived = sums(Wire(up=format, feedback=True), rounds)
        step = {"float16": 2**-11, "bfloat16": 2**-8, "int8": 1 / 127, "int4": 1 / 7}[format]
        assert (made - arrived).abs().max() < step * 1.5 * 4.6  # the largest |change + e|


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_without_feedback_the_error_of_the_sum_is_a_random_walk(format: str) -> None:
    def error(rounds: int) -> float:
        made, arrived = sums(Wire(up=format), rounds)
        return float((made - arrived).square().mean().sqrt())

    assert error(144) / error(16) == pytest.approx(3, rel=0.15)


def test_feedback_keeps_what_encoding_lost_and_nothing_else() -> None:
    received, memory = model_message(), {"optimiser.0.step": torch.ones(())}
    setting = Wire(up="int4", feedback=True)
    upload = trained(received)
    packed = pack_upload(upload, received, setting, 0, memory, relative=True)
    assert set(memory) == {"optimiser.0.step", "wire/0.weight", "wire/2.weight"}
    change = upload.state["0.weight"] - received.state["0.weight"]
    torch.testing.assert_close(unpack(packed).state["0.weight"] + memory["wire/0.weight"], change)
    again = pack_upload(upload, received, setting, 0, memory, relative=True)
    assert not same(packed, again)


def test_what_was_kept_for_another_shape_is_dropped() -> None:
    received = model_message(40)
    setting, upload, memory = Wire(up="int4", feedback=True), trained(received), {}
    fresh = pack_upload(upload, received, setting, 0, memory, relative=True)
    stale = {"wire/0.weight": torch.ones(80, 3, 3, 3), "wire/2.weight": torch.ones(())}
    assert same(pack_upload(upload, received, setting, 0, stale, relative=True), fresh)
    assert torch.equal(stale["wire/0.weight"], memory["wire/0.weight"])


def test_what_was_kept_takes_the_type_of_the_weights() -> None:
    upload, memory = Message({"w": torch.randn(3, 4).bfloat16()}), {"wire/w": torch.randn(3, 4, dtype=torch.float64)}
    packed = pack_upload(upload, upload, Wire(up="int8", feedback=True), 0, memory, relative=True)
    assert unpack(packed).state["w"].dtype == memory["wire/w"].dtype == torch.bfloat16


def test_a_round_that_went_wrong_leaves_no_trace_in_the_feedback() -> None:
    received, setting, memory = model_message(), Wire(up="int8", feedback=True), {}
    pack_upload(trained(received), received, setting, 0, memory, relative=True)
    wrong = trained(received)
    wrong.state["0.weight"][0, 0] = math.nan
    pack_upload(wrong, received, setting, 0, memory, relative=True)
    assert set(memory) == {"wire/2.weight"}
    packed = pack_upload(trained(received), received, setting, 0, memory, relative=True)
    assert all(math.isfinite(norm) for norm in unpack_upload(packed, received, setting, relative=True).norms.values())


# ------------------------------------------------------------------------------------------------ what is refused


def changed(packed: Message, state: dict[str, object] | None = None, **text: str | None) -> Message:
    """Replace tensors and text (`layout` for `wire.layout`); None takes them away."""
    words = {**packed.text, **{{"layout": "wire.layout"}.get(word, word): value for word, value in text.items()}}
    tensors = {**packed.state, **(state or {})}
    return Message(
        {n: x for n, x in tensors.items() if x is not None}, {w: v for w, v in words.items() if v is not None}
    )


def with_layout(packed: Message, name: str, entry: object) -> Message:
    return changed(packed, layout=json.dumps({**json.loads(packed.text["wire.layout"]), name: entry}))


INT8 = pack(Message({"w": torch.ones(3, 5), "b": torch.ones(5)}), "int8", 0)
INT4 = pack(Message({"w": torch.ones(3, 5), "b": torch.ones(5)}), "int4", 0)
HALF = pack(Message({"w": torch.ones(3, 5), "b": torch.ones(5)}), "float16", 0)
MALFORMED = {
    "unknown format": (changed(INT8, wire="int2"), "wire: found 'int2', expected float16 or bfloat16 or int8 or int4."),
    "float32 by name": (changed(INT8, wire="float32"), "wire: found 'float32', expected float16 or"),
    "another format": (changed(INT8, wire="int4"), "w: found torch.int8 of shape \\(3, 5\\), expected torch.uint8 of"),
    "no layout": (changed(INT8, layout=None), "wire.layout: found None, expected JSON with type and shape"),
    "no JSON": (changed(INT8, layout="{w"), "wire.layout: found '{w', expected JSON"),
    "a list": (changed(INT8, layout="[]"), "wire.layout: found '\\[\\]', expected JSON"),
    "deep": (changed(INT8, layout="[" * 100000), "wire.layout: found '\\[\\["),
    "many digits": (changed(INT8, layout="1" * 100000), "wire.layout: found '111"),
    "no entry": (with_layout(INT8, "w", None), "wire.layout of w: found None, expected \\[float64 or float32 or"),
    "unknown type": (with_layout(INT8, "w", ["complex64", [3, 5]]), "wire.layout of w: found \\['complex64'"),
    "type is a list": (with_layout(INT8, "w", [["float32"], [3, 5]]), "wire.layout of w: found"),
    "one dimension": (with_layout(INT8, "w", ["float32", [15]]), "wire.layout of w: found"),
    "65 dimensions": (with_layout(INT8, "w", ["float32", [1] * 65]), "wire.layout of w: found"),
    "negative size": (with_layout(INT4, "w", ["float32", [-3, -5]]), "wire.layout of w: found"),
    "true": (with_layout(INT8, "w", ["float32", [3, True]]), "wire.layout of w: found"),
    "a fraction": (with_layout(INT8, "w", ["float32", [3.0, 5.0]]), "wire.layout of w: found"),
    "absurd size": (with_layout(INT4, "w", ["float32", [3, 2**40]]), "w: found torch.uint8 of shape \\(3, 3\\), exp"),
    "more than absurd": (with_layout(INT4, "w", ["float32", [3, 10**30]]), "wire.layout of w: found"),
    "absurd and empty": (with_layout(INT4, "w", ["float32", [3, 10**30, 0]]), "wire.layout of w: found"),
    "another shape": (with_layout(INT8, "w", ["float32", [5, 3]]), "w: found torch.int8 of shape \\(3, 5\\), expected"),
    "another row": (with_layout(INT4, "w", ["float32", [3, 7]]), "w: found torch.uint8 of shape \\(3, 3\\), expected"),
    "layout of nothing": (with_layout(INT8, "v", ["float32", [3, 5]]), "v: found nothing, expected torch.int8 of"),
    "layout of a scale": (with_layout(INT8, "w..scale", ["float32", [3, 5]]), "wire.layout of w..scale: found"),
    "not in layout": (changed(INT8, layout="{}"), "w..scale: found torch.float32 of shape \\(3,\\), expected no such"),
    "not encoded": (changed(INT8, {"v": torch.ones(2, 2)}), "v: found torch.float32 of shape \\(2, 2\\), expected no"),
    "no data": (changed(INT8, {"w": None}), "w: found nothing, expected torch.int8 of shape \\(3, 5\\)."),
    "data of another type": (changed(HALF, {"w": torch.ones(3, 5).bfloat16()}), "w: found torch.bfloat16 of shape"),
    "no scale": (changed(INT8, {"w..scale": None}), "w..scale: found nothing, expected torch.float32 of shape \\(3"),
    "scale of another type": (changed(INT8, {"w..scale": torch.ones(3).double()}), "w..scale: found torch.float64"),
    "scale of another shape": (changed(INT8, {"w..scale": torch.ones(3, 1)}), "w..scale: found torch.float32 of shape"),
    "a scale too many": (changed(INT8, {"b..scale": torch.ones(5)}), "b..scale: found torch.float32 of shape \\(5,\\)"),
    "scale of a half": (changed(HALF, {"w..scale": torch.ones(3)}), "w..scale: found torch.float32 of shape \\(3,\\)"),
    "NaN scale": (changed(INT8, {"w..scale": torch.tensor([1, math.nan, 1])}), "w..scale: found NaN, infinite or neg"),
    "infinite scale": (changed(INT8, {"w..scale": torch.tensor([1, math.inf, 1])}), "w..scale: found NaN, infinite"),
    "negative scale": (changed(INT4, {"w..scale": torch.tensor([1.0, -1, 1])}), "w..scale: found NaN, infinite or neg"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_messages_are_refused_with_what_was_found_and_expected(case: str) -> None:
    message, words = MALFORMED[case]
    with pytest.raises(UploadError, match=f"^{words}"):
        unpack(message)
    with pytest.raises(UploadError):
        unpack_upload(message, Message({}), Wire(up="int8"), relative=True)


def test_text_of_any_depth_and_length_is_refused_in_a_short_sentence() -> None:
    for depth in (50, 500, *range(900, 1000, 3), 2000, 10000):
        for nested in ("[" * depth + "]" * depth, '{"w":' * depth + "1" + "}" * depth):
            with pytest.raises(UploadError):
                unpack(changed(INT8, layout=f'{{"w": {nested}}}'))
    long = "x" * 10**6
    for message in (changed(INT8, wire=long), changed(INT8, layout=long), with_layout(INT8, long, long)):
        with pytest.raises(UploadError) as refusal:
            unpack(message)
        assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("sent", FORMATS)
@pytest.mark.parametrize("wanted", FORMATS)
def test_an_upload_comes_in_the_format_that_was_agreed(sent: str, wanted: str) -> None:
    packed = pack(model_message(), sent, 0)
    if sent == wanted:
        unpack_upload(packed, Message({}), Wire(up=wanted), relative=True)
        return
    with pytest.raises(UploadError, match=f"wire: found '{sent}', expected '{wanted}'."):
        unpack_upload(packed, Message({}), Wire(up=wanted), relative=True)


def test_empty_tensors_of_absurd_shapes_cost_nothing() -> None:
    for shape in ([0, 2**62], [2**62, 0], [1] * 63 + [0]):
        for format in ("int8", "int4"):
            try:
                message = pack(Message({"w": torch.empty(shape)}), format, 0)
            except RuntimeError:  # the scales of 2**62 rows: what cannot be sent need not be read
                assert shape[0] == 2**62
                continue
            assert list(unpack(message).state["w"].shape) == shape


def test_codes_beyond_the_levels_are_no_numbers() -> None:
    back = unpack(changed(INT8, {"w": torch.full((3, 5), -128, dtype=torch.int8)})).state["w"]
    assert back.isnan().all()
    back = unpack(changed(INT4, {"w": torch.full((3, 3), 0x88, dtype=torch.uint8)})).state["w"]
    assert back.isnan().all()


def test_a_wire_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Wire().up = "int8"  # type: ignore[misc]
