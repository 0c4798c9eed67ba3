"""Run the command line in tests: in this process, which is quick, or as a process of its own."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfetch.cli import invoke

MAIN = "from comfetch.cli import main; main()"
TINY = ("--limit", "80", "--clients", "3", "--batch-size", "16")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def told(self) -> str:
        """The one line on standard error of a command that was refused."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        return self.err


def comfetch(*arguments: str | Path) -> Result:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = invoke([str(argument) for argument in arguments])
    return Result(code, out.getvalue(), err.getvalue())


def heed_interrupts() -> None:
    """Heed Ctrl-C, which jobs in the background of a shell are started to ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(
    *arguments: str | Path, code: str = MAIN, before: Callable[[], None] = heed_interrupts, **options: Any
) -> "subprocess.Popen[str]":
    """Start a command as a process of its own; `before` runs there first."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=before, **options,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> Result:
    """Wait for a process that `start` started."""
    out, err = process.communicate(timeout=300)
    return Result(process.returncode, out, err)
