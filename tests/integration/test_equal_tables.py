"""Tables and pictures of runs on equal terms are made from their records."""

import shutil

import pytest

from benchmarks import equal_tables
from comfetch.compare import Terms, note_sizes, plan_runs
from comfetch.experiment import read_experiment
from comfetch.records import format_toml
from comfetch.tune import Search, tune

METHODS = {"comfetch": {}, "narrow": {}, "fedavg": {}, "mask-l1": {"method_options": "kind = 'l1'"}}
RUN = {"task": "digits", "rounds": 1, "clients": 2, "limit": 100}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("equal")
    (folder / "tomls").mkdir()
    for name, options in METHODS.items():
        told = {**RUN, "method": name.split("-")[0], **options}
        (folder / "tomls" / f"{name}.toml").write_text(format_toml(told))
    terms = Terms("bytes", "comfetch@10")
    planned = plan_runs(folder / "tomls", folder / "equal-bytes", terms, seeds=2)
    for one in planned:
        if one.state == "missing":
            one.experiment.run(one.folder)
    note_sizes(planned, terms, folder / "equal-bytes")
    return folder


@pytest.fixture(autouse=True)
def here(results, monkeypatch):
    monkeypatch.setattr(equal_tables, "RESULTS", results)


def test_every_method_that_fits_has_a_row_with_its_seeds() -> None:
    _, _, *rows = equal_tables.equal_table("bytes").splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert sorted(row[0] for row in cells) == ["comfetch, default", "mask-l1", "narrow"]
    assert {row[3] for row in cells} == {"2"} and all("±" in row[4] for row in cells)
    assert next(row[1] for row in cells if row[0] == "comfetch, default") == "compression 10"


def test_words_tell_the_best_and_those_that_are_too_large() -> None:
    words = equal_tables.equal_words("bytes")
    assert "is best" in words and "- Too large at their smallest: fedavg (" in words


def test_runs_that_were_cut_are_left_out(results, tmp_path) -> None:
    copied = shutil.copytree(results / "equal-bytes", tmp_path / "runs")
    assert len(equal_tables.finished_runs(copied)) == 6
    (copied / "narrow-seed1" / "full.safetensors").unlink()
    assert len(equal_tables.finished_runs(copied)) == 5


def test_pictures_are_drawn(results) -> None:
    equal_tables.main()
    assert {path.name for path in (results / "equal-bytes").glob("*.png")} == {"bytes.png", "memory.png"}


def test_search_table_has_every_trial_and_marks_the_rate_that_was_taken(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "equal-bytes"
    folder.mkdir()
    (folder / "narrow.toml").write_text(format_toml({**RUN, "method": "narrow", "rounds": 2}))
    (found,) = tune(folder, Search(trials=2, rounds=1, lowest=0.0001, highest=0.01, validation=0.5, finals=1))
    monkeypatch.setattr(equal_tables, "EXPERIMENTS", tmp_path)
    head, _, row = equal_tables.search_table("bytes").splitlines()
    assert head == "| method | 0.0001 | 0.01 |"
    taken, other = sorted((cell.strip() for cell in row.strip("|").split("|")[1:]), reverse=True, key=len)
    assert taken.startswith("**") and taken.endswith(f" / {100 * found.accuracy:.1f}**")
    assert float(taken.strip("*").partition(" / ")[0]) >= float(other)


def test_runs_at_another_rate_stand_beside_those_of_their_own_seeds(results, tmp_path, monkeypatch) -> None:
    shutil.copytree(results / "equal-bytes", tmp_path / "equal-bytes")
    for seed in range(2):
        run = results / "equal-bytes" / f"narrow-seed{seed}"
        read_experiment(run / "run.toml", {"lr": 0.0005}).run(tmp_path / "equal-bytes-rates" / run.name)
    monkeypatch.setattr(equal_tables, "RESULTS", tmp_path)
    (row,) = equal_tables.rates_table("bytes").splitlines()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "narrow" and cells[1] == "0.001" and cells[3] == "0.0005"
    apart = float(cells[4].split(" ± ")[0]) - float(cells[2].split(" ± ")[0])
    assert float(cells[5].split(" ± ")[0]) == pytest.approx(apart, abs=0.11)


def test_no_records_give_empty_tables(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(equal_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(equal_tables, "EXPERIMENTS", tmp_path)
    assert all(len(make().splitlines()) in (0, 2) for make in equal_tables.TABLES.values())
