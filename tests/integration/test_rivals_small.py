"""Methods with smaller clients against short numpy transcriptions of their papers' rules, and what they share."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from comfetch import hashing
from comfetch.blueprint import blueprint
from comfetch.errors import ModelError, OptionError, RunError, UploadError
from comfetch.methods import Client, FedAvg, Local, Message, Upload, check_upload
from comfetch.methods.averaging import Averaging
from comfetch.methods.factors import FACTORED, Factoring, build_factored, plan_factors
from comfetch.methods.fedrolex import FederatedDropout, FedRolex
from comfetch.methods.flocora import FLoCoRA, decode, draw_base, quantise
from comfetch.methods.heterofl import HeteroFL
from comfetch.methods.lowrank import LowRank
from comfetch.methods.mask import Mask, pack_bits, unpack_bits
from comfetch.methods.narrow import Narrow
from comfetch.models import resnet9
from comfetch.transforms import chain, momentum
from tests.integration.regression import Regression

IN, HIDDEN, OUT = 6, 8, 5
SGD = Local("sgd", lr=0.05, steps=3, batch_size=100)


class Classification(Regression):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)


def problems(count: int = 3) -> list[Regression]:
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    return [Regression(normal(10 + 5 * i, IN), normal(10 + 5 * i, OUT)) for i in range(count)]


def one_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT, bias=False).double()


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, HIDDEN, bias=False), nn.Linear(HIDDEN, OUT, bias=False)).double()


def take_part(method, server, build, client, data, memory, seed=0):
    """What a driver does for one client: returns the download and the checked upload."""
    message = method.download(server, client)
    model = method.client_model(build, client, message)
    if hasattr(method, "load"):
        method.load(model, message, memory)
    else:
        model.load_state_dict(message.state)
    trained = method.train(model, data, memory, seed)
    upload = Upload(client, method.upload(message, trained, memory))
    check_upload(upload, message, method.expected(message))
    if hasattr(method, "check"):
        method.check(upload, message)
    return message, upload


def run(method, build, data, rounds, capacities=(None,), server=None, memories=None):
    server = method.start(build) if server is None else server
    clients = [Client(i, len(d), capacities[i % len(capacities)]) for i, d in enumerate(data)]
    memories = [{} for _ in data] if memories is None else memories
    for _ in range(rounds):
        parts = zip(clients, data, memories, strict=True)
        uploads = [take_part(method, server, build, *part, seed=server.round)[1] for part in parts]
        server = method.step(server, uploads[::-1])
    return server


def with_momentum(rho):
    """The server's transforms; those of ρ = 0 are none."""
    return chain(momentum(rho)) if rho else chain()


def weighted_mean(values, data):
    weights = np.array([len(d) for d in data], dtype=float)
    return np.tensordot(weights / weights.sum(), np.stack(values), axes=1)


# Sub-models


def transcribe_submodels(data, capacities, windows, rounds, scaled, rho):
    """HeteroFL's averaging over holders for y = W₂ (W₁ x / r), with windows(round, client, width) of hidden units."""
    w1, w2 = (p.detach().numpy().copy() for p in two_layers().parameters())
    u1, u2 = np.zeros_like(w1), np.zeros_like(w2)
    for t in range(rounds):
        total1, total2, held = np.zeros_like(w1), np.zeros_like(w2), np.zeros(HIDDEN)
        for i, d in enumerate(data):
            r = capacities[i % len(capacities)] ** -0.5
            kept = windows(t, i, int(np.ceil(r * HIDDEN)))
            a, b = w1[kept], w2[:, kept]
            scale = 1 / r if scaled else 1.0
            x, y = d.arrays
            for _ in range(3):
                h = scale * x @ a.T
                slope = 2 * (h @ b.T - y) / y.size
                a, b = a - 0.05 * scale * (slope @ b).T @ x, b - 0.05 * slope.T @ h
            total1[kept] += len(d) * a
            total2[:, kept] += len(d) * b
            held[kept] += len(d)
        some = held > 0
        u1, u2 = rho * u1, rho * u2
        u1[some] += w1[some] - total1[some] / held[some, None]
        u2[:, some] += w2[:, some] - total2[:, some] / held[some]
        w1, w2 = w1 - u1, w2 - u2
    return w1, w2


