"""The command line, from input to files: what it does, and how it refuses."""

import dataclasses
import json
import os
import re
import resource
import tomllib
from pathlib import Path

import pytest
import typer
from rich.console import Console
from safetensors import safe_open

from comfetch.cli import app
from comfetch.cli.demo import PICTURE
from comfetch.cli.watch import Watch
from comfetch.experiment import Experiment
from comfetch.files import load_state
from comfetch.report import find_runs, group_runs
from tests.end_to_end.commands import TINY, comfetch, finish, start

FILES = {
    "run.toml", "environment.json", "partition.json", "footprint.json", "rounds.jsonl", "checkpoint.safetensors",
    "full.safetensors", "sketched.safetensors",
}  # fmt: skip
NUMBERS = {"round", "loss", "accuracy", "accuracy_full", "bytes_down", "bytes_up", "client_memory", "seconds"}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMFETCH_DATA", raising=False)


def run_tiny(out: str, *more: str) -> None:
    result = comfetch("run", "digits", *TINY, "--rounds", "1", "--out", out, "--quiet", *more)
    assert (result.code, result.err, result.out) == (0, "", "")


def write_toml(path: str, **options: object) -> Path:
    tiny = {"task": "digits", "limit": 80, "clients": 3, "batch_size": 16, "rounds": 1, **options}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in tiny.items()))
    return Path(path)


def test_every_field_of_an_experiment_is_an_option_of_run() -> None:
    command = typer.main.get_command(app)
    options = {parameter.name for parameter in command.commands["run"].params}
    assert {field.name for field in dataclasses.fields(Experiment)} <= options


@pytest.mark.parametrize("command", ["demo", "run", "tune", "compare", "report", "footprint"])
def test_help_is_given(command: str) -> None:
    result = comfetch(command, "--help")
    assert result.code == 0 and "Usage: comfetch" in result.out and not result.err
    assert command in comfetch().out


