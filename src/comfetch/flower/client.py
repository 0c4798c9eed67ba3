"""A client's side on Flower: build the small model from a message, train it, and answer."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import nn

from comfetch import methods
from comfetch.capacity import parse_capacities
from comfetch.driver import Channel, kept_bytes, settle, train_client
from comfetch.errors import ComfetchError, MismatchError
from comfetch.flower.messages import (
    CONFIG,
    METRICS,
    read_config,
    to_arrays,
    to_config,
    to_content,
    to_message,
    to_state,
)
from comfetch.methods.base import Build, Client, LocalData, Method, State, TwoPass
from comfetch.wire import unpack

MEMORY = "comfetch.memory"
"""The record of a node's own state in which a client keeps what its method asks it to keep."""


@dataclass(frozen=True)
class Site:
    """What a node has: its method, the model's constructor, its number, its data, and how to test and measure.

    Args:
        capacity: the compression this node asks for, unless its node config states one, or its memory.
        test: (model) -> (number of examples, loss, accuracy) on the node's own test examples.
        measure: (model) -> (measured, predicted) peak bytes of a training step.
    """

    method: Method
    build: Build
    client: int
    data: LocalData
    channel: Channel = field(default_factory=Channel)
    capacity: float | None = None
    test: Callable[[nn.Module], tuple[int, float, float]] | None = None
    measure: Callable[[nn.Module], tuple[int, int | None]] | None = None


def client_model(build: Build, msg: Message, method: Method | None = None, memory: State | None = None) -> nn.Module:
    """Build what a client holds, with the weights of a message in it; the full weights never exist.

    Args:
        build: constructor of the full model. msg: a message of `comfetch.flower.Strategy`.
        method: that of the server, unless it is Comfetch, whose messages say all that is needed.
        memory: what this client keeps from round to round, if its method needs it.
    """
    received = unpack(to_message(msg.content))
    method = method_of(received.text) if method is None else method
    model = method.client_model(build, client_of(msg), received)
    load = getattr(method, "load", None)
    if load is None:
        model.load_state_dict(received.state)
    else:
        load(model, received, {} if memory is None else memory)
    return model


def method_of(text: dict[str, str]) -> Method:
    """Make the method that a download belongs to, of its text."""
    try:
        return _comfetch(text["key"], text["sketch"], text.get("capacities"))
    except (KeyError, ValueError, TypeError) as error:
        raise MismatchError(
            "This message is not Comfetch's. Give client_model the method that the server runs, too."
        ) from error


@functools.lru_cache(maxsize=8)
def _comfetch(key: str, sketch: str, capacities: str | None) -> Method:
    """Make Comfetch once for all messages of a process: it plans a model once."""
    settings = json.loads(sketch)
    compression, classes = settings.pop("compression"), None if capacities is None else parse_capacities(capacities)
    return methods.Comfetch(compression, int(key, 16), sketch=settings, capacities=classes)


def client_of(msg: Message) -> Client:
    """Return who a message is for."""
    told = read_config(msg.content)
    capacity = told.get("capacity")
    return Client(int(told["client"]), 0, None if capacity is None else float(capacity))


def client_app(site: Callable[[Context], Site], mods: list[Mod] | None = None) -> ClientApp:
    """Make a whole ClientApp of a function that says what a node has; `context.node_config` tells nodes apart.

    A node may state its memory or the compression it needs: `--node-config 'partition-id=0 memory="256MB"'`.
    `mods` of Flower are put around the training, such as those for privacy.
    """
    app = ClientApp()

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        """Say who this is and what it can hold."""
        here = site(context)
        told: dict[str, Any] = {"client": here.client, "examples": len(here.data)}
        stated: dict[str, Any] = {
            name: context.node_config[name] for name in ("memory", "compression") if name in context.node_config
        }
        if not stated and here.capacity is not None:
            stated = {"compression": here.capacity}
        return Message(RecordDict({CONFIG: to_config({**told, **stated})}), reply_to=msg)

    @app.train(mods=mods)
    def train(msg: Message, context: Context) -> Message:
        """Train, and answer with the new small weights."""
        here, memory, asked = site(context), _memory(context), read_config(msg.content)
        model = client_model(here.build, msg, here.method, memory)
        metrics: dict[str, Any] = {"num-examples": len(here.data)}
        if asked.get("measure") and here.measure is not None:
            measured, predicted = here.measure(model)
            metrics |= {"memory": measured, **({} if predicted is None else {"memory-predicted": predicted})}
        received, seed = unpack(to_message(msg.content)), int.from_bytes(asked["seed"], "big")
        trained, packed = train_client(here.method, here.channel, model, here.data, received, memory, seed)
        metrics["kept"] = kept_bytes(here.method, here.channel, received, memory)
        if (loss := here.channel.told(trained.loss)) is not None:
            metrics["loss"] = loss
        _keep(context, memory)
        return Message(RecordDict({**to_content(packed), METRICS: MetricRecord(metrics)}), reply_to=msg)

    @app.train("respond")
    def respond(msg: Message, context: Context) -> Message:
        """Answer in a second exchange."""
        here, memory = site(context), _memory(context)
        assert isinstance(here.method, TwoPass)
        answer = here.method.respond(to_message(msg.content), memory)
        _keep(context, memory)
        metrics = MetricRecord({"num-examples": len(here.data)})
        return Message(RecordDict({**to_content(answer), METRICS: metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        """Test what this client runs on its own examples."""
        here = site(context)
        if here.test is None:
            raise ComfetchError("This node has nothing to test on. Set fraction_evaluate=0, or give its Site a test.")
        model = client_model(here.build, msg, here.method, _memory(context))
        count, loss, accuracy = here.test(settle(here.method, here.channel, model, [here.data]))
        metrics = MetricRecord({"num-examples": count, "loss": loss, "accuracy": accuracy})
        return Message(RecordDict({METRICS: metrics}), reply_to=msg)

    return app


def _memory(context: Context) -> State:
    kept = context.state.get(MEMORY)
    return to_state(kept) if isinstance(kept, ArrayRecord) else {}


def _keep(context: Context, memory: State) -> None:
    if memory:
        context.state[MEMORY] = to_arrays(memory)[0]
