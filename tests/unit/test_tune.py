"""Tuning: one search for all, on examples that are held out of the training set, and never on the test set."""

import json
import tomllib
from pathlib import Path

import pytest

from comfetch.compare import Terms
from comfetch.data import load_task
from comfetch.errors import OptionError, RunError
from comfetch.tune import Search, tune

TASK = "tests.unit.small_task:task"
SEARCH = Search(trials=3, rounds=1, lowest=0.001, highest=0.1, validation=0.2)


def write(folder: Path, name: str, **options: object) -> None:
    folder.mkdir(exist_ok=True)
    given = {"task": TASK, "clients": 3, "batch_size": 8, "rounds": 4, **options}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    (folder / f"{name}.toml").write_text(f"# a comment\n{text}")


def trials(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.trials.jsonl").read_text().splitlines()]


def test_all_have_the_same_trials_and_the_best_is_written(tmp_path: Path) -> None:
    write(tmp_path, "a", compression=2.0)
    write(tmp_path, "b", method="fedavg", seed=1)
    write(tmp_path, "b2", method="fedavg", seed=2)
    found = tune(tmp_path, SEARCH)
    assert [one.names for one in found] == [["a"], ["b", "b2"]]
    for one in found:
        rows = trials(tmp_path, one.names[0])
        assert [row["lr"] for row in rows] == SEARCH.rates() == [0.001, 0.01, 0.1]
        best = max(rows, key=lambda row: (row["accuracy"], -row["loss"]))
        for name in one.names:
            options = tomllib.loads((tmp_path / f"{name}.toml").read_text())
            assert options["lr"] == best["lr"] == one.rate and options["rounds"] == 4 and options["task"] == TASK
    assert not (tmp_path / "b2.trials.jsonl").exists()


def test_trials_on_record_are_not_run_again_and_others_are(tmp_path: Path) -> None:
    write(tmp_path, "a")
    ran: list[float] = []
    tune(tmp_path, SEARCH, on_trial=lambda name, trial: ran.append(trial["lr"]))
    path = tmp_path / "a.trials.jsonl"
    kept = path.read_text().splitlines()
    path.write_text("\n".join([*kept[:2], kept[2][:20], ""]))
    tune(tmp_path, SEARCH, on_trial=lambda name, trial: ran.append(trial["lr"]))
    assert ran == [0.001, 0.01, 0.1, 0.1]
    write(tmp_path, "a", local_epochs=2)  # another experiment
    tune(tmp_path, SEARCH, on_trial=lambda name, trial: ran.append(trial["lr"]))
    assert len(ran) == 7


def test_the_test_set_is_never_touched(tmp_path: Path) -> None:
    """A test set of wrong targets and inputs that say nothing changes nothing."""
    rows = {}
    for task in ("task", "useless"):
        write(tmp_path / task, "a", task=f"tests.unit.small_task:{task}")
        tune(tmp_path / task, SEARCH)
        rows[task] = [{k: v for k, v in row.items() if k != "trial"} for row in trials(tmp_path / task, "a")]
    assert rows["task"] == rows["useless"] and max(row["accuracy"] for row in rows["task"]) > 0.8


def test_what_is_held_out_is_not_trained_on() -> None:
    whole = load_task(TASK)
    split = whole.held_out(0.2, seed=3)
    assert (len(split.train), len(split.test)) == (48, 12)
    train, test, all_rows = (
        {tuple(row.tolist()) for row in side.inputs} for side in (split.train, split.test, whole.train)
    )
    assert not train & test and train | test == all_rows
    assert whole.held_out(0.2, seed=3).checksum == split.checksum != whole.held_out(0.2, seed=4).checksum
    for part in (0.0, 1.0, 0.001, -1.0):
        with pytest.raises(OptionError, match="leaves nothing to train on or to test on"):
            whole.held_out(part)


def test_a_rate_that_fails_is_a_trial_and_all_failing_is_told(tmp_path: Path) -> None:
    write(tmp_path, "a", optimiser="sgd")
    found = tune(tmp_path, Search(2, 1, 0.01, 1e20, 0.2))
    assert found[0].rate == 0.01 and found[0].at_edge
    assert [bool(row["failed"]) for row in trials(tmp_path, "a")] == [False, True]
    with pytest.raises(RunError, match="all 2 rates failed"):
        tune(tmp_path, Search(2, 1, 1e20, 1e21, 0.2))


def test_experiments_are_sized_first_and_what_is_too_large_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b", method="fedavg")
    before = (tmp_path / "b.toml").read_text()
    found = tune(tmp_path, Search(1, 1, validation=0.2), terms=Terms("bytes", "comfetch@8"))
    assert [one.names for one in found] == [["a"]] and (tmp_path / "b.toml").read_text() == before
    options = tomllib.loads((tmp_path / "a.toml").read_text())
    assert options["lr"] == 0.003 and "compression" not in options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials=0 is below 1"),
        ({"rounds": 0}, "rounds=0 is below 1"),
        ({"lowest": 0.1, "highest": 0.01}, "no range of learning rates"),
        ({"lowest": -1.0}, "no range of learning rates"),
        ({"validation": 1.0}, "validation=1 is not between 0 and 1"),
        ({"finals": -1}, "finals=-1 is not between 0 and trials=7"),
        ({"trials": 2, "finals": 3}, "finals=3 is not between 0 and trials=2"),
    ],
)
def test_searches_that_cannot_be_meant_are_refused(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Search(**options)


def test_the_best_rates_are_tried_again_for_all_rounds_and_these_decide(tmp_path: Path) -> None:
    write(tmp_path, "a")
    search = Search(trials=3, rounds=1, lowest=0.001, highest=0.1, validation=0.2, finals=2)
    (found,) = tune(tmp_path, search)
    rows = trials(tmp_path, "a")
    assert [row["rounds"] for row in rows] == [1, 1, 1, 4, 4]
    first, finals = rows[:3], rows[3:]
    order = sorted(first, key=lambda row: (-row["accuracy"], row["loss"]))
    assert [row["lr"] for row in finals] == [row["lr"] for row in order[:2]]
    best = min(finals, key=lambda row: (-row["accuracy"], row["loss"]))
    assert (found.rate, found.accuracy) == (best["lr"], best["accuracy"])
    ran: list[float] = []
    tune(tmp_path, search, on_trial=lambda name, trial: ran.append(trial["lr"]))
    assert not ran


def test_what_an_experiment_was_sized_to_makes_no_other_trial(tmp_path: Path) -> None:
    write(tmp_path, "a")
    tune(tmp_path, SEARCH)
    ran: list[float] = []
    write(tmp_path, "a", equal="bytes 1000 as comfetch@8")
    tune(tmp_path, SEARCH, on_trial=lambda name, trial: ran.append(trial["lr"]))
    assert not ran
