"""What is committed stays small: records, not weights."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGEST = 500_000
"""Bytes. Weights and checkpoints are far above it, records and pictures far below."""


def test_no_weights_and_nothing_large_is_committed() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout: nothing is committed here")
    found = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert found
    weights = [
        p.name for p in found if p.suffix in (".safetensors", ".part", ".pt", ".npz") or p.name.startswith(".tmp")
    ]
    assert not weights
    assert not [f"{p.name}: {p.stat().st_size} bytes" for p in found if p.stat().st_size > LARGEST]