def drawn(key):
    def windows(round, client, width):
        rank = hashing.draw([hashing.fold(key, "channels", round, client, HIDDEN)], HIDDEN, HIDDEN).index[0]
        return np.flatnonzero(rank < width)

    return windows


@pytest.mark.parametrize(("scaled", "rho"), [(True, 0.0), (False, 0.0), (True, 0.5)])
@pytest.mark.parametrize(
    ("make", "windows"),
    [
        (HeteroFL, lambda t, i, width: np.arange(width)),
        (FedRolex, lambda t, i, width: np.arange(t, t + width) % HIDDEN),
        (FederatedDropout, drawn(7)),
    ],
)
def test_submodels_equal_their_transcription(make, windows, scaled, rho):
    capacities = (4.0, 16.0, 2.0)  # no client holds everything: what nobody trains must stay
    method = make(capacities=capacities, scaled=scaled, local=SGD, server=with_momentum(rho), key=7)
    data = problems(4)
    server = run(method, two_layers, data, 6, capacities)
    wanted = transcribe_submodels(data, capacities, windows, 6, scaled, rho)
    for got, want in zip(server.weights.values(), wanted, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-12)
    untouched = np.isclose(server.weights["0.weight"].numpy(), two_layers()[0].weight.detach().numpy()).all(1)
    assert untouched.sum() == (2 if make is HeteroFL else 0)  # ⌈8/√2⌉ = 6 of 8 units are ever trained


def test_windows_roll_by_one_channel_a_round():
    method = FedRolex(compression=4)
    windows = [method.channels(8, 4, round, Client(0, 1)).tolist() for round in (0, 1, 6, 8)]
    assert windows == [[0, 1, 2, 3], [1, 2, 3, 4], [6, 7, 0, 1], [0, 1, 2, 3]]


def test_dropped_channels_differ_by_client_and_round_and_follow_the_key():
    method = FederatedDropout(key=3)
    seen = {(r, c): tuple(method.channels(64, 32, r, Client(c, 1)).tolist()) for r in range(3) for c in range(3)}
    assert len(set(seen.values())) == 9
    assert FederatedDropout(key=3).channels(64, 32, 1, Client(2, 1)).tolist() == list(seen[1, 2])
    assert FederatedDropout(key=4).channels(64, 32, 1, Client(2, 1)).tolist() != list(seen[1, 2])


def test_levels_of_the_paper_are_capacities():
    method = HeteroFL(capacities=(256, 64, 16, 4, 1))
    server = method.start(resnet9)
    widths = [
        method.download(server, Client(0, 1, capacity)).state["1.0.weight"].shape[0] for capacity in (1, 4, 16, 64, 256)
    ]
    assert widths == [128, 64, 32, 16, 8]
    assert method.audience(server, Client(0, 1)) == 256  # one that states no capacity is taken for the smallest
    with pytest.raises(OptionError, match="capacity=5 is no class of this run"):
        method.download(server, Client(0, 1, 5))


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))


def test_masked_loss_leaves_absent_classes_alone():
    data = Classification(torch.randn(12, 4), torch.tensor([1, 3] * 6))
    method = HeteroFL(compression=1, masked_loss=True, local=SGD)
    server = method.start(classifier)
    after = run(method, classifier, [data], 1, server=server).weights["2.weight"]
    changed = (after - server.weights["2.weight"]).abs().amax(1) > 1e-6
    assert changed.tolist() == [False, True, False, True, False]


