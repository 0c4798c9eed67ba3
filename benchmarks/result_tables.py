"""Make the tables of docs/results.md from the committed records: language and theory."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import language, theory
from comfetch.footprint import format_bytes
from comfetch.records import PARTITION, read_json, read_options, read_rounds

PAPER_LANGUAGE = {
    "fedavg-32": (9607, 47.58), "fedavg-16": (4423, 49.78), "fedavg-8": (2599, 44.01), "fedavg-4": (1879, 25.63),
    "fetchsgd": (9607, 86.81),
    "comfetch-1": (9607, 80.44), "comfetch-2": (5511, 81.50), "comfetch-4": (3463, 80.57), "comfetch-8": (2439, 78.61),
    "papers-2": (5511, 81.50), "papers-4": (3463, 80.57), "papers-8": (2439, 78.61),
}  # fmt: skip
"""Row -> parameters and test accuracy in the paper's table (MNLI, 39 tags)."""


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Lay out a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def language_table(task: str) -> str:
    """Show all rows of the language experiment: size, tuned rate, accuracy over seeds, traffic, memory."""
    rows = []
    for name, row in language.ROWS.items():
        folders = [language.folder_of(task, name, seed) for seed in language.SEEDS]
        folders = [folder for folder in folders if read_rounds(folder)]
        if not folders:
            continue
        runs = [read_rounds(folder) for folder in folders]
        options, last = read_options(folders[0] / "run.toml"), runs[0][-1]
        classes = len(read_json(folders[0] / PARTITION)["labels"])
        cells = [row.label, str(language.parameters(options, classes)), f"{options['lr']:g}"]
        cells += [
            spread([100 * max(r["accuracy"] for r in run) for run in runs]),
            spread([100 * run[-1]["accuracy"] for run in runs]),
        ]
        cells += [format_bytes(last[way] / last["clients"]) for way in ("bytes_down", "bytes_up")]
        cells += [format_bytes(last["client_memory"])]
        if task == "mnli-pos":
            size, accuracy = PAPER_LANGUAGE[name]
            cells += [str(size), f"{accuracy:.2f}"]
        rows.append(cells)
    head = ["row", "parameters", "rate", "best", "last", "download", "upload", "client memory"]
    return markdown([*head, *(["paper: parameters", "paper: accuracy"] if task == "mnli-pos" else [])], rows)


def language_search() -> str:
    """Show what the search found: accuracy on the held-out sentences for each rate."""
    trials, rows = language.read_search(), []
    for task in language.TASKS:
        for row in language.ROWS.values():
            options = [row.experiment(task, lr=rate, **language.TRIAL) for rate in language.RATES]
            found = [language.trial_of(trials, one) for one in options]
            if task in row.tasks and all(found):
                best = language.best_rate(trials, row, task)
                cells = [_trial(trial, rate == best) for trial, rate in zip(found, language.RATES, strict=True)]
                rows.append([task, row.label, *cells])
    return markdown(["task", "row", *(f"{rate:g}" for rate in language.RATES)], rows)


def _trial(trial: dict[str, Any] | None, best: bool) -> str:
    assert trial is not None
    told = f"{100 * trial['accuracy'][-1]:.1f}" if trial["accuracy"] else "fails"
    return f"**{told}**" if best else told


def spread(values: Sequence[float], form: str = "{:.1f}") -> str:
    """Write mean ± standard deviation.

    >>> spread([80.0, 81.0, 82.0])
    '81.0 ± 1.0'
    """
    mean = form.format(statistics.fmean(values))
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def short(number: float) -> str:
    """Write a number with two digits, large ones as a power of ten.

    >>> short(1.632), short(161.0), short(33200.0)
    ('1.6', '160', '3.3·10⁴')
    """
    if number < 1000:
        return f"{float(f'{number:.2g}'):g}"
    digits, power = f"{number:.1e}".split("e")
    return f"{digits}·10{str(int(power)).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Fit log y = a + b log x, and return b."""
    found = statistics.linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points])
    return found.slope


def rate_slopes(what: str) -> dict[tuple[str, str], float]:
    """Return the slope of a gradient norm over T for each problem and scale, over all seeds."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in theory.read("rate"):
        if row["rounds"] >= theory.FITTED:
            points.setdefault((row["problem"], row["scale"]), []).append((row["rounds"], row[what] / row["first"]))
    return {pair: slope(found) for pair, found in points.items()}


def theory_rate() -> str:
    """Show how the gradient norm of the sketched objective falls with T."""
    mean, least, rows = rate_slopes("mean"), rate_slopes("least"), []
    for (problem, kind), fitted in mean.items():
        found = [r for r in theory.read("rate") if r["problem"] == problem and r["scale"] == kind]
        longest = max(r["rounds"] for r in found)
        ends = [r for r in found if r["rounds"] == longest]
        smooth = statistics.fmean(r["smoothness_sketched"] / r["smoothness"] for r in ends)
        shares = [statistics.fmean(r[a] / r[b] for r in ends) for a, b in (
            ("mean", "first"), ("least", "first"), ("full_last", "full_first")
        )]  # fmt: skip
        rows.append(
            [problem, kind, f"{smooth:.0f}", f"{fitted:.2f}", f"{least[problem, kind]:.2f}"]
            + [f"{100 * share:.2g} %" for share in shares]
        )
    head = ["problem", "scale", "L̃ / L", "slope of the mean", "slope of the least"]
    longest = max((row["rounds"] for row in theory.read("rate")), default=0)
    return markdown([*head, f"mean at T = {longest}", "least", "‖∇f‖² at the end"], rows)


def theory_step() -> str:
    """Show plain SGD with the printed and the true smoothness."""
    found = {(r["compression"], r["rounds"], r["printed"]): r for r in theory.read("step")}
    rows = []
    for compression, rounds, printed in found:
        if printed and (compression, rounds, False) in found:
            pair = [found[compression, rounds, told] for told in (True, False)]
            smooth = [short(r[n]) for r, n in zip(pair, ("smoothness_printed", "smoothness_sketched"), strict=True)]
            ends = [short(r["last"] / r["first"]) for r in pair]
            rows.append([f"{compression:g}", str(rounds), *smooth, *ends])
    head = ["compression", "T", "L d/c as printed", "L̃", "‖∇f̃‖² last / first, printed step", "with L̃"]
    return markdown(head, rows)


def theory_prediction() -> str:
    """Show measured errors and bounds at some depths, in units of the full net's output."""
    found = {(row["recovery"], row["depth"]): row for row in theory.read("prediction")}
    rows = []
    for name in theory.RECOVERIES:
        for depth in (1, 2, 4, 8):
            if row := found.get((name, depth)):
                numbers = [row[n] for n in ("error", "error_most", "induction", "printed")]
                rows.append([name, str(depth), *map(short, numbers)])
    return markdown(["recovery", "depth", "error, median", "largest", "induction", "bound as printed"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "language_mnli": lambda: language_table("mnli-pos"),
    "language_ewt": lambda: language_table("ewt-pos"),
    "language_search": language_search,
    "theory_rate": theory_rate,
    "theory_step": theory_step,
    "theory_prediction": theory_prediction,
}
