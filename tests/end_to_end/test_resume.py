"""Runs that are stopped at any moment, and go on as if nothing had happened."""

import json
import multiprocessing
import random
import re
import shlex
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from comfetch.cli import invoke
from comfetch.files import load_state
from tests.end_to_end.commands import comfetch, finish, start

# Every kind of state that a run keeps: clients' memory, transforms, hashes drawn anew, clients drawn each round.
OPTIONS = (
    "digits", "--limit", "300", "--clients", "5", "--fraction", "0.6", "--rounds", "6", "--partition", "dirichlet",
    "--keep-optimiser", "--server-momentum", "0.5", "--top-k", "0.5", "--redraw", "2", "--batch-size", "16", "--quiet",
)  # fmt: skip
KILLED_RUNS = 6
FINAL = ("full.safetensors", "sketched.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert comfetch("run", *OPTIONS, "--out", folder).code == 0
    return folder


def assert_same_result(folder: Path, wanted: Path) -> None:
    for name in FINAL:
        assert (folder / name).read_bytes() == (wanted / name).read_bytes()
    found, expected = (rounds(run) for run in (folder, wanted))
    timeless = [{name: value for name, value in record.items() if name != "seconds"} for record in found]
    assert timeless == [{name: value for name, value in record.items() if name != "seconds"} for record in expected]
    assert not list(folder.glob(".*"))


def rounds(folder: Path) -> list[dict[str, Any]]:
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_nothing_is_half_written(folder: Path) -> None:
    """Read every file that can be seen; what was being written has a name of its own, with a dot."""
    for path in folder.glob("[!.]*"):
        if path.suffix == ".safetensors":
            load_state(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
    rounds(folder)


def has_rounds(folder: Path, least: int, child: Any) -> bool:
    return len(rounds(folder)) >= least or not child.is_alive()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_run_killed_at_random_moments_goes_on_bit_for_bit(uninterrupted: Path, tmp_path: Path) -> None:
    # Children of a server that has imported everything: a real process each, without seconds of imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["comfetch.cli", "torch._dynamo", "sklearn.datasets"])
    moments = random.Random(0)

    def run(folder: Path) -> Any:
        resume = ["--resume"] if folder.exists() else []
        child = context.Process(target=invoke, args=(["run", *OPTIONS, "--out", str(folder), *resume],))
        child.start()
        return child

    def complete(folder: Path) -> float:
        began = time.monotonic()
        child = run(folder)
        child.join()
        assert child.exitcode == 0
        return time.monotonic() - began

    complete(tmp_path / "warm up")
    lasts = complete(tmp_path / "uncut")
    assert_same_result(tmp_path / "uncut", uninterrupted)
    cut = 0
    for number in range(KILLED_RUNS):
        folder = tmp_path / str(number)
        for least in (moments.randint(0, 2), moments.randint(0, 4)):
            child = run(folder)
            wait_for(partial(has_rounds, folder, least, child))
            time.sleep(moments.uniform(0, lasts / 4))
            child.kill()
            child.join()
            cut += child.exitcode == -signal.SIGKILL
            assert_nothing_is_half_written(folder)
        complete(folder)
        assert_same_result(folder, uninterrupted)
    assert cut >= KILLED_RUNS, "most kills came too late"


def test_a_killed_command_goes_on_bit_for_bit(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start("run", *OPTIONS, "--out", folder)
    wait_for(lambda: (folder / "checkpoint.safetensors").exists())
    process.kill()
    finish(process)
    assert_nothing_is_half_written(folder)
    assert comfetch("run", *OPTIONS, "--out", folder, "--resume").code == 0
    assert_same_result(folder, uninterrupted)


def test_ctrl_c_says_how_to_go_on_and_that_works(uninterrupted: Path, tmp_path: Path) -> None:
    for attempt in range(5):  # on a busy machine a run may be over before the signal reaches it
        folder = tmp_path / f"run {attempt}"
        process = start("run", *OPTIONS, "--out", folder)
        wait_for(lambda folder=folder: len(rounds(folder)) >= 1)
        process.send_signal(signal.SIGINT)
        result = finish(process)
        if result.code != 0:
            break
    assert result.code == 130 and result.err.count("\n") == 1
    told = re.fullmatch(
        r"comfetch: interrupted after round \d, which is saved. Go on with: comfetch (.*)\n", result.err
    )
    assert told, result.err
    assert comfetch(*shlex.split(told[1])).code == 0
    assert_same_result(folder, uninterrupted)


def test_other_data_is_not_taken_for_the_same(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for path in uninterrupted.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**environment, "data": "0" * 64}))
    assert "began with data of checksum 000000000000" in comfetch("run", *OPTIONS, "--out", folder, "--resume").told