def test_rows_of_the_last_layer_are_averaged_over_those_who_have_the_class():
    labels = ([1, 3] * 6, [3, 4] * 9)
    data = [Classification(torch.randn(len(held), 4), torch.tensor(held)) for held in labels]
    method = HeteroFL(capacities=(1, 4), masked_loss=True, local=SGD)
    assert not method.pools
    server = method.start(classifier)
    clients = [Client(0, 12, 1.0), Client(1, 18, 4.0)]
    uploads = [take_part(method, server, classifier, c, d, {})[1] for c, d in zip(clients, data, strict=True)]
    after = method.step(server, uploads).weights
    for name in ("2.weight", "2.bias"):
        total, held = np.zeros_like(server.weights[name]), np.zeros_like(server.weights[name])
        for upload, has in zip(uploads, labels, strict=True):
            part = upload.message.state[name].numpy()
            for row in set(has):
                where = (row, slice(part.shape[1])) if part.ndim > 1 else row
                total[where] += upload.client.examples * part[row]
                held[where] += upload.client.examples
        wanted = np.where(held > 0, total / np.maximum(held, 1), server.weights[name].numpy())
        np.testing.assert_allclose(after[name].numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize("make", [HeteroFL, FedRolex, FederatedDropout])
def test_each_width_has_its_own_statistics_and_the_full_model_those_of_the_widest(make):
    classes = (1.0, 16.0)
    method = make(capacities=classes, local=SGD)
    server = started(method)
    clients = [Client(i, 12, classes[i % 2]) for i in range(4)]
    uploads = [take_part(method, server, small_net, c, d, {})[1] for c, d in zip(clients, images(4), strict=True)]
    after = method.step(server, uploads)
    name = "4.running_var"
    wide = (uploads[0].message.state[name] + uploads[2].message.state[name]) / 2
    torch.testing.assert_close(after.weights[name], wide)
    if make is HeteroFL:  # the others send other channels in the next round
        torch.testing.assert_close(method.download(after, clients[0]).state[name], wide)
        narrow = (uploads[1].message.state[name] + uploads[3].message.state[name]) / 2
        torch.testing.assert_close(method.download(after, clients[1]).state[name], narrow)
    again = method.step(after, [take_part(method, after, small_net, clients[1], images(2)[1], {})[1]])
    torch.testing.assert_close(again.weights[name], wide)


# Masks


@pytest.mark.parametrize("kind", ["random", "l1"])
@pytest.mark.parametrize(("scaled", "rho"), [(True, 0.0), (False, 0.0), (True, 0.5)])
def test_masked_averaging_equals_its_transcription(kind, scaled, rho):
    method = Mask(3, kind=kind, scaled=scaled, policy="all", local=SGD, server=with_momentum(rho), key=5)
    data = problems()
    server = run(method, one_layer, data, 5)
    w = one_layer().weight.detach().numpy().copy()
    count = round(w.size / 3)
    if kind == "random":
        order = hashing.draw([hashing.fold(5, "mask", "weight")], w.size, w.size).index[0]
    else:
        order = np.argsort(np.argsort(-np.abs(w).ravel(), kind="stable"))
    mask = (order < count).reshape(w.shape)
    full = np.linalg.norm(w)
    w = w * mask
    if scaled:
        w *= full / np.linalg.norm(w)
    u = np.zeros_like(w)
    for _ in range(5):
        ends = []
        for d in data:
            v = w
            for _ in range(3):
                v = v - 0.05 * mask * d.gradient(v)
            ends.append(v)
        u = rho * u + w - weighted_mean(ends, data)
        w = w - u
    np.testing.assert_allclose(server.weights["weight"].numpy(), w, rtol=1e-10, atol=1e-12)
    assert (w != 0).sum() == count


def test_the_bits_of_an_l1_mask_travel_once_to_each_client():
    method, data = Mask(4, kind="l1", policy="all", local=SGD), problems(2)
    server, memories = method.start(one_layer), [{}, {}]
    first, upload = take_part(method, server, one_layer, Client(0, 10), data[0], memories[0])
    assert first.state["mask/weight"].shape == ((IN * OUT + 7) // 8,)
    assert first.state["weight"].shape == (round(IN * OUT / 4),)
    assert "mask/weight" not in upload.message.state
    server = method.step(server, [upload])
    again = take_part(method, server, one_layer, Client(0, 10), data[0], memories[0])[0]
    late = take_part(method, server, one_layer, Client(1, 10), data[1], memories[1])[0]
    assert "mask/weight" not in again.state
    assert "mask/weight" in late.state
    assert torch.equal(memories[0]["mask/weight"], memories[1]["mask/weight"])


def test_a_client_without_its_mask_says_so():
    method = Mask(4, kind="l1", policy="all")
    message = method.download(method.start(one_layer), Client(0, 10))
    message = Message({"weight": message.state["weight"]}, message.text)
    elsewhere = Mask(4, kind="l1", policy="all")
    with pytest.raises(RunError, match="lost its mask"):
        elsewhere.load(elsewhere.client_model(one_layer, Client(0, 10), message), message, {})


@pytest.mark.parametrize("size", [1, 8, 13])
def test_bits_are_unpacked_as_they_were_packed(size):
    places = torch.arange(0, size, 3)
    assert unpack_bits(pack_bits(places, size), size).tolist() == places.tolist()


def test_given_weights_are_masked_but_not_scaled():
    given = one_layer().state_dict()
    weights = Mask(2, policy="all").start(one_layer, given, fresh=False).weights["weight"]
    kept = weights != 0
    assert int(kept.sum()) == IN * OUT // 2
    assert torch.equal(weights[kept], given["weight"][kept])


# Low rank


@pytest.mark.parametrize(
    ("decay", "scaled", "rho"), [(0.0, True, 0.0), (0.1, True, 0.0), (0.0, False, 0.0), (0.1, False, 0.5)]
)
def test_low_rank_averaging_equals_its_transcription(decay, scaled, rho):
    def build():
        torch.manual_seed(0)
        return nn.Linear(16, 12, bias=False).double()

    draw = torch.Generator().manual_seed(2)
    data = [
        Regression(
            torch.randn(9 + i, 16, generator=draw, dtype=torch.float64),
            torch.randn(9 + i, 12, generator=draw, dtype=torch.float64),
        )
        for i in range(4)
    ]
    capacities = (1.5, 3.0)
    rule = with_momentum(rho)
    method = LowRank(capacities=capacities, decay=decay, scaled=scaled, policy="all", local=SGD, server=rule)
    server = run(method, build, data, 4, capacities)
    w = build().weight.detach().numpy().copy()
    if scaled:
        u, s, v = np.linalg.svd(w, full_matrices=False)
        w = u[:, :4] * s[:4] @ v[:4] * np.linalg.norm(s) / np.linalg.norm(s[:4])
    m = np.zeros_like(w)
    for _ in range(4):
        u, s, v = np.linalg.svd(w, full_matrices=False)
        begins, ends = [], []
        for i, d in enumerate(data):
            rank = int(16 * 12 / (capacities[i % 2] * 28))
            out, small = u[:, :rank] * np.sqrt(s[:rank]), np.sqrt(s[:rank])[:, None] * v[:rank]
            begins.append(out @ small)
            for _ in range(3):
                g = d.gradient(out @ small) + decay * out @ small
                out, small = out - 0.05 * g @ small.T, small - 0.05 * out.T @ g
            ends.append(out @ small)
        sent = weighted_mean(begins, data)
        m = rho * m + sent - weighted_mean(ends, data)
        w = sent - m
    np.testing.assert_allclose(server.weights["weight"].numpy(), w, rtol=1e-8, atol=1e-10)


def test_low_rank_clients_start_with_the_norm_of_the_full_weights_but_given_ones_are_left_alone():
    method, full = LowRank(8, policy="all"), small_net().state_dict()
    for fresh in (True, False):
        server = method.start(small_net, full, fresh)
        for name, plan in method._flat(8.0).items():
            small, out = (method.download(server, Client(0, 1)).state[name + end] for end in ("_in", "_out"))
            kept = float(plan.lift(small, out).norm() / full[name].norm())
            assert abs(kept - 1) < 1e-4 if fresh else kept < 0.9
            assert fresh or torch.equal(server.weights[name], full[name])


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 3, 3), (8, 6, 1, 5)])
def test_truncation_is_the_best_approximation_of_its_rank_and_full_rank_is_exact(shape):
    weight = torch.randn(shape, dtype=torch.float64)
    for rank in (2, 6):
        plan = Factoring(shape, split=len(shape) == 4, rank=rank)
        matrix = plan.matrices(weight)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        small, out = plan.truncate(u, s, v)
        assert (tuple(small.shape), tuple(out.shape)) == plan.shapes
        lost = (plan.lift(small, out) - weight).norm()
        torch.testing.assert_close(lost, s[0, rank:].norm())
        torch.testing.assert_close(plan.squared_norm(small, out), plan.lift(small, out).square().sum())
    whole = Factoring(shape, split=len(shape) == 4, rank=min(plan.size))
    torch.testing.assert_close(whole.lift(*whole.truncate(u, s, v)), weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x)[0]
        return y


