"""Nodes that die, dawdle, leave and come back, servers that die, too few nodes: rounds close, and nothing is lost.

Every test plays against real SuperNodes, and compares the weights with those of one process in which exactly those
clients took part whose updates should have been used.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from comfetch.driver import Round, train_client, train_seed
from comfetch.experiment import Experiment
from comfetch.federation import Federation, make_federation
from comfetch.methods import Server
from comfetch.records import load_checkpoint
from examples.federation import Loopback, Run

HERE = Path(__file__).resolve().parent
APP = HERE / "faults_app"
IMPATIENT = [sys.executable, str(HERE / "impatient.py")]
CLIENTS = 2
ALL = tuple(range(CLIENTS))
EXPERIMENT = {
    "task": str(HERE.parents[1] / "examples" / "own_task.py"), "limit": 300, "clients": CLIENTS, "compression": 4.0,
    "partition": "dirichlet", "unequal": True, "batch_size": 32, "key": 7, "seed": 5,
}  # fmt: skip
"""A task that loads at once, with clients of different size: it matters whose update is in the mean."""
LIMIT = 240
"""Seconds for what takes some ten on an idle machine."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    """Start a SuperLink, and a SuperNode for each client. A node that comes back gets a new id, as it has no key."""
    with Loopback(tmp_path_factory.mktemp("federation"), tls=False, auth=False) as loopback:
        for client in ALL:
            loopback.start_node(f"node-{client}", {"partition-id": client}, prefix=IMPATIENT, wait=False)
        yield loopback


@pytest.fixture(scope="module")
def twin() -> Federation:
    """Load the same experiment into this process."""
    experiment = Experiment.of(EXPERIMENT)
    task, build = experiment.load()
    return make_federation(
        experiment.make_method(), task, build, CLIENTS, 1.0, experiment.partition, experiment.alpha,
        experiment.unequal, experiment.seed,
    )  # fmt: skip


def pace() -> float:
    """Tell how many times longer things take than on a machine that does nothing else."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) - 1)


def until(there: Callable[[], Any], what: str, run: Run | None = None) -> None:
    """Wait for something, but not for ever."""
    end = time.monotonic() + LIMIT
    while not there():
        assert time.monotonic() < end, f"{what}: not within {LIMIT} s\n{run.text if run else ''}"
        assert run is None or run.process.poll() is None, f"{what}: the run has ended\n{run.text}"
        time.sleep(0.05)


def play(
    twin: Federation, server: Server, answering: Collection[int], missing: Collection[int]
) -> tuple[Server, dict[str, Any]]:
    """Play a round in which some clients answer, and others get their download and are never heard of again."""
    clients = [twin.clients[client] for client in sorted([*answering, *missing])]
    game = Round(twin.method, server, twin.channel, clients)
    with torch.random.fork_rng(devices=[]):
        for client in clients:
            audience, _, received = game.post(client)
            if client.id in answering:
                model, seed = twin.model(client, audience, received), train_seed(twin.seed, server.round, client)
                data, memory = twin.data[client.id], dict[str, torch.Tensor]()
                trained, answer = train_client(twin.method, twin.channel, model, data, received, memory, seed)
                game.take(client, answer, trained.loss)
    return game.close()


