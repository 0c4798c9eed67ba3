"""Clients that lie: each is refused and named, and the round goes on as if they had not been there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.federation.hostile_app import ATTACKS, HONEST

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run one round in which all but a few clients attack."""
    folder = tmp_path_factory.mktemp("hostile")
    command = [sys.executable, "-m", "tests.federation.hostile_app", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads((folder / "result.json").read_text()), "log": done.stderr + done.stdout}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_and_named_with_its_node(outcome: dict[str, Any], attack: str) -> None:
    client = HONEST + list(ATTACKS).index(attack)
    told = [line for line in outcome["record"]["refused"] if line.startswith(f"client {client} (node ")]
    assert len(told) == 1 and ATTACKS[attack][1] in told[0], told
    assert told[0] in outcome["log"]


def test_the_round_goes_on_with_the_honest_clients_alone(outcome: dict[str, Any]) -> None:
    assert outcome["record"]["clients"] == HONEST
    assert len(outcome["record"]["refused"]) == len(ATTACKS)
    assert outcome["away"] < 1e-6