LAYERS = {
    "linear": (lambda: nn.Linear(16, 12), (3, 16)),
    "conv1d": (lambda: nn.Conv1d(8, 8, 3), (2, 8, 9)),
    "conv2d": (lambda: nn.Conv2d(8, 8, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), (2, 8, 11, 12)),
    "conv3d": (lambda: nn.Conv3d(6, 6, 2), (2, 6, 4, 4, 4)),
    "embedding": (lambda: nn.Embedding(30, 12), None),
    "lstm": (lambda: nn.LSTM(12, 12, batch_first=True), (2, 3, 12)),
    "gru": (lambda: nn.GRU(12, 12, 2), (2, 3, 12)),
    "rnn": (lambda: nn.RNN(12, 12, bidirectional=True), (2, 3, 12)),
    "attention": (Attention, (2, 5, 16)),
    "attention with other keys": (lambda: nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), (2, 5, 16)),
}


@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_factored_layer_is_the_full_layer_with_the_lifted_weight(name, split, based):
    build, shape = LAYERS[name]
    plans = plan_factors(build(), "all", lambda m, n: 2, split)
    layer = build_factored(blueprint(build), plans, scale=3.0, based=based).eval()
    full = build().eval()
    state = full.state_dict()
    for owner, weights in plans.items():
        for weight, plan in weights.items():
            key = f"{owner}.{weight}" if owner else weight
            small, out = (torch.randn(s) for s in plan.shapes)
            layer.get_parameter(f"{key}_in").data, layer.get_parameter(f"{key}_out").data = small, out
            base = torch.randn(plan.shape) if based else torch.zeros(())
            if based:
                layer.get_buffer(f"{key}_base").copy_(base)
            state[key] = base + 3.0 * plan.lift(small, out)
    own = layer.state_dict()
    layer.load_state_dict({n: own.get(n) if n.endswith(("_in", "_out")) else state[n] for n in own})
    full.load_state_dict(state)
    inputs = (torch.randint(30, (2, 5)),) if shape is None else (torch.randn(shape),)
    inputs = inputs * 2 if name == "attention with other keys" else inputs
    got, want = layer(*inputs), full(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert any(isinstance(module, tuple(FACTORED.values())) for module in layer.modules())


# FLoCoRA


def quantised(x: np.ndarray) -> np.ndarray:
    least, most = x.min(1, keepdims=True), x.max(1, keepdims=True)
    step = (most - least) / 255
    return np.round((x - least) / np.where(step > 0, step, 1)) * step + least


@pytest.mark.parametrize(("int8", "rho"), [(True, 0.0), (False, 0.0), (True, 0.5)])
def test_flocora_equals_its_transcription(int8, rho):
    def build():
        torch.manual_seed(0)
        return nn.Linear(IN, OUT, bias=False).double()

    rule = with_momentum(rho)
    method = FLoCoRA(rank=2, scale=4.0, quantised=int8, policy="all", local=SGD, server=rule, key=3)
    data = problems()
    start = method.start(build)
    server = run(method, build, data, 5, server=start)
    base = draw_base(hashing.fold(3, "base", "weight"), Factoring((OUT, IN))).numpy().astype(float)
    small, out = start.extra["adapter/weight_in"].numpy(), np.zeros((OUT, 2))
    code = quantised if int8 else np.copy
    u = [np.zeros_like(small), np.zeros_like(out)]
    for _ in range(5):
        ends = []
        for d in data:
            a, b = code(small), code(out)
            for _ in range(3):
                g = 4.0 * d.gradient(base + 4.0 * b @ a)
                a, b = a - 0.05 * b.T @ g, b - 0.05 * g @ a.T
            ends.append((code(a), code(b)))
        sent, means = (code(small), code(out)), [weighted_mean(side, data) for side in zip(*ends, strict=True)]
        u = [rho * kept + begin - mean for kept, begin, mean in zip(u, sent, means, strict=True)]
        small, out = (begin - kept for begin, kept in zip(sent, u, strict=True))
    np.testing.assert_allclose(server.weights["weight"].numpy(), base + 4.0 * out @ small, rtol=1e-9, atol=1e-11)
    assert not np.allclose(out, 0)


def test_codes_are_int8_within_half_a_step_of_the_values():
    x = torch.cat([torch.randn(4, 3, 2), torch.full((1, 3, 2), 7.0)])
    codes, scale, least = quantise(x)
    assert codes.dtype == torch.int8 and codes.shape == x.shape and scale.shape == least.shape == (5,)
    back = decode({"w": codes, "w/scale": scale, "w/least": least, "b": x})
    assert bool(((back["w"] - x).abs().amax((1, 2)) <= scale / 2 + 1e-6).all())
    assert torch.equal(back["w"][4], x[4])
    assert back.keys() == {"w", "b"}


def test_the_base_is_drawn_from_the_key_alone_with_variance_two_over_inputs():
    base = draw_base(hashing.fold(1, "base", "w"), Factoring((64, 32, 3, 3)))
    assert base.shape == (64, 32, 3, 3)
    assert abs(float(base.var()) * 32 * 9 / 2 - 1) < 0.05
    assert abs(float(base.mean())) < 0.01
    again = draw_base(hashing.fold(1, "base", "w"), Factoring((64, 32, 3, 3)))
    assert torch.equal(base, again)
    golden = draw_base(9, Factoring((1, 4))).flatten().tolist()
    assert golden == pytest.approx([0.4466955, 0.6140745, -0.5748404, 0.6976481], abs=1e-6)


def test_given_weights_travel_once_as_the_frozen_base():
    method, data = FLoCoRA(rank=2, scale=1.0, policy="all", local=SGD), problems(1)
    given = one_layer().state_dict()
    server, memory = method.start(one_layer, given, fresh=False), {}
    first, upload = take_part(method, server, one_layer, Client(0, 10), data[0], memory)
    assert torch.equal(first.state["base/weight"], given["weight"])
    server = method.step(server, [upload])
    second, upload = take_part(method, server, one_layer, Client(0, 10), data[0], memory)
    assert "base/weight" not in second.state
    assert second.nbytes < first.nbytes
    moved = method.step(server, [upload]).weights["weight"]
    assert 0 < float((moved - given["weight"]).norm()) < float(given["weight"].norm())


# All of them


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16),
        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def images(count: int = 3) -> list[Classification]:
    draw = torch.Generator().manual_seed(4)
    pattern = torch.randn(10, 1, 8, 8, generator=draw)
    found = []
    for _ in range(count):
        labels = torch.randint(10, (12,), generator=draw)
        found.append(Classification(pattern[labels] + 0.3 * torch.randn(12, 1, 8, 8, generator=draw), labels))
    return found


