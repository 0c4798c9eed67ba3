"""Every method runs on Flower as in one process; Flower's own mods for privacy take our messages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from comfetch.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Run all methods in one simulation on Ray, and once more in its own process."""
    folder = tmp_path_factory.mktemp("methods")
    done = subprocess.run(
        [sys.executable, "-m", "tests.federation.methods_app", str(folder)], cwd=ROOT, text=True, capture_output=True,
        timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, float]] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_the_same_weights_on_ray_bit_for_bit(outcome: dict[str, dict[str, float]], name: str) -> None:
    assert outcome[name]["away"] == 0
    assert outcome[name]["clients"] == 4  # two of three clients, in two rounds: none was refused


@pytest.mark.parametrize("mod", ["clipping", "noise"])
def test_mods_of_flower_clip_the_change_of_a_sketch(outcome: dict[str, dict[str, float]], mod: str) -> None:
    """The change of each client in sketch space has at most norm 0.5; the mean of lifted changes can be longer."""
    assert outcome["none mod"]["away"] == 0
    assert outcome[f"{mod} mod"]["clients"] == 6
    assert 0 < outcome[f"{mod} mod"]["moved"] < 0.75 * outcome["none mod"]["moved"]
