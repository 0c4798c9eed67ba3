"""The README is true: its code runs and prints what it says, and its tables are those of the committed records."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

import comfetch as cf
from benchmarks import tables
from comfetch.experiment import Experiment

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    return printed.getvalue()


def test_the_six_lines_print_what_the_readme_shows():
    shown = re.search(r"prints\n\n```\n(.*?)```", README, re.DOTALL)
    assert shown
    assert run(CODE[0]) == shown[1]
    assert len(CODE[0].splitlines()) == 6


def test_the_federated_lines_train_digits():
    accuracy = float(run(CODE[1]))
    assert accuracy > 0.6


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_tables_are_those_of_the_records(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert tables.renewed(text) == text, "run `make tables`"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


def test_the_default_preset_in_python_gives_the_runs_of_the_command_line():
    (code,) = re.findall(r"```python\n(method = .*?)```", (ROOT / "docs/training.md").read_text("utf-8"), re.DOTALL)
    names = {"cf": cf}
    exec(compile(code, "training.md", "exec"), names)
    ours = cf.simulate(names["method"], "digits", clients=2, rounds=2)
    theirs = Experiment.of({"task": "digits", "compression": 10.0, "clients": 2, "rounds": 2}).run()
    for name, weight in ours.full.state_dict().items():
        assert torch.equal(weight, theirs.full.state_dict()[name]), name
