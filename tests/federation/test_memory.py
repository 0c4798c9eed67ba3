"""A client under a hard limit of memory: a full model kills it, the sketch of the same model trains."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import federation as bench
from benchmarks.limits import EACH, MemoryLimit
from examples.federation import Loopback

CANNOT = "can't allocate memory"
IMPATIENT = [sys.executable, str(Path(__file__).resolve().parent / "impatient.py")]


@pytest.fixture
def limits() -> Iterator[list[MemoryLimit]]:
    """Limit three nodes, each to the same memory of its own."""
    with MemoryLimit(bench.LIMIT) as one, MemoryLimit(bench.LIMIT) as two, MemoryLimit(bench.LIMIT) as three:
        yield [one, two, three]


def wait_for_death(federation: Loopback, limit: MemoryLimit, seconds: float = 200) -> None:
    """Wait until the kernel has killed a process; where it does not, until allocation has failed."""
    end = time.monotonic() + seconds
    while not (limit.killed or "MemoryError" in federation.logs("node-0") or CANNOT in federation.logs("node-0")):
        assert time.monotonic() < end, federation.logs("node-0")
        time.sleep(0.2)


@pytest.mark.slow
def test_a_full_model_kills_a_client_whose_memory_a_sketch_fits_in(limits: list[MemoryLimit], tmp_path: Path) -> None:
    """100 million parameters. Flower misses a killed client after a minute, in which the other federation runs."""
    full, *small = limits
    with Loopback(tmp_path / "a", database=False) as fedavg, Loopback(tmp_path / "b", database=False) as comfetch:
        bench.start_nodes(fedavg, [[*full.prefix, *IMPATIENT]])
        failing = bench.start(fedavg, "fedavg", {**bench.LARGE, "num-server-rounds": 1})
        wait_for_death(fedavg, full)

        bench.start_nodes(comfetch, [[*limit.prefix, *IMPATIENT] for limit in small])
        done = bench.start(comfetch, "comfetch", bench.LARGE).finish()
        failed = failing.finish()

        assert done["status"] == "finished:completed", done["details"]
        assert [record["clients"] for record in done["rounds"]] == [2, 2]
        assert len(done["clients"]) == 4  # a process for each message
        assert [limit.killed for limit in small] == [0, 0]

        assert not any("training_cpu" in client for client in failed["clients"])  # none has trained
        [record] = failed["rounds"]
        assert record["clients"] == 0
        assert record["refused"][0].startswith(f"client 0 (node {fedavg.members['node-0'].node_id}): ")
        if full.kind != EACH:
            assert full.killed == 1
            assert fedavg.members["node-0"].process.poll() is None  # it was the client, and not the node
            assert "ClientApp stopped responding" in record["refused"][0]
