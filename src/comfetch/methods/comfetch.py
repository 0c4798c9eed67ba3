"""Comfetch: clients download, train and upload count sketches of the weights, and never hold the weights themselves."""

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from comfetch import hashing
from comfetch.api import plan_for
from comfetch.blueprint import blueprint
from comfetch.convert import swap_empty
from comfetch.errors import OptionError
from comfetch.methods.base import (
    Build,
    Client,
    LocalData,
    Message,
    Server,
    State,
    Trained,
    Upload,
    average,
    start_server,
)
from comfetch.methods.local import Local, one_gradient, train_locally
from comfetch.plan import Plan
from comfetch.policy import Settings
from comfetch.transforms import Transform, chain, error_feedback

UPLOADS = ("weights", "gradient")
SPACES = ("full", "sketch")


@dataclass
class Comfetch:
    """Sketch both directions and the client's memory: it holds, gets and sends S = A W alone, and a 64-bit key.

    Args:
        compression: factor by which each sketched weight shrinks. Further fields of `policy.Settings` go into `sketch`.
        local: how a client trains. uploads: the new small "weights", or one "gradient" (Algorithms 1 and 2).
        server: transforms of the averaged update; for gradients they must contain the learning rate (`scale`).
        space: where they work: on the "full" update, or on the "sketch" while the hash is fixed.
        redraw: draw new hashes every so many rounds; None keeps them.
        weighting: average by "examples" or "uniform".
        key: what the hashes are drawn from.
    """

    compression: float = 4
    key: int = 0
    local: Local = field(default_factory=Local)
    server: Transform = field(default_factory=chain)
    uploads: str = "weights"
    space: str = "full"
    redraw: int | None = None
    weighting: str = "examples"
    sketch: dict[str, Any] = field(default_factory=dict)
    name: str = "comfetch"

    def __post_init__(self) -> None:
        for option, value, known in (("uploads", self.uploads, UPLOADS), ("space", self.space, SPACES)):
            if value not in known:
                raise OptionError(f"{option}={value!r} is not known. Choose one of: {', '.join(known)}.")
        if self.redraw is not None and self.redraw < 1:
            raise OptionError(f"redraw={self.redraw} is below 1. It is the number of rounds a hash is kept.")
        unknown = self.sketch.keys() - {f.name for f in dataclasses.fields(Settings)}
        if unknown:
            raise OptionError(f"sketch: unknown settings {', '.join(sorted(unknown))}.")
        self.settings = Settings(compression=self.compression, key=self.key, **self.sketch)
        self.settings.check()
        if self.space == "sketch" and (self.redraw is not None or self.settings.rows > 1):
            raise OptionError("space='sketch' needs one hash for the whole run: set redraw=None and rows=1.")
        self._plans: dict[Any, Plan] = {}

    def start(self, build: Build) -> Server:
        """Start with the model as it is built, its sketched weights scaled to keep their norm in the sketch."""
        server = start_server(build)
        for name, plan in self.plan(build, 0).items():
            server.weights[name] = plan.fresh(server.weights[name])
        return server

    def plan(self, build: Build, draw: int) -> Plan:
        """Return the plan under the hashes of one draw."""
        if build not in self._plans:
            self._plans = {build: plan_for(build, self.settings)[0]}
        if draw and (build, draw) not in self._plans:
            first = self._plans[build]
            again = {n: dataclasses.replace(p, key=hashing.fold(p.key, "draw", draw)) for n, p in first.items()}
            self._plans = {build: first, (build, draw): Plan(again, first.kept)}
        return self._plans[(build, draw) if draw else build]

    def audience(self, server: Server, client: Client) -> Hashable:
        """Send everybody the same, until hashes are drawn anew."""
        return self._draw(server.round)

    def download(self, server: Server, client: Client) -> Message:
        """Send S = A W, the other weights as they are, and the key."""
        text = {"round": str(server.round), "key": f"{self.key:016x}", "draw": str(self._draw(server.round))}
        return Message(self._plan(server.round).sketch(server.weights), text)

    def client_model(self, build: Build, client: Client, message: Message) -> nn.Module:
        """Build the sketched model; the full weights never exist."""
        return swap_empty(blueprint(build), self.plan(build, int(message.text["draw"])))

    def train(self, model: nn.Module, data: LocalData, memory: State, seed: int) -> Trained:
        """Train the small weights, or take their gradient."""
        if self.uploads == "gradient":
            return one_gradient(model, data, self.local, seed)
        return train_locally(model, data, self.local, memory, seed)

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send the new small weights, or their gradient."""
        return Message({name: tensor.clone() for name, tensor in trained.state.items()}, received.text)

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← W − transforms(lifted update); statistics of normalisation are averaged."""
        plan, mean = self._plan(server.round), average(uploads, self.weighting)
        if self.uploads == "gradient":
            update = {name: mean[name] for name in server.trained}
        else:
            sent = plan.sketch({name: server.weights[name] for name in server.trained})
            update = {name: sent[name] - mean[name] for name in server.trained}
        delta = self._transform(plan, server, update)
        weights = {**server.weights, **{n: x for n, x in mean.items() if n not in server.trained}}
        weights.update({name: server.weights[name] - delta[name] for name in server.trained})
        return Server(weights, server.trained, server.round + 1, self.server.state_dict())

    def _transform(self, plan: Plan, server: Server, update: State) -> State:
        """Lift the update and transform it, or the other way round in sketch space."""
        gradient = self.uploads == "gradient"

        def lift(small: State) -> State:
            return _map(plan, "lift_gradient" if gradient else "lift", small)

        def drop(full: State) -> State:
            return _map(plan, "drop_gradient" if gradient else "sketch", full)

        self.server.load_state_dict(server.transforms)
        if self.space == "full":
            delta = self.server(lift(update))
            self.server.applied(delta)
            return delta
        last = self.server.transforms[-1] if isinstance(self.server, chain) and self.server.transforms else None
        if isinstance(last, error_feedback):
            last.lift, last.drop = lift, drop
            delta = self.server(update)
            self.server.applied(drop(delta))
            return delta
        small = self.server(update)
        self.server.applied(small)
        return lift(small)

    def _draw(self, round: int) -> int:
        return 0 if self.redraw is None else round // self.redraw

    def _plan(self, round: int) -> Plan:
        build = next(iter(self._plans))
        return self.plan(build, self._draw(round))


def _map(plan: Plan, verb: str, state: State) -> State:
    with torch.no_grad():
        return {name: getattr(plan[name], verb)(x) if name in plan.weights else x for name, x in state.items()}
