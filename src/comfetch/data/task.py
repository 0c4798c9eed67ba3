"""Describe a learning task: its examples, its default model, its loss and its metric."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from comfetch.errors import DataError, OptionError

IGNORED = -100
"""The target of a padded token: counted by neither loss nor metric."""

Constructor = Callable[[], nn.Module]
Prepare = Callable[[Tensor], Tensor]
Augment = Callable[[Tensor, Generator], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Metric = Callable[[Tensor, Tensor], tuple[int, int]]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Average -log softmax(outputs)[target] over all targets but the ignored ones.

    Args:
        outputs: `[batch, classes]`, or `[batch, words, classes]` for tagging.
        targets: `[batch]` or `[batch, words]`.
    """
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def accuracy(outputs: Tensor, targets: Tensor) -> tuple[int, int]:
    """Count the targets that are met, and all that are not ignored.

    >>> accuracy(torch.eye(3), torch.tensor([0, 2, IGNORED]))
    (1, 2)
    """
    counted = targets != IGNORED
    right = (outputs.argmax(-1) == targets) & counted
    return int(right.sum()), int(counted.sum())


def as_is(inputs: Tensor) -> Tensor:
    """Give the stored inputs to the model without any change."""
    return inputs


@dataclass(frozen=True)
class Examples:
    """Hold examples in memory: row i of `inputs` belongs to row i of `targets` (and of `groups`).

    `groups` is the natural key, if there is one: examples of one group belong to one client.
    """

    inputs: Tensor
    targets: Tensor
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        lengths = {len(rows) for rows in (self.inputs, self.targets, self.groups) if rows is not None}
        if len(lengths) > 1:
            found = f"{len(self.inputs)} inputs, {len(self.targets)} targets"
            found += "" if self.groups is None else f", {len(self.groups)} groups"
            raise DataError(f"Examples: {found}. Give one target (and one group) for each input.")

    def __len__(self) -> int:
        """Count the examples."""
        return len(self.inputs)

    def __getitem__(self, rows: Tensor) -> "Examples":
        """Select rows by a tensor of indices: one copy of just these rows."""
        groups = None if self.groups is None else self.groups.index_select(0, rows)
        return Examples(self.inputs.index_select(0, rows), self.targets.index_select(0, rows), groups)

    def at(self, rows: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> "Examples":
        """Select rows by a numpy array of indices, as `partition` gives them."""
        return self[torch.from_numpy(rows)]


@dataclass(frozen=True)
class Task:
    """Bind data, default model, loss and metric to a name.

    Args:
        name: what the user calls it.
        model: a name in `comfetch.models.MODELS`, or a constructor without arguments.
        train, test: examples in memory, as compact as they come (images are bytes).
        inputs: shape of one prepared input: `(channels, height, width)`; `(vocabulary,)` for words.
        classes: number of different targets.
        labels: their names, if known.
        grouped_by: what `Examples.groups` means, such as "prompt"; empty without groups.
        prepare: stored inputs of a batch -> the model's inputs. It runs on each batch and not once, since
            50,000 CIFAR images are 154 MB as bytes and 614 MB as floats, and to normalise 128 of them takes
            0.13 ms, a thousandth of a training step (one core; a batch of bytes is also gathered faster).
        augment: stored inputs of a training batch, a generator -> stored inputs, changed at random.
        padded: whether rows end in padding, so that a batch is cut to its longest row.
    """

    name: str
    model: str | Constructor
    train: Examples
    test: Examples
    inputs: tuple[int, ...]
    classes: int
    labels: tuple[str, ...] = ()
    grouped_by: str = ""
    prepare: Prepare = as_is
    augment: Augment | None = None
    padded: bool = False
    loss: Loss = cross_entropy
    metric: Metric = accuracy

    def __post_init__(self) -> None:
        for side, examples in (("train", self.train), ("test", self.test)):
            if not len(examples):
                raise DataError(f"Task {self.name}: no {side} examples. Give at least one.")
            if self.metric is accuracy:
                _check_targets(f"Task {self.name}, {side}", examples.targets, self.classes)

    @cached_property
    def checksum(self) -> str:
        """The sha256 of all examples as they are held: equal for equal data, wherever it was read from."""
        digest = hashlib.sha256()
        for examples in (self.train, self.test):
            for rows in (examples.inputs, examples.targets):
                digest.update(f"{rows.dtype} {tuple(rows.shape)}".encode())
                digest.update(rows.contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def limited(self, limit: int, seed: int = 0) -> "Task":
        """Keep the first `limit` examples of each side after a shuffle by `seed`."""
        if limit < 1:
            raise OptionError(f"limit={limit} is below 1. It is the number of examples to keep.")
        rng = np.random.default_rng(seed)
        sides = [side.at(rng.permutation(len(side))[:limit]) for side in (self.train, self.test)]
        return replace(self, train=sides[0], test=sides[1])

    def held_out(self, part: float, seed: int = 0) -> "Task":
        """Test on a part of the training examples, drawn by `seed`, which are then not trained on."""
        count = math.floor(part * len(self.train) + 0.5) if 0 < part < 1 else 0
        if not 0 < count < len(self.train):
            raise OptionError(
                f"validation={part:g} of {len(self.train)} training examples leaves nothing to train on or to test on. "
                "Give a part such as 0.1."
            )
        order = np.random.default_rng([seed, count]).permutation(len(self.train))
        return replace(self, train=self.train.at(np.sort(order[count:])), test=self.train.at(np.sort(order[:count])))

    def check(self, build: Constructor) -> None:
        """Try a model on two examples, on the meta device: a misfit is told before any weight is made."""
        rows = torch.arange(min(2, len(self.train)))
        inputs, targets = self.batch(self.train, rows)
        try:
            with torch.device("meta"):
                outputs = build()(inputs.to("meta"))
        except NotImplementedError:
            return  # a model that needs real values cannot be tried this way
        except (RuntimeError, TypeError, ValueError) as error:
            if "meta tensor" in str(error):
                return
            found = f"{inputs.dtype} inputs of shape {tuple(inputs.shape)} ({error})"
            raise OptionError(f"Task {self.name}: its model fails on {found}. Take another one.") from error
        wanted = (*targets.shape, self.classes)
        if self.loss is cross_entropy and tuple(outputs.shape) != wanted:
            found = f"outputs of shape {tuple(outputs.shape)}, {wanted} expected"
            raise OptionError(f"Task {self.name}: its model gives {found}. Take another one.")

    def batch(self, examples: Examples, rows: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Make the model's inputs and targets of some rows, augmented if a generator is given."""
        inputs, targets = examples.inputs.index_select(0, rows), examples.targets.index_select(0, rows)
        if self.padded:
            longest = int((targets != IGNORED).sum(1).max()) if len(rows) else 0
            inputs, targets = inputs[:, :longest], targets[:, :longest]
        if generator is not None and self.augment is not None:
            inputs = self.augment(inputs, generator)
        return self.prepare(inputs), targets

    def batches(
        self, examples: Examples, size: int, generator: Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Go once over the examples: shuffled and augmented with a generator, plain and in order without.

        A training epoch leaves out a last batch of a single example (another one each time): batch norm
        cannot normalise a single value per channel.
        """
        if size < 1:
            raise OptionError(f"batch size {size} is below 1. Give the number of examples in a batch.")
        total = len(examples)
        order = torch.arange(total) if generator is None else torch.randperm(total, generator=generator)
        if generator is not None and size > 1 and total > 1 and total % size == 1:
            order = order[:-1]
        for rows in order.split(size):
            yield self.batch(examples, rows, generator)


def _check_targets(where: str, targets: Tensor, classes: int) -> None:
    """Refuse targets that are no class numbers."""
    if targets.dtype != torch.int64:
        raise DataError(f"{where}: targets are {targets.dtype}. Give class numbers as torch.int64.")
    counted = targets[targets != IGNORED]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        found = f"targets from {int(counted.min())} to {int(counted.max())}"
        raise DataError(f"{where}: {found}, but there are {classes} classes. Number them from 0.")
