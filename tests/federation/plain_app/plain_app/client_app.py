"""Add one more than the node's partition to the received vector."""

import time

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Reply with the received vector plus 1 + partition-id."""
    time.sleep(float(context.run_config["seconds"]))
    partition = int(context.node_config["partition-id"])
    arrays = [array + 1 + partition for array in message.content["arrays"].to_numpy_ndarrays()]
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)
