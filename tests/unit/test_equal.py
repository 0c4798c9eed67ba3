"""Equal terms: what a run costs a client, and the setting that brings it to a budget."""

import dataclasses
import re

import pytest
import torch
from torch import nn

from comfetch import sketch
from comfetch.compare import Terms, check_terms, cost_table, note_sizes, plan_runs, size_all
from comfetch.equal import KINDS, Meter, format_cost, knob_of, read_budget, size_to
from comfetch.equal.costs import step_flops
from comfetch.errors import ModelError, OptionError, RunError
from comfetch.experiment import Experiment
from comfetch.methods import METHODS
from comfetch.pareto import exchange_bytes
from comfetch.records import read_json, write_json
from comfetch.report import Run

TASK = "tests.unit.small_task:task"
METER = Meter()
REFERENCE = "comfetch@4"


def experiment(method: str = "comfetch", **options: object) -> Experiment:
    small = {"task": TASK, "clients": 3, "batch_size": 8, "rounds": 4}
    return Experiment.of({**small, "method": method, **options})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_sized_to_the_budget_or_said_to_be_too_large(name: str, kind: str) -> None:
    given = experiment(name)
    budget = read_budget(REFERENCE, given, kind, METER)
    sized = size_to(given, budget, kind, METER)
    assert sized.cost == METER.cost(sized.experiment, kind)
    knob = knob_of(given)
    if not sized.fits:
        assert f"cannot meet {format_cost(kind, budget)}: needs {format_cost(kind, sized.cost)}" in sized.verdict
        tried = (knob.settings[0], knob.settings[len(knob.settings) // 2]) if knob else ()
        for setting in tried:
            assert cost_or(METER, knob.set(given, setting), kind) > budget
    elif knob is None or "does not change it" in sized.verdict:
        assert sized.experiment == given
    else:
        method = sized.experiment.make_method()
        own = knob.settings.index(getattr(method, (knob.options or ("compression",))[0]))
        places = {min(len(knob.settings) - 1, own + 2**n) for n in (0, 2, 4, 11)} - {own}
        larger = [cost_or(METER, knob.set(given, knob.settings[place]), kind) for place in sorted(places)]
        assert all(cost == sized.cost or cost > budget for cost in larger)
        assert not larger or larger[-1] > budget


def cost_or(meter: Meter, one: Experiment, kind: str) -> float:
    """What it costs; beyond all budgets where a model cannot be made at that size."""
    try:
        return meter.cost(one, kind)
    except ModelError:
        return float("inf")


@pytest.mark.parametrize("name", METHODS)
def test_bytes_are_those_of_the_run(name: str) -> None:
    options = {"method_options": "anchor_rounds = 3"} if name == "docofl" else {}
    given = experiment(name, **options)
    history = given.run()
    run = Run(None, given.options(), history.records, {}, {})
    assert METER.cost(given, "bytes") == pytest.approx(exchange_bytes(run), abs=1)


@pytest.mark.parametrize("name", ["ef21", "qsgd", "comfetch"])
def test_rounds_beyond_those_played_are_like_the_last_ones(name: str) -> None:
    given = experiment(name, rounds=15)
    run = Run(None, given.options(), given.run().records, {}, {})
    assert METER.cost(given, "bytes") == pytest.approx(exchange_bytes(run), rel=1e-3)


def test_memory_counts_what_is_kept_and_a_download_that_is_needed_again() -> None:
    weights = sum(p.nbytes for p in experiment().load()[1]().parameters())
    costs = {name: METER.cost(experiment(name), "memory") for name in ("fedavg", "qsgd", "doublesqueeze", "ef21")}
    extra = {name: (cost - costs["fedavg"]) / weights for name, cost in costs.items()}
    assert extra["qsgd"] == pytest.approx(1, abs=0.01)  # the weights it began with
    assert extra["doublesqueeze"] == pytest.approx(2, abs=0.01)  # its copy and its error
    assert extra["ef21"] == pytest.approx(4, abs=0.01)  # its copy, two estimates, and one that waits
    kept = [record["client_kept"] for record in experiment("ef21").run().records]
    assert max(kept) == pytest.approx(4 * weights, rel=0.01)


def test_memory_that_is_predicted_is_that_of_the_run() -> None:
    given = experiment("narrow")
    run = Run(None, given.options(), given.run().records, {}, {})
    assert METER.cost(given, "memory") == pytest.approx(run.memory(), rel=0.02)


@pytest.mark.parametrize(
    ("layer", "shape", "forward"),
    [
        (nn.Linear(6, 8), (4, 6), 2 * 4 * 6 * 8),
        (nn.Conv2d(8, 16, 3, padding=1), (2, 8, 5, 5), 2 * 2 * 25 * 16 * 8 * 9),
        (nn.Conv2d(8, 16, 3, padding=1, groups=4), (2, 8, 5, 5), 2 * 2 * 25 * 16 * 2 * 9),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 5, 5), 2 * 2 * 25 * 8 * 9),
    ],
)
def test_a_step_is_counted_as_forward_and_the_gradient_of_the_weights(layer, shape, forward) -> None:
    assert step_flops(layer, torch.zeros(shape)) == 2 * forward
    two = (
        nn.Sequential(nn.Identity(), layer)
        if isinstance(layer, nn.Linear)
        else nn.Sequential(nn.Conv2d(8, 8, 1), layer)
    )
    first = 0 if isinstance(layer, nn.Linear) else 2 * (2 * 2 * 25 * 8 * 8)
    expected = 2 * forward if isinstance(layer, nn.Linear) else first + 3 * forward
    assert step_flops(two, torch.zeros(shape)) == expected


