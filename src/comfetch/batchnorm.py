"""Take the running statistics of batch norm anew, of a model that was made of others by averaging.

The mean of what clients have counted while they trained does not fit the mean of their weights: the farther apart their
weights are, the less, and the most in the first rounds.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from comfetch.methods.base import LocalData

EXAMPLES, BATCH = 1000, 50
"""How many training examples the statistics of a model are taken from, and in batches of how many."""


@torch.no_grad()
def take_statistics(model: nn.Module, data: Sequence[LocalData]) -> None:
    """Set running statistics to the mean over batches of about a thousand examples, as many of each client.

    Nothing else is changed. What clients would answer for it, two numbers a channel, is not counted as traffic.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    model.eval()  # no dropout
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean of all batches
        norm.train()
    for own in data:
        batches = own.batches(BATCH, torch.Generator().manual_seed(0))
        for inputs, _ in itertools.islice(batches, max(1, EXAMPLES // (BATCH * len(data)))):
            if len(inputs) > 1:  # one example has no variance
                model(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