def test_a_run_folder_holds_everything() -> None:
    result = comfetch("run", "digits", *TINY, "--rounds", "2", "--out", "run", "--tensorboard")
    assert result.code == 0 and not result.err
    for shown in ("client  examples", "round 1/2", "loss", "accuracy", "↓", "↑", "left", "Everything is in run"):
        assert shown in result.out
    assert {path.name for path in Path("run").iterdir()} == FILES | {"tensorboard"}
    assert list(Path("run/tensorboard").glob("events.out.tfevents.*"))
    records = [json.loads(line) for line in Path("run/rounds.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == [1, 2]
    assert all(record.keys() >= NUMBERS for record in records)
    options = tomllib.loads(Path("run/run.toml").read_text())
    assert Experiment.of(options).options() == options and options["rounds"] == 2
    environment = json.loads(Path("run/environment.json").read_text())
    assert {"comfetch", "commit", "torch", "threads", "data"} <= environment.keys()
    with safe_open("run/full.safetensors", "pt") as full, safe_open("run/sketched.safetensors", "pt") as sketched:
        assert set(full.keys()) == set(sketched.keys()) and "comfetch.plan" in sketched.metadata()


def test_run_takes_a_file_and_options_go_before_it() -> None:
    path = write_toml("experiment.toml", preset="paper", compression=8.0, model="mlp", lr=0.01)
    result = comfetch("run", path, "--lr", "0.02", "--no-keep-optimiser")
    assert result.code == 0
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"digits-comfetch-8-[0-9a-f]{6}", folder.name)
    options = tomllib.loads((folder / "run.toml").read_text())
    assert (options["lr"], options["compression"], options["hash"]) == (0.02, 8.0, "random")
    assert options["keep_optimiser"] is False and options["load_rates"] is True


def test_a_run_is_not_begun_twice_but_can_be_extended() -> None:
    run_tiny("run")
    again = ("run", "digits", *TINY, "--out", "run", "--quiet")
    assert "Go on with --resume" in comfetch(*again, "--rounds", "2").told
    assert "another configuration (lr: 0.001 there, 0.1 now)" in comfetch(*again, "--lr", "0.1", "--resume").told
    assert comfetch(*again, "--rounds", "3", "--resume").code == 0
    assert len(Path("run/rounds.jsonl").read_text().splitlines()) == 3
    assert "holds 3 rounds already" in comfetch(*again, "--rounds", "2", "--resume").told


BAD = {
    "unknown task": (["nonsense"], "Task 'nonsense' is unknown. Choose one of digits"),
    "unknown option": (["digits", "--nonsense", "1"], "No such option"),
    "missing task": ([], "Missing argument"),
    "unknown method": (["digits", "--method", "x"], "method='x' is not known. Choose one of: comfetch, fedavg"),
    "unknown preset": (["digits", "--preset", "x"], "preset='x' is not known"),
    "unknown model": (["digits", "--model", "x"], "model='x' is not known. Choose one of: mlp"),
    "unfit model": (["digits", "--model", "lstm-tagger"], "reads words"),
    "unknown optimiser": (["digits", "--optimiser", "lbfgs"], "optimiser='lbfgs' is not known"),
    "unused unknown name": (["digits", "--method", "fedavg", "--hash", "x"], "hash='x' is not known"),
    "no number": (["digits", "--rounds", "x"], "'x' is not a valid integer"),
    "negative rounds": (["digits", "--rounds", "-1"], "rounds=-1"),
    "negative rate": (["digits", "--lr", "-1"], "lr=-1.0"),
    "infinite rate": (["digits", "--lr", "inf"], "lr=inf"),
    "absurd rate": (["digits", "--lr", "1e300"], "lr=1e+300"),
    "compression below 1": (["digits", "--compression", "0.25"], "4 means four times smaller"),
    "no clients": (["digits", "--clients", "0"], "clients=0"),
    "too many clients": (["digits", "--clients", "1000000"], "too few for 1000000 clients"),
    "fraction above 1": (["digits", "--fraction", "2"], "fraction=2.0"),
    "negative seed": (["digits", "--seed", "-1"], "seed=-1"),
    "negative key": (["digits", "--key", "-1"], "key=-1"),
    "absurd batch": (["digits", "--batch-size", str(10**30)], "more than 64 bits"),
    "no threads": (["digits", "--threads", "0"], "threads=0"),
    "unknown device": (["digits", "--device", "x"], "device='x' cannot be used here"),
    "empty device": (["digits", "--device", "meta"], "device='meta' cannot be used here"),
    "nothing to resume": (["digits", "--out", "none", "--resume"], "none does not exist"),
    "missing file": (["none.toml"], "none.toml: cannot be read"),
    "missing dataset": (["cifar10"], "Provide it in one of three ways: --data-dir"),
    "missing folder": (["cifar10", "--data-dir", "none"], "data_dir none is not a folder"),
    "unwritable folder": (["digits", "--out", "/proc/none"], "/proc/none: cannot be made"),
    "loss is no number": (["digits", *TINY, "--lr", "1e20"], "lower the learning rate"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case: str) -> None:
    arguments, message = BAD[case]
    assert message in comfetch("run", *arguments, "--quiet").told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task = ", "not valid TOML"),
        ('task = "digits"\ncompresion = 4', "Unknown option 'compresion'. Did you mean 'compression'?"),
        ('task = "digits"\nrounds = "many"', "rounds='many' is not of type int"),
        ('task = "digits"\nlr = true', "lr=True is not of type float"),
    ],
)
def test_a_broken_file_is_refused_by_name(text: str, message: str) -> None:
    Path("broken.toml").write_text(text)
    told = comfetch("run", "broken.toml").told
    assert "broken.toml: " in told and message in told


def test_a_dataset_with_a_wrong_checksum_is_refused() -> None:
    for name, size in (("train", 2605912), ("test", 330912)):
        Path(f"ud_english_ewt_{name}.conllu.gz").write_bytes(bytes(size))
    assert re.search(
        r"ewt_\w+.conllu.gz: sha256 \w+ found, \w+ expected", comfetch("run", "ewt-pos", "--data-dir", ".").told
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "cannot be made. Permission denied" in comfetch("run", "digits", *TINY, "--out", "locked/run").told


def test_a_process_exits_with_2_and_loads_no_plots() -> None:
    light = "assert not {'matplotlib', 'tensorboard', 'sklearn'} & set(sys.modules)"
    code = f"import sys\nfrom comfetch.cli import main\ntry: main()\nfinally: {light}"
    assert "is unknown" in finish(start("run", "nonsense", code=code)).told


def test_a_full_disk_costs_nothing_that_was_saved() -> None:
    run_tiny("run")
    before = load_state("run/checkpoint.safetensors")

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))

    arguments = ("run", "digits", *TINY, "--rounds", "2", "--out", "run", "--quiet", "--resume")
    told = finish(start(*arguments, before=small_disk)).told
    assert "checkpoint.safetensors: cannot be written" in told
    after = load_state("run/checkpoint.safetensors")
    assert before[1] == after[1] and all(after[0][name].equal(tensor) for name, tensor in before[0].items())
    assert not list(Path("run").glob(".*"))
    assert comfetch(*arguments).code == 0
    assert len(Path("run/rounds.jsonl").read_text().splitlines()) == 2


