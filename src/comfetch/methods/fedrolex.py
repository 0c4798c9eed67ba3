"""Sub-models whose channels change: FedRolex (Alam et al. 2022), federated dropout (Caldas et al. 2018)."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from comfetch import hashing
from comfetch.methods.base import Client, Server
from comfetch.methods.submodel import SubModel


@dataclass
class Rolling(SubModel):
    """Train sub-models whose channels change from round to round.

    Running statistics that other sub-models have left behind do not fit the next one, nor the full model. So they are
    taken anew before a test unless the averaging says otherwise, from examples of the clients (the static batch norm of
    HeteroFL and FedRolex, where it is done once, after training).
    """

    rolls: ClassVar[bool] = True
    holds: ClassVar[str] = "narrow sub-model"


@dataclass
class FedRolex(Rolling):
    """Compress both directions, the client's memory and its work: a client holds, gets and sends a narrow sub-model.

    In round t a layer of n channels keeps the window {(t + j) mod n : j < ⌈r · n⌉}, r = 1/√compression: it rolls by one
    channel a round, so all of the server's model is trained though no client could hold it. Layers of one size have the
    same window, so weights between channels farther apart than its width stay as they were drawn (the paper's rule).
    Running statistics of batch norm are taken anew before every test, where the paper does so after training.
    """

    down: ClassVar[str] = "a window of channels of every layer, rolling"
    up: ClassVar[str] = "the same window"

    name: str = "fedrolex"

    def channels(self, channels: int, width: int, round: int, client: Client) -> Tensor:
        """Keep the window of this round."""
        return (round + torch.arange(width)) % channels


@dataclass
class FederatedDropout(Rolling):
    """Compress both directions, the client's memory and its work: a client holds, gets and sends a narrow sub-model.

    Each client in each round gets ⌈r · n⌉ of n channels drawn at random, r = 1/√compression. The paper draws for each
    layer of its own; here layers of one size keep the same channels, so that residuals fit. What is sent is not
    compressed further, where the paper adds quantisation and a Hadamard transform: use the wire's int8 for that. What
    this trains is the full model: a sub-model drawn anew is worse, the narrower the more so. Its paper has no batch
    norm; here running statistics are taken anew before every test.
    """

    down: ClassVar[str] = "random channels of every layer"
    up: ClassVar[str] = "the same channels"
    pools: ClassVar[bool] = False

    name: str = "fed-dropout"

    def audience(self, server: Server, client: Client) -> Hashable:
        """Send each client channels of its own."""
        return client.id, self._capacity(client)

    def channels(self, channels: int, width: int, round: int, client: Client) -> Tensor:
        """Draw channels by key, round and client, in ascending order."""
        key = hashing.fold(self.key, "channels", round, client.id, channels)
        rank = hashing.draw([key], channels, channels).index[0]
        return torch.from_numpy((rank < width).nonzero()[0])
