import dataclasses
import json

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from comfetch.errors import OptionError, UploadError
from comfetch.experiment import Experiment
from comfetch.layers import SketchedLayer
from comfetch.methods import METHODS, Client, Comfetch, FedAvg, Local, Message, Upload, check_upload
from comfetch.methods.averaging import Averaging
from comfetch.models import resnet18
from comfetch.transforms import chain, error_feedback, scale, top_k

CLIENT = Client(0, 10)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))


def comfetch(**options):
    options.setdefault("sketch", {"only": ["2"]})
    return Comfetch(4, **options)


@given(
    st.dictionaries(st.text("abc.é_1", min_size=1, max_size=9), st.tuples(st.integers(0, 12), st.integers(0, 3))),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
    st.dictionaries(st.sampled_from(["key", "round", "ü"]), st.text("0aü", max_size=5)),
)
def test_the_bytes_of_a_message_are_those_of_its_file(shapes, dtype, text):
    state = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    state["counter"] = torch.zeros((), dtype=torch.int64)
    assert Message(state, text).nbytes == len(safetensors.torch.save(state, text or None))


def test_the_download_is_sketched_and_small():
    method = comfetch(key=3)
    server = method.start(build)
    message = method.download(server, CLIENT)
    assert message.state["2.weight"].shape == (16, 32)
    assert message.state["0.weight"].shape == (32, 6)
    sketch = '{"compression":4,"only":["2"]}'
    assert message.text == {"round": "0", "key": "0000000000000003", "draw": "0", "sketch": sketch}
    model = method.client_model(build, CLIENT, message)
    assert isinstance(model[2], SketchedLayer)
    model.load_state_dict(message.state)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_lengths_by_layer_go_before_the_compression_and_reach_the_client():
    method = Comfetch(4, sketch={"length": {"2": 8, "0": 16}, "blocks": 2})
    message = method.download(method.start(build), CLIENT)
    assert message.state["2.weight"].shape == (8, 32) and message.state["0.weight"].shape == (16, 6)
    told = json.loads(message.text["sketch"])
    again = Comfetch(told.pop("compression"), sketch=told)
    again.client_model(build, CLIENT, message).load_state_dict(message.state)
    with pytest.raises(OptionError, match="leave out capacities"):
        Comfetch(4, sketch={"length": 8}, capacities=(1, 2))


def test_a_forgotten_load_is_loud():
    method = comfetch()
    model = method.client_model(build, CLIENT, method.download(method.start(build), CLIENT))
    assert bool(torch.isnan(model(torch.zeros(2, 6))).all())


def test_server_and_client_models_agree():
    method = comfetch()
    server = method.start(build)
    message = method.download(server, CLIENT)
    model = method.client_model(build, CLIENT, message)
    model.load_state_dict(message.state)
    full = build()
    full.load_state_dict(server.weights)
    x = torch.randn(4, 6)
    torch.testing.assert_close(model.eval()(x), full.eval()(x))  # fresh weights lie in the range of the projection


def test_fresh_weights_keep_their_norm():
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(0)
    server = comfetch().start(build)
    torch.testing.assert_close(server.weights["2.weight"].norm(), model[2].weight.detach().norm())


def test_redrawn_hashes_differ_and_are_told_to_the_client():
    method = comfetch(redraw=2)
    server = method.start(build)
    texts = []
    for round in range(4):
        message = method.download(dataclasses.replace(server, round=round), CLIENT)
        texts.append(message.text["draw"])
    assert texts == ["0", "0", "1", "1"]
    first, later = method.plan(build, 0)["2.weight"], method.plan(build, 1)["2.weight"]
    assert first.key != later.key


def uploads(method, count=2):
    server = method.start(build)
    message = method.download(server, CLIENT)
    answers = []
    for i in range(count):
        state = {name: t + i if t.is_floating_point() else t + 7 for name, t in message.state.items()}
        answers.append(Upload(Client(i, 10 * (i + 1)), Message(state, message.text)))
    return server, message, answers


def test_counters_are_never_averaged_and_statistics_are():
    method = FedAvg()
    server, _, answers = uploads(method)
    after = method.step(server, answers)
    assert after.weights["3.num_batches_tracked"] == 0
    torch.testing.assert_close(after.weights["3.running_mean"], torch.full((64,), 20 / 30))
    assert after.round == 1