def test_compare_runs_what_is_missing_and_resumes_what_was_cut() -> None:
    write_toml("tomls/a.toml", method="fedavg")
    write_toml("tomls/b.toml", compression=8.0)
    first = comfetch("compare", "tomls")
    assert first.code == 0 and "a: missing" in first.out and "b: missing" in first.out
    assert {path.name for path in Path("runs/tomls").iterdir()} == {"a", "b"}
    write_toml("tomls/a.toml", method="fedavg", rounds=2)
    Path("runs/tomls/b/full.safetensors").unlink()
    kept = Path("runs/tomls/a/environment.json").stat().st_mtime_ns
    second = comfetch("compare", "tomls")
    assert second.code == 0 and "a: cut" in second.out and "b: cut" in second.out
    assert len(Path("runs/tomls/a/rounds.jsonl").read_text().splitlines()) == 2
    assert Path("runs/tomls/b/full.safetensors").exists()
    assert Path("runs/tomls/a/environment.json").stat().st_mtime_ns == kept
    models = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.safetensors")}
    third = comfetch("compare", "tomls")
    assert third.code == 0 and "a: finished" in third.out and "b: finished" in third.out
    assert models == {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.safetensors")}


def test_compare_repeats_experiments_with_further_seeds() -> None:
    write_toml("tomls/a.toml", method="fedavg", seed=3)
    assert comfetch("compare", "tomls", "--seeds", "2").code == 0
    assert {path.name for path in Path("runs/tomls").iterdir()} == {"a-seed3", "a-seed4"}
    drawn = [tomllib.loads(Path(f"runs/tomls/a-seed{seed}/run.toml").read_text()) for seed in (3, 4)]
    assert [(run["seed"], run["key"]) for run in drawn] == [(3, 0), (4, 1)]
    assert drawn[1] == {**drawn[0], "seed": 4, "key": 1}
    more = comfetch("compare", "tomls", "--seeds", "3")
    assert "a-seed4: finished" in more.out and "a-seed5: missing" in more.out
    assert len(group_runs(find_runs([Path("runs/tomls")]))) == 1
    assert "seeds=0 is below 1" in comfetch("compare", "tomls", "--seeds", "0").told
    write_toml("tomls/a.toml", seed=2**63 - 1)
    assert "seed=9223372036854775808" in comfetch("compare", "tomls", "--seeds", "2", "--out", "out").told
    assert not Path("out").exists()


def test_compare_refuses_another_configuration_before_it_runs_anything() -> None:
    write_toml("tomls/b.toml")
    assert comfetch("compare", "tomls", "--out", "out").code == 0
    files = {path: path.read_bytes() for path in Path("out/b").iterdir()}
    write_toml("tomls/a.toml")
    write_toml("tomls/b.toml", lr=0.1)
    write_toml("tomls/c.toml", compression=0.5)
    told = comfetch("compare", "tomls", "--out", "out").told
    assert "out/b holds a run of another configuration (lr: 0.001 there, 0.1 now)" in told
    assert "compression=0.5 is below 1" in told
    assert not Path("out/a").exists() and files == {path: path.read_bytes() for path in Path("out/b").iterdir()}


def test_compare_goes_on_after_a_run_that_fails() -> None:
    write_toml("tomls/a.toml", lr=1e20)
    write_toml("tomls/b.toml")
    told = comfetch("compare", "tomls", "--out", "out").told
    assert told.startswith("comfetch: 1 of 2 runs failed; a: Round 1: no upload could be used")
    assert Path("out/b/full.safetensors").exists()
    assert "holds no TOML files" in comfetch("compare", "out").told


def test_compare_on_equal_terms_sizes_runs_and_resumes() -> None:
    for name, method in (("a", "comfetch"), ("b", "narrow"), ("c", "fedavg")):
        write_toml(f"tomls/{name}.toml", method=method)
    terms = ("--equal", "bytes", "--budget", "comfetch@10")
    listed = comfetch("compare", "tomls", *terms, "--dry-run")
    assert listed.code == 0 and not Path("runs").exists()
    head, first, second, third = listed.out.splitlines()
    assert head.split()[:4] == ["run", "method", "bytes", "a"] and "compression 10" in first and "compression" in second
    assert third.startswith("c") and "cannot meet 710 kB: needs 4.51 MB (nothing to set)" in third
    begun = comfetch("compare", "tomls", *terms)
    assert begun.code == 0 and "a: missing" in begun.out and "c: too large" in begun.out
    assert {path.name for path in Path("runs/tomls").iterdir()} == {"a", "b", "equal.json"}
    options = tomllib.loads(Path("runs/tomls/b/run.toml").read_text())
    assert options["equal"] == "bytes 710304 as comfetch@10" and options["compression"] > 4
    record = json.loads(Path("runs/tomls/b/rounds.jsonl").read_text().splitlines()[0])
    assert 0.98 * 710_304 < (record["bytes_down"] + record["bytes_up"]) / 3 <= 710_304
    notes = Path("runs/tomls/equal.json").read_text()
    again = comfetch("compare", "tomls", *terms)
    assert again.code == 0 and "a: finished" in again.out and "b: finished" in again.out
    assert Path("runs/tomls/equal.json").read_text() == notes
    Path("tomls/a.toml").unlink()
    assert comfetch("compare", "tomls", *terms).code == 0
    assert Path("runs/tomls/equal.json").read_text() == notes  # what is noted of runs that are not of this folder stays
    write_toml("tomls/a.toml", method="comfetch")
    assert "another configuration (compression" in comfetch("compare", "tomls").told
    assert comfetch("report", "runs/tomls", "--out", "report.md").code == 0
    page = Path("report.md").read_text()
    assert "Not run, as they need more than 710 kB of bytes: fedavg (4.51 MB)." in page and "is best" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "tomls", "--equal", "bytes"], "--equal needs --budget"),
        (["compare", "tomls", "--budget", "1MB"], "--budget needs --equal"),
        (["compare", "tomls", "--equal", "time", "--budget", "1MB"], "equal='time' is not known. Choose one of: bytes"),
        (["compare", "tomls", "--equal", "bytes", "--budget", "much"], "is not a number of bytes"),
        (["compare", "tomls", "--equal", "flops", "--budget", "fedavg@2"], "fedavg has no setting of its size"),
        (["compare", "none", "--dry-run"], "none holds no TOML files"),
        (["tune", "none"], "none holds no TOML files"),
        (["tune", "tomls", "--trials", "0"], "trials=0 is below 1"),
        (["tune", "tomls", "--lowest", "1"], "no range of learning rates"),
        (["tune", "tomls", "--validation", "2"], "validation=2 is not between 0 and 1"),
        (["tune", "tomls", "--validation", "0.001"], "leaves nothing to train on or to test on"),
        (["run", "digits", "--validation", "1.5"], "leaves nothing to train on or to test on"),
    ],
)
def test_bad_terms_and_searches_are_refused_in_one_line(arguments: list[str], message: str) -> None:
    write_toml("tomls/a.toml")
    before = Path("tomls/a.toml").read_bytes()
    assert message in comfetch(*arguments).told
    assert not Path("runs").exists() and Path("tomls/a.toml").read_bytes() == before