def started(method):
    torch.manual_seed(0)
    return method.start(small_net)


@pytest.mark.parametrize(
    "method",
    [
        HeteroFL(1, local=SGD), FedRolex(1, local=SGD), FederatedDropout(1, local=SGD), LowRank(1, local=SGD),
        Mask(1, policy="all", local=SGD), Mask(1, kind="l1", policy="all", local=SGD), Narrow(compression=1, local=SGD),
        HeteroFL(capacities=(1,), local=SGD),
    ],
    ids=lambda method: method.name,
)  # fmt: skip
def test_without_compression_every_method_is_federated_averaging(method):
    data, plain = images(), FedAvg(local=SGD)
    capacities = getattr(method, "capacities", None) or (None,)
    ours = run(method, small_net, data, 4, capacities, started(method)).weights
    theirs = run(plain, small_net, data, 4, server=started(plain)).weights
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-5)


METHODS = {
    "narrow": lambda **options: Narrow(compression=4, **options),
    "heterofl": lambda **options: HeteroFL(4, **options),
    "fedrolex": lambda **options: FedRolex(4, **options),
    "fed-dropout": lambda **options: FederatedDropout(4, **options),
    "lowrank": lambda **options: LowRank(4, policy="all", **options),
    "mask": lambda **options: Mask(4, policy="all", **options),
    "mask-l1": lambda **options: Mask(4, kind="l1", policy="all", **options),
    "flocora": lambda **options: FLoCoRA(rank=2, policy="all", **options),
}


