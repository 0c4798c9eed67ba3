"""What methods share whose clients keep a copy of the model, so that only its change need travel down to them.

The server notes in which round it last took an upload of each client: that client holds the weights of that round. If
the change since then can be sent, it is; otherwise, as to a client that joins, everything is. What a client keeps on
the condition that its upload was taken waits until a download tells it so.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from comfetch.errors import RunError
from comfetch.methods.base import Client, Message, Server, State, Upload
from comfetch.methods.flat import UPDATE, FullModel, prefixed, unprefixed

CHANGE, KEPT, PENDING, ROUND = "change/", "weights/", "pending/", "round"
CLIENTS, ROUNDS, SHARES = "seen/clients", "seen/rounds", "seen/shares"


def seen(server: Server, client: Client) -> int:
    """Return the last round in which an upload of a client was taken; −1 if there is none."""
    if CLIENTS not in server.extra:
        return -1
    found = server.extra[ROUNDS][server.extra[CLIENTS] == client.id]
    return int(found[0]) if len(found) else -1


def note_seen(server: Server, uploads: list[Upload], weights: list[float] | None = None) -> State:
    """Return the notes after a round: clients, rounds, and the weight that each had when it was first seen."""
    names = (CLIENTS, ROUNDS, SHARES)
    rows = zip(*(server.extra[name].tolist() for name in names), strict=True) if CLIENTS in server.extra else ()
    known: dict[int, tuple[int, float]] = {client: (round, share) for client, round, share in rows}
    ordered = sorted(uploads, key=lambda upload: upload.client.id)
    for upload, weight in zip(ordered, weights or [1.0] * len(ordered), strict=True):
        share = known[upload.client.id][1] if upload.client.id in known else weight
        known[upload.client.id] = server.round, share
    rounds, shares = zip(*(known[i] for i in sorted(known)), strict=True)
    return {
        CLIENTS: torch.tensor(sorted(known)), ROUNDS: torch.tensor(rounds),
        SHARES: torch.tensor(shares, dtype=torch.float64),
    }  # fmt: skip


def shared_sum(notes: State, decoded: list[Upload]) -> Tensor:
    """Sum the vectors of a round, each with the weight that its client had when it was first seen."""
    shares = dict(zip(notes[CLIENTS].tolist(), notes[SHARES].tolist(), strict=True))
    ordered = sorted(decoded, key=lambda upload: upload.client.id)
    total = torch.zeros_like(ordered[0].message.state[UPDATE])
    for upload in ordered:
        total.add_(upload.message.state[UPDATE], alpha=shares[upload.client.id])
    return total


@dataclass(kw_only=True)
class Replica(FullModel):
    """Send the last change in its code to clients that have the weights before it, and the full weights to others.

    A subclass leaves the code of its last change in the server's `extra`, under names that begin with `change/`.
    """

    tells: ClassVar[bool] = False
    """Whether each client is told which of its uploads was taken last."""

    def change_since(self, server: Server, round: int) -> State | None:
        """Return the code of what changed since a round; None if it cannot be sent."""
        return unprefixed(CHANGE, server.extra) if 0 <= round == server.round - 1 else None

    def changed(self, state: State, code: State, memory: State) -> State:
        """Apply the code of a change to a client's copy."""
        raise NotImplementedError

    def besides(self, server: Server) -> State:
        """Return what goes down with the full weights."""
        return {}

    def audience(self, server: Server, client: Client) -> Hashable:
        """Send the same to clients that took part equally long ago, as far as that matters."""
        last = seen(server, client)
        return server.round - last if last >= 0 and (self.tells or self.change_since(server, last) is not None) else 0

    def download(self, server: Server, client: Client) -> Message:
        """Send the change, with all buffers as they are; or everything."""
        last = seen(server, client)
        code = self.change_since(server, last)
        text = {"round": str(server.round)} | ({"seen": str(last)} if self.tells or code is not None else {})
        if code is None:
            besides = self.besides(server)
            return Message({**server.weights, **prefixed(CHANGE, besides)} if besides else server.weights, text)
        buffers = {name: server.weights[name] for name in self.layout.buffers}
        return Message({**buffers, **prefixed(CHANGE, code)}, text)

    def load(self, model: nn.Module, received: Message, memory: State) -> None:
        """Bring the client's copy up to date and put it into the model; to do it twice changes nothing."""
        round, last = int(received.text["round"]), int(received.text.get("seen", -1))
        settle(memory, last)
        code = unprefixed(CHANGE, received.state)
        state = {name: tensor for name, tensor in received.state.items() if not name.startswith(CHANGE)}
        if not state.keys() >= self.layout.trained.keys():
            kept = unprefixed(KEPT, memory)
            if not kept or not last <= int(memory[ROUND]) <= round:
                raise RunError(f"Round {round + 1}: the client has lost its copy of round {last + 1}. Start it anew.")
            state = {**kept, **state}
            if int(memory[ROUND]) < round:
                state = self.changed(state, code, memory)
        else:
            memory.update(code)
        memory.update({KEPT + name: tensor.detach().clone() for name, tensor in state.items()})
        memory[ROUND] = torch.tensor(round)
        model.load_state_dict(state)

    def received_state(self, received: Message, memory: State) -> State:
        """Return the client's copy."""
        return unprefixed(KEPT, memory)


