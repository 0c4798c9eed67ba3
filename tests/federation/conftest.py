"""What the tests with real processes share. They run with `make test-federation`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.federation import Loopback

HERE = Path(__file__).resolve().parent
# An app's modules are imported by the processes that run it, not by pytest looking for doctests.
collect_ignore = ["faults_app", "plain_app"]


@pytest.fixture(scope="session")
def plain_app() -> Path:
    """Give the folder of a minimal app: each node adds 1 + partition-id to a vector of zeros."""
    return HERE / "plain_app"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    """Start a SuperLink with TLS and node authentication, one for all tests of a file. Logs stay in pytest's folder."""
    with Loopback(tmp_path_factory.mktemp("federation")) as loopback:
        yield loopback
