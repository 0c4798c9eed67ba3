"""The example in Flower's own template runs unchanged in simulation and in deployment."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.federation import ENVIRONMENT, MARK, Loopback, free_port, kill_processes

APP = Path(__file__).resolve().parents[2] / "examples" / "flower_app"
NODES = 2


def rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def check(out: Path, wanted: int) -> None:
    """Check the records and the server's full model."""
    found = rounds(out)
    assert [record["round"] for record in found] == list(range(1, wanted + 1))
    assert all(record["clients"] == NODES and record["refused"] == [] for record in found)
    assert found[-1]["clients_accuracy"] > found[0]["clients_accuracy"] > 0.3
    full = torch.load(out / "final_model.pt", weights_only=True)
    assert full["layers.2.weight"].shape == (512, 512)
    small = found[0]["bytes_down"] / NODES
    assert small < 0.2 * sum(tensor.numel() * 4 for tensor in full.values())


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Give a home of Flower whose only connection is its simulation; its daemon ends with the test."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.local]\naddress = ":local:"\noptions.num-supernodes = {NODES}\n'
        "options.backend.client-resources.num-cpus = 1\n"
    )
    yield home
    kill_processes(tmp_path)


def test_the_example_runs_in_simulation(home: Path, tmp_path: Path) -> None:
    out, rounds_wanted = tmp_path / "out", 2
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {**os.environ, **ENVIRONMENT, "PATH": path, "FLWR_HOME": str(home), MARK: f"{tmp_path}:run"}
    env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"] = str(free_port())
    config = f'num-server-rounds={rounds_wanted} out="{out}"'
    with (tmp_path / "log").open("wb") as log:
        subprocess.run(
            ["flwr", "run", str(APP), "local", "--run-config", config, "--stream"], env=env, cwd=tmp_path, stdout=log,
            stderr=subprocess.STDOUT, timeout=300, check=True,
        )  # fmt: skip
    for _ in range(20):  # the stream may end before the last file is written
        if (out / "final_model.pt").exists():
            break
        time.sleep(0.5)
    assert out.exists(), (tmp_path / "log").read_text(errors="replace")
    check(out, rounds_wanted)


def test_the_example_runs_in_deployment_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Loopback(tmp_path / "federation") as federation:
        for index in range(NODES):
            federation.start_node(f"node-{index}", {"partition-id": index, "num-partitions": NODES}, wait=False)
        run = federation.wait_run(federation.run_app(APP, {"num-server-rounds": 1, "out": str(out)}))
        assert run.status == "finished:completed", run.text
        first = rounds(out)
        run = federation.wait_run(federation.run_app(APP, {"num-server-rounds": 2, "out": str(out), "resume": True}))
        assert run.status == "finished:completed", run.text
        assert rounds(out)[:1] == first
        check(out, 2)
        traffic = run.facts["network-traffic"]
        assert traffic["inbound-bytes"] < 2 * NODES * rounds(out)[-1]["bytes_up"]
