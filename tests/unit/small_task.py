"""A task that is learnt in a second: two blobs in 16 dimensions, and a net with one layer that is worth sketching."""

import torch
from torch import nn


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 2))


def blobs(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % 2
    return torch.randn(count, 16, generator=generator) + targets[:, None], targets


def task():
    return net, blobs(60, 0), blobs(40, 1)


def useless():
    """The same with a test set whose targets are wrong, and whose inputs say nothing."""
    inputs, targets = blobs(40, 1)
    return net, blobs(60, 0), (torch.full_like(inputs, 1e6), 1 - targets)
