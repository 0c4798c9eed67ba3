"""Read the official python batches of CIFAR, which are pickles, without trusting them.

A pickle may name any function of any module and have it called. These need three names of numpy only, so
nothing else is admitted.
"""

import hashlib
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from comfetch.data.files import read
from comfetch.errors import DataError

OFFICIAL = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}
"""The published md5 of each file. (It finds damage; it is no protection against malice.)"""


def _numpy_names() -> dict[tuple[str, str], Any]:
    """Give what rebuilds an array, under the names of old and new numpy."""
    function: Any = np.empty(0).__reduce__()[0]  # numpy's own _reconstruct, whatever its module is called
    names: dict[tuple[str, str], Any] = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names[module, "_reconstruct"] = function
    return names


class _ArraysOnly(pickle.Unpickler):
    """Unpickle plain values and numpy arrays, and refuse every other name."""

    admitted = _numpy_names()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.admitted[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs") from None


def matches_official(paths: list[Path]) -> bool:
    """Tell whether all files are byte for byte the published ones."""
    return all(hashlib.md5(read(path), usedforsecurity=False).hexdigest() == OFFICIAL[path.name] for path in paths)


def read_batch(path: Path, label: str) -> tuple[np.ndarray[Any, np.dtype[Any]], np.ndarray[Any, np.dtype[Any]]]:
    """Read one batch: images `[n, 3, 32, 32]` and class numbers `[n]`.

    Args:
        label: the entry with the class numbers, `labels` or `fine_labels`.
    """
    content = read(path)
    try:
        batch = _ArraysOnly(BytesIO(content), encoding="bytes").load()
        entries = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        images = entries["data"].reshape(-1, 3, 32, 32)
        return images, np.asarray(entries[label], dtype=np.int64)
    except Exception as error:  # damage in a pickle may surface as an error of any kind
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: not a python batch of CIFAR ({reason}). Get the official archive again.") from error
