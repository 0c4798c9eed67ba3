"""Measure what a federation on Flower costs: seconds, bytes and memory, beside Flower's own FedAvg.

    python -m benchmarks.federation                # run all, print, and write benchmarks/results/federation.json
    python -m benchmarks.federation --part rounds  # run one part, and keep what is recorded of the others
    python -m benchmarks.federation --table        # print the Markdown tables of the committed results

- `memory`: 103 million parameters on SuperNodes whose memory the operating system limits. With the full model the
  client is killed; with the sketch it trains.
- `rounds`: 25 million parameters, two SuperNodes: the same client app under Flower's FedAvg and under Comfetch, in
  alternating runs on one SuperLink.
- `ray`: 100 small clients in Flower's simulation, rounds of the strategies interleaved in one run, and rounds of our
  own driver in one process.

All processes share this machine. SuperLinks keep their state in memory, as is Flower's default.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.federation_app.federation_app.task import perceptron
from benchmarks.limits import EACH, MemoryLimit
from comfetch.footprint import format_bytes
from comfetch.records import read_rounds
from examples.federation import ENVIRONMENT, MARK, SUPERLINK, Loopback, Run, Value

HERE = Path(__file__).resolve().parent
APP = HERE / "federation_app"
RESULTS = HERE / "results" / "federation.json"
TOLD = "client process: "
"""What a client process begins its last line with."""
LIMIT = 1_700_000_000
"""Bytes for a SuperNode and all that it starts, Python, torch and Flower included."""
NO_LIMIT = 2**40
LARGE: dict[str, Value] = {"width": 7168, "compression": 16.0, "num-server-rounds": 2, "keep": True}
"""103 million parameters, 413 MB."""
MIDDLE: dict[str, Value] = {"width": 3520, "compression": 10.0, "num-server-rounds": 3}
"""25 million parameters, 100 MB."""
REPEATS = 2
"""Runs of each strategy."""


@dataclass
class Trial:
    """A run of the app, and how long the nodes' logs were when it began."""

    federation: Loopback
    run: Run
    out: Path
    logs: dict[str, int]

    def finish(self, limit: float = 900) -> dict[str, Any]:
        """Wait for the end, and return what became of it: its status, the server's record, and the clients' costs."""
        federation, run = self.federation, self.federation.wait_run(self.run, limit)
        told = [line for name, size in self.logs.items() for line in federation.logs(name)[size:].splitlines()]
        found: dict[str, Any] = {
            "status": run.status, "details": run.facts["status-details"], "traffic": run.facts["network-traffic"],
            "clients": [json.loads(line.removeprefix(TOLD)) for line in told if line.startswith(TOLD)],
        }  # fmt: skip
        record, kept = self.out / "server.json", self.out / "run" / "rounds.jsonl"
        found |= json.loads(record.read_text()) if record.exists() else {}
        return found | ({"rounds": read_rounds(kept.parent)} if kept.exists() else {})


def start_nodes(federation: Loopback, prefixes: Sequence[Sequence[str]]) -> None:
    """Start a SuperNode with each of the prefixes."""
    for index, prefix in enumerate(prefixes):
        federation.start_node(f"node-{index}", {"partition-id": index}, prefix=prefix, wait=False)
    for index in range(len(prefixes)):
        federation.wait_node(f"node-{index}")


def start(federation: Loopback, method: str, config: dict[str, Value]) -> Trial:
    """Start a run of the app."""
    logs = {name: len(federation.logs(name)) for name in federation.members if name != SUPERLINK}
    out = federation.folder / f"run-{time.monotonic_ns()}"
    out.mkdir()
    run = federation.run_app(APP, {**config, "method": method, "nodes": len(logs), "out": str(out)})
    return Trial(federation, run, out, logs)


# Memory


def measure_memory() -> dict[str, Any]:
    """Find what a client takes without a limit, and what becomes of it under one."""
    rows = [
        {"method": method, "limit": None if limit == NO_LIMIT else limit, **train_under(method, limit)}
        for limit in (NO_LIMIT, LIMIT)
        for method in ("fedavg", "comfetch")
    ]
    return {"parameters": parameters(LARGE), "compression": LARGE["compression"], "rows": rows}


def train_under(method: str, bytes: int) -> dict[str, Any]:
    """Run a federation of two nodes, each with so much memory."""
    config = LARGE if method == "comfetch" else {**LARGE, "num-server-rounds": 1}
    with ExitStack() as stack:
        limits = [stack.enter_context(MemoryLimit(bytes)) for _ in range(2)]
        federation = stack.enter_context(Loopback(database=False))
        start_nodes(federation, [limit.prefix for limit in limits])
        found = start(federation, method, config).finish()
        row = {
            "kind": limits[0].kind, "status": found["status"], "killed": sum(limit.killed for limit in limits),
            "rounds": [record["clients"] for record in found.get("rounds", [])],
            "refused": [why.split("): ", 1)[1] for record in found.get("rounds", []) for why in record["refused"]],
            "client_peak": max((client["peak"] for client in found["clients"]), default=None),
            "node_peak": max((limit.peak or 0 for limit in limits), default=0) or None,
        }  # fmt: skip
    print(f"{method} under {format_bytes(bytes)}: {row}", flush=True)
    return row


# Rounds


