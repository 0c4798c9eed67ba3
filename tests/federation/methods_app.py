"""Run every method on Ray and in one process, and write how far apart they end.

All share one simulation, since Ray takes ten seconds to start: `python -m tests.federation.methods_app FOLDER`.
"""

import json
import sys
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from comfetch.experiment import Experiment
from comfetch.federation import make_federation
from comfetch.flower import Strategy, client_app
from comfetch.flower.apps import site_of
from comfetch.flower.client import MEMORY
from comfetch.methods import METHODS

ROUNDS = 2
BASE = {"task": "digits", "limit": 160, "clients": 3, "rounds": ROUNDS, "batch_size": 16, "fraction": 0.67, "key": 4}
RUNS = {name: Experiment.of({**BASE, "method": name}) for name in METHODS}
MODS = {"none": [], "clipping": [fixedclipping_mod], "noise": [LocalDpMod(0.5, 1e-6, 1.0, 1e-5)]}
"""Flower's own mods for privacy; the noise is so small that only clipping shows."""
RUNS |= {f"{mod} mod": Experiment.of({**BASE, "fraction": 1.0}) for mod in MODS}


def make_app() -> ClientApp:
    """Answer for the experiment that a message names."""

    def app_of(name: str) -> ClientApp:
        mods = MODS.get(name.removesuffix(" mod"), [])
        return client_app(lambda context: site_of(RUNS[name], context, None, "cpu"), mods)

    apps = {name: app_of(name) for name in RUNS}
    app = ClientApp()

    def answer(msg: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        kept = context.state.get("run", {}).get("name")
        name = msg.content["config"].get("run", kept)  # the second exchange of a method has no config of ours
        if kept != name:
            context.state["run"] = ConfigRecord({"name": name})
            context.state.pop(MEMORY, None)
        return apps[name](msg, context)

    app.train()(answer)
    app.train("respond")(answer)
    app.evaluate()(answer)
    app.query()(lambda msg, context: apps["fedavg"](msg, context))
    return app


def away(name: str, weights: dict[str, torch.Tensor]) -> float:
    """Run an experiment in this process, and return the largest difference."""
    experiment = RUNS[name]
    wanted = experiment.run().server.weights
    return max(float((weights[n].double() - tensor.double()).abs().max()) for n, tensor in wanted.items())


def main(folder: Path) -> None:
    """Run all, and write what came of it."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        for name, experiment in RUNS.items():
            task, build = experiment.load()
            federation = make_federation(
                experiment.make_method(), task, build, experiment.clients, experiment.fraction,
            )  # fmt: skip
            strategy = Strategy(
                federation.method, build, ask=True, min_nodes=experiment.clients, fraction_train=experiment.fraction,
                fraction_evaluate=1.0 if name in METHODS else 0.0, seed=experiment.seed,
            )  # fmt: skip
            config = {"run": name} | ({"clipping_norm": 0.5} if name == "clipping mod" else {})
            result = strategy.start(
                grid, num_rounds=ROUNDS, timeout=300, train_config=ConfigRecord(config),
                evaluate_config=ConfigRecord({"run": name}),
            )  # fmt: skip
            assert strategy.server is not None
            start = federation.start().weights
            moved = sum(
                float((t.double() - start[n].double()).square().sum()) for n, t in strategy.server.weights.items()
            )
            refused = sum(int(metrics.get("clients", 0)) for metrics in result.train_metrics_clientapp.values())
            found[name] = {"away": away(name, strategy.server.weights), "moved": moved**0.5, "clients": refused}

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"include_dashboard": False}}
    run_simulation(server, make_app(), 3, backend_config=resources)
    (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
