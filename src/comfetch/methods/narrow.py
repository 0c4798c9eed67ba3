"""Federated averaging of a narrow model: the plainest way to make clients smaller."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from comfetch.blueprint import blueprint
from comfetch.errors import OptionError
from comfetch.methods.base import Build, Client, Message, Server, State, start_server
from comfetch.methods.fedavg import FedAvg
from comfetch.settings import check_compression
from comfetch.widths import Narrowed, cut, first_channels, narrow_to, plan_widths


@dataclass
class Narrow(FedAvg):
    """Compress both directions, memory and work by a narrower model: clients and server hold, get and send it alone.

    There is no full model, not even on the server. All hidden layers have the same part of their channels, the largest
    that fits. Given weights are cut to their first channels, which leaves little of what they had learnt.

    Args:
        compression: factor by which the number of all weights shrinks, running statistics included.
        weights: the largest number of weights itself, instead.
    """

    down: ClassVar[str] = "narrow model"
    up: ClassVar[str] = "narrow model"
    holds: ClassVar[str] = "narrow model"

    compression: float = 4
    weights: int | None = None
    name: str = "narrow"

    def __post_init__(self) -> None:
        check_compression(self.compression)
        if self.weights is not None and not (isinstance(self.weights, int) and self.weights >= 1):
            raise OptionError(f"weights={self.weights!r} is not a whole number of at least 1.")
        self._cache: tuple[Build, Narrowed] | None = None

    def narrowed(self, build: Build) -> Narrowed:
        """Return the constructor of the narrow model."""
        if self._cache is None or self._cache[0] is not build:
            state = blueprint(build).model.state_dict()
            full = sum(tensor.numel() for tensor in state.values() if tensor.is_floating_point())
            self._cache = build, narrow_to(build, self.weights or full / self.compression)
        return self._cache[1]

    def start(self, build: Build, given: State | None = None, fresh: bool = True) -> Server:
        """Start with the narrow model as it is built, or with the first channels of the weights given."""
        small = self.narrowed(build)
        if given is not None:
            plan = plan_widths(blueprint(build).model)
            index = plan.index(small.ratio, first_channels)
            given = {name: cut(tensor, index.get(name, ())) for name, tensor in given.items()}
        return start_server(small, given)

    def client_model(self, build: Build, client: Client, message: Message) -> nn.Module:
        """Build the narrow model."""
        return self.narrowed(build)()
