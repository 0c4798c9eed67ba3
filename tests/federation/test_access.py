"""Who may take part: only nodes with a registered key, and only over TLS with the right certificate."""

import contextlib
import http.client
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from examples.federation import FederationError, Loopback, make_certificates

REFUSED = "Exit Code: 305"  # Flower's own code; the process ends with 1
IMPATIENT = ("--max-retries", "1")  # a node that cannot connect tries for ever otherwise


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an authority that has nothing to do with the federation."""
    return make_certificates(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def nodes(federation: Loopback, other_ca: Path) -> None:
    """Start two good nodes and all bad ones at once: each takes seconds to start, and to give up."""
    for index in range(2):
        config = {"partition-id": index, "num-partitions": 2}
        federation.start_node(f"good-{index}", config, wait=False)
    federation.start_node("unregistered", {}, register=False, wait=False)
    federation.start_node("wrong-authority", {}, ca=other_ca, options=IMPATIENT, wait=False)
    federation.start_node("without-key", {}, key=False, wait=False)
    federation.start_node("plain", {}, key=False, tls=False, options=IMPATIENT, wait=False)

    federation.unregister(federation.register("dismissed"))
    federation.start_node("dismissed", {}, register=False, wait=False)


def refusal(federation: Loopback, name: str) -> str:
    """Wait until a node has given up, and give its log."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        federation.members[name].process.wait(60)
    assert federation.members[name].process.returncode == 1, federation.logs(name)
    assert federation.members[name].node_id is None
    assert REFUSED in federation.logs(name)
    return federation.logs(name)


def test_registered_nodes_finish_a_round_over_tls(federation: Loopback, nodes: None, plain_app: Path) -> None:
    ids = {str(federation.wait_node(f"good-{index}")) for index in range(2)}
    run = federation.wait_run(federation.run_app(plain_app))
    assert run.status == "finished:completed", run.text
    assert "Received 2 results and 0 failures" in run.text
    assert "mean of the result: 1.500" in run.text  # the mean of 1 and 2: both nodes' node-config arrived
    assert {node["node-id"] for node in federation.supernodes() if node["status"] == "online"} == ids


def test_an_unregistered_node_is_refused_and_says_so(federation: Loopback, nodes: None) -> None:
    assert "Failed to activate SuperNode" in refusal(federation, "unregistered")
    assert "No SuperNode found with the given public key" in federation.logs("superlink")


def test_a_node_whose_registration_was_taken_back_is_refused(federation: Loopback, nodes: None) -> None:
    assert "Failed to activate SuperNode" in refusal(federation, "dismissed")


def test_a_node_without_a_key_is_refused(federation: Loopback, nodes: None) -> None:
    assert "All SuperNodes must be registered" in refusal(federation, "without-key")


def test_a_node_that_trusts_another_authority_does_not_connect(federation: Loopback, nodes: None) -> None:
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(federation, "wrong-authority")


def test_a_node_without_tls_does_not_connect(federation: Loopback, nodes: None) -> None:
    refusal(federation, "plain")


def test_a_plain_http_client_gets_no_answer_from_the_tls_port(federation: Loopback) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises((urllib.error.URLError, http.client.HTTPException, OSError)):
        opener.open(f"http://{federation.address}/", timeout=5)


def test_a_run_is_not_handed_to_a_superlink_of_another_authority(
    federation: Loopback, other_ca: Path, plain_app: Path
) -> None:
    federation.add_connection("stranger", other_ca)
    with pytest.raises(FederationError, match="Connection to the SuperLink is unavailable"):
        federation.command("run", str(plain_app), "stranger")


def test_a_run_is_not_handed_over_without_tls(federation: Loopback, plain_app: Path) -> None:
    federation.add_connection("plain", None)
    with pytest.raises(FederationError, match="Connection to the SuperLink is unavailable"):
        federation.command("run", str(plain_app), "plain")
