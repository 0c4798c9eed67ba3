"""Write the tables of README.md and docs/ anew from the committed records: `make tables`.

A table stands between `<!-- table NAME -->` and `<!-- end -->`. With --check nothing is written, and exit code 1
means that a table is not that of its records.
"""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import cifar_tables, driver, equal_tables, federation, layers, result_tables, settings_tables
from benchmarks.result_tables import markdown
from comfetch.footprint import format_bytes
from comfetch.records import read_options, read_rounds

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PAPER = {10: 54.1, 4: 60.7}
"""Compression -> best accuracy so far at round 10 in the authors' logs (CIFAR-10, IID, 10 clients; mean of 3 seeds)."""


def demo() -> str:
    """Compare the runs of `comfetch demo`: accuracy after the last round, traffic of one client in a round, memory."""
    rows = []
    for folder in sorted((p.parent for p in RESULTS.glob("demo/*/run.toml")), key=_compression):
        options, records = read_options(folder / "run.toml"), read_rounds(folder)
        last = records[-1]
        name = "FedAvg" if options["method"] == "fedavg" else f"Comfetch, compression {options['compression']:g}"
        traffic = [format_bytes(last[way] / last["clients"]) for way in ("bytes_down", "bytes_up")]
        rows.append([name, f"{100 * last['accuracy']:.1f} %", *traffic, format_bytes(last["client_memory"])])
    return markdown(["method", "accuracy", "download", "upload", "client memory"], rows)


def cifar() -> str:
    """Compare our runs with the authors' logs."""
    rows = []
    for folder in sorted(RESULTS.glob("cifar10-paper-*"), key=_compression):
        options, records = read_options(folder / "run.toml"), read_rounds(folder, until=10)
        best = 100 * max(r["accuracy"] for r in records)
        theirs = PAPER[int(options["compression"])]
        sent = format_bytes(records[-1]["bytes_down"] / records[-1]["clients"])
        rows.append([f"{options['compression']:g}", f"{best:.1f}", f"{theirs:.1f}", f"{best - theirs:+.1f}", sent])
    return markdown(["compression", "ours, best so far at round 10", "authors' logs", "difference", "download"], rows)


def layer_times() -> str:
    """Show the layer benchmark."""
    return layers.table(json.loads(layers.RESULTS.read_text())["rows"]) + "\n"


def driver_times() -> str:
    """Show the driver's benchmark."""
    return driver.table(json.loads(driver.RESULTS.read_text())["rows"]) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "cifar": cifar,
    "layers": layer_times,
    "driver": driver_times,
    **{f"federation-{part}": partial(lambda part: federation.tables()[part], part) for part in federation.PARTS},
    **result_tables.TABLES,
    **cifar_tables.TABLES,
    **equal_tables.TABLES,
    **settings_tables.TABLES,
}


def renewed(text: str) -> str:
    """Return a page with all of its tables written anew."""
    return PLACE.sub(lambda m: m[1] + TABLES[m[2]]() + m[4], text)


def main() -> int:
    """Write or check all pages."""
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if renewed(text) != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(renewed(text), encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if stale and "--check" in sys.argv else 0


def _compression(folder: Path) -> float:
    options = read_options(folder / "run.toml")
    return 0.0 if options["method"] == "fedavg" else float(options["compression"])


if __name__ == "__main__":
    sys.exit(main())