def wait(memory: State, received: Message, kept: State) -> None:
    """Keep tensors on the condition that this round's upload is taken."""
    memory.update({PENDING + name: tensor for name, tensor in kept.items()})
    memory[PENDING + ROUND] = torch.tensor(int(received.text["round"]))


def settle(memory: State, last: int) -> None:
    """Keep for good what waits, if the upload of that round was taken, else forget it."""
    waiting = {name: memory.pop(PENDING + name) for name in unprefixed(PENDING, memory)}
    if waiting and int(waiting.pop(ROUND)) == last:
        memory.update(waiting)


@dataclass(kw_only=True)
class SparseChanges(Replica):
    """Send the full weights; or with `changes` only the values of those coordinates that changed since the last time.

    The server keeps for each coordinate the round in which it changed last, and a client its copy of the model. Where
    the values and their places would be more than all weights, all weights are sent.
    """

    down: ClassVar[str] = "full weights, or the coordinates changed since the client's last round"

    changes: bool = False

    def change_since(self, server: Server, round: int) -> State | None:
        """Return the places and values that changed since a round."""
        if not self.changes or round < 0:
            return None
        index = (server.extra["changed"] > round).nonzero().squeeze(1).to(torch.int32)
        values = self.layout.flatten(server.weights)[index]
        small = index.nbytes + values.nbytes < self.layout.size * values.element_size()
        return {"index": index, "values": values} if small else None

    def changed(self, state: State, code: State, memory: State) -> State:
        """Put new values into their places."""
        vector = self.layout.flatten(state).index_copy(0, code["index"].long(), code["values"])
        return {**state, **self.layout.split(vector)}

    def load(self, model: nn.Module, received: Message, memory: State) -> None:
        """Load the weights; a copy is kept only for changes."""
        if self.changes:
            super().load(model, received, memory)
        else:
            model.load_state_dict(received.state)

    def received_state(self, received: Message, memory: State) -> State:
        """Return what the client's model started from."""
        return super().received_state(received, memory) if self.changes else received.state

    def note_changes(self, server: Server, uploads: list[Upload], delta: Tensor) -> State:
        """Return the notes after a round in which Δ was applied."""
        if not self.changes:
            return {}
        old = server.extra.get("changed")
        old = torch.zeros(self.layout.size, dtype=torch.int32) if old is None else old
        return {"changed": torch.where(delta != 0, server.round + 1, old).int(), **note_seen(server, uploads)}