@dataclass
class Game:
    """One experiment on the nodes: its runs, its records, and its clients that can be held in training."""

    federation: Loopback
    twin: Federation
    out: Path
    run: Run | None = None

    def start(self, **config: Any) -> Run:
        given = {**EXPERIMENT, "out": str(self.out), **config}
        self.signals.mkdir(exist_ok=True)
        self.run = self.federation.run_app(APP, {name.replace("_", "-"): value for name, value in given.items()})
        return self.run

    @property
    def signals(self) -> Path:
        return self.out.with_name(f"{self.out.name}-signals")

    def hold(self, client: int, number: int) -> None:
        """Let a client go no further when it has begun to train in a round."""
        self.signals.mkdir(exist_ok=True)
        (self.signals / f"client-{client}-round-{number}.hold").touch()

    def release(self, client: int, number: int) -> None:
        (self.signals / f"client-{client}-round-{number}.hold").unlink()

    def until_held(self, client: int, number: int) -> None:
        """Wait until a client has begun to train."""
        began = self.signals / f"client-{client}-round-{number}.began"
        until(began.exists, f"client {client} in round {number}", self.run)
        began.unlink()

    def until_answered(self, client: int, times: int) -> None:
        """Wait until a node has sent so many updates in this run."""
        assert self.run is not None
        sent = re.compile(rf"\[RUN {self.run.id}\][^[]*Sending: train message [^[]*Sent successfully")
        member = self.federation.members[f"node-{client}"]
        until(lambda: len(sent.findall(member.said)) >= times, f"{times} answers of client {client}", self.run)

    def stop_after_answer(self, client: int) -> None:
        """Let a node leave when the server has its update and all others but one, in the first round.

        An answer that still lies on the SuperLink when its node leaves is lost: Flower asks first whether a node is
        online, and then whether it has answered.
        """
        assert self.run is not None
        run, others = self.run, f"{CLIENTS - 1} of {CLIENTS} nodes have answered"
        until(lambda: others in run.text, "all answers but one", run)
        self.federation.stop(f"node-{client}")

    def finish(self) -> Run:
        """Wait for the end of the run, and give it."""
        assert self.run is not None
        return self.federation.wait_run(self.run, LIMIT)

    def records(self) -> list[dict[str, Any]]:
        file = self.out / "rounds.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def check(self, *answered: Collection[int]) -> None:
        """Compare records and weights with a federation in which these clients alone took part, round by round."""
        records = self.records()
        assert [record["round"] for record in records] == list(range(1, len(answered) + 1))
        assert [record["clients"] for record in records] == [len(clients) for clients in answered]
        server = self.twin.start()
        for clients, record in zip(answered, records, strict=True):
            missing = [int(told.split()[1]) for told in record["refused"]]
            server, wanted = play(self.twin, server, clients, missing)
            assert record["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
            assert record["bytes_up"] == wanted["bytes_up"] and record["bytes_down"] == wanted["bytes_down"]
        kept = load_checkpoint(self.out)
        assert kept is not None and kept[0].round == len(answered)
        for name, weight in server.weights.items():
            torch.testing.assert_close(kept[0].weights[name], weight, rtol=0, atol=1e-6)
        assert not [path.name for path in self.out.iterdir() if path.name.startswith(".")]  # nothing half written

    def end(self) -> None:
        """Leave nothing that could disturb the next test."""
        for hold in self.signals.glob("*.hold"):
            hold.unlink()
        if self.run is not None and self.run.process.poll() is None:
            self.federation.stop_run(self.run)


@pytest.fixture
def game(federation: Loopback, twin: Federation, tmp_path: Path) -> Iterator[Game]:
    """Give an experiment whose nodes are all there."""
    for name in map("node-{}".format, ALL):
        if federation.members[name].process.poll() is not None:
            federation.restart(name)
        federation.wait_node(name)
    made = Game(federation, twin, tmp_path / "run")
    yield made
    made.end()


def refused(record: dict[str, Any], client: int, node: int | None) -> str:
    """Return why the one client that a record names was not used."""
    (told,) = record["refused"]
    assert told.startswith(f"client {client} (node {node}): ")
    return str(told)


def test_a_node_killed_in_mid_round_is_left_out_of_it_and_comes_back(game: Game) -> None:
    """The SuperLink misses the node after 20 seconds (60 with Flower's own heartbeats), and the round closes.

    The node is started again at once, as a service manager would do it. What it had begun is not repeated.
    """
    old = game.federation.members["node-1"].node_id
    game.hold(1, 1)
    run = game.start(rounds=2, min_nodes=1)
    game.until_held(1, 1)
    game.federation.kill("node-1")
    game.release(1, 1)
    new = game.federation.restart("node-1").node_id
    assert game.finish().status == "finished:completed", run.text
    game.check([0], ALL)
    first, second = game.records()
    assert "Node Unavailable" in refused(first, 1, old)
    assert first["refused"][0] in run.text
    assert second["refused"] == []
    assert f"Client 1 is now node {new}, and no longer node {old}." in run.text


def test_an_answer_that_comes_too_late_is_not_used_and_the_node_takes_part_again(game: Game) -> None:
    """A node works off its messages one after another, each in a process of its own.

    While it is busy with a round that has closed, it does not take the next round's message: that waits, and its time
    runs. The late answer goes to the SuperLink, which throws it away, as its message has expired; then the node takes
    the first message that has not. So a node that always takes too long is always left out, but is never behind by
    more than one message.
    """
    node, timeout = game.federation.members["node-1"].node_id, 30 * pace()
    game.hold(1, 1)
    run = game.start(rounds=2, timeout=timeout)
    game.until_held(1, 1)
    until(game.records, "the end of round 1", run)
    game.release(1, 1)
    assert game.finish().status == "finished:completed", run.text
    game.check([0], ALL)
    first, second = game.records()
    assert f"no answer within {timeout:g} seconds" in refused(first, 1, node)
    assert second["refused"] == []
    game.until_answered(1, 2)  # the late answer was sent, too


def test_a_node_leaves_between_rounds_and_comes_back(game: Game) -> None:
    old = game.federation.members["node-1"].node_id
    game.hold(0, 1)
    game.hold(0, 2)
    run = game.start(rounds=3, min_nodes=1)
    game.stop_after_answer(1)
    game.release(0, 1)
    game.until_held(0, 2)
    new = game.federation.restart("node-1").node_id
    game.release(0, 2)
    assert game.finish().status == "finished:completed", run.text
    game.check(ALL, [0], ALL)
    assert [record["refused"] for record in game.records()] == [[]] * 3
    assert f"Client 1 is now node {new}, and no longer node {old}." in run.text


def test_a_server_that_is_killed_in_mid_round_goes_on_where_it_was(game: Game) -> None:
    """First the ServerApp is killed, then the SuperLink with all that it has started; its database is kept.

    Flower starts neither again. Nodes go on with what they had begun, and their answers are ignored: the next run plays
    the round anew, and ends with the weights of a run that was never disturbed.
    """
    game.hold(1, 1)
    game.hold(1, 2)
    first = game.start(rounds=2, resume=True)  # nothing to resume yet: it begins
    game.until_held(1, 1)
    assert len(game.federation.kill_server_app()) == 1
    game.federation.stop_run(first)  # Flower itself would notice after a minute
    assert game.records() == []
    game.release(1, 1)

    game.start(rounds=2, resume=True)
    game.until_held(1, 2)
    game.federation.kill("superlink")
    game.check(ALL)
    game.release(1, 2)
    game.federation.restart("superlink")

    last = game.start(rounds=2, resume=True)
    assert game.finish().status == "finished:completed", last.text
    assert "Going on after round 1." in last.text
    game.check(ALL, ALL)
    assert [record["refused"] for record in game.records()] == [[]] * 2


def test_too_few_nodes_are_waited_for_and_then_the_run_fails_and_says_what_to_do(game: Game) -> None:
    game.hold(0, 1)
    run = game.start(rounds=2, min_nodes=2, wait=8.0)
    game.stop_after_answer(1)
    game.release(0, 1)
    until(lambda: "Waiting for nodes: 1 of 2 are there; giving up in 8 s." in run.text, "a word about it", run)
    assert game.finish().status == "finished:failed"
    told = "Only 1 of at least 2 nodes are there after 8 seconds. Start more SuperNodes, or lower the minimum"
    assert told in run.text and told in run.facts["status-details"]
    game.check(ALL)  # what was done is there, to be resumed
