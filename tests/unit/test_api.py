"""The one verb: sizes by compression, length or budget, and its refusals."""

from typing import Any

import pytest
import torch
from torch import nn

import comfetch as cf
from comfetch.api import parse_bytes, plan_for
from comfetch.errors import ComfetchError, ModelError, OptionError
from comfetch.settings import Settings
from tests.oracle import quiet_sketch


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


BATCH = torch.randn(8, 64)


def test_compression_is_four_if_no_size_is_given() -> None:
    assert cf.sketch(net)[2].weight.shape == (128, 512)


@pytest.mark.parametrize(
    "sizes", [{"compression": 2, "length": 8}, {"compression": 2, "budget": "1MB"}, {"length": 8, "budget": 10**6}]
)
def test_two_sizes_at_once_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=" and ".join(sizes) + " were given together. Give one of them"):
        cf.sketch(net, **sizes, batch=BATCH)


@pytest.mark.parametrize("thing", [None, 7, "resnet18", [nn.Linear(2, 2)]])
def test_what_is_neither_model_nor_constructor_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match="takes a model or its constructor, not a"):
        cf.sketch(thing)  # type: ignore[arg-type]


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        cf.sketch(net, 4)  # type: ignore[misc]


@pytest.mark.parametrize(
    "text, size",
    [
        (7, 7), ("7", 7), ("7b", 7), ("256MB", 256_000_000), ("256 mb", 256_000_000), ("1.5 GB", 1_500_000_000),
        ("1KiB", 1024), ("2MiB", 2 * 2**20), ("1 GiB", 2**30), ("3k", 3000), (" 10kB ", 10_000),
    ],
)  # fmt: skip
def test_bytes_are_read_with_their_units(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-3MB", "0", 0, -1, True, "3TB", "3 MB a day", "1e6", "nan", None])
def test_budget_that_is_no_number_of_bytes_is_refused(text: Any) -> None:
    with pytest.raises(OptionError, match="not a number of bytes. Write, for example, 256MB."):
        parse_bytes(text)


def test_budget_without_a_batch_is_refused_and_a_batch_helps() -> None:
    with pytest.raises(OptionError, match="budget needs batch"):
        cf.sketch(net, budget="2MB")
    cf.sketch(net, budget="2MB", batch=BATCH)


@pytest.mark.parametrize("build", [net, net()], ids=["constructor", "model"])
@pytest.mark.parametrize("mode", ["output", "input", "both"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_budget_is_kept_and_used(build: Any, mode: str, optimiser: str) -> None:
    full = cf.footprint(net(), batch=BATCH, optimiser=optimiser).full
    budget = int(0.4 * full)
    sketch = cf.sketch if build is net else quiet_sketch
    model = sketch(build, budget=budget, batch=BATCH, optimiser=optimiser, mode=mode)
    for measured in (False, True):
        found = cf.footprint(model, batch=BATCH, optimiser=optimiser, measured=measured).sketched
        assert 0.75 * budget < found <= budget * (1.1 if measured else 1)


def test_budget_above_the_full_model_compresses_nothing() -> None:
    model = cf.sketch(net(), budget="100MB", batch=BATCH)  # no warning: nothing is lost
    assert model[2].weight.shape == (512, 512)


def test_larger_budget_never_gives_a_smaller_model() -> None:
    sizes = [
        sum(p.numel() for p in cf.sketch(net, budget=b, batch=BATCH).parameters())
        for b in ("1.3MB", "1.6MB", "2MB", "3MB", "4MB")
    ]
    assert sizes == sorted(sizes) and len(set(sizes)) > 3


@pytest.mark.parametrize("mode", ["output", "input", "both"])
def test_budget_below_the_floor_names_the_minimum_and_the_minimum_works(mode: str) -> None:
    with pytest.raises(OptionError, match="below the floor") as error:
        cf.sketch(net, budget="100kB", batch=BATCH, mode=mode)
    least = int(str(error.value).split("at least ")[1].split(" bytes")[0])
    assert cf.footprint(cf.sketch(net, budget=least, batch=BATCH, mode=mode), batch=BATCH).sketched <= least
    with pytest.raises(OptionError, match="below the floor"):
        cf.sketch(net, budget=int(0.99 * least), batch=BATCH, mode=mode)
    for compression in (10, 20, 48, 100, 1000, 10**5):  # no compression does better than the minimum
        model = cf.sketch(net, compression=compression, mode=mode)
        assert cf.footprint(model, batch=BATCH).sketched >= 0.99 * least


def test_unknown_optimiser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="optimiser='lion' is not known. Choose one of: sgd, momentum, adam, adamw."):
        cf.sketch(net, optimiser="lion")


def test_same_key_gives_the_same_hashes_and_another_key_others() -> None:
    plans = [cf.plan_of(cf.sketch(net, key=k)) for k in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]


def test_constructor_and_model_get_the_same_plan() -> None:
    settings = Settings(compression=4, key=5)
    built, given = plan_for(net, settings)[0], plan_for(net(), settings)[0]
    assert built == given and built.kept == given.kept
    assert built == cf.plan_of(cf.sketch(net, compression=4, key=5))


def test_plan_needs_no_weights() -> None:
    plan, built = plan_for(net, Settings(compression=4))
    assert all(p.is_meta for p in built.model.parameters())
    assert plan["2.weight"].small_shape == (128, 512)


@pytest.mark.parametrize(
    "call",
    [
        lambda: cf.sketch(net, compression=0), lambda: cf.sketch(nn.ReLU()), lambda: cf.unsketch(nn.ReLU()),
        lambda: cf.load("/nowhere/at/all", net), lambda: cf.save(nn.ReLU(), "/nowhere/at/all"),
        lambda: cf.footprint(net(), optimiser="x"), lambda: cf.parameter_groups(net(), lr=-1.0),
        lambda: cf.register_layer(int),
    ],
)  # fmt: skip
def test_every_refusal_is_a_comfetch_error(call: Any) -> None:
    with pytest.raises(ComfetchError):
        call()


def test_model_on_another_device_keeps_it() -> None:
    model = quiet_sketch(net().to("cpu"), compression=4)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_refusals_of_models_are_model_errors() -> None:
    with pytest.raises(ModelError):
        cf.sketch(net, only="x")
