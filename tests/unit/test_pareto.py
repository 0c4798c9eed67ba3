"""The front of runs that none beats, and what is said about it."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from comfetch.page import to_html
from comfetch.pareto import AXES, Point, by_task, front, points, short_labels, sized_to, verdicts
from comfetch.plots import pareto_picture, to_svg
from comfetch.report import find_missed, group_runs, to_markdown
from tests.unit.test_report import make_run

NUMBERS = st.integers(1, 6).map(float)
POINTS = st.lists(st.builds(Point, st.just(""), NUMBERS, NUMBERS), min_size=1, max_size=12)


@given(POINTS)
def test_the_front_is_what_no_other_beats(found: list[Point]) -> None:
    best = front(found)
    assert sorted(map(repr, best)) == sorted(repr(p) for p in found if not any(q.beats(p) for q in found))


@given(POINTS)
def test_along_the_front_accuracy_grows_with_cost_and_all_others_are_beaten_by_it(found: list[Point]) -> None:
    best = front(found)
    assert [p.cost for p in best] == sorted(p.cost for p in best)
    assert [p.accuracy for p in best] == sorted(p.accuracy for p in best)
    assert max(p.accuracy for p in found) == best[-1].accuracy and min(p.cost for p in found) == best[0].cost
    assert all(any(q.beats(p) for q in best) for p in found if p not in best)


@given(POINTS, st.randoms(use_true_random=False))
def test_the_front_does_not_depend_on_order_or_units(found: list[Point], rng: random.Random) -> None:
    mixed = [Point(p.label, 1000 * p.cost, p.accuracy) for p in rng.sample(found, len(found))]
    assert [(1000 * p.cost, p.accuracy) for p in front(found)] == [(p.cost, p.accuracy) for p in front(mixed)]


def groups():
    small = make_run("a", [0.63], method="comfetch", compression=10.0, clients=1)
    narrow = make_run("b", [0.589], method="narrow", compression=6.3, clients=1)
    full = make_run("c", [0.654], method="fedavg", clients=1)
    poor = make_run("d", [0.60], method="qsgd", clients=1)
    for run, size in ((small, 100_000), (narrow, 98_000), (full, 1_000_000), (poor, 500_000)):
        run.rounds[0].update(bytes_down=size, bytes_up=size, client_memory=size)
    for run in (small, narrow):
        run.options["equal"] = "bytes 200000 as comfetch@10"
    return group_runs([small, narrow, full, poor])


def test_words_say_who_wins_where() -> None:
    told = {axis.name: " ".join(words) for axis, words in verdicts(groups())}
    assert told["bytes"] == (
        "At 200 kB a round comfetch is best (63.0), then narrow (58.9). "
        "At 2 MB a round fedavg is best (65.4), then comfetch (63.0), qsgd (60.0) and 1 more. "
        "No run is both smaller and better than comfetch and fedavg. qsgd and narrow are beaten."
    )
    assert "At 98 kB narrow is best (58.9); all others need more." in told["memory"]
    assert "No run is both faster and better than fedavg." in told["seconds"]


def test_differences_within_the_spread_of_seeds_are_marked() -> None:
    runs = [make_run(f"a{s}", [0.6 + s / 100], seed=s) for s in range(3)]
    runs += [make_run(f"b{s}", [0.595 + s / 100], seed=s, method="fedavg") for s in range(3)]
    runs += [make_run(f"c{s}", [0.1 + s / 100], seed=s, method="qsgd") for s in range(3)]
    (_, words), *_ = verdicts(group_runs(runs))
    assert (
        "comfetch is best (61.0 ± 1.0), then fedavg (60.5 ± 1.0, within the spread) and qsgd (11.0 ± 1.0)." in words[0]
    )


def test_a_run_near_the_budget_it_was_sized_to_stands_at_it() -> None:
    costs = {point.label: point.cost for point in points(groups(), AXES[0])}
    assert costs == {"fedavg": 2e6, "qsgd": 1e6, "narrow": 2e5, "comfetch": 2e5}
    run = make_run("a", [0.5])
    run.options["equal"] = "memory 5000"
    assert sized_to(run, "memory") == 5000 and sized_to(run, "bytes") is None


def test_labels_are_as_short_as_they_can_be() -> None:
    runs = [
        make_run("a", [0.5], compression=4.0),
        make_run("b", [0.5], compression=8.0),
        make_run("c", [0.5], method="narrow"),
    ]
    assert short_labels(group_runs(runs)) == ["comfetch 4×", "narrow", "comfetch 8×"]
    runs.append(make_run("d", [0.5], compression=4.0, lr=0.1))
    assert short_labels(group_runs(runs))[:2] == ["comfetch 4×", "comfetch 4×, lr 0.1"]


def test_tasks_are_not_compared_with_each_other() -> None:
    runs = [make_run("a", [0.5]), make_run("b", [0.5], method="fedavg"), make_run("c", [0.5], task="cifar10")]
    assert {task: len(members) for task, members in by_task(group_runs(runs)).items()} == {"digits": 2}


@pytest.mark.parametrize("seed", range(3))
def test_names_of_twenty_methods_at_equal_bytes_do_not_lie_on_each_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = [
        Point(f"method number {n}", 3e5 if n % 2 else rng.uniform(1e5, 3e5), rng.uniform(50, 70)) for n in range(20)
    ]
    figure = pareto_picture(found, AXES[0])
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text, renderer) for text in figure.axes[0].texts]  # without the leading lines
    overlaps = sum(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert len(boxes) == 20 and overlaps == 0


@pytest.mark.parametrize("accuracies", [[50.0], [99.9, 99.95], [0.0, 100.0], [10.0, 10.0]])
def test_pictures_of_any_range_are_drawn(accuracies: list[float]) -> None:
    found = [Point(f"run {n}", 1e3 * (n + 1), accuracy, 0.5) for n, accuracy in enumerate(accuracies)]
    svg = to_svg(pareto_picture(found, AXES[2]), "front")
    assert "run 0" in svg and "test accuracy" in svg


def test_page_and_markdown_tell_fronts_and_what_was_not_run(tmp_path: Path) -> None:
    rows = [{"method": "qsgd", "cost": 900_000, "fits": False}, {"method": "mask", "cost": 199_000, "fits": True}]
    told = {"kind": "bytes", "budget": 200_000, "as": "comfetch@10", "runs": rows}
    (tmp_path / "equal.json").write_text(json.dumps(told))
    missed = find_missed([tmp_path])
    assert missed == ["Not run, as they need more than 200 kB of bytes: qsgd (900 kB)."]
    page, table = to_html(groups(), missed), to_markdown(groups(), missed)
    for written in (page, table):
        assert "Which wins where" in written and missed[0] in written and "comfetch is best (63.0)" in written
    assert page.count("<svg") == 6
    assert "Which wins where" not in to_html(groups()[:1]) + to_markdown(groups()[:1])
