"""Flower as a second driver: a strategy that runs any method, round by round, over a grid of nodes."""

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result
from torch import nn

from comfetch import records
from comfetch.accounting import epsilon
from comfetch.capacity import format_capacities
from comfetch.driver import Channel, Record, Round, check_channel, sample, train_seed
from comfetch.errors import OptionError, UploadError
from comfetch.flower.messages import CONFIG, METRICS, to_arrays, to_config, to_content, to_message, to_state
from comfetch.flower.nodes import Nodes, exchange, reason
from comfetch.footprint import format_bytes, meta_model
from comfetch.methods.base import Build, Client, Method, Server

EXAMPLES = "num-examples"
"""The metric that Flower's own strategies weight by."""
LOSSES = ("loss", "train_loss", "train-loss")
"""Names that apps give the training loss."""
SLACK = 2**16
"""Bytes that an upload may have beyond twice what is expected: headers of many small arrays."""
EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""What Flower says of messages that nobody has answered in time, among others."""
MOST_IDLE = 3
"""After so many rounds in a row without any upload that can be used, the run is given up."""
RESPOND = f"{MessageType.TRAIN}.respond"
"""The second exchange of methods that have one."""


class Strategy(flower.Strategy):
    """Run a method on Flower: `start` as with any strategy of Flower; the model's full weights stay on the server.

    Args:
        method: such as `comfetch.methods.Comfetch(compression=10)`. build: the model's constructor.
        fraction_train, fraction_evaluate: parts of the nodes that train and test in a round, drawn by key and round.
        min_nodes: nodes that must be there before a round begins; wait: seconds to wait for them.
        ask: ask each node once for its number, its examples and what it can hold, which needs a client app that answers
            (`comfetch.flower.client_app` does); always done if the method has capacity classes.
        channel: wire format, privacy, largest change of a client.
        pretrained: the initial arrays are trained: project them; fresh ones are scaled to keep their variance.
        predict: (client's model on the meta device) -> bytes of its training step; nodes may then state their memory.
            For a batch of inputs: `lambda model: comfetch.footprint.count(model, batch, "adam").total`.
        seed: what clients' data order and the model's own initial weights are drawn from.
        out: folder for records and checkpoints, written after each round; resume: go on from there.
    """

    def __init__(
        self, method: Method, build: Build, *, fraction_train: float = 1.0, fraction_evaluate: float = 1.0,
        min_nodes: int = 2, wait: float = 600.0, ask: bool = False, channel: Channel | None = None,
        pretrained: bool = False, predict: Callable[[nn.Module], int] | None = None, seed: int = 0,
        out: str | Path | None = None, resume: bool = False,
    ) -> None:  # fmt: skip
        for name, value in (("fraction_train", fraction_train), ("fraction_evaluate", fraction_evaluate)):
            if not (isinstance(value, int | float) and 0 <= value <= 1):
                raise OptionError(f"{name}={value!r} is not in [0, 1]. It is the part of nodes in a round.")
        self.method, self.build, self.seed, self.pretrained = method, build, seed, pretrained
        self.fraction_train, self.fraction_evaluate = fraction_train, fraction_evaluate
        self.channel = channel or Channel()
        check_channel(method, self.channel)
        self.predict = predict
        capacities = getattr(method, "capacities", None)
        needs = None if predict is None else self.predicted_bytes
        self.nodes = Nodes(min_nodes, wait, ask or capacities is not None, capacities, needs)
        self.out, self.resume = None if out is None else Path(out), resume
        self.server: Server | None = None
        self.timeout = 3600.0
        self._round: Round | None = None
        self._posted: list[tuple[Client, Message]] = []
        self._measured: dict[int, tuple[int, int | None]] = {}
        self._idle = self._kept = 0
        self.bytes_evaluation = 0

    def summary(self) -> None:
        """Log what is run."""
        log(INFO, "\t├──> Method: %s", describe(self.method))
        log(INFO, "\t├──> Wire: %s down, %s up", self.channel.wire.down, self.channel.wire.up)
        log(INFO, "\t└──> Nodes: at least %d, %.2f of them train, %.2f test",
            self.nodes.least, self.fraction_train, self.fraction_evaluate)  # fmt: skip

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord | None = None, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:  # fmt: skip
        """Run rounds until there are `num_rounds`, those of an earlier start included if it is resumed.

        Without `initial_arrays` the model starts with the weights of its constructor. `evaluate_fn` gets the server's
        own full weights.
        """
        self.timeout = timeout
        history = self._begin(initial_arrays, num_rounds)
        self.summary()
        result = Result()
        server = self._server
        if evaluate_fn is not None and server.round == 0 and (found := evaluate_fn(0, self._full())) is not None:
            result.evaluate_metrics_serverapp[0] = found
        while self._server.round < num_rounds:
            number, began = self._server.round + 1, time.perf_counter()
            log(INFO, "[ROUND %d/%d]", number, num_rounds)
            record = self.play(grid, self._server, train_config)[1]
            result.train_metrics_clientapp[number] = _metrics(record)
            tested = self.test(grid, evaluate_config) if self.fraction_evaluate else {}
            if tested:
                result.evaluate_metrics_clientapp[number] = MetricRecord(dict(tested))
            found = None if evaluate_fn is None else evaluate_fn(number, self._full())
            if found is not None:
                result.evaluate_metrics_serverapp[number] = found
            if tested:
                record |= {f"clients_{name}": value for name, value in tested.items()}
                record["bytes_evaluation"] = self.bytes_evaluation
            record |= dict(found or {})
            record["seconds"] = time.perf_counter() - began
            if self.channel.privacy.where != "none":
                record["epsilon"] = epsilon(self.channel.privacy, number)
            log(INFO, "\t└──> %s", tell(record))
            history.append(record)
            if self.out is not None:
                records.append_round(self.out, record)
                records.save_checkpoint(self.out, self._server, {})
        result.arrays = self._full()
        return result

    def play(self, grid: Grid, server: Server, config: ConfigRecord | None = None) -> tuple[Server, Record]:
        """Run one round from a server's state: what `start` does in each, and what other drivers may call."""
        self.server = server
        messages = self.configure_train(server.round + 1, ArrayRecord(), config or ConfigRecord(), grid)
        self._take(exchange(grid, messages, self.timeout))
        assert self._round is not None
        request = self._round.ask() if self._round.taken else None
        if request is not None:
            nodes = {client.id: node for node, client in self.nodes.clients.items()}
            content = RecordDict(to_content(request))
            self._posted = [
                (client, Message(content, nodes[client.id], RESPOND, ttl=self.timeout)) for client in self._round.asked
            ]
            self._take(exchange(grid, [message for _, message in self._posted], self.timeout))
        if self._round.taken:
            self.server, record = self._round.close()
            self._idle = 0
        else:
            self.server, record = self._skip(server)
        peaks = [measured for measured, _ in self._measured.values()]
        predicted = [p for _, p in self._measured.values() if p is not None]
        record |= {"client_memory": max(peaks, default=0), "client_memory_predicted": max(predicted, default=None)}
        record["client_kept"] = self._kept
        return self.server, record

    def _skip(self, server: Server) -> tuple[Server, Record]:
        """Go on after a round that nobody has answered in a way that can be used, but not for ever."""
        assert self._round is not None
        self._idle += 1
        if self._idle == MOST_IDLE:
            self._round.close()  # says why
        log(WARNING, "Round %d: no upload could be used; the weights stay as they are.", server.round + 1)
        return replace(server, round=server.round + 1), self._round.record(server.round + 1)

    def test(self, grid: Grid, config: ConfigRecord | None = None) -> dict[str, float]:
        """Let nodes test the model that clients run; their metrics are averaged by number of examples."""
        messages = self.configure_evaluate(self._server.round, ArrayRecord(), config or ConfigRecord(), grid)
        found = self.aggregate_evaluate(self._server.round, [r for r in exchange(grid, messages, self.timeout) if r])
        return {} if found is None else {name: float(value) for name, value in found.items()}  # type: ignore[arg-type]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Post each chosen node its download; `arrays` are not used: the server's state is ours."""
        present = self.nodes.present(grid)
        nodes = {client.id: node for node, client in present.items()}
        chosen = sample(self.method.key, self._server.round, present.values(), self.fraction_train)
        self._round, self._kept = Round(self.method, self._server, self.channel, chosen), 0
        messages = self._messages(self._round, chosen, nodes, MessageType.TRAIN, config, server_round)
        self._posted = list(zip(chosen, messages, strict=True))
        log(INFO, "configure_train: %d of %d nodes", len(chosen), len(present))
        return [message for _, message in self._posted]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the replies to what `configure_train` has posted, and make the server's next state."""
        by_message = {reply.metadata.reply_to_message_id: reply for reply in replies}
        self._take([by_message.get(message.metadata.message_id) for _, message in self._posted])
        assert self._round is not None
        self.server, record = self._round.close()
        return self._full(), _metrics(record)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Post each chosen node what clients run, never the full weights to one that has a sketch."""
        if not self.fraction_evaluate:
            return []
        present = self.nodes.present(grid)
        nodes = {client.id: node for node, client in present.items()}
        post = Round(self.method, self._server, self.channel)
        chosen = sample(self.method.key, self._server.round, present.values(), self.fraction_evaluate)
        messages = self._messages(post, chosen, nodes, MessageType.EVALUATE, config, server_round)
        self.bytes_evaluation = post.bytes_down
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average all numbers of the nodes' metrics by their number of examples."""
        rows = []
        for reply in replies:
            try:
                rows.append(_read_metrics(reply))
            except UploadError as error:
                log(WARNING, "aggregate_evaluate: refused: node %d: %s", reply.metadata.src_node_id, error)
        rows = [row for row in rows if row.get(EXAMPLES, 0) > 0]
        if not rows:
            return None
        total = sum(row[EXAMPLES] for row in rows)
        names = [name for name in rows[0] if name != EXAMPLES and all(name in row for row in rows)]
        mean = {name: sum(row[name] * row[EXAMPLES] for row in rows) / total for name in names}
        return MetricRecord({**mean, EXAMPLES: total})

    def predicted_bytes(self, capacity: float | None) -> int:
        """Predict what a training step takes in a class."""
        assert self.predict is not None
        client = Client(0, 1, capacity)
        model = self.method.client_model(self.build, client, self.method.download(self._server, client))
        return self.predict(meta_model(model))

    @property
    def _server(self) -> Server:
        if self.server is None:
            self._begin(None, None)
        assert self.server is not None
        return self.server

    def _begin(self, initial: ArrayRecord | None, rounds: int | None) -> list[Record]:
        """Make the first state, or load the one of an earlier start."""
        if self.out is not None:
            told = {"method": describe(self.method), "key": self.method.key, "seed": self.seed, "rounds": rounds}
            records.open_folder(self.out, told, self.resume and self.out.exists())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            given = None if initial is None else to_state(initial)
            self.server = self.method.start(self.build, given, fresh=not self.pretrained)
        kept = records.load_checkpoint(self.out) if self.out is not None and self.resume else None
        if kept is not None:
            self.server = kept[0]
            log(INFO, "Going on after round %d.", self.server.round)
        return [] if self.out is None else records.cut_rounds(self.out, self.server.round)

    def _messages(
        self, post: Round, clients: list[Client], nodes: dict[int, int], kind: str, config: ConfigRecord,
        server_round: int,
    ) -> list[Message]:  # fmt: skip
        """Write to clients. All of one audience share their arrays: the server holds them once."""
        shared: dict[Hashable, dict[str, Any]] = {}
        messages = []
        for client in clients:
            audience, packed, _ = post.post(client)
            if audience not in shared:
                shared[audience] = to_content(packed, {**config, "server-round": server_round})
            seed = train_seed(self.seed, self._server.round, client).to_bytes(8, "big")
            own = to_config({"client": client.id, "measure": client.id not in self._measured, "seed": seed})
            content = {**shared[audience], CONFIG: ConfigRecord({**shared[audience][CONFIG], **own})}
            messages.append(Message(RecordDict(content), nodes[client.id], kind, ttl=self.timeout))
        return messages

    def _take(self, replies: list[Message | None]) -> None:
        """Take replies in the order of the clients, so that sums do not depend on who was first."""
        assert self._round is not None
        for (client, posted), reply in zip(self._posted, replies, strict=True):
            node = posted.metadata.dst_node_id
            if reply is None or _is_over(posted, reply):
                self._round.refuse(f"client {client.id} (node {node}): no answer within {self.timeout:g} seconds.")
            elif reply.has_error():
                self._round.refuse(f"client {client.id} (node {node}): {reason(reply)}")
            else:
                self._take_one(client, node, reply, posted)

    def _take_one(self, client: Client, node: int, reply: Message, posted: Message) -> None:
        assert self._round is not None
        try:
            metrics = _read_metrics(reply)
            claimed = int(metrics.get(EXAMPLES, client.examples))
            if client.examples not in (0, claimed) or claimed < 1:
                raise UploadError(f"it claims {claimed} examples; {client.examples or 'at least 1'} expected.")
            sent = self._round.sent[self.method.audience(self._round.server, client)][1]
            expected = self.method.expected(self._round.request or sent)
            most = 2 * sum(tensor.numel() * max(4, tensor.element_size()) for tensor in expected.values()) + SLACK
            message = to_message(reply.content, most)
            if not message.text:  # an app that knows nothing of us: Flower itself says what it replies to
                message = replace(message, text=(self._round.request or sent).text)
        except UploadError as error:
            self._round.refuse(f"client {client.id} (node {node}): {error}")
            return
        known = replace(client, examples=claimed)
        loss = next((metrics[name] for name in LOSSES if name in metrics), None)
        self._kept = max(self._kept, int(metrics.get("kept", 0)))
        if "memory" in metrics:
            predicted = metrics.get("memory-predicted")
            self._measured[client.id] = int(metrics["memory"]), None if predicted is None else int(predicted)
        self._round.take(known, message, None if loss is None else self.channel.told(loss), f" (node {node})")

    def _full(self) -> ArrayRecord:
        return to_arrays(self._server.weights)[0]


def describe(method: Method) -> str:
    """Say which method runs, and how far it compresses."""
    capacities, compression = getattr(method, "capacities", None), getattr(method, "compression", None)
    if capacities:
        return f"{method.name}, clients of capacity {format_capacities(capacities)}"
    return method.name if compression is None else f"{method.name}, compression {compression:g}"


def tell(record: Record) -> str:
    """Write a round's record in one line."""
    named = (("loss", "loss"), ("accuracy", "accuracy"), ("clients_accuracy", "accuracy on clients"))
    parts = [f"{word} {record[name]:.4g}" for name, word in named if record.get(name) is not None]
    traffic = f"{format_bytes(record['bytes_down'])} down, {format_bytes(record['bytes_up'])} up"
    refused = f", {len(record['refused'])} not used" if record["refused"] else ""
    return ", ".join([*parts, traffic, f"{record['clients']} clients{refused}", f"{record['seconds']:.1f} s"])


def _read_metrics(reply: Message) -> dict[str, float]:
    """Read the finite numbers of a reply's metrics."""
    if not reply.has_content():
        raise UploadError(reason(reply))
    found = reply.content.get(METRICS, MetricRecord())
    if not isinstance(found, MetricRecord):
        raise UploadError(f"{METRICS} is a {type(found).__name__}, not a MetricRecord.")
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    for name, value in numbers.items():
        if not abs(value) < 2**53:
            raise UploadError(f"its metric {name} is {value}.")
    return numbers


def _is_over(posted: Message, reply: Message) -> bool:
    """Tell whether Flower says that there is no answer since the message has expired, a moment before we give it up."""
    over = posted.metadata.created_at + posted.metadata.ttl <= time.time()
    return over and reply.has_error() and reply.error.code in EXPIRED


def _metrics(record: Record) -> MetricRecord:
    """Return the numbers of a record."""
    return MetricRecord({k: v for k, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)})