def test_the_average_does_not_depend_on_the_order_of_arrival():
    _, _, answers = uploads(FedAvg(), 5)
    forth, back = Averaging()(answers), Averaging()(answers[::-1])
    assert all(torch.equal(forth[name], back[name]) for name in forth)


def test_uniform_weights_ignore_the_number_of_examples():
    _, message, answers = uploads(FedAvg())
    torch.testing.assert_close(Averaging("uniform")(answers)["0.bias"], message.state["0.bias"] + 0.5)
    with pytest.raises(OptionError, match="weighting='loudest'"):
        Averaging("loudest")


def change(message: Message, name: str, tensor=None, text=None) -> Message:
    state = dict(message.state)
    if tensor is None:
        del state[name]
    else:
        state[name] = tensor
    return Message(state, message.text if text is None else text)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda m: change(m, "0.weight"), "0.weight is missing"),
        (lambda m: change(m, "evil", torch.zeros(1)), "evil is unknown"),
        (lambda m: change(m, "0.bias", torch.zeros(31)), r"0.bias is torch.float32 of shape \(31,\)"),
        (lambda m: change(m, "0.bias", torch.zeros(32).double()), "0.bias is torch.float64"),
        (lambda m: change(m, "0.bias", torch.full((32,), torch.nan)), "0.bias has NaN"),
        (lambda m: change(m, "0.bias", torch.full((32,), torch.inf)), "0.bias has NaN or infinite"),
        (lambda m: change(m, "0.bias", torch.full((32,), 1e9)), "its norm is"),
        (lambda m: Message(m.state, {**m.text, "key": "ff"}), "key is 'ff'"),
        (lambda m: Message(m.state, {**m.text, "round": "7"}), "round is '7', expected '0'"),
        (lambda m: Message(m.state, {}), "round is None"),
    ],
)
def test_an_upload_that_is_no_answer_is_refused_and_named(spoil, complaint):
    method = comfetch()
    _, message, answers = uploads(method)
    check_upload(answers[0], message, method.expected(message))
    with pytest.raises(UploadError, match=f"client 5: .*{complaint}"):
        check_upload(Upload(Client(5, 10), spoil(answers[0].message)), message, method.expected(message))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Comfetch(0.5), lambda: Comfetch(4, uploads="everything"), lambda: Comfetch(4, redraw=0),
        lambda: Comfetch(4, space="outer"), lambda: Comfetch(4, space="sketch", redraw=2),
        lambda: Comfetch(4, sketch={"lenght": 3}), lambda: Comfetch(4, sketch={"hash": "md5"}),
        lambda: Comfetch(4, key=-1), lambda: Comfetch(4, sketch={"key": 5}), lambda: Comfetch(4, sketch=3),
        lambda: Comfetch(4, sketch={"compression": 2}), lambda: Comfetch(0.5, sketch={"length": 8}),
        lambda: Local("adamm"), lambda: Local(lr=0), lambda: Local(lr=float("nan")), lambda: Local(epochs=0),
        lambda: Local(batch_size=-1), lambda: Local(clip=0.0), lambda: Local(prox=-1),
        lambda: Local("adam", settings={"momentum": 0.9}),
    ],
)  # fmt: skip
def test_options_that_cannot_be_meant_are_refused(make):
    with pytest.raises(OptionError):
        make()


def test_the_paper_preset_sketches_everything_but_the_classifier_with_plain_lengths():
    method = Experiment.of({"preset": "paper", "compression": 10.0}).make_method()
    assert (method.averaging.weighting, method.local.keep_optimiser, method.local.load_rates) == ("uniform", True, True)
    plan = method.plan(resnet18, 0)
    lengths = {name: plan[name].length[0] for name in plan}
    assert lengths["conv1.weight"] == 6
    assert lengths["layer2.0.downsample.0.weight"] == 12
    assert lengths["layer4.1.conv2.weight"] == 51
    assert "fc.weight" not in plan
    assert {(p.hash, p.scale, p.blocks, p.mode) for p in plan.values()} == {("random", "count", 1, "output")}


