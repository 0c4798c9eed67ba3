"""Bytes of training: predicted without allocating, measured by running a step, and both alike."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comfetch as cf
from comfetch.errors import ModelError, OptionError
from comfetch.footprint import OPTIMISERS, format_bytes, track
from tests.oracle import quiet_sketch


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, stride=2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids)))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


MODELS: dict[str, tuple[Any, Tensor]] = {
    "linear": (net, torch.randn(32, 64)),
    "convolutional": (Convolutional, torch.randn(8, 3, 12, 12)),
    "encoder": (Encoder, torch.randint(50, (4, 12))),
    "tagger": (Tagger, torch.randint(50, (4, 12))),
}


@pytest.mark.parametrize(
    "name, optimiser", [("linear", optimiser) for optimiser in OPTIMISERS] + [(name, "adam") for name in MODELS][1:]
)
def test_predicted_and_measured_bytes_agree_within_ten_per_cent(name: str, optimiser: str) -> None:
    build, batch = MODELS[name]
    for mode in ("output", "input"):
        model = cf.sketch(build, compression=4, mode=mode)
        predicted = cf.footprint(model, batch=batch, optimiser=optimiser)
        measured = cf.footprint(model, batch=batch, optimiser=optimiser, measured=True)
        assert predicted.sketched == pytest.approx(measured.sketched, rel=0.1)
        for kind in ("weights", "gradients", "optimiser", "buffers", "download", "upload"):
            assert getattr(predicted.sketched_bytes, kind) == getattr(measured.sketched_bytes, kind), kind
        assert predicted.sketched_bytes.activations == pytest.approx(measured.sketched_bytes.activations, rel=0.1)
        full = cf.footprint(cf.unsketch(model), batch=batch, optimiser=optimiser, measured=True)
        assert predicted.full == pytest.approx(full.sketched, rel=0.1)


def test_bytes_are_those_of_plain_arithmetic() -> None:
    model = cf.sketch(net, compression=4)
    found = cf.footprint(model, optimiser="adam")
    full, small = (sum(p.numel() for p in m.parameters()) for m in (net(), model))
    assert found.full_bytes.weights == found.full_bytes.gradients == 4 * full
    assert found.sketched_bytes.weights == found.sketched_bytes.gradients == 4 * small
    assert found.sketched_bytes.optimiser == 8 * small + 4 * 6  # a step counter for each of six parameters
    assert found.sketched_bytes.download == found.sketched_bytes.upload == 4 * small + 8  # and a key
    assert found.full_bytes.activations == 0
    assert found.full == found.full_bytes.total and found.sketched == found.sketched_bytes.total


@pytest.mark.parametrize("optimiser, copies", [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2)])
def test_optimiser_state_is_the_same_with_and_without_a_batch(optimiser: str, copies: int) -> None:
    model = cf.sketch(net, compression=4)
    small = 4 * sum(p.numel() for p in model.parameters())
    without = cf.footprint(model, optimiser=optimiser).sketched_bytes.optimiser
    assert without == cf.footprint(model, MODELS["linear"][1], optimiser=optimiser).sketched_bytes.optimiser
    assert without - copies * small == (24 if optimiser.startswith("adam") else 0)


def test_rows_cost_as_many_times_as_there_are() -> None:
    one, three = (cf.sketch(lambda: nn.Linear(256, 256, bias=False), compression=4, rows=k) for k in (1, 3))
    assert cf.footprint(three).sketched_bytes.weights == 3 * cf.footprint(one).sketched_bytes.weights


def test_activations_of_a_full_layer_are_what_torch_keeps() -> None:
    """Behind z = W₂ relu(W₁ x) torch holds relu(W₁ x) for the way back, and two maps of that size on it; x is given."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    found = cf.footprint(model, batch=torch.randn(1000, 64), optimiser="sgd").full_bytes
    assert found.activations == pytest.approx(3 * 1000 * 256 * 4, rel=0.1)


