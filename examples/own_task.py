"""Write a task of your own: a model constructor, a training set and a test set.

Run it with the file's path, or with an import path:

    comfetch run examples/own_task.py --rounds 10
    comfetch run examples/own_task.py:grouped --partition natural
    comfetch run my_package.my_module:task

The path names a function without arguments (`task` if the file alone is given). Data may be a pair of
tensors, as here, or any torch Dataset of (input, target), such as torchvision's. It is held in memory.
"""

import torch
from torch import Tensor, nn

from comfetch.data import Examples, Task, task_of

FEATURES, CLASSES = 20, 3


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw points of three interleaved spirals, hidden in 20 noisy dimensions."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, CLASSES, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + targets * (2 * torch.pi / CLASSES)
    points = 0.1 * torch.randn(count, FEATURES, generator=generator)
    points[:, 0] += 2 * radius * angle.cos()
    points[:, 1] += 2 * radius * angle.sin()
    return points, targets


def model() -> nn.Module:
    """Build the full model. It takes no argument, so that clients can build it on the meta device."""
    return nn.Sequential(
        nn.Linear(FEATURES, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


def task() -> tuple[object, object, object]:
    """Give the three things that make a task."""
    return model, spirals(3000, seed=1), spirals(1000, seed=2)


def grouped() -> Task:
    """Give a whole `Task`, where more is to be said: here, which sensor saw each example."""
    inputs, targets = spirals(3000, seed=1)
    sensors = (inputs[:, 2] * 100).long() % 30
    train = Examples(inputs, targets, sensors)
    return task_of("spirals", model, train, spirals(1000, seed=2), grouped_by="sensor")
