"""The table of runs: what is averaged, what it is called, how it is written."""

import csv
import io
from pathlib import Path

import pytest

from comfetch import records
from comfetch.errors import RunError
from comfetch.experiment import Experiment
from comfetch.page import to_html
from comfetch.report import Run, find_runs, group_runs, label, read_run, table, to_csv, to_markdown


def make_run(name: str, accuracies: list[float], **options: object) -> Run:
    rounds = [
        {
            "round": number, "loss": 1.0, "accuracy": accuracy, "accuracy_full": accuracy, "bytes_down": 1000,
            "bytes_up": 500, "client_memory": 2000 + number, "seconds": 0.5,
        }
        for number, accuracy in enumerate(accuracies, start=1)
    ]  # fmt: skip
    return Run(Path(name), Experiment.of({"rounds": len(accuracies), **options}).options(), rounds, {}, {})


def test_runs_that_differ_in_seed_and_key_only_are_averaged() -> None:
    runs = [make_run(str(seed), [0.5, 0.6 + seed / 10], seed=seed, key=seed) for seed in range(3)]
    (group,) = group_runs(runs)
    assert len(group.runs) == 3 and group.label == "comfetch 4×"
    assert group.values(lambda run: run.last("accuracy")) == (pytest.approx(0.7), pytest.approx(0.1))
    assert table([group])[1][:4] == ["comfetch 4×", "3", "2", "70.0 ± 10.0"]


def test_one_run_has_no_deviation() -> None:
    (group,) = group_runs([make_run("a", [0.5])])
    assert group.values(lambda run: run.last("accuracy")) == (0.5, None)
    assert "±" not in " ".join(table([group])[1])


def test_full_clients_do_not_heed_options_of_the_sketch() -> None:
    runs = [make_run(f"{n}", [0.5], method="fedavg", compression=float(n)) for n in (2, 8)]
    assert [group.label for group in group_runs(runs)] == ["fedavg"]


def test_groups_are_called_by_what_sets_them_apart() -> None:
    runs = [
        make_run("a", [0.5], method="fedavg", lr=0.1),
        make_run("b", [0.5], compression=8.0, lr=0.1, partition="dirichlet", unequal=True),
        make_run("c", [0.5, 0.6], compression=8.0, lr=0.2),
    ]
    assert [group.label for group in group_runs(runs)] == [
        "fedavg, rounds 1, lr 0.1",
        "comfetch 8×, rounds 1, partition dirichlet, unequal, lr 0.1",
        "comfetch 8×, rounds 2, lr 0.2",
    ]
    assert label({"method": "fedavg"}) == "fedavg"


def test_what_is_usual_and_what_a_preset_says_is_not_said_again() -> None:
    runs = [make_run("a", [0.5]), make_run("b", [0.5], preset="paper"), make_run("c", [0.5], preset="paper", lr=0.1)]
    labels = {group.label for group in group_runs(runs)}
    assert labels == {"comfetch 4×", "comfetch 4×, preset paper", "comfetch 4×, preset paper, lr 0.1"}


def test_what_a_method_does_not_heed_sets_no_run_apart() -> None:
    runs = [make_run("a", [0.5], method="artemis"), make_run("b", [0.5], method="fedavg")]
    assert [group.label for group in group_runs(runs)] == ["artemis", "fedavg"]
    runs = [make_run("a", [0.5], method="mask", spread=0.0), make_run("b", [0.5], method="mask")]
    assert [group.label for group in group_runs(runs)] == ["mask 4×"]


def test_runs_of_a_method_that_is_unknown_here_are_called_by_all_that_sets_them_apart() -> None:
    runs = [make_run("a", [0.5]), make_run("b", [0.5], lr=0.1)]
    for run in runs:
        run.options["method"] = "of-another-version"
    assert {group.label for group in group_runs(runs)} == {f"of-another-version 4×, lr {lr}" for lr in (0.001, 0.1)}


def test_totals_are_over_all_rounds_and_memory_is_the_largest() -> None:
    (group,) = group_runs([make_run("a", [0.5, 0.9, 0.7])])
    (row,) = csv.DictReader(io.StringIO(to_csv([group])))
    assert (row["bytes_down_mean"], row["bytes_up_mean"], row["client_memory_mean"]) == ("3000.0", "1500.0", "2003.0")
    assert (row["accuracy_mean"], row["best_accuracy_mean"], row["accuracy_sd"]) == ("0.7", "0.9", "")
    assert (row["task"], row["method"], row["compression"], row["seconds_mean"]) == ("digits", "comfetch", "4.0", "1.5")


def test_markdown_has_a_row_for_each_group() -> None:
    text = to_markdown(group_runs([make_run("a", [0.5]), make_run("b", [0.5], method="fedavg")]))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({row.count("|") for row in rows}) == 1


def test_the_page_escapes_what_users_named() -> None:
    page = to_html(group_runs([make_run("<b>", [0.5], task="my<task>.py")]))
    assert "my&lt;task&gt;.py" in page and "<b>" not in page and "my<task>" not in page


def test_runs_are_read_from_folders_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    run = make_run("a", [0.5, 0.6])
    folder = tmp_path / "deep" / "a"
    records.open_folder(folder, run.options, resume=False)
    for record in run.rounds:
        records.append_round(folder, record)
    with open(folder / records.ROUNDS, "a") as file:
        file.write('{"round": 3, "los')
    (found,) = find_runs([tmp_path, folder])
    assert found.options == run.options and found.rounds == run.rounds


def test_runs_that_cannot_be_reported_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run folder and holds none"):
        find_runs([tmp_path])
    records.open_folder(tmp_path / "a", make_run("a", [0.5]).options, resume=False)
    with pytest.raises(RunError, match="None of these runs has finished a round"):
        find_runs([tmp_path])
    records.append_round(tmp_path / "a", {"round": 1, "loss": 1.0})
    with pytest.raises(RunError, match="lacks accuracy, accuracy_full"):
        read_run(tmp_path / "a")
    (tmp_path / "a" / records.FOOTPRINT).write_text("{")
    (tmp_path / "a" / records.ROUNDS).unlink()
    with pytest.raises(RunError, match="footprint.json: cannot be read"):
        read_run(tmp_path / "a")


def test_a_record_that_does_not_fit_on_the_disk_is_refused(tmp_path: Path) -> None:
    (tmp_path / records.ROUNDS).symlink_to("/dev/full")
    with pytest.raises(RunError, match="cannot be written. No space left on device."):
        records.append_round(tmp_path, {"round": 1})
