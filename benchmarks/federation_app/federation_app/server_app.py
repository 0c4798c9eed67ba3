"""The server: one of three strategies for the same model."""

import json
import time
from itertools import pairwise
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as flower

from comfetch.flower import Strategy
from comfetch.methods import Comfetch, FedAvg
from federation_app.task import peak_memory, perceptron

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run rounds, and write down how long each took and what this process has taken."""
    config, ends = context.run_config, []
    build, nodes, out = perceptron(config["width"]), config["nodes"], Path(config["out"])

    def clock(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        ends.append(time.perf_counter())

    torch.manual_seed(0)
    if config["method"] == "flower":
        strategy = flower.FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
        initial = ArrayRecord(build().state_dict())
    else:
        method = Comfetch(config["compression"]) if config["method"] == "comfetch" else FedAvg()
        kept = out / "run" if config["keep"] else None
        strategy, initial = Strategy(method, build, fraction_evaluate=0.0, min_nodes=nodes, out=kept), None
    named = ConfigRecord({"method": config["method"]})
    result = strategy.start(grid, initial, config["num-server-rounds"], config["timeout"], named, evaluate_fn=clock)
    record = {
        "seconds": [end - begin for begin, end in pairwise(ends)], "cpu": time.process_time(), "peak": peak_memory(),
        "rounds": [dict(metrics) for metrics in result.train_metrics_clientapp.values()],
    }  # fmt: skip
    (out / "server.json").write_text(json.dumps(record))