def test_sketched_layers_and_fused_recurrent_ones_are_counted() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))

    batch = torch.zeros(2, 16, 6, 6)
    small = sketch(net, compression=4, only=["2"])
    full_layer, first = 3 * 2 * 2 * 36 * 64 * 64 * 9, 2 * 2 * 2 * 36 * 64 * 16 * 9
    assert step_flops(net(), batch) == full_layer + first
    assert step_flops(small, batch) == full_layer // 4 + first
    lstm = nn.LSTM(8, 16, batch_first=True)
    products = 2 * 3 * 5 * 4 * 16 * (8 + 16)
    assert products <= step_flops(lstm, torch.zeros(3, 5, 8)) <= 3 * products


def test_budgets_are_numbers_or_methods() -> None:
    one = experiment()
    assert read_budget("300kB", one, "bytes") == 300_000
    assert read_budget("1.5 GFLOP", one, "flops") == 1.5e9
    assert read_budget("comfetch@4", one, "memory", METER) == METER.cost(experiment(compression=4.0), "memory")
    assert read_budget("fedavg", one, "flops", METER) == METER.cost(experiment("fedavg"), "flops")
    ranked = experiment("flocora", method_options="rank = 3")
    assert read_budget("flocora@3", one, "bytes", METER) == METER.cost(ranked, "bytes")
    sketched = experiment(
        hash="random", blocks="1", wire_up="int8"
    )  # a budget has no options of the sketch or the wire
    assert read_budget("comfetch@4", sketched, "bytes", METER) == read_budget("comfetch@4", one, "bytes", METER)


