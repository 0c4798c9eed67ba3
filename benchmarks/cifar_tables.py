"""Make the tables of the CIFAR-10 experiments from the committed records: the paper's own, masks, and our default."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.result_tables import markdown
from comfetch.footprint import format_bytes
from comfetch.records import read_options, read_rounds

RESULTS = Path(__file__).parent / "results"
LOGS: dict[str, tuple[float | None, float | None]] = {
    "paper/iid-kept-100": (65.4, 73.4), "paper/iid-kept-50": (63.4, 71.5), "paper/iid-kept-25": (60.7, 68.9),
    "paper/iid-kept-10": (54.1, 61.5), "paper/dirichlet-kept-25": (52.0, 63.0),
    "paper/dirichlet-kept-10": (46.4, 54.9), "paper/dirichlet-capped-kept-25": (52.0, 63.0),
    "paper/dirichlet-capped-kept-10": (46.4, 54.9), "paper/dirichlet-equal-kept-10": (None, None),
    "masks/random-kept-25": (63.8, 71.0), "masks/random-kept-10": (61.5, 67.5), "masks/l1-kept-10": (59.2, 65.4),
    "masks/random-kept-25-torch": (63.8, 71.0), "masks/random-kept-10-torch": (61.5, 67.5),
    "masks/l1-kept-10-torch": (59.2, 65.4),
}  # fmt: skip
"""Run -> best accuracy so far at rounds 10 and 20 in the authors' logs (10 clients; mean of 3 seeds)."""
PRESETS = {
    **{f"default, compression {c}": f"default/compression-{c}" for c in (4, 10, 32)},
    "paper, compression 4": "paper/iid-kept-25", "paper, compression 10": "paper/iid-kept-10",
    "FedAvg, the default's recipe": "default/fedavg", "FedAvg, the paper's recipe": "paper/iid-kept-100",
}  # fmt: skip
"""Row of the first table -> its run."""
BEFORE = {
    f"{name}, compression {c}": f"{folder}/compression-{c}"
    for c in (4, 10, 32)
    for name, folder in (
        ("four blocks and spread (default)", "default"), ("auto blocks and spread", "auto-blocks"),
        ("auto blocks, no spread", "even"),
    )
}  # fmt: skip
"""The same for the presets that were the default before."""
AT = (10, 20)
"""Rounds at which runs are compared."""
STATISTICS = {"averaged": "default/compression-10", "anew": "default/compression-10-anew"}
"""Where running statistics come from -> a run that differs in nothing else."""
EARLY = (1, 2, 3, 5, 7, 10)
"""Rounds at which these are compared."""


def best_so_far(rounds: Sequence[dict[str, Any]], until: int) -> float | None:
    """Return the best accuracy of the first rounds, in per cent; None for a run that has not come so far."""
    return 100 * max(r["accuracy"] for r in rounds[:until]) if len(rounds) >= until else None


def told(number: float | None, form: str = "{:.1f}") -> str:
    """Write a number, or a dash for none."""
    return "–" if number is None else form.format(number)


def logs(group: str) -> str:
    """Compare runs with the authors' logs."""
    rows = []
    for name, theirs in LOGS.items():
        folder = RESULTS / name
        rounds = read_rounds(folder) if name.startswith(group) else []
        if len(rounds) < AT[0]:
            continue
        options = read_options(folder / "run.toml")
        ours = [best_so_far(rounds, until) for until in AT]
        cells = [folder.name]
        for mine, logged in zip(ours, theirs, strict=True):
            apart = None if mine is None or logged is None else mine - logged
            cells += [told(mine), told(logged if options["rounds"] >= 20 or mine else None), told(apart, "{:+.1f}")]
        cells += [str(len(rounds)), format_bytes(rounds[-1]["bytes_down"] / rounds[-1]["clients"])]
        rows.append([*cells, format_bytes(rounds[-1]["client_memory"])])
    heads = [f"{what} {until}" for until in AT for what in ("ours, round", "logs,", "difference,")]
    return markdown(["run", *heads, "rounds run", "download", "client memory"], rows)


def ablation() -> str:
    """Show what the default preset gains by each of its settings."""
    rows = []
    for file in sorted([*RESULTS.glob("ablation/*/run.toml"), *RESULTS.glob("even/compression-10/run.toml")]):
        options, best = read_options(file), best_so_far(read_rounds(file.parent), 10)
        if best is not None:
            adam = "kept" if options["keep_optimiser"] else "fresh"
            cells = [options["blocks"], options["scale"], adam, str(options["batch_size"]), f"{options['lr']:g}"]
            rows.append((best, [*cells, f"{options['server_momentum']:g}", told(best)]))
    head = ["blocks", "scale", "Adam's state", "batch", "rate", "server momentum", "best so far at round 10"]
    return markdown(head, [cells for _, cells in sorted(rows)])


def presets(runs: Mapping[str, str]) -> str:
    """Compare runs on all images; `runs` are names and folders."""
    rows = []
    for name, folder in runs.items():
        if len(rounds := read_rounds(RESULTS / folder)) >= AT[0]:
            last = rounds[-1]
            found = [told(best_so_far(rounds, until)) for until in AT]
            traffic = [format_bytes(last[way] / last["clients"]) for way in ("bytes_down", "bytes_up")]
            rows.append([name, *found, *traffic, format_bytes(last["client_memory"])])
    return markdown(["run", *(f"round {until}" for until in AT), "download", "upload", "client memory"], rows)


def statistics() -> str:
    """Show what running statistics taken anew are worth: accuracy after single rounds."""
    rows = []
    for name, folder in STATISTICS.items():
        if len(rounds := read_rounds(RESULTS / folder)) >= EARLY[-1]:
            rows.append([name, *(told(100 * rounds[until - 1]["accuracy"]) for until in EARLY)])
    return markdown(["running statistics", *(f"round {until}" for until in EARLY)], rows)


TABLES: dict[str, Callable[[], str]] = {
    "paper_logs": lambda: logs("paper/"),
    "mask_logs": lambda: logs("masks/"),
    "default_ablation": ablation,
    "default_presets": partial(presets, PRESETS),
    "default_before": partial(presets, BEFORE),
    "statistics": statistics,
}
