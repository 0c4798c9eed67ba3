"""Plans: plain data that travels, prints and refuses what does not belong to it."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

import comfetch as cf
from comfetch.errors import MismatchError, OptionError
from comfetch.plan import Geometry, Plan, WeightPlan, format_table
from tests.oracle import quiet_sketch


def weight_plan(**changes: Any) -> WeightPlan:
    plan = WeightPlan(
        geometry=Geometry((12, 8)), mode="output", length=(6, 8), rows=1, blocks=2, hash="balanced", scale="mean", key=5
    )
    return dataclasses.replace(plan, **changes)


def test_small_shape_has_rows_first() -> None:
    assert weight_plan().small_shape == (6, 8)
    assert weight_plan(rows=3).small_shape == (3, 6, 8)
    assert weight_plan(mode="both", length=(6, 2), blocks=1).small_shape == (6, 2)


def test_small_shape_of_groups_is_stacked_along_the_first_dimension() -> None:
    grouped = weight_plan(geometry=Geometry((12, 8, 3, 3), groups=2), length=(3, 8))
    assert grouped.small_shape == (6, 8, 3, 3)
    transposed = weight_plan(geometry=Geometry((12, 8, 3), groups=2, transposed=True), length=(4, 6))
    assert transposed.small_shape == (12, 4, 3)


def test_compression_counts_all_rows() -> None:
    assert weight_plan().compression == 2
    assert weight_plan(rows=4).compression == 0.5


def test_every_row_side_group_and_block_has_a_hash_of_its_own() -> None:
    plan = weight_plan(geometry=Geometry((200, 8), groups=2), length=(10, 8), rows=2, blocks=4)
    signs = torch.cat([torch.from_numpy(plan.draw(side, row).sign) for side in ("output",) for row in range(2)])
    assert signs.shape == (16, 100)
    assert len({tuple(s.tolist()) for s in signs}) == 16
    both = weight_plan(mode="both", geometry=Geometry((50, 50)), length=(10, 10), blocks=1)
    assert both.draw("output", 0).sign.tolist() != both.draw("input", 0).sign.tolist()


def test_hashes_do_not_depend_on_the_length() -> None:
    long, short = weight_plan(), weight_plan(length=(3, 8))
    assert (long.draw("output", 0).index % 3 == short.draw("output", 0).index).all()


@pytest.mark.parametrize("verb", ["sketch", "unsketch", "lift", "lift_gradient", "unsketch_rows"])
@pytest.mark.parametrize("rows", [1, 2])
def test_weight_of_another_shape_is_refused(verb: str, rows: int) -> None:
    with pytest.raises(MismatchError):
        getattr(weight_plan(rows=rows), verb)(torch.zeros(5, 5))


def test_random_hashes_do_not_fold() -> None:
    with pytest.raises(OptionError, match="Only balanced hashes fold"):
        weight_plan(hash="random").fold(torch.zeros(6, 8), (3, 8))


@pytest.mark.parametrize("key", [0, 1, 2**63 + 1, 2**64 - 1])
def test_plan_survives_json_with_its_key(key: int) -> None:
    plan = Plan({"a.weight": weight_plan(key=key), "b.weight": weight_plan(rows=2)}, {"c": "first layer"})
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.kept == plan.kept
    assert again["a.weight"] == plan["a.weight"] and isinstance(again["a.weight"].geometry.shape, tuple)


@pytest.mark.parametrize(
    "text",
    [
        "", "7", "[]", "{}", "null", '{"version": 1}', '{"version": 1, "weights": {"a": {}}, "kept": {}}',
        '{"version": 1, "weights": [1], "kept": {}}',
    ],
)  # fmt: skip
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(MismatchError, match="Not a plan"):
        Plan.from_json(text)


def test_plan_with_a_broken_number_is_refused() -> None:
    data = json.loads(Plan({"a": weight_plan()}).to_json())
    data["weights"]["a"]["key"] = "not hexadecimal"
    with pytest.raises(MismatchError, match="Not a plan"):
        Plan.from_json(json.dumps(data))


def test_plan_of_another_version_is_refused_with_its_version() -> None:
    data = json.loads(Plan({"a": weight_plan()}).to_json())
    with pytest.raises(MismatchError, match="version 2"):
        Plan.from_json(json.dumps({**data, "version": 2}))


def test_plans_are_equal_by_their_weights() -> None:
    one, other = Plan({"a": weight_plan()}), Plan({"a": weight_plan(key=6)})
    assert one != other
    assert one == Plan({"a": dataclasses.replace(weight_plan())}, {"b": "kept"})
    assert one != {"a": weight_plan()}


def test_plan_sketches_and_unsketches_a_state_and_leaves_the_rest() -> None:
    plan = Plan({"a.weight": weight_plan()})
    state = {"a.weight": torch.randn(12, 8), "a.bias": torch.randn(12)}
    small = plan.sketch(state)
    assert small["a.weight"].shape == (6, 8) and small["a.bias"] is state["a.bias"]
    assert plan.unsketch(small)["a.weight"].shape == (12, 8)


def test_plan_of_a_sketched_model_says_all_that_was_asked_for() -> None:
    model = quiet_sketch(
        nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 256), nn.Linear(256, 2)),
        compression=4, key=9, mode="input", rows=2, blocks=8, hash="random", scale="count",
    )  # fmt: skip
    plan = cf.plan_of(model)
    assert list(plan) == ["1.weight"]
    only = plan["1.weight"]
    assert (only.shape, only.small_shape) == ((256, 64), (2, 256, 16))
    assert (only.mode, only.rows, only.blocks, only.hash, only.scale) == ("input", 2, 8, "random", "count")
    assert plan.kept == {"0": "first layer", "2": "final classifier"}


def test_printed_plan_names_every_weight_and_every_layer_that_stays_full() -> None:
    model = quiet_sketch(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 256), nn.Linear(256, 2)), compression=4)
    text = str(cf.plan_of(model))
    assert text.splitlines()[0].split() == ["weight", "full", "small", "mode", "rows", "blocks", "hash", "scale"]
    assert "1.weight  256x64  64x64  output" in text
    assert "0 stays full: first layer" in text and "2 stays full: final classifier" in text


def test_table_of_nothing_is_its_head() -> None:
    assert format_table(("name", "n"), []) == "name  n"


def test_loads_of_two_sides_multiply() -> None:
    plan = weight_plan(mode="both", geometry=Geometry((12, 8)), length=(4, 4), blocks=1)
    assert torch.equal(plan.load_power(1).expand(4, 4), torch.full((4, 4), 6.0, dtype=torch.float64))
    assert torch.allclose(plan.load_power(0.5).expand(4, 4), torch.full((4, 4), 6.0, dtype=torch.float64).sqrt())


def test_loads_of_random_hashes_are_finite_to_every_power() -> None:
    plan = weight_plan(hash="random", geometry=Geometry((12, 8)), length=(10, 8), blocks=1)
    for power in (-1.0, -0.5, 0.5, 1.0):
        assert torch.isfinite(plan.load_power(power)).all()


@pytest.mark.parametrize("scale", ["mean", "isometric"])
@pytest.mark.parametrize("rows", [1, 3])
def test_fresh_weights_keep_their_norm_in_the_sketch(scale: str, rows: int) -> None:
    plan = weight_plan(geometry=Geometry((256, 64)), length=(32, 64), scale=scale, rows=rows, blocks=8)
    full = torch.randn(256, 64, dtype=torch.float64)
    seen = plan.unsketch(plan.sketch(plan.fresh(full)))
    assert float(seen.norm()) == pytest.approx(float(full.norm()), rel=1e-9)


def test_zero_weights_stay_zero_when_fresh() -> None:
    assert torch.equal(weight_plan().fresh(torch.zeros(12, 8)), torch.zeros(12, 8))