@pytest.mark.parametrize("name", METHODS)
def test_messages_are_about_as_small_as_the_compression_says(name):
    method = METHODS[name](local=SGD)
    message, upload = take_part(method, started(method), small_net, Client(0, 12), images(1)[0], {})
    full = sum(t.nbytes for t in small_net().state_dict().values() if t.is_floating_point())
    for sent in (message, upload.message):
        size = sum(t.nbytes for t in sent.state.values())
        assert size < 0.4 * full
        assert sent.nbytes - size < 3000  # names and text


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"fed-dropout"}))  # which needs wider layers than these
def test_training_lowers_the_loss_of_the_client_model(name):
    data = images(2)
    method = METHODS[name](local=Local("adam", lr=0.01, steps=8, batch_size=12))
    server = started(method)
    memory: dict[str, Tensor] = {}
    before = client_model(method, server, memory)
    server = run(method, small_net, data, 6, server=server, memories=[memory, memory])
    after = client_model(method, server, memory)
    losses = [data[0].loss(model(data[0].x), data[0].y).item() for model in (before, after)]
    assert losses[1] < 0.9 * losses[0]


@pytest.mark.parametrize("method", [Mask(4, policy="all", local=SGD), Mask(4, kind="l1", policy="all", local=SGD),
                                    FLoCoRA(rank=2, quantised=False, policy="all", local=SGD)])  # fmt: skip
