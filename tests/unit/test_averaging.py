"""Averages of uploads: against numpy and scipy, whatever the order of arrival, and against hostile clients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import trim_mean

from comfetch.errors import OptionError
from comfetch.medians import sort_rows
from comfetch.methods import Client, Message, Upload
from comfetch.methods.averaging import LARGE, RULES, Averaging

SHAPES = {"small": (3, 4), "large": (2, LARGE // 2 + 3), "scalar": (), "empty": (0, 2)}


def uploads(count: int, seed: int = 0) -> list[Upload]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        state = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
        made.append(Upload(Client(i, 7 * i + 3), Message({**state, "counter": torch.tensor(i)})))
    return made


def stacked(answers: list[Upload], name: str) -> np.ndarray:
    return np.stack([upload.message.state[name].double().numpy() for upload in answers])


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_mean_is_that_of_numpy(weighting: str, count: int) -> None:
    answers = uploads(count)
    weights = [u.client.examples if weighting == "examples" else 1 for u in answers]
    mean = Averaging(weighting)(answers)
    for name in SHAPES:
        wanted = np.average(stacked(answers, name), axis=0, weights=weights)
        np.testing.assert_allclose(mean[name].numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_the_mean_is_summed_client_by_client_bit_for_bit() -> None:
    answers = uploads(5)
    total = sum(u.client.examples for u in answers)
    mean = Averaging()(answers)
    for name in SHAPES:
        wanted = answers[0].message.state[name] * (answers[0].client.examples / total)
        for u in answers[1:]:
            wanted.add_(u.message.state[name], alpha=u.client.examples / total)
        assert torch.equal(mean[name], wanted)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10])
def test_the_median_is_that_of_numpy(count: int) -> None:
    answers = uploads(count)
    found = Averaging(rule="median")(answers)
    for name in SHAPES:
        np.testing.assert_allclose(found[name].numpy(), np.median(stacked(answers, name), axis=0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("trim", [0, 0.1, 0.25, 0.4, 0.49])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 10])
def test_the_trimmed_mean_is_that_of_scipy(count: int, trim: float) -> None:
    answers = uploads(count)
    found = Averaging(rule="trimmed-mean", trim=trim)(answers)
    for name in ("small", "large"):
        wanted = trim_mean(stacked(answers, name), trim, axis=0)
        np.testing.assert_allclose(found[name].numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_a_fraction_that_floats_cannot_hold_cuts_as_many_as_it_says() -> None:
    answers = [Upload(Client(i, 1), Message({"w": torch.tensor([float(i < 29)])})) for i in range(100)]
    assert math.floor(0.29 * 100) == 28
    assert Averaging(rule="trimmed-mean", trim=0.29)(answers)["w"] == 0


@given(st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=1, max_size=40))
def test_rows_are_sorted(rows: list[list[int]]) -> None:
    assert torch.stack(sort_rows([torch.tensor(row) for row in rows])).tolist() == np.sort(rows, axis=0).tolist()


@given(st.data())
def test_hostile_clients_cannot_move_a_robust_average_out_of_the_honest_range(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 15))
    rule = data.draw(st.sampled_from(["median", "trimmed-mean"]))
    trim = data.draw(st.floats(0, 0.499))
    hostile = data.draw(st.integers(0, (count - 1) // 2 if rule == "median" else math.floor(trim * count)))
    value = st.floats(-100, 100, width=32)
    honest = data.draw(st.lists(value, min_size=count - hostile, max_size=count - hostile))
    evil = data.draw(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=hostile, max_size=hostile))
    values = data.draw(st.permutations(honest + evil))
    answers = [Upload(Client(i, 10**i), Message({"w": torch.tensor([x])})) for i, x in enumerate(values)]
    found = float(Averaging(rule=rule, trim=trim)(answers)["w"])
    rounding = 1e-6 * max(abs(x) for x in honest)
    assert min(honest) - rounding <= found <= max(honest) + rounding


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_arrival_changes_no_bit(rule: str) -> None:
    answers, average = uploads(9), Averaging(rule=rule, trim=0.2)
    first = average(answers)
    for seed in range(5):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(seed)).tolist()
        again = average([answers[i] for i in order])
        assert list(again) == list(first)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("rule", RULES)
def test_counters_are_left_out_and_types_and_uploads_stay(rule: str) -> None:
    states = [{"h": torch.full((5,), i, dtype=torch.bfloat16), "counter": torch.tensor(i)} for i in range(3)]
    answers = [Upload(Client(i, 1), Message(state)) for i, state in enumerate(states)]
    found = Averaging(rule=rule)(answers)
    assert found.keys() == {"h"}
    torch.testing.assert_close(found["h"], torch.ones(5, dtype=torch.bfloat16))
    assert [float(state["h"][0]) for state in states] == [0, 1, 2]


def test_weights_are_in_the_order_of_the_clients_and_equal_under_robust_rules() -> None:
    answers = uploads(3)[::-1]
    assert Averaging().weights(answers) == [3, 10, 17]
    assert Averaging("uniform").weights(answers) == [1, 1, 1]
    assert Averaging(rule="median").weights(answers) == [1, 1, 1]


def test_options_that_cannot_be_meant_are_refused_with_the_choices() -> None:
    with pytest.raises(OptionError, match="weighting='loudest' is not known. Choose one of: examples, uniform"):
        Averaging("loudest")
    with pytest.raises(OptionError, match="rule='krum' is not known. Choose one of: mean, median, trimmed-mean"):
        Averaging(rule="krum")
    for trim in (-0.1, 0.5, float("nan"), "much"):
        with pytest.raises(OptionError, match=r"is not in \[0, 0.5\)"):
            Averaging(rule="trimmed-mean", trim=trim)  # type: ignore[arg-type]
