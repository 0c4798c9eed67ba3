"""The example of sketched feature selection finds the features that matter, in a fraction of their memory."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from comfetch import hashing

EXAMPLE = Path(__file__).parents[2] / "examples" / "mission.py"


@pytest.fixture(scope="module")
def mission():
    return runpy.run_path(str(EXAMPLE))


def test_the_heavy_features_are_found_in_memory_far_below_their_number(mission, capsys):
    assert mission["run"](features=200_000, length=512, heavy=8, examples=1200) == 1.0
    printed = capsys.readouterr().out
    assert "memory: 14,936 bytes; the coefficients themselves would take 800,000" in printed


def test_the_hash_of_some_features_is_that_of_the_library(mission):
    sketch = mission["Sketch"](length=16, rows=3, key=4)
    wanted = hashing.draw([hashing.fold(4, "row", row) for row in range(3)], 1000, 16, "random")
    some = np.array([0, 17, 999])
    bucket, sign = sketch.hash(some)
    assert np.array_equal(bucket, wanted.index[:, some])
    assert np.array_equal(sign, wanted.sign[:, some])


def test_a_lone_coefficient_is_read_back_exactly(mission):
    sketch = mission["Sketch"](length=8)
    sketch.add(np.array([123456789]), np.array([2.5]))
    assert sketch.query(np.array([123456789, 5]))[0] == 2.5
