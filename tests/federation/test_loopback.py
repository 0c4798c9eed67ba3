"""The harness itself: whatever happens, nothing that it started survives it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.federation import FederationError, Loopback, make_certificates, processes

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "federation.py"


def test_nothing_survives_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Loopback(tmp_path, tls=False, auth=False) as federation:
        federation.start_node("node-0", {"partition-id": 0})
        assert [node["status"] for node in federation.supernodes()] == ["online"]
        assert len(processes(tmp_path)) >= 4  # each member, and the process that starts its apps
        _ = 1 / 0
    assert not processes(tmp_path)


def test_a_superlink_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    with Loopback(tmp_path / "first", tls=False, auth=False) as first:
        second = Loopback(tmp_path / "second", tls=False, auth=False)
        second.port = first.port
        with pytest.raises(FederationError, match="(?s)superlink ended with .*address already in use"):
            second.__enter__()
        assert not processes(tmp_path / "second")


def test_a_folder_with_other_keys_is_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    with pytest.raises(FederationError, match="is not empty"):
        Loopback(tmp_path).__enter__()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_survives_the_script_when_it_is_interrupted(
    number: signal.Signals, tmp_path: Path, plain_app: Path
) -> None:
    command = [sys.executable, SCRIPT, "--app", plain_app, "--nodes", "2", "--rounds", "50", "--folder", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as script:
        assert script.stdout is not None
        while not any("flwr-clientapp" in line for line in processes(tmp_path).values()):
            assert script.poll() is None, script.stdout.read()
            time.sleep(0.2)
        script.send_signal(number)
        script.communicate(timeout=30)
    assert script.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    end = time.monotonic() + (10 if number == signal.SIGKILL else 0)  # then somebody else has to tidy up, and notices
    while processes(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert not processes(tmp_path)


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    assert (tmp_path / "server.key").stat().st_mode & 0o777 == 0o600
