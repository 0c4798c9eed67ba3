"""One process, Ray and a deployment give the same weights for the same keys."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from comfetch.experiment import Experiment
from comfetch.federation import make_federation
from comfetch.footprint import meta_model
from comfetch.methods import Client
from examples.federation import Loopback
from tests.end_to_end.commands import finish, start

APP = Path(__file__).resolve().parents[2] / "examples" / "flower_experiment"
CLIENTS = 3
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "one class": {"compression": 8.0, "keep_optimiser": True},
    "mixed classes": {"capacities": "1,2,8", "fraction": 0.67},
    "quantised": {
        "compression": 4.0,
        "wire_down": "int8",
        "wire_up": "int4",
        "wire_feedback": True,
        "evaluation": "both",
    },
}
"""Wire formats, sampling, memory on the clients, evaluation there: what could differ between drivers."""
COMMON = {"task": "digits", "limit": 240, "clients": CLIENTS, "rounds": 2, "batch_size": 32, "key": 5, "seed": 3}


def options(name: str) -> dict[str, Any]:
    return {**COMMON, **EXPERIMENTS[name]}


def command(name: str, out: Path, engine: str) -> list[str]:
    """Give the arguments of an experiment on the command line, with one thread."""
    given = options(name)
    flags = [f"--{option.replace('_', '-')}" if v is True else f"--{option.replace('_', '-')}={v}"
             for option, v in given.items() if option != "task"]  # fmt: skip
    return ["run", given["task"], *flags, "--out", str(out), "--engine", engine, "--threads", "1"]


def run(name: str, out: Path, engine: str, resume: bool = False) -> None:
    """Run an experiment by the command line."""
    done = finish(start(*command(name, out, engine), *(["--resume"] if resume else [])))
    assert done.code == 0, done.err


def kill_after_a_round(name: str, out: Path) -> None:
    """Run an experiment on Ray, and kill it when its first round is on record."""
    process = start(*command(name, out, "ray"))
    end = time.monotonic() + 200
    while not ((out / "checkpoint.safetensors").exists() or process.poll() is not None or time.monotonic() > end):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert len(records(out)) >= 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every experiment in one process first: what the others are compared with."""
    folder = tmp_path_factory.mktemp("engines")
    for name in EXPERIMENTS:
        run(name, folder / "local" / name, "local")
    return folder


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    """Start a SuperLink and a SuperNode for each client: memory for class 1, a byte less, a byte less than for 2."""
    needed = [bytes_needed(capacity) for capacity in (1.0, 2.0)]
    memories = [f"{needed[0]}B", f"{needed[0] - 1}B", f"{needed[1] - 1}B"]
    with Loopback(tmp_path_factory.mktemp("deployment")) as loopback:
        for index, memory in enumerate(memories):
            loopback.start_node(f"node-{index}", {"partition-id": index, "memory": memory}, wait=False)
        yield loopback


def bytes_needed(capacity: float) -> int:
    """Predict the bytes of a training step in one of the mixed classes."""
    experiment = Experiment.of(options("mixed classes"))
    task, build = experiment.load()
    method = experiment.make_method()
    federation, client = make_federation(method, task, build, CLIENTS), Client(0, 1, capacity)
    model = method.client_model(build, client, method.download(federation.start(), client))
    return federation.predict(meta_model(model)).total


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_ray_gives_the_weights_of_one_process_bit_for_bit(folder: Path, name: str) -> None:
    if name == "mixed classes":
        kill_after_a_round(name, folder / "ray" / name)
    run(name, folder / "ray" / name, "ray", resume=name == "mixed classes")
    here, there = folder / "local" / name, folder / "ray" / name
    for file in ("full.safetensors", "sketched.safetensors"):
        wanted, found = load_file(here / file), load_file(there / file)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[tensor], found[tensor]) for tensor in wanted)
    assert records(here) == records(there)


@pytest.mark.parametrize("name", ["one class", "mixed classes"])
def test_a_deployment_gives_the_weights_of_one_process(folder: Path, deployment: Loopback, name: str) -> None:
    there = folder / "deployment" / name
    config = {option.replace("_", "-"): value for option, value in options(name).items()}
    done = deployment.wait_run(deployment.run_app(APP, {**config, "out": str(there), "timeout": 120.0}))
    assert done.status == "finished:completed", done.text
    wanted, found = (load_file(path / name / "full.safetensors") for path in (folder / "local", folder / "deployment"))
    for tensor in wanted:
        torch.testing.assert_close(found[tensor], wanted[tensor], rtol=0, atol=1e-6)
    for here, other in zip(records(folder / "local" / name), records(there), strict=True):
        assert here.pop("refused") == other.pop("refused") == []
        assert here.pop("accuracy_by_capacity", {}) == pytest.approx(other.pop("accuracy_by_capacity", {}), abs=1e-5)
        assert here == pytest.approx(other, abs=1e-5)
