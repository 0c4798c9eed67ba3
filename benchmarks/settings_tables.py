"""Make the tables of what each setting of the sketch is worth, from the committed records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.equal_tables import gained, seed_groups
from benchmarks.result_tables import markdown, spread
from comfetch.experiment import heeds, read_experiment
from comfetch.footprint import format_bytes
from comfetch.pareto import exchange_bytes

EXPERIMENTS = Path(__file__).parent / "experiments"
RESULTS = Path(__file__).parent / "results"
REFERENCE = "reference"
DRAWN = {"seed", "key"}


def settings_table(model: str) -> str:
    """Show the settings of one model, the best first, and what sets each apart from the reference."""
    reference = read_experiment(EXPERIMENTS / f"settings-{model}" / f"{REFERENCE}.toml").options()
    groups = seed_groups(RESULTS / f"settings-{model}")
    rows = []
    for name, group in groups.items():
        apart = difference(group.runs[0].options, reference) or "nothing"
        last, best = ([100 * getattr(run, which)("accuracy") for run in group.runs] for which in ("last", "best"))
        costs = [format_bytes(group.values(measure)[0]) for measure in (exchange_bytes, lambda run: run.memory())]
        cells = [name, apart, str(len(last)), gained(group, groups.get(REFERENCE)), spread(last), spread(best)]
        rows.append((sum(last) / len(last), [*cells, *costs]))
    ordered = [cells for _, cells in sorted(rows, key=lambda row: -row[0])]
    head = ["run", "what differs", "seeds", "against the reference", "last", "best", "bytes a round", "client memory"]
    return markdown(head, ordered)


def difference(options: dict[str, Any], reference: dict[str, Any]) -> str:
    """Say which options of a run are not the reference's, of those that its method heeds."""
    told = []
    for name in sorted(options.keys() | reference.keys()):
        heeded = name not in DRAWN and heeds(options["method"], name)
        if heeded and options.get(name) != reference.get(name):
            value = options.get(name)
            told.append(f"`{name}` {value:g}" if isinstance(value, float) else f"`{name}` {value}")
    return ", ".join(told)


TABLES: dict[str, Callable[[], str]] = {
    "settings_resnet18": lambda: settings_table("resnet18"),
    "settings_lstm": lambda: settings_table("lstm"),
    "settings_vit": lambda: settings_table("vit"),
}
