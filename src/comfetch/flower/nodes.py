"""Know the nodes of a federation: ask each once who it is and what it can hold, and put it into a capacity class."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

import httpx
from flwr.app import Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from comfetch.api import parse_bytes
from comfetch.capacity import format_capacities
from comfetch.errors import OptionError, RunError
from comfetch.flower.messages import CONFIG, read_config, to_config
from comfetch.methods.base import Client

ASKING = 120.0
"""Seconds that a node has to say who it is; then it is asked again, but rounds begin without it."""
TELL = 10.0
"""Seconds between messages about what is being waited for."""
UNASKED = "No query function registered"
"""What Flower says for an app that knows nothing of our question."""
Predict = Callable[[float | None], int]
"""Predict the bytes of a training step in a class."""


@dataclass
class Nodes:
    """Nodes by their id in Flower, and the clients they are.

    Args:
        least: nodes that must be there before a round begins. wait: seconds until the run is given up; a node that is
            there has ASKING seconds to say who it is.
        ask: ask nodes who they are; if not, they are numbered as they come.
        capacities: the classes of the run, if it has any. predict: bytes that a client of a class needs.
    """

    least: int = 2
    wait: float = 600.0
    ask: bool = True
    capacities: tuple[float, ...] | None = None
    predict: Predict | None = None
    clients: dict[int, Client] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    asked: dict[int, tuple[str, float]] = field(default_factory=dict)  # {node: (message, when it expires)}
    silent: dict[int, str] = field(default_factory=dict)  # {node: why}: asked again, but rounds begin without them
    here: set[int] = field(default_factory=set)

    def present(self, grid: Grid) -> dict[int, Client]:
        """Return the clients that can take part now; wait for enough of them, but not for ever."""
        began, told, pause = time.monotonic(), -math.inf, 0.05
        while True:
            self._look(grid)
            self._ask(grid)
            found = {node: client for node, client in self.clients.items() if node in self.here}
            asked, now = self.asked.keys() - self.silent.keys(), time.monotonic()
            if len(found) >= self.least and not asked:
                return found
            if now - began > self.wait and not asked:
                why = [*(f" Refused: {why}" for why in self.refused.values()),
                       *(f" Not heard: node {node}: {why}" for node, why in self.silent.items())]  # fmt: skip
                raise RunError(
                    f"Only {len(found)} of at least {self.least} nodes are there after {self.wait:g} seconds."
                    f"{''.join(why)} Start more SuperNodes, or lower the minimum; what was done is saved."
                )
            if len(found) < self.least and now - told > TELL:
                told = now
                log(INFO, "Waiting for nodes: %d of %d are there%s; giving up in %.0f s.", len(found), self.least,
                    f" ({len(asked)} connected, asked who they are)" if asked else "",
                    max(0.0, self.wait - (now - began)))  # fmt: skip
            time.sleep(pause)
            pause = min(1.2 * pause, 0.5)

    def _look(self, grid: Grid) -> None:
        """See who is there, and forget what was between us and nodes that have left, but for who they are."""
        before, self.here = self.here, set(grid.get_node_ids())
        self.asked = {node: question for node, question in self.asked.items() if node in self.here}
        self.silent = {node: why for node, why in self.silent.items() if node in self.here}
        if before - self.here:  # those who were refused are asked again: one may be the node that left, come back
            self.refused = {}

    def _ask(self, grid: Grid) -> None:
        """Ask new nodes who they are, and hear those who have answered."""
        new, now = sorted(self.here - self.clients.keys() - self.refused.keys() - self.asked.keys()), time.monotonic()
        if not self.ask:
            for node in new:
                self.clients[node] = self._admit(node, {})
            return
        if new:
            content = RecordDict({CONFIG: to_config({"ask": "client"})})
            sent = grid.push_messages([Message(content, node, MessageType.QUERY, ttl=ASKING) for node in new])
            self.asked |= {node: (message, now + ASKING) for node, message in zip(new, sent, strict=False)}
        waiting = {message: node for node, (message, _) in self.asked.items() if message}
        for reply in _pull(grid, list(waiting)) if waiting else ():
            self._hear(waiting[reply.metadata.reply_to_message_id], reply)
        for node in [node for node, (_, end) in self.asked.items() if end < now]:
            del self.asked[node]
            self.silent.setdefault(node, f"no answer within {ASKING:g} seconds.")

    def _hear(self, node: int, reply: Message) -> None:
        """Take what a node says of itself."""
        if reply.has_error() and UNASKED not in str(reply.error.reason):
            log(WARNING, "Node %d could not say who it is: %s", node, reason(reply))
            self.silent[node] = reason(reply)
            self.asked[node] = "", self.asked[node][1]  # asked again when that question would have expired
            return
        del self.asked[node]
        self.silent.pop(node, None)
        told = read_config(reply.content) if reply.has_content() else {}
        try:
            self.clients[node] = self._admit(node, told)
        except OptionError as error:
            self.refused[node] = f"node {node}: {error}"
            log(WARNING, "Refused: node %d: %s", node, error)

    def _admit(self, node: int, told: dict[str, Any]) -> Client:
        """Make a client of what a node says of itself; an app that does not answer our question says nothing."""
        taken = {client.id: other for other, client in self.clients.items()}
        number = told.get("client", next(i for i in range(len(taken) + 1) if i not in taken))
        examples = told.get("examples", 0)
        for name, value in (("client", number), ("examples", examples)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**48:
                raise OptionError(f"{name}={value!r} is not a whole number of at least 0.")
        if taken.get(number) in self.here:
            raise OptionError(f"it says that it is client {number}, as node {taken[number]} does, which is there, too.")
        if number in taken:
            del self.clients[taken[number]]
            log(INFO, "Client %d is now node %d, and no longer node %d.", number, node, taken[number])
        capacity = self.classify(told.get("memory") or None, told.get("compression") or None)
        log(INFO, "Node %d is client %d%s.", node, number, "" if capacity is None else f" of class {capacity:g}")
        return Client(number, examples, capacity)

    def classify(self, memory: Any, compression: Any) -> float | None:
        """Return the largest class that fits what a node states; refuse one that cannot hold the smallest."""
        classes = self.capacities or (None,)
        if compression is not None and self.capacities:
            if isinstance(compression, bool) or not isinstance(compression, int | float):
                raise OptionError(f"compression={compression!r} is not a number.")
            classes = tuple(k for k in self.capacities if k >= compression)
            if not classes:
                known = format_capacities(self.capacities)
                raise OptionError(f"it asks for compression {compression:g}; the classes of this run are {known}.")
        if memory is None:
            return classes[0] if compression is not None else classes[-1]
        if self.predict is None:
            raise OptionError(
                f"memory={memory!r}: the server cannot predict what a client needs. Give Strategy a predict."
            )
        most = parse_bytes(memory)
        needed = {k: self.predict(k) for k in classes}
        fitting = [k for k in classes if needed[k] <= most]
        if not fitting:
            raise OptionError(f"memory={memory!r} is too little: a training step needs {min(needed.values())} bytes.")
        return fitting[0]


def exchange(grid: Grid, messages: list[Message], timeout: float) -> list[Message | None]:
    """Send messages and return their replies in the same order; None for those that have not come in time.

    Flower's own function does not say which replies are missing, and looks for them every three seconds.
    """
    ids = list(grid.push_messages(messages)) if messages else []
    replies: dict[str, Message] = {}
    began = time.monotonic()
    while (waiting := [i for i in ids if i and i not in replies]) and (waited := time.monotonic() - began) < timeout:
        before = len(replies)
        replies |= {reply.metadata.reply_to_message_id: reply for reply in _pull(grid, waiting)}
        if len(replies) > before:
            log(INFO, "%d of %d nodes have answered.", len(replies), len(ids))
        if len(replies) < len(ids):  # what this adds to a round is at most a twentieth of it
            time.sleep(min(max(0.05, waited / 20), 0.5))
    return [replies.get(i) if i else None for i in [*ids, *[""] * (len(messages) - len(ids))]]


def _pull(grid: Grid, waiting: list[str]) -> Iterable[Message]:
    """Look for replies. A SuperLink whose database is locked answers with an error of its own: none are there yet."""
    try:
        return grid.pull_messages(waiting)
    except httpx.HTTPStatusError as error:
        if not error.response.is_server_error:
            raise
        log(WARNING, "The SuperLink could not say whether there are replies: %s. It is asked again.", error)
        return []


def reason(reply: Message) -> str:
    """Write why a node could not answer, in one line: of a traceback, its end."""
    lines = [line.strip() for line in str(reply.error.reason or f"error {reply.error.code}").splitlines()]
    return " ".join(line for line in lines if line)[-500:]
