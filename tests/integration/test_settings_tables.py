"""The table of settings is made from records."""

import pytest

from benchmarks import settings_tables
from comfetch.compare import plan_runs
from comfetch.records import format_toml, read_rounds

RUN = {"task": "digits", "rounds": 1, "clients": 2, "limit": 100, "compression": 8.0}


def test_settings_are_told_by_what_differs_from_the_reference(tmp_path, monkeypatch) -> None:
    tomls = tmp_path / "tomls" / "settings-vit"
    tomls.mkdir(parents=True)
    for name, options in {"reference": {}, "blocks-2": {"blocks": "2"}, "narrow": {"method": "narrow"}}.items():
        (tomls / f"{name}.toml").write_text(format_toml({**RUN, **options}))
    for one in plan_runs(tomls, tmp_path / "settings-vit", seeds=2):
        one.experiment.run(one.folder)
    monkeypatch.setattr(settings_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(settings_tables, "EXPERIMENTS", tmp_path / "tomls")
    _, _, *rows = settings_tables.settings_table("vit").splitlines()
    cells = {row[0]: row[1:] for row in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)}
    told = {name: row[0] for name, row in cells.items()}
    assert told == {"reference": "nothing", "blocks-2": "`blocks` 2", "narrow": "`method` narrow"}
    assert all(row[1] == "2" and "±" in row[3] for row in cells.values())
    means = [float(row[3].split()[0]) for row in cells.values()]
    assert means == sorted(means, reverse=True)
    accuracies = {
        (name, seed): 100 * read_rounds(tmp_path / "settings-vit" / f"{name}-seed{seed}")[-1]["accuracy"]
        for name in cells
        for seed in (0, 1)
    }
    for name in ("blocks-2", "narrow"):
        a, b = (accuracies[name, seed] - accuracies["reference", seed] for seed in (0, 1))
        assert cells[name][2] == f"{(a + b) / 2:+.1f} ± {abs(a - b) / 2**0.5:.1f}"
    assert cells["reference"][2] == "–"


@pytest.mark.parametrize("model", ["resnet18", "vit"])
def test_no_records_give_an_empty_table(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(settings_tables, "RESULTS", tmp_path)
    assert len(settings_tables.settings_table(model).splitlines()) == 2
