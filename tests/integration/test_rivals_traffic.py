"""Each method that compresses traffic against a short numpy transcription of its paper's rule."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from comfetch import hashing
from comfetch.errors import OptionError, RunError, UploadError
from comfetch.methods import Client, FedAvg, Local, Message, Upload, check_upload
from comfetch.methods.artemis import Artemis
from comfetch.methods.averaging import Averaging
from comfetch.methods.base import TwoPass
from comfetch.methods.blockwise import Blockwise
from comfetch.methods.docofl import DoCoFL
from comfetch.methods.doublesqueeze import DoubleSqueeze
from comfetch.methods.eden import quantiser
from comfetch.methods.ef21 import EF21
from comfetch.methods.fetchsgd import FetchSGD
from comfetch.methods.qsgd import QSGD
from comfetch.methods.sketched_sgd import SketchedSGD
from comfetch.methods.topk import LocalTopK, TrueTopK
from comfetch.transforms import chain, momentum
from tests.integration.regression import Regression

OUT, IN, CLIENTS, ROUNDS, LR = 6, 8, 3, 6, 0.3
SIZE = OUT * IN + OUT
SIZES = [OUT * IN, OUT]
MODES = ("gradient", "weights")
ALL = [list(range(CLIENTS))] * ROUNDS
SOME = [[0, 1], [0, 2], [1, 2], [0], [0, 1, 2], [0, 1, 2]]
"""Who takes part in each round: client 2 joins late, and each is away at times."""


class Problem(Regression):
    """One client's least squares problem: loss = mean over all elements of (W x + b - y)²; θ is W and b."""

    def update(self, theta: np.ndarray, mode: str) -> np.ndarray:
        """The gradient at θ, or minus the change of θ by two steps of local training."""
        if mode == "gradient":
            return self.gradient(theta)
        new = theta
        for _ in range(2):
            new = new - LR * self.gradient(new)
        return theta - new

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        w, b = theta[: OUT * IN].reshape(OUT, IN), theta[OUT * IN :]
        slope = 2 * (self.x.numpy() @ w.T + b - self.y.numpy()) / self.y.numel()
        return np.concatenate([(slope.T @ self.x.numpy()).ravel(), slope.sum(0)])


def problems() -> list[Problem]:
    """Clients of unequal size."""
    draw = torch.Generator().manual_seed(1)
    return [
        Problem(*(torch.randn(10 + 5 * i, n, generator=draw, dtype=torch.float64) for n in (IN, OUT)))
        for i in range(CLIENTS)
    ]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT).double()


def first() -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in build().parameters()])


def local(mode: str) -> Local:
    return Local("sgd", lr=LR, steps=2 if mode == "weights" else None, batch_size=100)


def seed_of(round: int, client: int) -> int:
    return hashing.fold(7, round, client)


class Play:
    """A tiny driver: it checks every upload, loads every download twice, and can lose uploads."""

    def __init__(self, method, data, build=build):
        self.method, self.data, self.build = method, data, build
        self.server = method.start(build)
        self.clients = [Client(i, len(d)) for i, d in enumerate(data)]
        self.memories = [{} for _ in data]
        self.sent: list[dict[int, Message]] = []
        self.models: dict[int, nn.Module] = {}

    def receive(self, i: int) -> Message:
        message = self.method.download(self.server, self.clients[i])
        model = self.method.client_model(self.build, self.clients[i], message)
        load = getattr(self.method, "load", lambda model, message, memory: model.load_state_dict(message.state))
        load(model, message, self.memories[i])
        load(model, message, self.memories[i])
        self.sent[-1][i], self.models[i] = message, model
        return message

    def answer(self, i: int) -> Upload:
        message = self.receive(i)
        seed = seed_of(self.server.round, i)
        trained = self.method.train(self.models[i], self.data[i], self.memories[i], seed)
        return self.checked(i, self.method.upload(message, trained, self.memories[i]), message)

    def checked(self, i: int, answer: Message, sent: Message) -> Upload:
        upload = Upload(self.clients[i], answer)
        check_upload(upload, sent, self.method.expected(sent))
        getattr(self.method, "check", lambda upload, sent: None)(upload, sent)
        return upload

    def round(self, present, lost=()) -> None:
        self.sent.append({})
        uploads = [self.answer(i) for i in present]
        uploads = [upload for upload in uploads if upload.client.id not in lost]
        if isinstance(self.method, TwoPass):
            self.server, request = self.method.request(self.server, uploads)
            uploads = [self.checked(i, self.method.respond(request, self.memories[i]), request) for i in present]
        self.server = self.method.step(self.server, uploads[::-1])

    def theta(self) -> np.ndarray:
        return self.method.layout.flatten(self.server.weights).numpy()