def test_frozen_weights_have_no_gradient_and_no_state() -> None:
    model = net()
    model[2].requires_grad_(False)
    found = cf.footprint(model, optimiser="momentum").full_bytes
    frozen = 4 * (512 * 512 + 512)
    assert found.gradients == found.optimiser == found.weights - frozen


def test_full_model_stands_on_both_sides() -> None:
    found = cf.footprint(net(), batch=torch.randn(4, 64))
    assert found.full == found.sketched > 0
    assert found.layers == []


def test_counting_changes_neither_the_model_nor_its_mode() -> None:
    model = cf.sketch(net, compression=4).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    cf.footprint(model, batch=torch.randn(4, 64))
    cf.footprint(model, batch=torch.randn(4, 64), measured=True)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model.training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("form", ["tensor", "tuple", "dictionary"])
def test_batch_is_a_tensor_a_tuple_or_a_dictionary(form: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(128, 128)

        def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
            return self.layer(a if b is None else a + b)

    a = torch.randn(4, 128)
    batch = {"tensor": a, "tuple": (a, a), "dictionary": {"a": a, "b": a}}[form]
    assert cf.footprint(cf.sketch(Two, policy="all"), batch=batch).sketched_bytes.activations > 0


def test_table_has_a_line_for_each_layer_and_each_kind() -> None:
    text = str(cf.footprint(cf.sketch(net, compression=4), batch=torch.randn(4, 64)))
    lines = text.splitlines()
    assert lines[0].split() == ["full", "sketched", "factor"]
    assert [line.split()[0] for line in lines[1:]] == [
        "2", "weights", "gradients", "optimiser", "buffers", "activations", "total", "download", "upload",
    ]  # fmt: skip
    assert lines[1].split()[-1] == "3.98"
    assert "activations" not in str(cf.footprint(cf.sketch(net)))


def test_model_that_cannot_run_without_values_is_refused_and_measuring_it_helps() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y if bool(y.sum() > 0) else -y

    with pytest.raises(ModelError, match="Cannot count the activations of Branching .* measured=True may help"):
        cf.footprint(Branching(), batch=torch.randn(2, 128))


def test_model_whose_output_does_not_depend_on_its_weights_is_refused() -> None:
    class Constant(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ModelError, match="returned nothing that depends on its weights"):
        cf.footprint(Constant(4, 4), batch=torch.randn(2, 4))


def test_unknown_optimiser_is_refused() -> None:
    with pytest.raises(OptionError, match="Choose one of: sgd, momentum, adam, adamw"):
        cf.footprint(net(), optimiser="lion")


def test_tracker_counts_storages_from_birth_to_death() -> None:
    held = torch.zeros(1000)
    with track([held]) as live:
        a = torch.ones(500)
        b = a.view(50, 10)[1:]  # the same storage
        assert (live.now, live.peak) == (6000, 6000)
        c = b + 1  # 490 numbers
        assert live.now == 6000 + 1960
        del a, b, c
        assert (live.now, live.peak, live.largest) == (4000, 7960, 2000)
    torch.zeros(10**6)
    assert live.peak == 7960


def test_tracker_sees_the_backward_pass() -> None:
    x = torch.ones(1000, requires_grad=True)
    with track([x]) as live:
        x.exp().sum().backward()
    assert 12000 <= live.peak <= 12100


def test_quantised_sizes_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 44_900_000, 3.2e9, 5e12)] == [
        "0 B", "999 B", "1 kB", "44.9 MB", "3.2 GB", "5e+03 GB",
    ]  # fmt: skip


def test_footprint_of_a_model_given_is_that_of_one_built() -> None:
    given, built = quiet_sketch(net(), compression=4), cf.sketch(net, compression=4)
    batch = torch.randn(4, 64)
    assert cf.footprint(given, batch).sketched == cf.footprint(built, batch).sketched
