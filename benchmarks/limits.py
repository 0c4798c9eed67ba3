"""Limit the memory of a command and of all that it starts, by the operating system.

    with MemoryLimit(2**30) as limit:
        federation.start_node("node-0", {}, prefix=limit.prefix)

A control group of Linux (version 1 or 2) counts the real memory of its processes together, and when that is used up the
kernel kills one of them. The group is made inside the caller's own, or as near above it as the caller may write. Where
there is no such place, each process is limited by itself: RLIMIT_DATA counts its private writable memory, and
allocation fails when that is used up. `MemoryLimit.kind` says which of them it is.
"""

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
V1, V2, EACH = "cgroup v1", "cgroup v2", "RLIMIT_DATA"
LIMIT = {V1: "memory.limit_in_bytes", V2: "memory.max"}
PEAK = {V1: "memory.max_usage_in_bytes", V2: "memory.peak"}
EVENTS = {V1: "memory.oom_control", V2: "memory.events"}
MEMBERS = "cgroup.procs"


class MemoryLimit:
    """A limit for the commands that are started with `prefix` before them. It ends with the `with` block.

    Args:
        limit: bytes.
        name: of the group, if one can be made.
        kind: of the limit; the best that this machine offers, if not given.
    """

    def __init__(self, limit: int, name: str = "limited", kind: str | None = None) -> None:
        self.limit, self.name, self.wanted = limit, name, kind
        self.kind, self.group = EACH, Path()

    def __enter__(self) -> "MemoryLimit":
        """Make the group, or settle for limits of each process."""
        for kind, parent in _places() if self.wanted != EACH else ():
            group = parent / f"{self.name}-{os.getpid()}-{id(self):x}"
            try:
                group.mkdir()
                self._set(group, kind)
            except (OSError, subprocess.CalledProcessError):
                _remove(group)
                continue
            self.kind, self.group = kind, group
            break
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the group; its processes have ended by now."""
        if self.kind != EACH:
            _remove(self.group)

    def _set(self, group: Path, kind: str) -> None:
        (group / LIMIT[kind]).write_text(str(self.limit))
        with contextlib.suppress(OSError):  # swap, where it is counted
            if kind == V1:
                (group / "memory.memsw.limit_in_bytes").write_text(str(self.limit))
            else:
                (group / "memory.swap.max").write_text("0")
        # Whether processes may be moved into it is only known when one has been.
        subprocess.run([*_launcher(str(group / MEMBERS)), "true"], check=True, capture_output=True)

    @property
    def prefix(self) -> list[str]:
        """The command that limits itself, and then becomes the command that follows."""
        return _launcher(str(self.limit if self.kind == EACH else self.group / MEMBERS))

    @property
    def peak(self) -> int | None:
        """The most memory that the group has had at a time, in bytes, files that it has read included."""
        try:
            return int((self.group / PEAK[self.kind]).read_text())
        except (KeyError, OSError):  # limits of each process count nothing, and Linux before 5.19 not this
            return None

    @property
    def killed(self) -> int:
        """How many processes the kernel has killed for want of memory."""
        if self.kind == EACH:
            return 0
        events = dict(line.split() for line in (self.group / EVENTS[self.kind]).read_text().splitlines())
        return int(events["oom_kill"])


def _launcher(place: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), place]


def _places() -> Iterator[tuple[str, Path]]:
    """Give the control groups in which a new one may be tried: the caller's own, and those above it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            kind = V1 if "memory" in controllers.split(",") else V2
            if controllers and kind == V2:
                continue
            root = GROUPS / "memory" if kind == V1 else GROUPS
            if (root / MEMBERS).exists():
                place = root / own.lstrip("/")
                yield kind, place
                for above in place.parents:
                    if not above.is_relative_to(root):
                        break
                    yield kind, above


def _remove(group: Path, limit: float = 10) -> None:
    """Remove a group as soon as its last process is gone; one that was killed takes a moment."""
    end = time.monotonic() + limit
    while group.is_dir() and time.monotonic() < end:
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.1)


def main() -> None:
    """Limit this process, and become the command."""
    place, *command = sys.argv[1:]
    if place.isdigit():
        resource.setrlimit(resource.RLIMIT_DATA, (int(place), int(place)))
    else:
        Path(place).write_text(str(os.getpid()))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