def test_the_server_has_the_model_of_its_clients_in_full_form(method):
    data, memory = images(1), {}
    server = run(method, small_net, data, 2, server=started(method), memories=[memory])
    full = small_net()
    full.load_state_dict(server.weights)
    models = (full, client_model(method, server, memory))
    torch.testing.assert_close(*[model.eval()(data[0].x) for model in models])


def client_model(method, server, memory):
    message = method.download(server, Client(0, 12))
    model = method.client_model(small_net, Client(0, 12), message)
    if hasattr(method, "load"):
        method.load(model, message, memory)
    else:
        model.load_state_dict(message.state)
    return model


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("make", [HeteroFL, FedRolex, Mask])
def test_a_mean_of_uploads_of_one_capacity_counts_as_all_of_them(make, weighting):
    averaging = Averaging(weighting)
    method = (
        make(capacities=(4, 16), averaging=averaging) if make is not Mask else Mask(averaging=averaging, policy="all")
    )
    assert method.pools and not Mask(kind="l1").pools
    server, draw, uploads = started(method), torch.Generator().manual_seed(0), []
    for i, capacity in enumerate((4.0, 4.0, 16.0)):
        client = Client(i, 10 * (i + 1), capacity)
        state = method.download(server, client).state
        noisy = {n: t + torch.randn(t.shape, generator=draw) for n, t in state.items() if t.is_floating_point()}
        uploads.append(Upload(client, Message(noisy)))
    together = uploads[:2] if make is not Mask else uploads
    mean = averaging(together)
    pooled = Upload(Client(0, sum(u.client.examples for u in together), 4.0), Message(mean), len(together))
    apart, pooled_step = method.step(server, uploads), method.step(server, [pooled, *uploads[len(together) :]])
    for name, tensor in apart.weights.items():
        torch.testing.assert_close(pooled_step.weights[name], tensor)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_goes_on_from_the_server_and_the_memories_alone(name):
    data = images(2)
    method = METHODS[name](local=SGD)
    memories: list[dict[str, Tensor]] = [{}, {}]
    half = run(method, small_net, data, 2, server=started(method), memories=memories)
    kept, kept_memories = copy.deepcopy(half), copy.deepcopy(memories)
    whole = run(method, small_net, data, 2, server=half, memories=memories)
    fresh = METHODS[name](local=SGD)
    started(fresh)
    again = run(fresh, small_net, data, 2, server=kept, memories=kept_memories)
    for tensors in ("weights", "extra"):
        first, second = getattr(whole, tensors), getattr(again, tensors)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("name", METHODS)