def run(method, present=ALL) -> Play:
    play = Play(method, problems())
    for who in present:
        play.round(who)
    return play


def close(play: Play, theta: np.ndarray) -> None:
    assert not np.allclose(theta, first(), atol=1e-3)
    np.testing.assert_allclose(play.theta(), theta, rtol=1e-8, atol=1e-10)


def mean(vectors: dict[int, np.ndarray]) -> np.ndarray:
    """Average by number of examples."""
    n = {i: len(problems()[i]) for i in vectors}
    return sum(n[i] * v for i, v in vectors.items()) / sum(n.values())


def top(v: np.ndarray, fraction: float) -> np.ndarray:
    return places(v, max(1, int(fraction * SIZE + 0.5)))


def places(v: np.ndarray, k: int) -> np.ndarray:
    kept = np.zeros_like(v)
    order = np.argsort(-np.abs(v), kind="stable")[:k]
    kept[order] = v[order]
    return kept


def signs(v: np.ndarray) -> np.ndarray:
    return np.concatenate([np.abs(b).mean() * np.where(b >= 0, 1, -1) for b in np.split(v, [SIZES[0]])])


def rounded(v: np.ndarray, levels: int, bucket: int, seed: int, norm: str = "max") -> np.ndarray:
    """Random rounding with the numbers that a key gives."""
    u = torch.rand(SIZE, generator=torch.Generator().manual_seed(seed % 2**63), dtype=torch.float64).numpy()
    out = np.zeros_like(v)
    for i in range(0, SIZE, bucket):
        part = v[i : i + bucket]
        size = np.linalg.norm(part) if norm == "l2" else np.abs(part).max()
        if size > 0:
            out[i : i + bucket] = (
                size * np.sign(part) * np.floor(levels * np.abs(part) / size + u[i : i + bucket]) / levels
            )
    return out


def rotated(v: np.ndarray, bits: int, seed: int) -> np.ndarray:
    """EDEN with the numbers that a key gives; 54 coordinates are padded to 64."""
    key = torch.randint(0, 256, (8,), generator=torch.Generator().manual_seed(seed % 2**63), dtype=torch.uint8)
    (sign,) = hashing.draw([int.from_bytes(key.numpy().tobytes(), "little")], 64, 1, "random").sign
    h = np.ones((1, 1))
    for _ in range(6):
        h = np.kron([[1, 1], [1, -1]], h)
    rotation, x = h * sign / 8, np.pad(v, (0, 64 - SIZE))
    if not x.any():
        return v
    centroids, unit = quantiser(bits)[0].numpy(), 8 * rotation @ x / np.linalg.norm(x)
    q = centroids[np.abs(unit[:, None] - centroids).argmin(1)]
    return (x @ x / (rotation @ x @ q) * rotation.T @ q)[:SIZE]


def up_seed(round: int, client: int, key: int) -> int:
    return hashing.fold(key, "upload", seed_of(round, client) % 2**63)


def matrices(key: int, rows: int, length: int) -> np.ndarray:
    h = np.zeros((rows, length, SIZE))
    for row in range(rows):
        (index,), (sign,) = hashing.draw([hashing.fold(key, "row", row)], SIZE, length, "random")
        h[row, index, np.arange(SIZE)] = sign
    return h


