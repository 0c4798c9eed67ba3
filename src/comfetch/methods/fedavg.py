"""Federated averaging (McMahan et al. 2017): the reference."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from comfetch.methods.averaging import Averaging, step_from
from comfetch.methods.base import Build, Client, LocalData, Message, Server, State, Trained, Upload, start_server
from comfetch.methods.local import Local, train_locally
from comfetch.transforms import Transform, chain


@dataclass
class FedAvg:
    """Average models that clients have trained. Nothing is compressed: clients hold, get and send the full model."""

    down: ClassVar[str] = "full weights"
    up: ClassVar[str] = "full weights"
    pools: ClassVar[bool] = True
    holds: ClassVar[str] = "full weights"

    local: Local = field(default_factory=Local)
    server: Transform = field(default_factory=chain)
    averaging: Averaging = field(default_factory=Averaging)
    key: int = 0
    name: str = "fedavg"

    def start(self, build: Build, given: State | None = None, fresh: bool = True) -> Server:
        """Start with the model as it is built, or with the weights given."""
        return start_server(build, given)

    def audience(self, server: Server, client: Client) -> Hashable:
        """Send everybody the same."""
        return 0

    def download(self, server: Server, client: Client) -> Message:
        """Send the full weights."""
        return Message(server.weights, {"round": str(server.round)})

    def client_model(self, build: Build, client: Client, message: Message) -> nn.Module:
        """Build the full model."""
        return build()

    def train(self, model: nn.Module, data: LocalData, memory: State, seed: int) -> Trained:
        """Train as `local` says."""
        return train_locally(model, data, self.local, memory, seed)

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send the new weights."""
        return Message(trained.state, received.text)

    def expected(self, sent: Message) -> State:
        """Expect what was sent."""
        return sent.state

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← W − transforms(W − mean of the uploads); statistics of normalisation are averaged."""
        weights = step_from(server.weights, self.averaging(uploads), server.trained, self.server, server.transforms)
        return Server(weights, server.trained, server.round + 1, self.server.state_dict())
