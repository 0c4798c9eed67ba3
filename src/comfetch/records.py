"""Keep the records of a run in a folder: options, environment, one line a round, checkpoint, final models.

Every file is complete or absent at any moment: it is written beside and renamed; the log of rounds is cut back to the
checkpoint when a run goes on.
"""

import contextlib
import errno
import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from comfetch.errors import RunError
from comfetch.files import load_state, save_state
from comfetch.methods.base import Server, State

CHECKPOINT = "checkpoint.safetensors"
ROUNDS = "rounds.jsonl"
OPTIONS = "run.toml"
ENVIRONMENT = "environment.json"
PARTITION = "partition.json"
FOOTPRINT = "footprint.json"
EQUAL = "equal.json"
FINAL = ("full.safetensors", "sketched.safetensors")


def open_folder(folder: Path, options: Mapping[str, Any], resume: bool) -> None:
    """Make a run folder and write its options; refuse one with another configuration, or a run not to be resumed."""
    path = folder / OPTIONS
    if path.exists():
        check_folder(folder, options)
        kept = (folder / CHECKPOINT).exists()
        if kept and not resume:
            raise RunError(f"{folder} holds this run already. Go on with --resume, or choose another --out.")
        if not kept and (done := rounds_done(folder)) > 1:  # a run that is killed in its first round has begun nothing
            raise RunError(
                f"{folder} holds the records of {done} rounds of this run, but no {CHECKPOINT} to go on from. "
                "Choose another --out, or remove the folder to begin anew."
            )
    elif resume and not folder.exists():
        raise RunError(f"{folder} does not exist: there is nothing to resume.")
    make_folder(folder)
    _remove_leftovers(folder)
    write_text(path, format_toml(options))


def make_folder(folder: Path) -> None:
    """Make a folder if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be made. {error.strerror}.") from error


def check_folder(folder: Path, options: Mapping[str, Any]) -> None:
    """Refuse a folder whose run has other options; more rounds are welcome, fewer than it has are not."""
    found = read_options(folder / OPTIONS)
    differing = sorted(k for k in found.keys() | options.keys() if found.get(k) != options.get(k) and k != "rounds")
    if differing:
        changes = ", ".join(f"{k}: {found.get(k)!r} there, {options.get(k)!r} now" for k in differing)
        raise RunError(f"{folder} holds a run of another configuration ({changes}). Choose another --out.")
    done = rounds_done(folder)
    if done > options.get("rounds", done):
        raise RunError(
            f"{folder} holds {done} rounds already, more than rounds={options['rounds']}. Choose another --out."
        )


def rounds_done(folder: Path) -> int:
    """Return the number of the last round on record."""
    return max((record["round"] for record in read_rounds(folder)), default=0)


def remove_final(folder: Path) -> None:
    """Remove the final models of a run that goes on: those of an earlier round must not pass for the last."""
    for name in FINAL:
        (folder / name).unlink(missing_ok=True)


def finished(folder: Path, rounds: int) -> bool:
    """Tell whether a run has all its rounds and its final models; of a run that was put on record, only the rounds."""
    models = all((folder / name).exists() for name in FINAL)
    return rounds_done(folder) >= rounds and (models or not (folder / CHECKPOINT).exists())


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed had begun to write; safetensors has temporary files of its own."""
    for path in folder.glob(".*.part"):
        process = path.suffixes[-2].removeprefix(".")
        if process.isdigit() and not _is_alive(int(process)):
            path.unlink(missing_ok=True)
    for path in folder.glob(".tmp??????"):
        path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def save_checkpoint(folder: Path, server: Server, memories: Mapping[int, State]) -> None:
    """Save the server's state and what clients keep."""
    state = {f"weights/{n}": t for n, t in server.weights.items()}
    state |= {f"transforms/{n}": t for n, t in server.transforms.items()}
    state |= {f"extra/{n}": t for n, t in server.extra.items()}
    state |= {f"memory/{i}/{n}": t for i, memory in memories.items() for n, t in memory.items()}
    save_state(state, folder / CHECKPOINT, {"round": str(server.round), "trained": json.dumps(server.trained)})


def load_checkpoint(folder: Path) -> tuple[Server, dict[int, State]] | None:
    """Load the last checkpoint, if there is one."""
    if not (folder / CHECKPOINT).exists():
        return None
    state, text = load_state(folder / CHECKPOINT)
    parts: dict[str, State] = {"weights": {}, "transforms": {}, "extra": {}}
    memories: dict[int, State] = {}
    for name, tensor in state.items():
        kind, rest = name.split("/", 1)
        if kind == "memory":
            client, rest = rest.split("/", 1)
            memories.setdefault(int(client), {})[rest] = tensor
        else:
            parts[kind][rest] = tensor
    return Server(trained=json.loads(text["trained"]), round=int(text["round"]), **parts), memories


def append_round(folder: Path, record: Mapping[str, Any]) -> None:
    """Add the record of one round."""
    append_line(folder / ROUNDS, record)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file of JSON lines: the whole line, or nothing if the disk is full."""
    line = (json.dumps(record) + "\n").encode()
    try:
        with open(path, "ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"{path}: cannot be written. {error.strerror}.") from error


def read_rounds(folder: Path, until: int | None = None) -> list[dict[str, Any]]:
    """Read the records of a run, up to a round; a last line that was cut off is left out."""
    path = folder / ROUNDS
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [r for r in records if until is None or r["round"] <= until]


def cut_rounds(folder: Path, until: int) -> list[dict[str, Any]]:
    """Drop the records of rounds after a checkpoint, which will be run again."""
    records = read_rounds(folder, until)
    write_text(folder / ROUNDS, "".join(json.dumps(r) + "\n" for r in records))
    return records


def environment(data_checksum: str) -> dict[str, Any]:
    """Describe what a result depends on besides its options."""
    from comfetch import __version__

    return {
        "comfetch": __version__, "commit": _commit(), "torch": torch.__version__, "python": platform.python_version(),
        "platform": platform.platform(), "threads": torch.get_num_threads(), "data": data_checksum,
    }  # fmt: skip


def check_data(folder: Path, data_checksum: str) -> None:
    """Refuse to go on with a run on other data than it began with."""
    began = read_json(folder / ENVIRONMENT).get("data", data_checksum)
    if began != data_checksum:
        raise RunError(f"{folder}: its run began with data of checksum {began[:12]}, now it is {data_checksum[:12]}.")


def environment_changes(folder: Path) -> list[str]:
    """Say what is not as it was when the run began; a result may then differ in its last bits."""
    began, now = read_json(folder / ENVIRONMENT), environment("")
    told = ("torch", "python", "platform", "threads")
    return [f"{name} was {began[name]}, is {now[name]}" for name in told if name in began and began[name] != now[name]]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file; one that is not there is empty."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read. {error}") from error
    return found


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise RunError(f"{path}: cannot be written. {error.strerror}.") from error


def read_options(path: Path) -> dict[str, Any]:
    """Read a TOML file of options."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: cannot be read. {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{path}: not valid TOML. {error}") from error


def format_toml(options: Mapping[str, Any]) -> str:
    """Write options as TOML: text, numbers, truth values and lists of these; None is left out.

    >>> print(format_toml({"task": "digits", "lr": 0.1, "skip": ["fc"], "limit": None}), end="")
    task = "digits"
    lr = 0.1
    skip = ["fc"]
    """
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items() if value is not None)


def _commit() -> str | None:
    """Return the commit of the code, if it is a checkout."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
