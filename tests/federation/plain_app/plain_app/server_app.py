"""Average the nodes' vectors, and print the mean of the result."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    nodes = int(config["nodes"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([np.zeros(int(config["length"]), dtype=np.float32)]),
        num_rounds=int(config["num-server-rounds"]),
        timeout=float(config["timeout"]),
    )
    print(f"mean of the result: {result.arrays.to_numpy_ndarrays()[0].mean():.3f}")