def test_tune_writes_rates_and_tells_those_at_the_edge() -> None:
    write_toml("tomls/a.toml")
    result = comfetch("tune", "tomls", "--trials", "2", "--rounds", "1", "--lowest", "0.00001", "--highest", "0.003")
    assert result.code == 0 and "a: lr 1e-05: accuracy" in result.out and "at the edge of the grid" in result.out
    assert tomllib.loads(Path("tomls/a.toml").read_text())["lr"] == 0.003
    assert len(Path("tomls/a.trials.jsonl").read_text().splitlines()) == 2


def test_report_writes_a_page_that_needs_nothing_else() -> None:
    for seed in ("0", "1"):
        run_tiny(f"runs/{seed}", "--seed", seed, "--partition", "dirichlet")
    run_tiny("runs/fedavg", "--method", "fedavg", "--partition", "dirichlet")
    assert comfetch("report", "runs", "--out", "report.html").code == 0
    page = Path("report.html").read_text()
    assert page.count("<svg") == 3 + 3 + 2 + 1 and "comfetch 4×" in page and "±" in page
    assert not re.search(r'(src|href)="(?!#|data:)|@import|<script|url\((?!#)', page)
    ids = re.findall(r' id="([^"]+)"', page)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', page))
    assert used <= set(ids)