def test_hostile_uploads_are_refused(name):
    method = METHODS[name](local=SGD)
    message, upload = take_part(method, started(method), small_net, Client(0, 12), images(1)[0], {})
    state = upload.message.state
    for spoilt in (
        {n: t for n, t in state.items() if n != "0.bias"},
        {**state, "evil": torch.zeros(1)},
        {**state, "0.bias": torch.full_like(state["0.bias"], torch.nan)},
        {**state, "0.bias": torch.full_like(state["0.bias"], 1e30)},
        {**state, "0.bias": torch.zeros(77)},
        {n: t.repeat(2) if t.ndim == 1 else t for n, t in state.items()},
        {n: t.double() if t.is_floating_point() else t for n, t in state.items()},
    ):
        bad = Upload(Client(0, 12), Message(spoilt, message.text))
        with pytest.raises(UploadError):
            check_upload(bad, message, method.expected(message))


@pytest.mark.parametrize("value", [torch.nan, 3e5])
def test_codes_that_decode_to_absurd_values_are_refused(value):
    method = FLoCoRA(rank=2, policy="all", local=SGD)
    message, upload = take_part(method, started(method), small_net, Client(0, 12), images(1)[0], {})
    scale = torch.full_like(upload.message.state["8.weight_in/scale"], value)
    bad = Upload(Client(0, 12), Message({**upload.message.state, "8.weight_in/scale": scale}, message.text))
    with pytest.raises(UploadError, match="client 0: "):
        method.check(bad, message)


class Largest(TorchDispatchMode):
    """Note the most elements of a tensor that really exists."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.most = max(self.most, tensor.numel())
        return result


@pytest.mark.parametrize("name", ["narrow", "heterofl", "fedrolex", "fed-dropout", "lowrank"])
def test_clients_of_small_models_never_hold_a_full_weight(name):
    def build():
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    method = METHODS[name](local=SGD)
    server = method.start(build)
    client, data = Client(0, 12), Classification(torch.randn(12, 8), torch.randint(3, (12,)))
    message = method.download(server, client)
    with Largest() as seen:
        model = method.client_model(build, client, message)
        model.load_state_dict(message.state)
        method.upload(message, method.train(model, data, {}, 0), {})
    assert seen.most <= 64 * 64 / 2


def test_a_forgotten_load_is_loud():
    for name in set(METHODS) - {"narrow"}:
        method = METHODS[name]()
        model = method.client_model(small_net, Client(0, 12), method.download(started(method), Client(0, 12)))
        assert bool(model(images(1)[0].x).isnan().any()), name


@pytest.mark.parametrize(
    "make",
    [
        lambda: HeteroFL(0.5), lambda: HeteroFL(capacities=()), lambda: HeteroFL(capacities=(1, 0.1)),
        lambda: HeteroFL(averaging=Averaging(rule="median")), lambda: FedRolex(float("nan")),
        lambda: FederatedDropout(key=-1), lambda: LowRank(0), lambda: LowRank(decay=-1), lambda: LowRank(policy="most"),
        lambda: LowRank(capacities=[0.5]), lambda: Mask(0.1), lambda: Mask(kind="l2"), lambda: Mask(policy="most"),
        lambda: Mask(key=2**64), lambda: FLoCoRA(rank=0), lambda: FLoCoRA(rank=True), lambda: FLoCoRA(scale=0),
        lambda: FLoCoRA(scale=float("inf")), lambda: FLoCoRA(policy="most"), lambda: Narrow(compression=0.5),
        lambda: Narrow(weights=0), lambda: Narrow(weights=2.5),
    ],
)  # fmt: skip
def test_options_that_cannot_be_meant_are_refused(make):
    with pytest.raises(OptionError):
        make()


def test_models_without_smaller_factors_are_refused_with_a_remedy():
    with pytest.raises(ModelError, match="no layer has smaller adapters. Lower it"):
        FLoCoRA(rank=100, policy="all").start(one_layer)
    FLoCoRA(rank=2, policy="all").start(one_layer)
    with pytest.raises(ModelError, match="no layer has smaller factors. Raise it"):
        LowRank(1.01, policy="all").start(lambda: nn.Linear(2, 2))
    LowRank(4, policy="all").start(small_net)
