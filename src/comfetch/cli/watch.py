"""Show how runs go: a bar for each on a terminal, a line a round elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from comfetch.data import partition_table
from comfetch.driver import Record
from comfetch.errors import OptionError
from comfetch.federation import Federation
from comfetch.footprint import format_bytes


class Watch:
    """Show the runs of one command, one after another."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=8),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[state]}", markup=False),
            console=console,
            disable=quiet or not console.is_terminal,
        )

    def __enter__(self) -> "Watch":
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def say(self, text: str) -> None:
        """Print a text above the bars."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, table: Table) -> None:
        """Print a table."""
        if not self.quiet:
            self.console.print(table)

    def follow(self, name: str, rounds: int, tensorboard: Path | None = None, partition: bool = False) -> "Follow":
        """Follow one run; with `partition`, print how its examples are divided."""
        return Follow(self, name, rounds, self.bars.add_task(name, total=rounds, state=""), tensorboard, partition)


class Follow:
    """Follow one run: its `started` and `round` are called by the driver."""

    def __init__(
        self, watch: Watch, name: str, rounds: int, bar: TaskID, tensorboard: Path | None, partition: bool
    ) -> None:
        self.watch, self.name, self.rounds, self.bar = watch, name, rounds, bar
        self.tensorboard, self.partition, self.writer = tensorboard, partition, None
        self.bytes_down = self.bytes_up = self.done = 0
        self.took: list[float] = []

    def started(self, federation: Federation, history: list[Record]) -> None:
        """Take note of the rounds that were run before."""
        if self.partition:
            train, labels = federation.task.train, federation.task.labels
            self.watch.say(partition_table(federation.parts, train.targets, labels))
        self.bytes_down = sum(record["bytes_down"] for record in history)
        self.bytes_up = sum(record["bytes_up"] for record in history)
        self.done = len(history)
        if self.tensorboard is not None:
            self.writer = make_writer(self.tensorboard, self.done)
        if history:
            state = "has all its rounds already" if self.done >= self.rounds else f"goes on after round {self.done}"
            self.watch.say(f"{self.name}: {state}.")
            self._show(history[-1])

    def round(self, record: Record) -> None:
        """Show a round: loss, accuracy, bytes so far, time left, and every upload that was refused."""
        self.done = record["round"]
        self.bytes_down += record["bytes_down"]
        self.bytes_up += record["bytes_up"]
        self.took.append(record["seconds"])
        for refusal in record["refused"]:
            self.watch.say(f"{self.name}, round {self.done}: upload refused, {refusal}")
        if self.writer is not None:
            write_scalars(self.writer, record)
        self._show(record)
        if not self.watch.console.is_terminal:
            self.watch.say(f"{self.name}: round {self.done}/{self.rounds} {self.state(record)}")

    def close(self) -> None:
        """Close the event file, if there is one."""
        if self.writer is not None:
            self.writer.close()

    def state(self, record: Mapping[str, Any]) -> str:
        """Write how a run stands."""
        traffic = f"↓{format_bytes(self.bytes_down)} ↑{format_bytes(self.bytes_up)}"
        loss = record["test_loss"] if record["loss"] is None else record["loss"]
        parts = [f"loss {loss:.3f}", f"accuracy {record['accuracy']:.1%}", traffic]
        if self.took and self.done < self.rounds:
            mean = sum(self.took) / len(self.took)
            parts.append(f"{clock(mean * (self.rounds - self.done))} left")
        return " ".join(parts)

    def _show(self, record: Mapping[str, Any]) -> None:
        self.watch.bars.update(self.bar, completed=self.done, state=self.state(record))


def make_writer(folder: Path, done: int) -> Any:
    """Open a TensorBoard event file; what it has of later rounds, which are run again, is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise OptionError("--tensorboard needs tensorboard: pip install 'comfetch[plots]'.") from error
    return SummaryWriter(str(folder), purge_step=done + 1)


def write_scalars(writer: Any, record: Mapping[str, Any]) -> None:
    """Write every number of a round's record."""
    for name, value in record.items():
        if name != "round" and isinstance(value, int | float):
            writer.add_scalar(name, value, record["round"])
    writer.flush()


def clock(seconds: float) -> str:
    """Write a time for people.

    >>> clock(75), clock(7322)
    ('1:15', '2:02:02')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
