"""Comfetch: clients download, train and upload count sketches of the weights, and never hold the weights themselves."""

import dataclasses
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from comfetch import hashing
from comfetch.api import plan_for
from comfetch.blueprint import blueprint
from comfetch.capacity import average_levels, capacity_plans, check_capacities, format_capacities
from comfetch.convert import swap_empty
from comfetch.errors import OptionError
from comfetch.methods.averaging import Averaging
from comfetch.methods.base import Build, Client, LocalData, Message, Server, State, Trained, Upload, start_server
from comfetch.methods.local import Local, one_gradient, train_locally
from comfetch.plan import Plan
from comfetch.settings import Settings, check_compression
from comfetch.transforms import Transform, chain, error_feedback

UPLOADS = ("weights", "gradient")
SPACES = ("full", "sketch")


@dataclass
class Comfetch:
    """Sketch both directions and the client's memory: it holds, gets and sends S = A W alone, and a 64-bit key.

    Args:
        compression: factor by which each sketched weight shrinks. Further fields of `settings.Settings` go into
            `sketch`; a `length` there, for all layers or by layer name, goes before the compression.
        local: how a client trains. uploads: the new small "weights", or one "gradient" (Algorithms 1 and 2).
        server: transforms of the averaged update; for gradients they must contain the learning rate (`scale`).
        space: where they work: on the "full" update, or on the "sketch" while the hash is fixed.
        redraw: draw new hashes every so many rounds; None keeps them.
        averaging: how uploads become one.
        capacities: compressions of the classes of clients, instead of one for all; `Client.capacity` says which.
        key: what the hashes are drawn from.
    """

    down: ClassVar[str] = "sketched weights and a key"
    up: ClassVar[str] = "sketched weights, or their gradient"
    pools: ClassVar[bool] = True
    holds: ClassVar[str] = "sketched weights"

    compression: float = 4
    key: int = 0
    local: Local = field(default_factory=Local)
    server: Transform = field(default_factory=chain)
    uploads: str = "weights"
    space: str = "full"
    redraw: int | None = None
    averaging: Averaging = field(default_factory=Averaging)
    sketch: dict[str, Any] = field(default_factory=dict)
    capacities: Sequence[float] | None = None
    name: str = "comfetch"

    def __post_init__(self) -> None:
        for option, value, known in (("uploads", self.uploads, UPLOADS), ("space", self.space, SPACES)):
            if value not in known:
                raise OptionError(f"{option}={value!r} is not known. Choose one of: {', '.join(known)}.")
        if self.redraw is not None and self.redraw < 1:
            raise OptionError(f"redraw={self.redraw} is below 1. It is the number of rounds a hash is kept.")
        if not isinstance(self.sketch, dict):
            raise OptionError(f"sketch={self.sketch!r} is no table. Write, for example, {{ blocks = 8 }}.")
        check_compression(self.compression)
        unknown = self.sketch.keys() - {f.name for f in dataclasses.fields(Settings)}
        if own := self.sketch.keys() & {"compression", "key"}:
            raise OptionError(f"sketch: {', '.join(sorted(own))} stands outside of it, as an option of the method.")
        if unknown:
            raise OptionError(f"sketch: unknown settings {', '.join(sorted(unknown))}.")
        sized = "length" in self.sketch
        self.settings = Settings(compression=None if sized else self.compression, key=self.key, **self.sketch)
        if self.capacities is not None:
            if sized:
                raise OptionError("sketch: length goes for all clients. Leave it out, or leave out capacities.")
            self.capacities = check_capacities(self.capacities, self.settings)
            self.compression = max(self.capacities)
            self.settings = dataclasses.replace(self.settings, compression=self.compression)
            if self.compression > 1 and len(self.capacities) == 1:
                self.capacities = None
        self.settings.check()
        if self.space == "sketch":
            if self.redraw is not None or self.settings.rows > 1:
                raise OptionError("space='sketch' needs one hash for the whole run: set redraw=None and rows=1.")
            if self._classes() != (None,):
                raise OptionError("space='sketch' needs one length for all clients: leave out capacities.")
        self._plans: dict[Any, Plan] = {}
        self._build: Build | None = None
        self._sketched: tuple[Server | None, dict[float | None, State]] = (None, {})

    def start(self, build: Build, given: State | None = None, fresh: bool = True) -> Server:
        """Start with the model as it is built, its fresh sketched weights scaled to keep their norm in the sketch.

        With capacities that is the sketch of the smallest class: its subspace is in those of all, so all start alike.
        """
        server, smallest = start_server(build, given), self.plan(build, 0, self._classes()[-1])
        if fresh:
            server.weights |= {name: plan.fresh(server.weights[name]) for name, plan in smallest.items()}
        return server

    def plan(self, build: Build, draw: int = 0, capacity: float | None = None) -> Plan:
        """Return the plan of a capacity class under the hashes of one draw."""
        if build is not self._build:
            smallest = plan_for(build, self.settings)[0]
            first = {None: smallest} if self.capacities is None else capacity_plans(smallest, self.capacities)
            self._plans, self._build = {(0, k): plan for k, plan in first.items()}, build
        if (0, capacity) not in self._plans:
            raise OptionError(f"capacity={capacity!r} is no class of this run: {self.capacities}.")
        if (draw, capacity) not in self._plans:
            self._plans = {k: plan for k, plan in self._plans.items() if k[0] in (0, draw)}
            plan = self._plans[0, capacity]
            again = {n: dataclasses.replace(p, key=hashing.fold(p.key, "draw", draw)) for n, p in plan.items()}
            self._plans[draw, capacity] = Plan(again, plan.kept)
        return self._plans[draw, capacity]

    def audience(self, server: Server, client: Client) -> Hashable:
        """Send all of one class the same, until hashes are drawn anew."""
        return self._draw(server.round), self._class(client)

    def download(self, server: Server, client: Client) -> Message:
        """Send S = A W, the other weights as they are, the key, and what else a client needs to build its model."""
        capacity = self._class(client)
        text = {"round": str(server.round), "key": f"{self.key:016x}", "draw": str(self._draw(server.round))}
        text["sketch"] = json.dumps({"compression": self.compression, **self.sketch}, separators=(",", ":"))
        if self.capacities is not None:
            text |= {"capacity": f"{capacity:g}", "capacities": format_capacities(self.capacities)}
        return Message(dict(self._sketch(server, capacity)), text)

    def client_model(self, build: Build, client: Client, message: Message) -> nn.Module:
        """Build the sketched model; the full weights never exist."""
        return swap_empty(blueprint(build), self.plan(build, int(message.text["draw"]), self._class(client)))

    def train(self, model: nn.Module, data: LocalData, memory: State, seed: int) -> Trained:
        """Train the small weights, or take their gradient."""
        if self.uploads == "gradient":
            return one_gradient(model, data, self.local, seed)
        return train_locally(model, data, self.local, memory, seed)

    def upload(self, received: Message, trained: Trained, memory: State) -> Message:
        """Send the new small weights, or their gradient."""
        return Message(trained.state, received.text)

    def expected(self, sent: Message) -> State:
        """Expect what was sent."""
        return sent.state

    def step(self, server: Server, uploads: list[Upload]) -> Server:
        """W ← W − transforms(lifted update); statistics of normalisation are averaged, by class."""
        by_class: dict[float | None, list[Upload]] = {}
        for upload in uploads:
            by_class.setdefault(self._class(upload.client), []).append(upload)
        means = {k: self.averaging(by_class[k]) for k in self._classes() if k in by_class}
        updates = {k: self._update(server, k, mean) for k, mean in means.items()}
        if self._classes() == (None,):
            delta = self._transform(self._plan(server.round, None), server, updates[None])
        else:
            clients = {k: sum(self.averaging.weights(by_class[k])) for k in means}
            delta = self._transform_levels(server, updates, clients)
        weights, extra = dict(server.weights), dict(server.extra)
        for k, mean in reversed(means.items()):  # the server's own model keeps the statistics of the largest class
            statistics = {name: x for name, x in mean.items() if name not in server.trained}
            weights |= statistics
            extra |= {f"{k}/{name}": x for name, x in statistics.items()} if k is not None else {}
        weights |= {name: server.weights[name] - delta[name] for name in server.trained}
        return Server(weights, server.trained, server.round + 1, self.server.state_dict(), extra)

    def _update(self, server: Server, capacity: float | None, mean: State) -> State:
        """Return the mean update of a class: old small weights minus new, or the gradient."""
        if self.uploads == "gradient":
            return {name: mean[name] for name in server.trained}
        sent = self._sketch(server, capacity)
        return {name: sent[name] - mean[name] for name in server.trained}

    def _sketch(self, server: Server, capacity: float | None) -> State:
        """Return S = A W and a class's own statistics, computed once for a state of the server: step needs it, too."""
        if self._sketched[0] is not server:
            self._sketched = (server, {})
        found = self._sketched[1]
        if capacity not in found:
            own = {name: server.extra.get(f"{capacity}/{name}", tensor) for name, tensor in server.weights.items()}
            found[capacity] = self._plan(server.round, capacity).sketch(own)
        return found[capacity]

    def _transform_levels(self, server: Server, updates: dict[Any, State], clients: dict[Any, float]) -> State:
        """Lift the updates of all classes, average them level by level, and transform the result."""
        verb = "lift_gradient" if self.uploads == "gradient" else "lift"
        plans = {k: self._plan(server.round, k) for k in self._classes() if k is not None}
        lifted = {k: _map(plans[k], verb, update) for k, update in updates.items()}
        with torch.no_grad():
            full = {
                name: average_levels(name, plans, {k: (update[name], clients[k]) for k, update in lifted.items()})
                for name in server.trained
            }
        self.server.load_state_dict(server.transforms)
        delta = self.server(full)
        self.server.applied(delta)
        return delta

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

    def _classes(self) -> tuple[float | None, ...]:
        """Return the capacity classes, the largest clients first; one of the paper's for all if there are none."""
        return (None,) if self.capacities is None else tuple(self.capacities)

    def _class(self, client: Client) -> float | None:
        """Return the class of a client; one that has not stated any is put into the smallest."""
        if self.capacities is None:
            return None
        return max(self.capacities) if client.capacity is None else client.capacity

    def _draw(self, round: int) -> int:
        return 0 if self.redraw is None else round // self.redraw

    def _plan(self, round: int, capacity: float | None) -> Plan:
        assert self._build is not None
        return self.plan(self._build, self._draw(round), capacity)


def _map(plan: Plan, verb: str, state: State) -> State:
    with torch.no_grad():
        return {name: getattr(plan[name], verb)(x) if name in plan.weights else x for name, x in state.items()}
