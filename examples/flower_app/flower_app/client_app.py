"""The client: as in Flower's template, but for the two lines marked."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from comfetch.flower import client_model  # <- new
from flower_app.task import Net, load_data
from flower_app.task import test as test_fn
from flower_app.task import train as train_fn

app = ClientApp()


def loaders(context: Context):
    """Load this node's data."""
    node = context.node_config
    return load_data(node["partition-id"], node["num-partitions"], context.run_config["batch-size"])


def received_model(msg: Message) -> torch.nn.Module:
    """Build the model with the weights of a message."""
    model = client_model(Net, msg)  # <- instead of: Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return model


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    model = received_model(msg)
    trainloader, _ = loaders(context)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    loss = train_fn(model, trainloader, context.run_config["local-epochs"], msg.content["config"]["lr"], device)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainloader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the model on local data."""
    model = received_model(msg)
    _, testloader = loaders(context)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    loss, accuracy = test_fn(model, testloader, device)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(testloader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
