"""A federation in which every client but two attacks, each in its own way; prints what the server made of it.

Run as a script, since Ray takes over the process: `python -m tests.federation.hostile_app FOLDER`.
"""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from numpy.lib import format as npy

from comfetch.experiment import Experiment
from comfetch.federation import make_federation
from comfetch.flower import Strategy, client_app
from comfetch.flower.apps import site_of
from comfetch.flower.client import Site

NAME = "3.weight"
HONEST = 3


def arrays(reply: Message) -> dict[str, Array]:
    return dict(reply.content["arrays"])


def with_arrays(reply: Message, changes: dict[str, Any]) -> RecordDict:
    """Return the content with some arrays changed; None removes one."""
    found = {name: array for name, array in {**arrays(reply), **changes}.items() if array is not None}
    return RecordDict({**reply.content, "arrays": ArrayRecord(found)})


def scaled(factor: float) -> Callable[[Message], RecordDict]:
    return lambda reply: with_arrays(
        reply, {n: Array(a.numpy() * np.float32(factor)) for n, a in arrays(reply).items()}
    )


def with_text(reply: Message, **changes: Any) -> RecordDict:
    ours = {f"comfetch.{name}": value for name, value in changes.items()}
    return RecordDict({**reply.content, "config": ConfigRecord({**reply.content["config"], **ours})})


def with_metrics(reply: Message, **changes: Any) -> RecordDict:
    return RecordDict({**reply.content, "metrics": MetricRecord({**reply.content["metrics"], **changes})})


def array(data: bytes) -> Array:
    return Array("float32", (1,), "numpy.ndarray", data)


def lying() -> bytes:
    """Claim a quarter of a terabyte in the header of a small array."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (2**18, 2**18)})
    return file.getvalue() + bytes(16)


ATTACKS: dict[str, tuple[Callable[[Message], RecordDict], str]] = {
    "an unknown name": (lambda r: with_arrays(r, {"evil": Array(np.zeros(3, np.float32))}), "evil is unknown"),
    "a missing name": (lambda r: with_arrays(r, {NAME: None}), f"{NAME} is missing"),
    "a wrong shape": (lambda r: with_arrays(r, {NAME: Array(np.zeros((2, 2), np.float32))}), "of shape (2, 2)"),
    "a wrong type": (lambda r: with_arrays(r, {NAME: Array(arrays(r)[NAME].numpy().astype("f8"))}), "torch.float64"),
    "text for numbers": (lambda r: with_arrays(r, {NAME: Array(np.array(["x"]))}), "which no tensor has"),
    "no array at all": (lambda r: with_arrays(r, {NAME: array(b"x")}), "no array of numpy"),
    "a lying header": (lambda r: with_arrays(r, {NAME: array(lying())}), "bytes, but its shape"),
    "no arrays": (lambda r: RecordDict({"metrics": r.content["metrics"]}), "an ArrayRecord 'arrays' was expected"),
    "another key": (lambda r: with_text(r, key="00000000000000ff"), "key is '00000000000000ff'"),
    "a stale round": (lambda r: with_text(r, round="-1"), "round is '-1'"),
    "NaN": (scaled(float("nan")), "NaN or infinite"),
    "infinities": (scaled(float("inf")), "NaN or infinite"),
    "an absurd norm": (scaled(1e9), "its norm is"),
    "an oversized message": (
        lambda r: with_arrays(r, {NAME: Array(np.zeros(2**22, np.float32))}), "bytes of arrays, above"),
    "many more examples": (lambda r: with_metrics(r, **{"num-examples": 10**9}), "it claims 1000000000 examples"),
    "a negative number of examples": (lambda r: with_metrics(r, **{"num-examples": -5}), "it claims -5 examples"),
    "NaN for a loss": (lambda r: with_metrics(r, loss=float("nan")), "its metric loss is nan"),
    "a record of the wrong kind": (
        lambda r: RecordDict({**r.content, "metrics": ConfigRecord({"num-examples": 3})}), "not a MetricRecord"),
}  # fmt: skip
"""What is sent instead of an honest answer, and what the server must say of it."""

EXPERIMENT = Experiment.of({
    "task": "digits", "limit": 600, "clients": HONEST + len(ATTACKS), "compression": 8.0, "rounds": 1, "key": 2,
})  # fmt: skip


def spoil(msg: Message, context: Context, call_next: Any) -> Message:
    """Train honestly, and answer otherwise."""
    reply: Message = call_next(msg, context)
    number = int(context.node_config["partition-id"]) - HONEST
    if number >= 0:
        attack, _ = list(ATTACKS.values())[number]
        return Message(attack(reply), reply_to=msg)
    return reply


def site(context: Context) -> Site:
    return site_of(EXPERIMENT, context, None, "cpu")


def main(folder: Path) -> None:
    """Run a round with Flower, and write what came of it."""
    task, build = EXPERIMENT.load()
    method = EXPERIMENT.make_method()
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        strategy = Strategy(
            method, build, ask=True, min_nodes=EXPERIMENT.clients, out=folder / "run", fraction_evaluate=0.0
        )
        strategy.start(grid, num_rounds=EXPERIMENT.rounds, timeout=300)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"include_dashboard": False}}
    run_simulation(server, client_app(site, mods=[spoil]), EXPERIMENT.clients, backend_config=resources)
    federation = make_federation(EXPERIMENT.make_method(), task, build, EXPERIMENT.clients)
    federation.clients = federation.clients[:HONEST]
    federation.round(federation.start())
    alone, _ = federation.round(federation.start())
    from comfetch.records import load_checkpoint, read_rounds

    kept = load_checkpoint(folder / "run")
    assert kept is not None
    away = max(float((kept[0].weights[n] - alone.weights[n]).abs().max()) for n in alone.weights)
    result = {"record": read_rounds(folder / "run")[-1], "away": away}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
