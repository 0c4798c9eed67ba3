"""The server: as in Flower's template, but for the two lines marked."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

import comfetch.flower  # <- instead of: from flwr.serverapp.strategy import FedAvg
from flower_app.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation, and save the server's full model."""
    config = context.run_config
    arrays = ArrayRecord(Net().state_dict())
    strategy = comfetch.flower.Strategy(  # <- instead of: FedAvg(fraction_train=...)
        comfetch.methods.Comfetch(compression=10), Net, fraction_train=config["fraction-train"],
        min_nodes=config["min-nodes"], out=config["out"] or None, resume=config["resume"],
    )  # fmt: skip
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=config["num-server-rounds"],
    )
    if config["out"]:
        torch.save(result.arrays.to_torch_state_dict(), f"{config['out']}/final_model.pt")