def test_error_feedback_in_sketch_space_leaves_the_error_small():
    method = comfetch(space="sketch", server=chain(scale(1.0), error_feedback(top_k(0.1))))
    server, _, answers = uploads(method)
    after = method.step(server, answers)
    assert after.transforms["1.2.weight"].shape == (16, 32)
    assert after.weights["2.weight"].shape == (64, 32)


@pytest.mark.parametrize(
    ("options", "rate"),
    [({}, 1.0), ({"server_lr": 0.5}, 0.5), ({"uploads": "gradient", "lr": 0.03}, 0.03)],
)
def test_rivals_take_the_rate_of_the_server(options, rate):
    assert Experiment.of({"method": "fetchsgd", **options}).make_method().rate == rate


@pytest.mark.parametrize(
    ("options", "momentum"),
    [
        ({}, 0.3), ({"server_momentum": 0.0}, 0.0), ({"preset": "paper"}, 0.0), ({"uploads": "gradient"}, 0.0),
        ({"server_optimiser": "adam"}, 0.0), ({"server_optimiser": "adam", "server_momentum": 0.5}, 0.5),
    ],
)  # fmt: skip
def test_the_default_preset_has_momentum_for_averages_of_weights(options, momentum):
    assert Experiment.of(options).server_momentum == momentum


OWN_RULE = [name for name, kind in METHODS.items() if "server" not in {f.name for f in dataclasses.fields(kind)}]
"""Methods whose server has a rule of its own."""


@pytest.mark.parametrize("name", METHODS)
def test_momentum_is_on_record_only_for_methods_that_apply_it(name):
    made = Experiment.of({"method": name})
    assert made.options()["server_momentum"] == (0.0 if name in OWN_RULE else 0.3)
    assert Experiment.of(made.options()) == made
    if name not in OWN_RULE:
        assert [step.factor for step in made.make_method().server.transforms] == [0.3]


@pytest.mark.parametrize(
    ("option", "value"),
    [("server_momentum", 0.3), ("server_optimiser", "adam"), ("top_k", 0.1), ("factor_masking", True)],
)
@pytest.mark.parametrize("name", OWN_RULE)
def test_a_method_with_a_server_rule_of_its_own_refuses_what_it_would_not_heed(name, option, value):
    with pytest.raises(OptionError, match=f"^{option}={value!r}: {name} would not heed this. Leave it out") as refused:
        Experiment.of({"method": name, option: value})
    others = str(refused.value).partition("takes it: ")[2].rstrip(".").split(", ")
    assert sorted([*others, *OWN_RULE]) == sorted(METHODS)
    for other in others:
        Experiment.of({"method": other, option: value}).make_method()


def test_all_options_that_would_not_be_heeded_are_named_at_once():
    with pytest.raises(OptionError, match=r"^server_momentum=0.5, top_k=0.1: ef21 .* comfetch, fedavg"):
        Experiment.of({"method": "ef21", "server_momentum": 0.5, "top_k": 0.1, "server_lr": 0.5})


def test_a_method_without_any_rate_refuses_that_of_the_server(monkeypatch):
    Experiment.of({"method": "fetchsgd", "server_lr": 0.5})
    monkeypatch.setitem(METHODS, "fetchsgd", Local)  # no method is without, yet
    with pytest.raises(OptionError, match="^server_lr=0.5: fetchsgd would not heed this"):
        Experiment.of({"method": "fetchsgd", "server_lr": 0.5})


def test_gradients_are_refused_where_clients_send_what_they_have_trained():
    for name in ("fedavg", "heterofl", "mask"):
        with pytest.raises(OptionError, match=f"^uploads='gradient': {name} would not heed this.*: comfetch, fetchsgd"):
            Experiment.of({"method": name, "uploads": "gradient"})


@pytest.mark.parametrize("options", [{"server_lr": 0.5}, {"uploads": "gradient", "lr": 0.5}])
def test_the_rate_of_the_server_is_applied_once(options):
    method = Experiment.of({"method": "qsgd", "server_momentum": 0.0, **options}).make_method()
    assert method.rate == 1.0
    assert [step.rate for step in method.server.transforms] == [0.5]


def test_a_rate_of_zero_is_refused_and_not_taken_for_none():
    for name in ("fedavg", "qsgd", "fetchsgd"):
        with pytest.raises(OptionError, match="rate=0.0 is not"):
            Experiment.of({"method": name, "server_lr": 0.0}).make_method()
