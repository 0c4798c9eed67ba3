"""Model, data and training, the same for all strategies."""

from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from comfetch.flower import client_model
from comfetch.methods import FedAvg
from comfetch.models import mlp

Batches = list[tuple[Tensor, Tensor]]


def perceptron(width: int) -> Callable[[], nn.Module]:
    """Return the constructor of a perceptron with three hidden layers."""
    return lambda: mlp(width=width, depth=3)


def make_batches(client: int, steps: int, size: int) -> Batches:
    """Draw a client's examples: random ones in the shape of digits, whose package would take 130 MB of each client."""
    random = torch.Generator().manual_seed(client)
    return [
        (torch.randn(size, 1, 8, 8, generator=random), torch.randint(10, (size,), generator=random))
        for _ in range(steps)
    ]


def train(model: nn.Module, batches: Batches) -> float:
    """Train by plain gradient descent, and return the mean loss."""
    optimiser, total = torch.optim.SGD(model.parameters(), lr=0.02), 0.0
    for inputs, targets in batches:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimiser.step()
        total += loss.item()
    return total / len(batches)


def answer(msg: Message, build: Callable[[], nn.Module], batches: Batches) -> Message:
    """Train what was received, and answer with the new weights, as any client of Flower does."""
    if msg.content["config"]["method"] == "flower":
        model = build()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    else:
        model = client_model(build, msg, FedAvg() if msg.content["config"]["method"] == "fedavg" else None)
    loss = train(model, batches)
    metrics = MetricRecord({"train_loss": loss, "num-examples": sum(len(targets) for _, targets in batches)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
