"""Make tables and pictures of the comparisons on equal terms, and the table of the runs with one client.

    python -m benchmarks.equal_tables    # draw benchmarks/results/equal-*/*.png

The tables themselves are written by `make tables`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.result_tables import markdown, spread
from comfetch.compare import SEED
from comfetch.equal import format_cost
from comfetch.footprint import format_bytes
from comfetch.pareto import AXES, exchange_bytes, points, verdicts
from comfetch.plots import pareto_picture, to_png
from comfetch.records import EQUAL, finished, read_json, read_options
from comfetch.report import Group, Run, read_run
from comfetch.tune import TRIALS, read_trials

EXPERIMENTS = Path(__file__).parent / "experiments"
RESULTS = Path(__file__).parent / "results"
KINDS = ("bytes", "memory")
FOLDERS = (*KINDS, "bytes-4", "bytes-32", "bytes-all")
"""Comparisons: what was equal, and what was not as in the first ones: our compression (10), the images (3,000).
`equal-…` holds the runs."""
PRESETS = {
    "comfetch": "comfetch, default", "comfetch-int8": "comfetch, default, int8", "comfetch-paper": "comfetch, paper",
    "narrow-int8": "narrow, int8", "heterofl-int8": "heterofl, int8",
}  # fmt: skip


def finished_runs(folder: Path) -> list[Run]:
    """Read the runs of a folder that have come to their end, by name."""
    files = sorted(folder.glob("*/run.toml"))
    return [read_run(file.parent) for file in files if finished(file.parent, read_options(file)["rounds"])]


def seed_groups(folder: Path) -> dict[str, Group]:
    """Put the seeds of each finished experiment together, by its name."""
    groups: dict[str, Group] = {}
    for run in finished_runs(folder):
        name = run.folder.name.split(SEED)[0]
        groups.setdefault(name, Group(PRESETS.get(name, name))).runs.append(run)
    return groups


def method_groups(folder: str) -> list[Group]:
    """Put the seeds of each method together, the best method first."""
    groups = seed_groups(RESULTS / f"equal-{folder}")
    return sorted(groups.values(), key=lambda group: -group.values(lambda run: run.last("accuracy"))[0])


def settings(folder: str) -> dict[str, dict[str, Any]]:
    """Read to what each method was sized: name -> setting, cost and whether it fits, of its first seed."""
    sizes = read_json(RESULTS / f"equal-{folder}" / EQUAL).get("runs", [])
    return {row["run"].removesuffix(f"{SEED}0"): row for row in sizes if row["run"].endswith(f"{SEED}0")}


def gained(group: Group, usual: Group | None) -> str:
    """Write by how much runs are better than the usual ones: each against that of its own seed.

    Seeds differ more than methods do: data, its order and first weights are the same for all runs of one seed.
    """
    reference = {run.options["seed"]: _last(run) for run in usual.runs} if usual and usual is not group else {}
    found = [(_last(run), reference.get(run.options["seed"])) for run in group.runs]
    gains = [100 * (one - other) for one, other in found if other is not None]
    return spread(gains, "{:+.1f}") if gains else "–"


def equal_table(folder: str) -> str:
    """Show all methods that meet the budget: setting, tuned rate, accuracy over seeds, costs."""
    sized, rows, groups = settings(folder), list[list[str]](), method_groups(folder)
    usual = next((group for group in groups if group.label == PRESETS["comfetch"]), None)
    for group in groups:
        first = group.runs[0]
        name = first.folder.name.split(SEED)[0]
        accuracies = [[100 * measure(run) for run in group.runs] for measure in (_last, _best)]
        costs = [group.values(measure)[0] for measure in (exchange_bytes, Run.memory)]
        cells = [group.label, sized[name]["setting"], f"{first.options['lr']:g}", str(len(group.runs))]
        rows.append([*cells, *map(spread, accuracies), gained(group, usual), *map(format_bytes, costs)])
    head = ["method", "setting", "rate", "seeds", "last", "best", "against our default"]
    return markdown([*head, "bytes a round", "client memory"], rows)


def search_table(folder: str) -> str:
    """Show what the search of the rates found: accuracy on held-out images, that of the finals behind a slash."""
    tried: dict[str, dict[float, dict[int, str]]] = {}
    for file in sorted((EXPERIMENTS / f"equal-{folder}").glob(f"*{TRIALS}")):
        of_rates = tried.setdefault(file.name.removesuffix(TRIALS), {})
        for trial in read_trials(file):  # the last ones, should there be some of another size, too
            told = "fails" if trial["failed"] else f"{100 * trial['accuracy']:.1f}"
            of_rates.setdefault(trial["lr"], {})[trial["rounds"]] = told
    rates = sorted({rate for of_rates in tried.values() for rate in of_rates})
    rows = []
    for name, of_rates in tried.items():
        taken = read_options(EXPERIMENTS / f"equal-{folder}" / f"{name}.toml").get("lr")
        cells = [" / ".join(told for _, told in sorted(of_rates.get(rate, {}).items())) for rate in rates]
        marked = [f"**{cell}**" if rate == taken else cell for rate, cell in zip(rates, cells, strict=True)]
        rows.append([PRESETS.get(name, name), *marked])
    return markdown(["method", *(f"{rate:g}" for rate in rates)], rows)


def rates_table(kind: str) -> str:
    """Show what other rates than those of the search give, on the same terms and test images."""
    others, rows = seed_groups(RESULTS / f"equal-{kind}-rates"), []
    taken = seed_groups(RESULTS / f"equal-{kind}")
    for name, other in others.items():
        if name in taken:
            pair = (taken[name], other)
            cells = [
                cell
                for group in pair
                for cell in (f"{group.runs[0].options['lr']:g}", spread([100 * _last(run) for run in group.runs]))
            ]
            rows.append([taken[name].label, *cells, gained(other, taken[name])])
    head = ["method", "rate taken", "last", "another rate", "last", "other against taken"]
    return markdown(head, rows)


def equal_words(folder: str) -> str:
    """Say which method wins where, and which cannot meet the budget."""
    groups, lines = method_groups(folder), []
    for axis, sentences in verdicts(groups) if len(groups) > 1 else ():
        if axis.name in KINDS:  # seconds of a machine that did other work, too, are no measure
            lines.append(f"- Accuracy against {axis.title}: {' '.join(sentences)}")
    large = {name: row for name, row in settings(folder).items() if not row["fits"]}
    if large:
        needs = ", ".join(
            f"{PRESETS.get(name, name)} ({format_cost(folder.partition('-')[0], row['cost'])})"
            for name, row in large.items()
        )
        lines.append(f"- Too large at their smallest: {needs}.")
    return "".join(f"{line}\n" for line in lines)


def one_client() -> str:
    """Show the runs of one client, the largest first."""
    rows = []
    runs = finished_runs(RESULTS / "one-client")
    for run in sorted(runs, key=lambda run: (-run.last("bytes_down"), run.folder.name)):
        options = run.options
        kept = "1" if options["method"] == "fedavg" else f"{options['compression']:g}"
        cells = [run.folder.name, kept, str(options.get("rows", 1)), format_bytes(run.last("bytes_down"))]
        rows.append([*cells, format_bytes(run.memory()), f"{100 * _best(run):.1f}", f"{100 * _last(run):.1f}"])
    return markdown(["run", "compression", "rows", "weights", "client memory", "best", "last"], rows)


def _last(run: Run) -> float:
    return run.last("accuracy")


def _best(run: Run) -> float:
    return run.best("accuracy")


def main() -> None:
    """Draw the pictures."""
    for folder in FOLDERS:
        groups = method_groups(folder)
        for axis in AXES if len(groups) > 1 else ():
            if axis.name in KINDS:
                to_png(pareto_picture(points(groups, axis), axis), RESULTS / f"equal-{folder}" / f"{axis.name}.png")


TABLES: dict[str, Callable[[], str]] = {
    **{f"equal_{folder}": partial(equal_table, folder) for folder in FOLDERS},
    **{f"equal_{folder}_words": partial(equal_words, folder) for folder in FOLDERS},
    **{f"equal_{kind}_search": partial(search_table, kind) for kind in KINDS},
    **{f"equal_{kind}_rates": partial(rates_table, kind) for kind in KINDS},
    "one_client": one_client,
}

if __name__ == "__main__":
    main()
