"""Provide tasks by name, and divide their examples among clients.

`load_task("digits")` gives a `Task`: examples in memory, loss, metric and default model.
"""

import os
from collections.abc import Callable
from functools import partial

from comfetch.data.images import cifar, crop_and_flip, digits, fashion_mnist, normalise
from comfetch.data.own import is_own, load_own, task_of
from comfetch.data.partition import KINDS, from_flower, label_counts, partition, partition_table
from comfetch.data.task import IGNORED, Examples, Task, accuracy, cross_entropy
from comfetch.data.text import ewt, mnli
from comfetch.errors import DataError

__all__ = [
    "IGNORED",
    "KINDS",
    "TASKS",
    "Examples",
    "Task",
    "accuracy",
    "crop_and_flip",
    "cross_entropy",
    "from_flower",
    "label_counts",
    "load_task",
    "normalise",
    "partition",
    "partition_table",
    "task_of",
]

TASKS: dict[str, Callable[[str | os.PathLike[str] | None], Task]] = {
    "digits": digits,
    "cifar10": partial(cifar, classes=10),
    "cifar100": partial(cifar, classes=100),
    "ewt-pos": ewt,
    "ewt-pos:penn": partial(ewt, name="ewt-pos:penn", column=4),
    "mnli-pos": mnli,
    "fashion-mnist": fashion_mnist,
}
"""Every task that has a name, and what loads it."""


def load_task(
    name: str, data_dir: str | os.PathLike[str] | None = None, *, limit: int | None = None, seed: int = 0
) -> Task:
    """Load a task by its name, or a user's own by `file.py`, `file.py:function` or `module:function`.

    Args:
        data_dir: the folder with the data, before COMFETCH_DATA; `hub` fetches images from Hugging Face.
        limit: keep so many examples of each side, drawn by `seed`: for quick runs.
    """
    if name in TASKS:
        task = TASKS[name](data_dir)
    elif is_own(name):
        task = load_own(name)
    else:
        raise DataError(
            f"Task {name!r} is unknown. Choose one of {', '.join(TASKS)}; or give your own as file.py or "
            "module:function."
        )
    return task if limit is None else task.limited(limit, seed)