@pytest.mark.parametrize(
    ("kind", "budget", "message"),
    [
        ("bytes", "much", "is not a number of bytes. Write, for example, 256MB. Or name a method"),
        ("flops", "3 apples", "is not a number of operations"),
        ("bytes", "nothing@4", "'nothing' is no method. Choose one of: comfetch"),
        ("bytes", "fedavg@4", "fedavg has no setting of its size. Write fedavg alone"),
        ("bytes", "comfetch@x", "'x' is no compression"),
        ("bytes", "flocora@1.5", "'1.5' is no rank"),
        ("bytes", "comfetch@0.5", "below 1"),
        ("time", "1s", "equal='time' is not known. Choose one of: bytes, memory, flops"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(kind: str, budget: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_budget(budget, experiment(), kind)
    assert message in str(caught.value)
    if budget == "fedavg@4":
        assert read_budget("fedavg", experiment(), kind) > 0


def test_what_would_send_less_is_said_and_does() -> None:
    given = experiment("local-top-k", rounds=20)
    budget = read_budget("comfetch@4", given, "bytes", METER)
    sized = size_to(given, budget, "bytes", METER)
    assert not sized.fits and "'changes = true' sends less" in sized.verdict
    assert size_to(dataclasses.replace(given, method_options="changes = true"), budget, "bytes", METER).fits


def test_a_setting_that_costs_as_much_as_the_best_stays() -> None:
    given = experiment(compression=4.0)
    assert size_to(given, read_budget("comfetch@4", given, "bytes", METER), "bytes", METER).experiment == given
    fixed = experiment(capacities="1,4")
    assert knob_of(fixed) is None and knob_of(experiment("narrow", method_options="weights = 500")) is None


def test_a_sketch_and_its_top_k_shrink_together() -> None:
    knob = knob_of(experiment("fetchsgd", compression=5.0, method_options="fraction = 0.1, changes = true"))
    sized = knob.set(experiment("fetchsgd", method_options="fraction = 0.1, changes = true"), 10.0)
    assert (sized.compression, sized.method_options) == (10.0, "fraction = 0.05, changes = true")


def test_equal_terms_need_the_same_data_federation_and_random_numbers() -> None:
    one = experiment()
    check_terms({"a": one, "b": experiment("narrow", lr=0.1)})
    with pytest.raises(OptionError, match=r"clients is 3 in a, 4 in b; batch_size is 8 in a, 9 in b"):
        check_terms({"a": one, "b": experiment("narrow", clients=4, batch_size=9)})
    with pytest.raises(OptionError, match=r"\(seed, key\) is \[\(0, 0\), \(1, 0\)\] in a, \[\(0, 0\)\] in b"):
        check_terms({"a": one, "a1": experiment(seed=1), "b": experiment("narrow")})
    with pytest.raises(OptionError, match="is not the same for all: .* for a, .* for b"):
        size_all({"a": one, "b": experiment(optimiser="sgd")}, Terms("memory", "fedavg"), METER)


def test_seeds_are_sized_alike_and_data_order_and_clients_are_the_same(tmp_path) -> None:
    given = {f"{m}{s}": experiment(m, seed=s, fraction=0.67) for m in ("comfetch", "mask") for s in (0, 1)}
    sizes = size_all(given, Terms("bytes", REFERENCE), Meter())
    assert sizes["mask0"].experiment.compression == sizes["mask1"].experiment.compression
    for seed in (0, 1):
        first, second = (METER.federation(sizes[f"{m}{seed}"].experiment) for m in ("comfetch", "mask"))
        assert [first.sample(r) for r in range(4)] == [second.sample(r) for r in range(4)]
        assert all((a == b).all() for a, b in zip(first.parts, second.parts, strict=True))
        a, b = first.start().weights, second.start().weights
        assert torch.equal(a["0.weight"], b["0.weight"]) and a.keys() == b.keys()


def test_the_table_tells_costs_and_verdicts(tmp_path) -> None:
    (tmp_path / "tomls").mkdir()
    for name, one in {"a": experiment(), "b": experiment("fedavg")}.items():
        lines = [f"{k} = {v!r}" for k, v in one.options().items() if k in ("task", "clients", "batch_size", "method")]
        (tmp_path / "tomls" / f"{name}.toml").write_text("\n".join(lines))
    planned = plan_runs(tmp_path / "tomls", tmp_path / "runs", Terms("bytes", "comfetch@4"), METER)
    assert [one.state for one in planned] == ["missing", "too large"]
    head, first, second = cost_table(planned, METER).splitlines()
    assert head.split()[0] == "run" and "as given" in first and "cannot meet" in second
    assert planned[0].experiment.equal.endswith("as comfetch@4")
    assert dataclasses.replace(planned[0].experiment, equal=None, rounds=4) == experiment()


@pytest.mark.parametrize(
    ("budget", "part", "stays"), [(REFERENCE, 1.005, True), (REFERENCE, 1.05, False), ("9kB", 1.005, False)]
)
def test_runs_stay_sized_to_a_method_whose_cost_has_moved_a_little(
    tmp_path, budget: str, part: float, stays: bool
) -> None:
    (tmp_path / "tomls").mkdir()
    (tmp_path / "tomls" / "narrow.toml").write_text(f"task = {TASK!r}\nmethod = 'narrow'\nclients = 2\nrounds = 1\n")
    terms = Terms("bytes", budget)
    (first,) = plan_runs(tmp_path / "tomls", tmp_path, terms, METER)
    first.experiment.run(first.folder)
    before = round(first.sized.budget)
    moved = re.sub(r"\d+", str(round(before * part)), first.experiment.equal, count=1)
    options = first.folder / "run.toml"
    options.write_text(options.read_text().replace(first.experiment.equal, moved))
    if stays:
        (again,) = plan_runs(tmp_path / "tomls", tmp_path, terms, METER)
        assert (again.state, again.experiment.equal) == ("finished", moved)
        assert again.sized.fits and again.experiment.compression == first.experiment.compression
    else:
        with pytest.raises(RunError, match="another configuration"):
            plan_runs(tmp_path / "tomls", tmp_path, terms, METER)


def test_what_is_noted_of_other_runs_stays_though_the_named_method_costs_a_little_less_now(tmp_path) -> None:
    (tmp_path / "tomls").mkdir()
    (tmp_path / "tomls" / "narrow.toml").write_text(f"task = {TASK!r}\nmethod = 'narrow'\nclients = 2\nrounds = 1\n")
    terms = Terms("bytes", REFERENCE)
    planned = plan_runs(tmp_path / "tomls", tmp_path, terms, METER)
    for part, kept in ((1.005, ["mask", "narrow"]), (1.05, ["narrow"])):
        rows = [{"run": "mask", "method": "mask", "cost": 1, "setting": "compression 5", "fits": True}]
        before = {"kind": "bytes", "budget": planned[0].sized.budget * part, "as": REFERENCE, "runs": rows}
        write_json(tmp_path / "equal.json", before)
        note_sizes(planned, terms, tmp_path)
        found = read_json(tmp_path / "equal.json")
        assert [row["run"] for row in found["runs"]] == kept and found["budget"] == planned[0].sized.budget
