"""Each algorithm against a short numpy transcription of the paper's pseudo-code, with explicit hash matrices."""

import numpy as np
import pytest
import torch
from torch import nn

from comfetch import hashing
from comfetch.methods import Client, Comfetch, FedAvg, Local, Upload
from comfetch.transforms import chain, error_feedback, momentum, scale, top_k
from tests.integration.regression import Regression

OUT, IN, EXAMPLES = 12, 8, 20


def problems(count: int = 3) -> list[Regression]:
    draw = torch.Generator().manual_seed(1)
    return [
        Regression(
            torch.randn(EXAMPLES, IN, generator=draw, dtype=torch.float64),
            torch.randn(EXAMPLES, OUT, generator=draw, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT, bias=False).double()


def run(method, data, rounds):
    server = method.start(build)
    clients = [Client(i, len(d)) for i, d in enumerate(data)]
    memories = [{} for _ in data]
    for _ in range(rounds):
        uploads = []
        for client, local, memory in zip(clients, data, memories, strict=True):
            message = method.download(server, client)
            model = method.client_model(build, client, message)
            model.load_state_dict(message.state)
            trained = method.train(model, local, memory, seed=client.id)
            uploads.append(Upload(client, method.upload(message, trained, memory)))
        server = method.step(server, uploads)
    return server.weights["weight"].numpy()


def matrix(method: Comfetch, row: int = 0, draw: int = 0) -> np.ndarray:
    """The hash matrix H of the only weight, with one block."""
    plan = method.plan(build, draw)["weight"]
    key = hashing.fold(plan.key, "output", row, 0, 0)
    (index,), (sign,) = hashing.draw([key], OUT, plan.length[0], plan.hash)
    h = np.zeros((plan.length[0], OUT))
    h[index, np.arange(OUT)] = sign
    return h


def largest(v: np.ndarray, fraction: float) -> np.ndarray:
    k = max(1, round(fraction * v.size))
    kept = np.zeros(v.size)
    order = np.argsort(-np.abs(v.ravel()), kind="stable")[:k]
    kept[order] = v.ravel()[order]
    return kept.reshape(v.shape)


def paper_sketch(**more):
    return {"hash": "random", "blocks": 1, "scale": "count", "policy": "all", **more}


@pytest.mark.parametrize("masked", [False, True])
def test_algorithm_1_equals_its_transcription(masked):
    server = chain(momentum(0.9, masked=masked), scale(0.1), error_feedback(top_k(0.2)))
    method = Comfetch(2, key=5, uploads="gradient", server=server, sketch=paper_sketch())
    data = problems()
    result = run(method, data, rounds=6)
    h = matrix(method)
    w = build().weight.detach().numpy().copy()
    u, e = np.zeros_like(w), np.zeros_like(w)
    for _ in range(6):
        g = h.T @ np.mean([h @ d.gradient(h.T @ (h @ w)) for d in data], axis=0)
        u = 0.9 * u + g
        v = e + 0.1 * u
        delta = largest(v, 0.2)
        e = v - delta
        w = w - delta
        u = np.where(delta != 0, 0, u) if masked else u
    np.testing.assert_allclose(result, w, rtol=1e-10, atol=1e-12)


def test_algorithm_1_with_a_new_hash_each_round_equals_its_transcription():
    method = Comfetch(2, key=5, uploads="gradient", server=chain(scale(0.1)), redraw=1, sketch=paper_sketch())
    data = problems()
    result = run(method, data, rounds=4)
    w = build().weight.detach().numpy().copy()
    for round in range(4):
        h = matrix(method, draw=round)
        w = w - 0.1 * h.T @ np.mean([h @ d.gradient(h.T @ (h @ w)) for d in data], axis=0)
    np.testing.assert_allclose(result, w, rtol=1e-10, atol=1e-12)


def test_algorithm_1_in_sketch_space_equals_its_transcription():
    server = chain(momentum(0.9), scale(0.1), error_feedback(top_k(0.2)))
    method = Comfetch(2, key=5, uploads="gradient", server=server, space="sketch", sketch=paper_sketch())
    data = problems()
    result = run(method, data, rounds=6)
    h = matrix(method)
    load = h @ h.T
    w = build().weight.detach().numpy().copy()
    u, e = np.zeros((len(h), IN)), np.zeros((len(h), IN))
    for _ in range(6):
        u = 0.9 * u + np.mean([h @ d.gradient(h.T @ (h @ w)) for d in data], axis=0)
        v = e + 0.1 * u
        delta = largest(h.T @ v, 0.2)
        e = v - np.linalg.pinv(load) @ h @ delta
        w = w - delta
    np.testing.assert_allclose(result, w, rtol=1e-10, atol=1e-12)


def test_algorithm_2_equals_its_transcription():
    method = Comfetch(2, key=3, uploads="gradient", server=chain(scale(0.1)), sketch=paper_sketch(rows=3))
    data = problems()
    result = run(method, data, rounds=4)
    hs = [matrix(method, row) for row in range(3)]
    w = build().weight.detach().numpy().copy()
    for _ in range(4):
        g = np.zeros_like(w)
        for d in data:
            x, y = d.x.numpy(), d.y.numpy()
            outputs = np.stack([x @ (h.T @ (h @ w)).T for h in hs])  # (rows, examples, outputs)
            chosen = outputs.argsort(axis=0)[1]
            slope = 2 * (np.median(outputs, axis=0) - y) / y.size
            for row, h in enumerate(hs):
                g += h.T @ (h @ (np.where(chosen == row, slope, 0).T @ x)) / len(data)
        w = w - 0.1 * g
    np.testing.assert_allclose(result, w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["count", "isometric", "mean"])
def test_averaging_after_several_local_steps_equals_its_transcription(kind):
    sketch = {"hash": "balanced", "blocks": 1, "scale": kind, "policy": "all"}
    local = Local("sgd", lr=0.05, steps=3, batch_size=EXAMPLES)
    method = Comfetch(3, key=9, local=local, sketch=sketch)
    data = problems()
    result = run(method, data, rounds=4)
    h = matrix(method)
    n = np.diag(h @ h.T)
    a = {"count": h, "isometric": h / np.sqrt(n)[:, None], "mean": h / n[:, None]}[kind]
    expand = {"count": h.T, "isometric": a.T, "mean": h.T}[kind]
    w = build().weight.detach().numpy().copy()
    if kind != "count":
        p = expand @ a @ w
        w = p * np.linalg.norm(w) / np.linalg.norm(p)
    for _ in range(4):
        ends = []
        for d in data:
            s = a @ w
            for _ in range(3):
                s = s - 0.05 * expand.T @ d.gradient(expand @ s)
            ends.append(s)
        w = w + np.linalg.pinv(a) @ (np.mean(ends, axis=0) - a @ w)
    np.testing.assert_allclose(result, w, rtol=1e-9, atol=1e-11)


def test_averaging_with_two_rows_lifts_by_the_pseudo_inverse_of_the_stack():
    sketch = {"hash": "balanced", "blocks": 1, "scale": "count", "policy": "all", "rows": 2}
    local = Local("sgd", lr=0.05, steps=2, batch_size=EXAMPLES)
    method = Comfetch(3, key=9, local=local, sketch=sketch)
    data = problems()
    result = run(method, data, rounds=3)
    hs = [matrix(method, row) for row in range(2)]
    stack = np.concatenate(hs)
    w = build().weight.detach().numpy().copy()
    for _ in range(3):
        ends = []
        for d in data:
            s = [h @ w for h in hs]
            for _ in range(2):
                slope = d.gradient((hs[0].T @ s[0] + hs[1].T @ s[1]) / 2)
                s = [x - 0.05 * h @ slope / 2 for x, h in zip(s, hs, strict=True)]
            ends.append(np.concatenate(s))
        w = w + np.linalg.pinv(stack) @ (np.mean(ends, axis=0) - stack @ w)
    np.testing.assert_allclose(result, w, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_compression_1_equals_federated_averaging(optimiser):
    local = Local(optimiser, lr=0.02, steps=4, batch_size=EXAMPLES)
    data = problems()
    ours = run(Comfetch(1, key=2, local=local, sketch={"policy": "all", "blocks": 1}), data, rounds=5)
    theirs = run(FedAvg(local=local), data, rounds=5)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert not np.allclose(ours, build().weight.detach().numpy(), atol=1e-2)


def test_fedavg_weights_clients_by_examples():
    data = problems(2)
    data[1] = Regression(data[1].x[:5], data[1].y[:5])
    local = Local("sgd", lr=0.05, steps=2, batch_size=EXAMPLES)
    result = run(FedAvg(local=local), data, rounds=1)
    ends = []
    for d in data:
        w = build().weight.detach().numpy().copy()
        for _ in range(2):
            w = w - 0.05 * d.gradient(w)
        ends.append(w)
    np.testing.assert_allclose(result, (20 * ends[0] + 5 * ends[1]) / 25, rtol=1e-12)