def estimate(h: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.median([matrix.T @ row for matrix, row in zip(h, table, strict=True)], axis=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize(("masked", "clear"), [(False, "subtract"), (True, "subtract"), (True, "zero")])
def test_fetchsgd_equals_its_transcription(mode, masked, clear, changes):
    method = FetchSGD(2, 3, 0.1, 0.8, masked, clear, changes=changes, rate=0.4, uploads=mode, local=local(mode), key=4)
    play = run(method, SOME)
    h = matrices(4, 3, 9)
    theta, u, e = first(), np.zeros((3, 9)), np.zeros((3, 9))
    for present in SOME:
        g = mean({i: problems()[i].update(theta, mode) for i in present})
        u = 0.8 * u + h @ g
        e = e + 0.4 * u
        delta = top(estimate(h, e), 0.1)
        theta = theta - delta
        touched = h @ delta != 0
        e = e - h @ delta if clear == "subtract" else np.where(touched, 0, e)
        u = np.where(touched, 0, u) if masked else u
    close(play, theta)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("candidates", [1, 3, 100])
def test_sketched_sgd_equals_its_transcription_with_all_errors_on_the_clients(mode, candidates):
    method = SketchedSGD(2, 3, 0.1, candidates, rate=0.4, uploads=mode, local=local(mode), key=4)
    play = run(method)
    h = matrices(4, 3, 9)
    theta, a = first(), dict.fromkeys(range(CLIENTS), np.zeros(SIZE))
    for _ in ALL:
        v = {i: 0.4 * problems()[i].update(theta, mode) + a[i] for i in a}
        found = places(estimate(h, mean({i: h @ v[i] for i in v})), min(SIZE, 5 * candidates))
        delta = places(np.where(found != 0, mean(v), 0), 5)
        theta = theta - delta
        a = {i: v[i] - delta for i in v}
    close(play, theta)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_true_top_k_equals_its_transcription(mode, masked, changes):
    method = TrueTopK(0.15, 0.7, masked, changes=changes, rate=0.4, uploads=mode, local=local(mode))
    play = run(method, SOME)
    theta, u, e = first(), np.zeros(SIZE), np.zeros(SIZE)
    for present in SOME:
        u = 0.7 * u + mean({i: problems()[i].update(theta, mode) for i in present})
        e = e + 0.4 * u
        delta = top(e, 0.15)
        e, theta = e - delta, theta - delta
        u = np.where(delta != 0, 0, u) if masked else u
    close(play, theta)


@pytest.mark.parametrize("mode", MODES)
def test_local_top_k_equals_its_transcription(mode):
    method = LocalTopK(0.15, 0.3, changes=True, rate=0.4, uploads=mode, local=local(mode))
    play = run(method, SOME)
    theta, u, e = first(), np.zeros(SIZE), np.zeros((CLIENTS, SIZE))
    for present in SOME:
        sent = {}
        for i in present:
            v = e[i] + problems()[i].update(theta, mode)
            sent[i] = top(v, 0.15)
            e[i] = v - sent[i]
        u = 0.3 * u + mean(sent)
        theta = theta - 0.4 * u
    close(play, theta)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", ["l2", "max"])
def test_qsgd_equals_its_transcription(mode, norm):
    play = run(QSGD(3, 10, norm, rate=0.4, uploads=mode, local=local(mode), key=4), SOME)
    theta = first()
    for round, present in enumerate(SOME):
        updates = {i: problems()[i].update(theta, mode) for i in present}
        sent = {i: rounded(g, 3, 10, up_seed(round, i, 4), norm) for i, g in updates.items()}
        theta = theta - 0.4 * mean(sent)
    close(play, theta)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compressor", ["top_k", "sign", "quantise"])
def test_doublesqueeze_equals_its_transcription(mode, compressor):
    method = DoubleSqueeze(compressor, 0.2, 2, 10, rate=0.4, uploads=mode, local=local(mode), key=4)
    play = run(method, SOME)

    def squeeze(v, seed):
        return {"top_k": top(v, 0.2), "sign": signs(v), "quantise": rounded(v, 2, 10, seed)}[compressor]

    theta, delta, deltas = first(), np.zeros(SIZE), np.zeros((CLIENTS, SIZE))
    for round, present in enumerate(SOME):
        sent = {}
        for i in present:
            v = deltas[i] + problems()[i].update(theta, mode)
            sent[i] = squeeze(v, up_seed(round, i, 4))
            deltas[i] = v - sent[i]
        v = mean(sent) + delta
        squeezed = squeeze(v, hashing.fold(4, "down", round))
        delta, theta = v - squeezed, theta - 0.4 * squeezed
    close(play, theta)


@pytest.mark.parametrize("mode", MODES)
def test_blockwise_momentum_equals_its_transcription(mode):
    play = run(Blockwise(0.6, rate=0.4, uploads=mode, local=local(mode)), SOME)
    theta, e, m, errors = first(), np.zeros(SIZE), np.zeros((CLIENTS, SIZE)), np.zeros((CLIENTS, SIZE))
    for present in SOME:
        sent = {}
        for i in present:
            g = problems()[i].update(theta, mode)
            m[i] = 0.6 * m[i] + g
            p = 0.6 * m[i] + g + errors[i]
            sent[i] = signs(p)
            errors[i] = p - sent[i]
        p = mean(sent) + e
        e, theta = p - signs(p), theta - 0.4 * signs(p)
    close(play, theta)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("memory_rate", [0.0, 0.3, None])
def test_artemis_equals_its_transcription(mode, memory_rate):
    play = run(Artemis(3, 10, memory_rate, rate=0.4, uploads=mode, local=local(mode), key=4), SOME)
    alpha = 1 / (2 * (math.sqrt(10) / 3 + 1)) if memory_rate is None else memory_rate
    theta, h, known = first(), np.zeros((CLIENTS, SIZE)), set()
    for round, present in enumerate(SOME):
        known |= set(present)
        sent = {i: rounded(problems()[i].update(theta, mode) - h[i], 3, 10, up_seed(round, i, 4)) for i in present}
        g = mean({i: h[i] for i in known}) + mean(sent)
        for i in present:
            h[i] = h[i] + alpha * sent[i]
        theta = theta - 0.4 * rounded(g, 3, 10, hashing.fold(4, "down", round))
    close(play, theta)


def ef21_transcription(mode, compress, schedule, lost=()):
    theta, e, own, known = first(), np.zeros(SIZE), np.zeros((CLIENTS, SIZE)), set()
    for round, present in enumerate(schedule):
        taken = [i for i in present if (round, i) not in lost]
        known |= set(taken)
        for i in taken:
            own[i] = own[i] + compress(problems()[i].update(theta, mode) - own[i])
        e = e + compress(mean({i: own[i] for i in known}) - e)
        theta = theta - 0.4 * e
    return theta


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compressor", ["top_k", "sign"])
def test_ef21_equals_its_transcription(mode, compressor):
    play = run(EF21(compressor, 0.2, rate=0.4, uploads=mode, local=local(mode)), SOME)
    compress = signs if compressor == "sign" else lambda v: top(v, 0.2)
    close(play, ef21_transcription(mode, compress, SOME))


def test_an_upload_that_was_lost_leaves_both_sides_of_ef21_in_step():
    schedule = [*ALL[:4], [0, 2], [0, 1, 2]]
    lost = {(0, 1), (2, 0), (3, 1), (4, 2)}
    play = Play(EF21("top_k", 0.2, rate=0.4, uploads="gradient", local=local("gradient")), problems())
    for round, present in enumerate(schedule):
        play.round(present, [i for r, i in lost if r == round])
    close(play, ef21_transcription("gradient", lambda v: top(v, 0.2), schedule, lost))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_docofl_equals_its_transcription(mode, plain, rho):
    levels, server = (None, 1, None) if plain else (20, 1, 7), chain(momentum(rho))
    play = run(DoCoFL(4, *levels, 10, rate=0.4, uploads=mode, local=local(mode), key=4, server=server), SOME)
    theta, u = first(), 0.0
    for round, present in enumerate(SOME):
        if round % 4 == 0:
            anchor = theta if plain else rounded(theta, 20, 10, hashing.fold(4, "anchor", round))
        start = anchor + rotated(theta - anchor, 2, hashing.fold(4, "down", round))
        updates = {i: problems()[i].update(start, mode) for i in present}
        sent = updates if plain else {i: rotated(g, 4, up_seed(round, i, 4)) for i, g in updates.items()}
        u = rho * u + 0.4 * mean(sent)
        theta = theta - u
    close(play, theta)


@pytest.mark.parametrize(
    "method",
    [
        TrueTopK(1.0, local=local("weights")), LocalTopK(1.0, local=local("weights")),
        DoubleSqueeze("top_k", 1.0, local=local("weights")), EF21("top_k", 1.0, local=local("weights")),
        SketchedSGD(1, 1, 1.0, 1, local=local("weights")),
    ],
    ids=lambda method: method.name,
)  # fmt: skip
def test_what_compresses_nothing_equals_federated_averaging(method):
    ours, theirs = run(method), Play(FedAvg(local=local("weights")), problems())
    for present in ALL:
        theirs.round(present)
    weights = theirs.server.weights
    close(ours, np.concatenate([weights["weight"].numpy().ravel(), weights["bias"].numpy()]))


@pytest.mark.parametrize("kind", [FetchSGD, TrueTopK])
def test_momentum_is_that_of_the_paper_for_gradients_and_none_for_changes_by_local_training(kind):
    for mode, rho in (("gradient", 0.9), ("weights", 0.0)):
        given = {"uploads": mode, "local": local(mode), "rate": 0.4}
        assert np.array_equal(run(kind(**given)).theta(), run(kind(**given, momentum=rho)).theta())
        assert not np.allclose(run(kind(**given)).theta(), run(kind(**given, momentum=0.9 - rho)).theta())


class Odd(nn.Module):
    """Tied weights, a frozen one, batch norm, half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(IN, IN), nn.Linear(IN, IN), nn.Linear(IN, OUT)
        self.norm = nn.BatchNorm1d(IN)
        self.b.weight = self.a.weight
        self.c.weight.requires_grad_(False)
        self.rough = nn.Parameter(torch.ones(IN, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.b(self.a(x.float()).relu())) * self.rough.float()).double()


def odd() -> nn.Module:
    torch.manual_seed(0)
    return Odd()


def every() -> list:
    """One of each method that compresses, with what it may send down."""
    return [
        FetchSGD(2, 3, 0.05, changes=True), FetchSGD(2, 3), SketchedSGD(2, 3, 0.05), TrueTopK(0.05), LocalTopK(0.05),
        QSGD(), DoubleSqueeze("top_k"), DoubleSqueeze("sign"), DoubleSqueeze("quantise"), Blockwise(), Artemis(),
        EF21("top_k"), EF21("sign"), DoCoFL(3),
    ]  # fmt: skip


@pytest.mark.parametrize("method", every(), ids=lambda method: method.name)
def test_tied_frozen_and_counting_tensors_come_through_and_clients_hold_the_servers_model(method):
    data = problems()
    play = Play(method, data, odd)
    for present in SOME:
        play.round(present)
        weights = play.server.weights
        assert torch.equal(weights["a.weight"], weights["b.weight"])
        assert torch.equal(weights["c.weight"], odd().c.weight)
        assert weights["rough"].dtype == torch.bfloat16
        assert int(weights["norm.num_batches_tracked"]) == 0
        assert not torch.equal(weights["norm.running_mean"], torch.zeros(IN))
        assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    play.sent.append({})
    for i in range(CLIENTS):
        play.receive(i)
        for name, tensor in play.models[i].state_dict().items():
            if isinstance(method, DoCoFL):
                torch.testing.assert_close(tensor, play.server.weights[name], rtol=0.05, atol=0.05)
            else:
                assert torch.equal(tensor, play.server.weights[name]), name


@pytest.mark.parametrize("method", every()[6:13], ids=lambda method: method.name)
def test_only_who_was_there_in_the_last_round_gets_the_change_alone(method):
    play = run(method, SOME)
    for sent, before in zip(play.sent, [[], *SOME], strict=False):
        for i, message in sent.items():
            assert ("weight" not in message.state) == (i in before)


def test_who_was_away_gets_all_that_changed_since():
    play = run(TrueTopK(0.05), SOME)
    for round, sent in enumerate(play.sent):
        for i, message in sent.items():
            assert ("weight" not in message.state) == any(i in before for before in SOME[:round])
    assert len(play.sent[3][0].state["change/values"]) <= 3 * 2  # away in round 2


def test_a_client_that_has_lost_its_copy_is_told_so():
    for method in (DoubleSqueeze("top_k"), DoCoFL(), TrueTopK(0.05)):
        play = run(method, ALL[:1])
        play.memories[1].clear()
        with pytest.raises(RunError, match="Start it anew"):
            play.round([0, 1])


def test_the_same_key_gives_the_same_run_and_another_key_another():
    for kind in (QSGD, Artemis, FetchSGD, SketchedSGD, DoCoFL):
        ends = [run(kind(local=local("weights"), key=key), ALL[:2]).theta() for key in (1, 1, 2)]
        assert np.array_equal(ends[0], ends[1])
        assert not np.array_equal(ends[0], ends[2])


def spoiled(upload: Upload) -> Iterator[tuple[str, Upload]]:
    """Make hostile variants of an upload."""
    state, text = upload.message.state, upload.message.text
    for name, tensor in state.items():
        variants = {"missing": None, "long": torch.cat([tensor, tensor]), "other type": tensor.to(torch.int64)}
        if tensor.is_floating_point():
            variants |= {"nan": torch.full_like(tensor, torch.nan), "huge": torch.full_like(tensor, 1e12)}
        if name.endswith("index"):
            variants |= {
                "outside": tensor + SIZE,
                "negative": tensor - SIZE,
                "repeated": tensor[:1].expand(len(tensor)),
            }
        if name.endswith("codes"):
            variants["beyond"] = torch.full_like(tensor, 255)
        for kind, variant in variants.items():
            rest = {n: t for n, t in state.items() if n != name or variant is not None}
            changed = rest if variant is None else {**rest, name: variant}
            yield f"{name} {kind}", Upload(upload.client, Message(changed, text))
    yield "unknown", Upload(upload.client, Message({**state, "evil": torch.zeros(1)}, text))
    yield "round", Upload(upload.client, Message(state, {**text, "round": "9"}))


@pytest.mark.parametrize("method", every(), ids=lambda method: method.name)
def test_hostile_uploads_are_refused_before_anything_is_used(method):
    play = run(method, ALL[:1])
    play.sent.append({})
    upload = play.answer(1)
    sent = play.sent[-1][1]
    for kind, variant in spoiled(upload):
        with pytest.raises(UploadError, match="client 1: "):
            play.checked(1, variant.message, sent)
            pytest.fail(f"{kind} was taken")


def test_hostile_answers_in_the_second_exchange_are_refused():
    play = run(SketchedSGD(2, 3, 0.05), ALL[:1])
    play.sent.append({})
    _, request = play.method.request(play.server, [play.answer(1)])
    answer = Upload(play.clients[1], play.method.respond(request, play.memories[1]))
    for kind, variant in spoiled(answer):
        with pytest.raises(UploadError, match="client 1: "):
            play.checked(1, variant.message, request)
            pytest.fail(f"{kind} was taken")


@pytest.mark.parametrize(
    "make",
    [
        lambda: FetchSGD(0.5), lambda: FetchSGD(rows=0), lambda: FetchSGD(fraction=0), lambda: FetchSGD(momentum=1),
        lambda: FetchSGD(clear="all"), lambda: FetchSGD(key=-1), lambda: FetchSGD(uploads="sketch"),
        lambda: FetchSGD(rate=0), lambda: SketchedSGD(candidates=0.5), lambda: SketchedSGD(compression=0),
        lambda: TrueTopK(2), lambda: TrueTopK(momentum=-1), lambda: LocalTopK(0), lambda: QSGD(0),
        lambda: QSGD(norm="l1"),
        lambda: DoubleSqueeze("zip"), lambda: DoubleSqueeze("top_k", 0), lambda: Blockwise(1.0), lambda: Artemis(0),
        lambda: Artemis(memory_rate=2), lambda: Artemis(averaging=Averaging(rule="median")), lambda: EF21("quantise"),
        lambda: EF21(averaging=Averaging(rule="median")), lambda: DoCoFL(0), lambda: DoCoFL(down_levels=300),
        lambda: DoCoFL(up_levels=0), lambda: DoCoFL(rate=float("nan")),
    ],
)  # fmt: skip
def test_options_that_cannot_be_meant_are_refused(make):
    with pytest.raises(OptionError):
        make()


@pytest.mark.parametrize("kind", [FetchSGD, SketchedSGD, TrueTopK, LocalTopK, QSGD, DoubleSqueeze, Blockwise, DoCoFL])
def test_a_robust_rule_is_used_where_there_can_be_one(kind):
    ends = [run(kind(local=local("weights"), averaging=Averaging(rule=rule)), ALL[:2]) for rule in ("mean", "median")]
    assert not np.allclose(ends[0].theta(), ends[1].theta())