def measure_rounds() -> dict[str, Any]:
    """Compare Flower's FedAvg with the full model and Comfetch, in alternating runs."""
    found: dict[str, list[dict[str, Any]]] = {"flower": [], "fedavg": [], "comfetch": []}
    with Loopback(database=False) as federation:
        start_nodes(federation, [(), ()])
        for _ in range(REPEATS):
            for method, trials in found.items():
                trials.append(start(federation, method, MIDDLE).finish())
                assert trials[-1]["status"] == "finished:completed", trials[-1]["details"]
                print(f"{method}: {[round(s, 1) for s in trials[-1]['seconds']]} s", flush=True)
    rows = [{"method": method, **summary(trials)} for method, trials in found.items()]
    return {
        "parameters": parameters(MIDDLE), "compression": MIDDLE["compression"], "nodes": 2, "repeats": REPEATS,
        "rounds": MIDDLE["num-server-rounds"], "rows": rows,
    }  # fmt: skip


def summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Take the medians over rounds and clients; traffic is that of one round with all nodes."""
    clients = [client for trial in trials for client in trial["clients"]]
    rounds = [record for trial in trials for record in trial["rounds"]]
    count = sum(len(trial["seconds"]) for trial in trials)
    return {
        "seconds": [second for trial in trials for second in trial["seconds"]],
        "link_down": sum(trial["traffic"]["outbound-bytes"] for trial in trials) / count,
        "link_up": sum(trial["traffic"]["inbound-bytes"] for trial in trials) / count,
        "record_down": statistics.median([record["bytes_down"] for record in rounds if "bytes_down" in record] or [0]),
        "record_up": statistics.median([record["bytes_up"] for record in rounds if "bytes_up" in record] or [0]),
        "client_peak": max(client["peak"] for client in clients),
        "client_cpu": statistics.median(client["cpu"] for client in clients),
        "training_cpu": statistics.median(client["training_cpu"] for client in clients),
        "server_peak": max(trial["peak"] for trial in trials),
        "server_cpu": statistics.median(trial["cpu"] for trial in trials) / MIDDLE["num-server-rounds"],
    }  # fmt: skip


# Ray


def measure_ray() -> dict[str, Any]:
    """Run the simulation in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ray.json"
        marked = {MARK: f"{folder}:ray", "FLWR_HOME": folder}
        command = [sys.executable, "-m", "benchmarks.federation_ray", str(out)]
        subprocess.run(command, env={**os.environ, **ENVIRONMENT, **marked}, check=True, cwd=HERE.parent)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


# Tables


def parameters(config: dict[str, Value]) -> int:
    """Count the parameters of a model without making them."""
    import torch

    with torch.device("meta"):
        return sum(p.numel() for p in perceptron(int(config["width"]))().parameters())


NAMES = {
    "flower": "Flower's FedAvg", "fedavg": "FedAvg in our strategy", "comfetch": "Comfetch, compression {:g}"
}  # fmt: skip


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Lay out a Markdown table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])


def memory_table(found: dict[str, Any]) -> str:
    """Show what a client took, and what became of it under the limit."""
    free, limited = ({row["method"]: row for row in found["rows"] if bool(row["limit"]) is b} for b in (False, True))
    rows = []
    for method, row in limited.items():
        done = f"{len(row['rounds'])} rounds, all clients" if min(row["rounds"]) == 2 else "client killed"
        if row["kind"] == EACH and done == "client killed":
            done = "client out of memory"
        peaks = [free[method][name] for name in ("client_peak", "node_peak")]
        cells = ["" if peak is None else format_bytes(peak) for peak in peaks]
        rows.append([name_of(method, found), *cells, f"{done}"])
    limit = format_bytes(next(iter(limited.values()))["limit"])
    return markdown(["method", "client process", "with its SuperNode", f"limited to {limit}"], rows)


def rounds_table(found: dict[str, Any]) -> str:
    """Show what a round took."""
    rows = []
    for row in found["rows"]:
        seconds, traffic = statistics.median(row["seconds"]), [row["link_down"] / 2, row["link_up"] / 2]
        cells = [f"{seconds:.1f}", f"{row['client_cpu']:.1f}", f"{row['training_cpu']:.2f}"]
        cells += [format_bytes(count) for count in [*traffic, row["client_peak"]]]
        rows.append([name_of(row["method"], found), *cells])
    head = ["strategy", "seconds a round", "CPU s of a client process", "of it training", "download", "upload"]
    return markdown([*head, "client memory"], rows)


def ray_table(found: dict[str, Any]) -> str:
    """Show rounds of small clients."""
    places = {"ray": "Flower on Ray", "driver": "comfetch, one process"}
    rows = [
        [places[place], name_of(method, found), f"{row['seconds']:.2f}", f"{row['cpu_ms']:.1f}"]
        for place in places
        for method, row in found[place].items()
    ]
    return markdown(["engine", "strategy", "seconds a round", "CPU ms a client"], rows)


def name_of(method: str, found: dict[str, Any]) -> str:
    """Name a strategy for people."""
    return NAMES[method].format(found["compression"])


PARTS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], str]]] = {
    "memory": (measure_memory, memory_table),
    "rounds": (measure_rounds, rounds_table),
    "ray": (measure_ray, ray_table),
}


def tables() -> dict[str, str]:
    """Return the tables of the committed results."""
    results = json.loads(RESULTS.read_text())
    return {part: table(results[part]) for part, (_, table) in PARTS.items() if part in results}


def main() -> int:
    """Run the benchmark, or print the tables of the committed results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the committed results as Markdown")
    parser.add_argument("--part", choices=PARTS, help="run this part alone")
    options = parser.parse_args()
    if not options.table:
        results = json.loads(RESULTS.read_text()) if options.part and RESULTS.exists() else {}
        for part in [options.part] if options.part else PARTS:
            results[part] = PARTS[part][0]()
            versions = {name: metadata.version(name) for name in ("torch", "flwr", "ray")}
            results |= {"versions": versions, "cores": os.cpu_count()}
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    print("\n".join(tables().values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
