"""The client, and what its process takes."""

import atexit
import json
import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from federation_app.task import answer, make_batches, peak_memory, perceptron

app = ClientApp()
cost: dict[str, float] = {}


@app.train()
def handle(msg: Message, context: Context) -> Message:
    """Train."""
    config, began = context.run_config, time.process_time()
    batches = make_batches(context.node_config["partition-id"], config["steps"], config["batch"])
    reply = answer(msg, perceptron(config["width"]), batches)
    cost["training_cpu"] = time.process_time() - began
    return reply


@atexit.register
def tell() -> None:
    """Write into the node's log what this process has taken, the sending of the answer included."""
    print(f"client process: {json.dumps({**cost, 'cpu': time.process_time(), 'peak': peak_memory()})}", flush=True)