def test_report_writes_markdown_and_csv() -> None:
    run_tiny("runs/a")
    assert comfetch("report", "runs/a", "--out", "report.md").code == 0
    assert Path("report.md").read_text().count("|") >= 3 * 11
    assert comfetch("report", "runs/a", "--out", "report.csv").code == 0
    header, row = Path("report.csv").read_text().splitlines()
    assert len(header.split(",")) == len(row.split(","))
    assert "must end in .html, .md, .csv" in comfetch("report", "runs", "--out", "report.pdf").told
    assert "is no run folder and holds none" in comfetch("report", "none", "--out", "report.md").told


def test_footprint_of_a_task_and_of_a_constructor() -> None:
    compressed = comfetch("footprint", "digits", "--compression", "10")
    assert compressed.code == 0 and "activations" in compressed.out
    fitted = comfetch("footprint", "digits", "--budget", "3MB", "--optimiser", "sgd", "--batch-size", "16")
    assert re.search(r"total .* MB +[12]\.\d+ MB", fitted.out)
    model = comfetch("footprint", "comfetch.models:resnet18")
    assert re.search(r"weights +44.7 MB +11.\d MB", model.out) and "activations" not in model.out
    assert "activations" in comfetch("footprint", "comfetch.models:resnet18", "--input", "3x32x32").out


def test_footprint_of_a_users_own_task() -> None:
    Path("own.py").write_text(
        "import torch\n"
        "def task():\n"
        "    data = torch.zeros(8, 200), torch.zeros(8, dtype=torch.int64)\n"
        "    net = lambda: torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(3)])\n"
        "    return net, data, data\n"
    )
    assert "activations" in comfetch("footprint", "own.py", "--compression", "2").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits", "--budget", "1kB"], "below the floor"),
        (["digits", "--budget", "much"], "is not a number of bytes"),
        (["digits", "--budget", "1MB", "--compression", "2"], "Give one of them"),
        (["digits", "--optimiser", "x"], "optimiser='x' is not known"),
        (["comfetch.models:nothing"], "has no function nothing"),
        (["comfetch.models:mlp", "--input", "8by8"], "is not a shape"),
        (["comfetch.models:resnet18", "--budget", "1GB"], "budget needs batch"),
    ],
)
def test_footprint_refuses_in_one_line(arguments: list[str], message: str) -> None:
    assert message in comfetch("footprint", *arguments).told


@pytest.mark.slow
def test_the_demo_keeps_what_it_promises_and_is_shown_again() -> None:
    result = comfetch("demo", "--out", "demo")
    assert result.code == 0 and not result.err
    groups = {group.label: group.runs[0] for group in group_runs(find_runs([Path("demo")]))}
    fedavg = groups["fedavg"]
    for compression, points in ((4, 2), (10, 6)):
        run = groups[f"comfetch {compression}×"]
        assert run.last("accuracy") >= fedavg.last("accuracy") - points / 100
        assert run.total("bytes_down") <= fedavg.total("bytes_down") / 2
        assert run.total("bytes_up") <= fedavg.total("bytes_up") / 2
    assert (Path("demo") / PICTURE).stat().st_size > 10_000
    again = comfetch("demo", "--out", "demo")
    assert again.code == 0 and "has all its rounds already" in again.out


def test_an_upload_that_was_refused_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "round": 1, "loss": 1.0, "accuracy": 0.5, "bytes_down": 1, "bytes_up": 1, "seconds": 1.0,
        "refused": ["client 2: fc.weight has NaN or infinite values."],
    }  # fmt: skip
    with Watch(Console()) as watch:
        watch.follow("digits", 3).round(record)
    shown = capsys.readouterr().out
    assert "digits, round 1: upload refused, client 2: fc.weight has NaN or infinite values." in shown
    assert "digits: round 1/3 loss 1.000 accuracy 50.0% ↓1 B ↑1 B 0:02 left" in shown
