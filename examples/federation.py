"""Start a real federation on this machine: a SuperLink and SuperNodes as separate processes on loopback.

    python examples/federation.py                              # examples/flower_app on four nodes
    python examples/federation.py --nodes 2 --rounds 5 --folder /tmp/federation
    python examples/federation.py --app path/to/another/app

The SuperLink speaks TLS only, with a certificate of an authority made for the occasion, and takes in only nodes
whose public keys are registered. On many machines the same commands run by hand: see docs/deploy.md.

`Loopback` does the same for programs:

    with Loopback() as federation:
        federation.start_node("node-0", {"partition-id": 0, "num-partitions": 2})
        federation.start_node("node-1", {"partition-id": 1, "num-partitions": 2})
        run = federation.run_app("examples/flower_app", {"num-server-rounds": 3})
        print(federation.wait_run(run).status)
"""

import argparse
import contextlib
import datetime
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Value = bool | int | float | str

HOST = "127.0.0.1"
SUPERLINK = "superlink"
COMMAND = "command"
CONNECTION = "loopback"
MARK = "FEDERATION_PROCESS"
TAKEN_IN = r"SuperNode ID: (\d+)"
ENVIRONMENT = {
    # Nothing calls out, and nothing is installed behind the user's back.
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "NO_PROXY": f"{HOST},localhost",
    "no_proxy": f"{HOST},localhost",
    # A message waits up to so many seconds before its client process is started; Flower's default is 1.
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    # All nodes share the cores of one machine.
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


class FederationError(RuntimeError):
    """A process of the federation ended, or was not ready in time."""


# Certificates and keys


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _write_key(key: ec.EllipticCurvePrivateKey, path: Path, form: serialization.PrivateFormat) -> None:
    text = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    path.touch(mode=0o600)
    path.write_bytes(text)


def make_certificates(folder: Path) -> Path:
    """Make an authority and a certificate of it for 127.0.0.1 and localhost, and give the authority's path.

    Writes ca.crt, server.crt and server.key. The authority's own key is not kept: nobody can sign with it again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    now = datetime.datetime.now(datetime.UTC)

    def certificate(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name("loopback authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )

    usage = dict.fromkeys(
        ["content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
         "decipher_only"], False,
    )  # fmt: skip
    signs = x509.KeyUsage(digital_signature=False, key_cert_sign=True, crl_sign=True, **usage)
    serves = x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **usage)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")])
    ca = (
        certificate("loopback authority", authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs, critical=True)
        .sign(authority, hashes.SHA384())
    )
    crt = (
        certificate("loopback server", server)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(serves, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
        .sign(authority, hashes.SHA384())
    )
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.crt").write_bytes(crt.public_bytes(serialization.Encoding.PEM))
    _write_key(server, folder / "server.key", serialization.PrivateFormat.PKCS8)
    return folder / "ca.crt"


def make_node_key(folder: Path, name: str) -> Path:
    """Make a node's key pair, NAME and NAME.pub, as `ssh-keygen -t ecdsa -b 384` does, and give the private one's path.

    Only the public key leaves the node: the SuperLink registers it, and the node signs its requests with the other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_key(key, folder / name, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / f"{name}.pub").write_bytes(public + b" " + name.encode() + b"\n")
    return folder / name


# Processes


def free_port() -> int:
    """Ask the system for a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def processes(folder: Path, name: str = "") -> dict[int, str]:
    """Find the processes of the federation in a folder, or of one member, and give {process id: command line}.

    A mark in the environment tells: it is inherited, so this finds what a process has started, in whatever session,
    and also after its end. Without /proc it finds nothing, and process groups alone are relied on.
    """
    found, wanted = {}, f"{MARK}={folder}:{name}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marks = [line for line in (process / "environ").read_bytes().split(b"\0") if line.startswith(wanted)]
            if wanted in marks or (marks and not name):
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(process.name)] = line.decode(errors="replace")
    return found


def kill_processes(folder: Path, name: str = "") -> None:
    """Kill the processes of the federation in a folder, or of one member, until there are none."""
    while alive := processes(folder, name):
        for process_id in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        time.sleep(0.05)


# A process of its own that reads until the other end of its input is gone, also by kill -9, and then tidies up.
KEEPER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from federation import kill_processes
sys.stdin.read()
kill_processes(Path(sys.argv[2]))
"""


def toml(values: Mapping[str, Value]) -> str:
    """Write values as Flower's options take them: key=value, strings in quotes, separated by spaces."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())


def plain(text: str) -> str:
    """Take the colours out of a log."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@dataclass
class Member:
    """A SuperLink or SuperNode: how it was started, its process and its log."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: Path
    process: "subprocess.Popen[bytes]"
    log_start: int  # where this process begins in the log: a restarted member writes on

    @property
    def said(self) -> str:
        """What the process has written into its log."""
        return plain(self.log.read_bytes()[self.log_start :].decode(errors="replace"))

    @property
    def node_id(self) -> int | None:
        """The node's id, once the SuperLink has taken it in."""
        found = re.search(TAKEN_IN, self.said)
        return int(found[1]) if found else None


@dataclass
class Run:
    """A run of an app: the process of `flwr run`, its log, and what became of it."""

    process: "subprocess.Popen[bytes]"
    log: Path
    id: int
    status: str = ""  # as SuperLink tells it: pending, starting, running, finished:completed, finished:failed, …
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What the server app has logged and printed so far (if the run is streamed)."""
        return plain(self.log.read_text(errors="replace"))


class Loopback:
    """A federation on this machine. Its processes end with the `with` block, however that ends, kill -9 included.

    Args:
        folder: for keys, state and logs; a temporary one, removed at the end, if not given.
        tls: the SuperLink has a certificate, and speaks nothing else than TLS.
        auth: only nodes with a registered key are taken in (needs `tls`).
        database: the SuperLink keeps its state in a file, and so over a restart; if not, in memory. Flower's file is
            locked for seconds at a time while messages of hundreds of megabytes are written on a busy machine.
    """

    def __init__(
        self, folder: Path | str | None = None, *, tls: bool = True, auth: bool = True, database: bool = True
    ) -> None:
        if auth and not tls:
            raise ValueError("auth=True needs tls=True: Flower authenticates nodes over TLS only. Give auth=False too.")
        self.tls, self.auth, self.database = tls, auth, database
        self._temporary = tempfile.TemporaryDirectory(prefix="federation-") if folder is None else None
        self.folder = Path(self._temporary.name if self._temporary else str(folder)).resolve()
        self.log_folder, self.keys = self.folder / "logs", self.folder / "keys"
        self.port = free_port()
        self.ca: Path | None = None
        self.members: dict[str, Member] = {}
        self._runs: list[Run] = []
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where the SuperLink listens, for nodes and for commands."""
        return f"{HOST}:{self.port}"

    # Begin and end

    def __enter__(self) -> "Loopback":
        """Start the SuperLink and wait until it listens."""
        if self.folder.exists() and any(self.folder.iterdir()):
            raise FederationError(f"{self.folder} is not empty. Name a new folder: keys and state are made anew.")
        self.log_folder.mkdir(parents=True, exist_ok=True)
        command = ["flower-superlink", "--host", HOST, "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation"]
        command += ["--database", str(self.folder / "superlink.db")] if self.database else []
        if self.tls:
            self.ca = make_certificates(self.keys)
            command += ["--ssl-ca-certfile", str(self.ca), "--ssl-certfile", str(self.keys / "server.crt")]
            command += ["--ssl-keyfile", str(self.keys / "server.key")]
        else:
            command += ["--insecure"]
        if self.auth:
            command += ["--enable-supernode-auth"]
        self.add_connection(CONNECTION, self.ca)
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-c", KEEPER, str(Path(__file__).resolve().parent), str(self.folder)],
                stdin=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            self._start(SUPERLINK, command, {})
            self.wait_superlink()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill whatever runs."""
        for run in self._runs:
            run.process.kill()
            run.process.wait()
        for name in reversed(self.members):
            self.kill(name)
        if self._keeper:
            self._keeper.communicate()
        if self._temporary:
            self._temporary.cleanup()

    def add_connection(self, name: str, ca: Path | None) -> None:
        """Tell the command line of a way to reach the SuperLink; without an authority, it is plain HTTP."""
        config = self.folder / "homes" / COMMAND / "config.toml"
        config.parent.mkdir(parents=True, exist_ok=True)
        security = "insecure = true" if ca is None else f"root-certificates = {json.dumps(str(ca))}"
        with config.open("a") as file:
            file.write(f'[superlink.{name}]\naddress = "{self.address}"\n{security}\n\n')

    def _environment(self, name: str) -> dict[str, str]:
        # Flower's processes start one another by name, found on the path.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        # Each member has a home of its own, as on machines of their own.
        home = self.folder / "homes" / name
        return {**os.environ, **ENVIRONMENT, "PATH": path, "FLWR_HOME": str(home), MARK: f"{self.folder}:{name}"}

    def _start(self, name: str, command: list[str], env: Mapping[str, str]) -> Member:
        log = self.log_folder / f"{name}.log"
        log.touch()
        size, environment = log.stat().st_size, {**self._environment(name), **env}
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        self.members[name] = Member(name, command, environment, log, process, size)
        return self.members[name]

    def _fail(self, problem: str, log: Path, lines: int = 25) -> NoReturn:
        end = "\n".join(plain(log.read_text(errors="replace")).splitlines()[-lines:])
        raise FederationError(f"{problem} The end of {log}:\n{end}")

    def wait_superlink(self, limit: float = 60) -> None:
        """Wait until the SuperLink listens."""
        self._wait(SUPERLINK, r"Uvicorn running on", limit)

    def _wait(self, name: str, said: str, limit: float) -> str:
        """Wait until a member has written something into its log, and give what the expression found."""
        member, end = self.members[name], time.monotonic() + limit
        while not (found := re.search(said, member.said)):
            if member.process.poll() is not None:
                self._fail(f"{name} ended with {member.process.returncode}.", member.log)
            if time.monotonic() > end:
                self._fail(f"{name} was not ready within {limit:.0f} seconds.", member.log)
            time.sleep(0.1)
        return found[found.re.groups]

    # Flower's command line

    def command(self, *arguments: str, limit: float = 60) -> str:
        """Run a `flwr` command against this SuperLink and give its output."""
        done = subprocess.run(
            ["flwr", *arguments], env=self._environment(COMMAND), cwd=self.folder, text=True, timeout=limit,
            stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
        if done.returncode:
            said = plain(done.stdout + done.stderr)
            raise FederationError(f"flwr {' '.join(arguments)} ended with {done.returncode}:\n{said}")
        return done.stdout

    def _query(self, *arguments: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.command(*arguments, CONNECTION, "--format", "json"))
        if not answer["success"]:  # such a command still ends with 0
            raise FederationError(f"flwr {' '.join(arguments)}: {answer}")
        return answer

    def supernodes(self) -> list[dict[str, Any]]:
        """List the nodes as the SuperLink sees them: node-id, status (registered, online, offline), and times."""
        nodes: list[dict[str, Any]] = self._query("supernode", "list")["nodes"]
        return nodes

    def run_facts(self, run_id: int) -> dict[str, Any]:
        """Ask the SuperLink about a run: status, status-details, network-traffic, compute-time, and times."""
        facts: dict[str, Any] = self._query("list", "--run-id", str(run_id))["runs"][0]
        return facts

    # Nodes

    def register(self, name: str) -> int:
        """Tell the SuperLink a node's public key, which is made if there is none, and give the node's id."""
        if not (self.keys / name).exists():
            make_node_key(self.keys, name)
        return int(self._query("supernode", "register", str(self.keys / f"{name}.pub"))["node-id"])

    def unregister(self, node_id: int) -> None:
        """Take a node's registration back."""
        self.command("supernode", "unregister", str(node_id), CONNECTION)

    def start_node(
        self,
        name: str,
        config: Mapping[str, Value],
        *,
        register: bool = True,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        tls: bool | None = None,
        ca: Path | None = None,
        key: bool | None = None,
        options: Sequence[str] = (),
        wait: bool = True,
    ) -> Member:
        """Register a node's key, start the node, and wait until the SuperLink has taken it in.

        Args:
            name: of the node, of its log, and of its key, which is made if there is none of this name.
            config: what the client finds in `context.node_config`.
            register: tell the SuperLink the public key (where it authenticates nodes).
            env: more environment variables; its client processes inherit them.
            prefix: a command that starts the command that follows it, such as `systemd-run --user --scope -p …`.
            tls, ca, key: whether the node speaks TLS, the authority it trusts, and whether it has a key to sign with;
                as the SuperLink wants it if not given.
            options: more options of `flower-supernode`.
            wait: if false, return at once; `wait_node` waits.
        """
        command = [*prefix, "flower-supernode", "--superlink", self.address, "--port", str(free_port())]
        command += ["--node-config", toml(config)] if config else []
        secure, authenticated = self.tls if tls is None else tls, self.auth if key is None else key
        command += ["--root-certificates", str(ca or self.ca)] if secure else ["--insecure"]
        if authenticated:
            if register:
                self.register(name)
            elif not (self.keys / name).exists():
                make_node_key(self.keys, name)
            command += ["--auth-supernode-private-key", str(self.keys / name)]
        member = self._start(name, [*command, *options], env or {})
        if wait:
            self.wait_node(name)
        return member

    def wait_node(self, name: str, limit: float = 60) -> int:
        """Wait until the SuperLink has taken the node in, and give the node's id."""
        return int(self._wait(name, TAKEN_IN, limit))

    def children(self, name: str) -> dict[int, str]:
        """Find a member's process and all that it has started: {process id: command line}."""
        return processes(self.folder, name)

    def kill(self, name: str) -> None:
        """Kill a member and all that it has started at once, as when a machine dies. The SuperLink is not told."""
        member = self.members[name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(member.process.pid, signal.SIGKILL)
        kill_processes(self.folder, name)
        member.process.wait()

    def stop(self, name: str, limit: float = 15) -> None:
        """Ask a member to end, as an administrator would. A node tells the SuperLink that it leaves."""
        member = self.members[name]
        member.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            member.process.wait(limit)
        self.kill(name)

    def restart(self, name: str, limit: float = 120) -> Member:
        """Start a member that was killed or stopped again, with the same key and options; its log goes on.

        A killed node counts as online until the SuperLink has missed its heartbeats, and until then its like is
        refused. So it is started again and again, as a service manager would do it.
        """
        old, end = self.members[name], time.monotonic() + limit
        if old.process.poll() is None:
            raise FederationError(f"{name} is still running. Stop or kill it first.")
        while True:
            member = self._start(name, old.command, old.env)
            try:
                if name == SUPERLINK:
                    self.wait_superlink()
                else:
                    self.wait_node(name)
                return member
            except FederationError:
                if member.process.poll() is None or time.monotonic() > end:
                    raise

    def kill_server_app(self) -> list[int]:
        """Kill the processes of the server app, as when they run out of memory, and give their ids."""
        killed = [process_id for process_id, line in self.children(SUPERLINK).items() if "flwr-serverapp" in line]
        for process_id in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        return killed

    def logs(self, name: str) -> str:
        """Give a member's log, without colours. A node's log holds what its client processes print."""
        return plain((self.log_folder / f"{name}.log").read_text(errors="replace"))

    # Runs

    def run_app(self, app: Path | str, config: Mapping[str, Value] | None = None, *, stream: bool = True) -> Run:
        """Hand an app to the SuperLink (`flwr run`) and return when the run has been started.

        Args:
            app: the app's folder. Its pyproject.toml names the keys that `config` may override.
            config: what the server and the clients find in `context.run_config`.
            stream: let the process live as long as the run, and write the server app's log.
        """
        log = self.log_folder / f"run-{len(self._runs) + 1}.log"
        command = ["flwr", "run", str(Path(app).resolve()), CONNECTION]
        command += ["--run-config", toml(config)] if config else []
        command += ["--stream"] if stream else []
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=self._environment(COMMAND), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        run = Run(process, log, 0)
        self._runs.append(run)
        while not (found := re.search(r"Successfully started run (\d+)", run.text)):
            if process.poll() is not None and "Successfully started run" not in run.text:
                self._fail(f"flwr run ended with {process.returncode}.", log)
            time.sleep(0.1)
        run.id = int(found[1])
        return run

    def wait_run(self, run: Run, limit: float = 300) -> Run:
        """Wait until a run has finished, and fill in its status: finished:completed, finished:failed, …"""
        end = time.monotonic() + limit
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(limit)
        while True:
            run.facts = self.run_facts(run.id)
            run.status = run.facts["status"]
            if run.status.startswith("finished"):
                return run
            if time.monotonic() > end:
                self._fail(f"The run is {run.status} after {limit:.0f} seconds.", run.log)
            time.sleep(0.5)

    def stop_run(self, run: Run) -> None:
        """Tell the SuperLink to give a run up, for instance one whose server app was killed."""
        self.command("stop", str(run.id), CONNECTION)

    def follow(self, run: Run) -> Iterator[str]:
        """Give the lines of a streamed run as they come, until it ends."""
        with run.log.open(errors="replace") as lines:
            rest = ""
            while True:
                ended = run.process.poll() is not None  # asked first: what comes before the end is read below
                rest += lines.read()
                *whole, rest = rest.split("\n")
                yield from map(plain, whole)
                if ended:
                    return
                time.sleep(0.1)


def friendly(line: str) -> str:
    """Shorten a line of Flower's log: the level is told only if something is wrong."""
    return re.sub(r"^INFO\s*:\s{0,6}", "", line).rstrip()


def main() -> int:
    """Run an app on a federation on loopback, and give 0 if the run completed."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Run a Flower app on a SuperLink and SuperNodes on this machine.")
    parser.add_argument("--app", type=Path, default=here / "flower_app", help="the app's folder")
    parser.add_argument("--nodes", type=int, default=4, help="SuperNodes to start")
    parser.add_argument("--rounds", type=int, help="rounds to train; the app's own number if not given")
    parser.add_argument("--folder", type=Path, help="keep keys, state and logs here (default: nothing is kept)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is stopped then, too
    config: dict[str, Value] = {} if options.rounds is None else {"num-server-rounds": options.rounds}
    try:
        with Loopback(options.folder) as federation:
            print(f"SuperLink: https://{federation.address}, its nodes authenticated by key", flush=True)
            names = [f"node-{index}" for index in range(options.nodes)]
            for index, name in enumerate(names):
                federation.start_node(name, {"partition-id": index, "num-partitions": options.nodes}, wait=False)
            for name in names:
                print(f"{name}: online, its id is {federation.wait_node(name)}", flush=True)
            run = federation.run_app(options.app, config)
            for line in federation.follow(run):
                print(f"  {friendly(line)}", flush=True)
            federation.wait_run(run)
            traffic = run.facts["network-traffic"]
            print(f"The run is {run.status}. {run.facts['status-details']}")
            print(f"The SuperLink received {traffic['inbound-bytes']:,} bytes and sent {traffic['outbound-bytes']:,}.")
            return 0 if run.status == "finished:completed" else 1
    except FederationError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
