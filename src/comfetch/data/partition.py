"""Divide examples among clients.

All kinds are short numpy code. The partitioners of flwr-datasets divide in the same ways, but took 5 s
to import and 2 to 4 s for 50,000 labels (here: some milliseconds), and every client process of a federation
divides anew; their IID split has no seed, their shards raise a warning of pyarrow, and their natural split
cannot bring many groups to fewer clients. Any of them can still be used: `from_flower`.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from comfetch.data.task import IGNORED
from comfetch.errors import DataError, OptionError

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]
Counts = np.ndarray[tuple[int, int], np.dtype[np.int64]]
TRIES = 1000
"""How often an unequal split is drawn until no client has too few examples."""
LEAST = 10
"""Examples that a client has at least in a capped division."""


@dataclass(frozen=True)
class _Wish:
    """Hold what a kind of partition may need."""

    labels: Any
    clients: int
    alpha: float
    equal: bool
    shards: int
    groups: Any
    seed: int

    @cached_property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def check_alpha(self) -> None:
        if not 0 < self.alpha < np.inf:
            raise OptionError(f"alpha={self.alpha} is not a positive number. Small means skewed, 1 is usual.")

    def unlucky(self, least: int) -> DataError:
        few = "without examples" if least == 1 else f"with less than {least} examples"
        return DataError(
            f"alpha={self.alpha} left one of {self.clients} clients {few} in {TRIES} draws. Take a larger alpha, fewer "
            "clients, or local sets of equal size (dirichlet without unequal)."
        )


def partition(
    targets: Any,
    clients: int,
    kind: str = "iid",
    *,
    alpha: float = 1.0,
    seed: int = 0,
    groups: Any = None,
    equal: bool = True,
    shards: int = 2,
) -> list[Indices]:
    """Give each client the indices of its examples, in increasing order.

    No example has two clients, no client is empty, and all examples are used. The same seed gives the same
    partition.

    Args:
        targets: one label an example, as a tensor or an array.
        kind: `iid`; `dirichlet` (labels skewed, the more the smaller `alpha`); `dirichlet-capped` (the same, but who
            has a fair part gets none of the labels that follow); `shards` (sorted by label and dealt out in pieces);
            `natural` (whole groups).
        alpha: of the Dirichlet distribution, above 0.
        groups: a group number an example, for `natural`.
        equal: whether `dirichlet` gives all clients as many examples (but for one).
        shards: how many pieces a client gets.

    >>> [part.tolist() for part in partition(np.array([0, 0, 1, 1]), 2, "shards", shards=1)]
    [[2, 3], [0, 1]]
    """
    labels = _array(targets)
    if kind not in KINDS:
        raise OptionError(f"partition {kind!r} is unknown. Choose one of {', '.join(KINDS)}.")
    if clients < 1:
        raise OptionError(f"clients={clients} is below 1. Give the number of clients.")
    if clients > len(labels):
        raise DataError(f"{len(labels)} examples are too few for {clients} clients. Take fewer clients.")
    if labels.ndim != 1 and kind in LABELLED:
        raise DataError(
            f"partition {kind} needs one label an example; this task has a label for each word. "
            f"Choose one of {', '.join(other for other in KINDS if other not in LABELLED)}."
        )
    wish = _Wish(labels, clients, alpha, equal, shards, None if groups is None else _array(groups), seed)
    return [np.sort(part).astype(np.int64) for part in KINDS[kind](wish)]


def _array(values: Any) -> Any:
    return values.numpy() if isinstance(values, Tensor) else np.asarray(values)


def _iid(wish: _Wish) -> list[Any]:
    """Shuffle and cut into parts of equal size (but for one)."""
    return np.array_split(wish.rng.permutation(len(wish.labels)), wish.clients)


def _dirichlet(wish: _Wish) -> list[Any]:
    """Draw how many examples of each label a client gets, then which."""
    wish.check_alpha()
    _, labels, stock = np.unique(wish.labels, return_inverse=True, return_counts=True)
    counts = _equal_counts(wish, stock) if wish.equal else _unequal_counts(wish, stock)
    shuffled = wish.rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    owners = np.concatenate([np.repeat(np.arange(wish.clients), column) for column in counts.T])
    return [by_label[owners == client] for client in range(wish.clients)]


def _equal_counts(wish: _Wish, stock: Any) -> Any:
    """Fill clients of equal size: each asks by its own mixture of labels, drawn from Dirichlet(alpha).

    Where a label is asked for more than there is, lots decide, and what is still needed is asked of the other
    labels. All clients ask at the same time, so none is left with the remains of all others.
    """
    total, clients = int(stock.sum()), wish.clients
    need = np.full(clients, total // clients) + (np.arange(clients) < total % clients)
    mixture = wish.rng.dirichlet(np.full(len(stock), wish.alpha), size=clients)
    counts, left = np.zeros((clients, len(stock)), np.int64), stock.copy()
    while need.any():
        chance = mixture * (left > 0)
        chance[chance.sum(1) < 1e-12] = left
        asked = wish.rng.multinomial(need, chance / chance.sum(1, keepdims=True))
        for label in np.flatnonzero(asked.sum(0) > left):
            asked[:, label] = wish.rng.multivariate_hypergeometric(asked[:, label], left[label])
        counts, left, need = counts + asked, left - asked.sum(0), need - asked.sum(1)
    return counts


def _unequal_counts(wish: _Wish, stock: Any) -> Any:
    """Divide each label among the clients by shares drawn from Dirichlet(alpha), until no client is empty."""
    for _ in range(TRIES):
        shares = wish.rng.dirichlet(np.full(wish.clients, wish.alpha), size=len(stock))
        cuts = np.rint(shares.cumsum(1) * stock[:, None]).astype(np.int64)
        cuts[:, -1] = stock
        counts = np.diff(cuts, axis=1, prepend=0).T
        if counts.sum(1).all():
            return counts
    raise wish.unlucky(1)


def _capped(wish: _Wish) -> list[Any]:
    """Divide each label in turn by Dirichlet(alpha) among the clients that have less than a fair part so far.

    The last labels are left to few clients, so these sets are less alike than those of `dirichlet`. This is the
    division of the Comfetch paper's published code, drawn as there from numpy's legacy generator: the same seed gives
    the same sets.
    """
    wish.check_alpha()
    legacy, labels = np.random.RandomState(wish.seed % 2**32), np.unique(wish.labels)
    fair = len(wish.labels) / wish.clients
    least = min(LEAST, int(fair))
    for _ in range(TRIES):
        parts = [np.empty(0, np.int64) for _ in range(wish.clients)]
        for label in labels:
            own = np.flatnonzero(wish.labels == label)
            legacy.shuffle(own)
            shares = legacy.dirichlet(np.full(wish.clients, wish.alpha)) * [len(part) < fair for part in parts]
            if not shares.sum() > 0:  # those who may still take some have drawn nothing at all
                break
            cuts = (np.cumsum(shares / shares.sum()) * len(own)).astype(int)[:-1]
            parts = [np.concatenate(pair) for pair in zip(parts, np.split(own, cuts), strict=True)]
        else:
            if min(map(len, parts)) >= least:
                return parts
    raise wish.unlucky(least)


def _shards(wish: _Wish) -> list[Any]:
    """Sort by label, cut into clients x shards pieces, and deal them out."""
    pieces = wish.clients * wish.shards
    if wish.shards < 1:
        raise OptionError(f"shards={wish.shards} is below 1. Give the number of pieces a client gets.")
    if pieces > len(wish.labels):
        raise DataError(
            f"{len(wish.labels)} examples are too few for {wish.clients} x {wish.shards} shards. Take fewer."
        )
    shuffled = wish.rng.permutation(len(wish.labels))
    by_label = shuffled[np.argsort(wish.labels[shuffled], kind="stable")]
    cut = np.array_split(by_label, pieces)
    dealt = wish.rng.permutation(pieces).reshape(wish.clients, wish.shards)
    return [np.concatenate([cut[piece] for piece in hand]) for hand in dealt]


def _natural(wish: _Wish) -> list[Any]:
    """Keep groups whole: in falling size, each goes to the client that has the fewest examples so far."""
    if wish.groups is None:
        raise DataError("partition natural needs groups, and this task has none. Choose another partition.")
    if len(wish.groups) != len(wish.labels):
        raise DataError(f"{len(wish.groups)} groups for {len(wish.labels)} examples. Give one for each.")
    names, groups, sizes = np.unique(wish.groups, return_inverse=True, return_counts=True)
    if len(names) < wish.clients:
        raise DataError(f"{len(names)} groups are too few for {wish.clients} clients. Take fewer clients.")
    shuffled = wish.rng.permutation(len(names))
    falling = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    owner = np.empty(len(names), np.int64)
    loads = [(0, client) for client in range(wish.clients)]
    for group in falling:
        load, client = heapq.heappop(loads)
        owner[group] = client
        heapq.heappush(loads, (load + int(sizes[group]), client))
    return [np.flatnonzero(owner[groups] == client) for client in range(wish.clients)]


KINDS: dict[str, Callable[[_Wish], list[Any]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "dirichlet-capped": _capped,
    "shards": _shards,
    "natural": _natural,
}
LABELLED = ("dirichlet", "dirichlet-capped", "shards")


def from_flower(partitioner: Any, targets: Any, groups: Any = None) -> list[Indices]:
    """Divide by a partitioner of flwr-datasets over the columns `label` and `group`.

    For instance `from_flower(PathologicalPartitioner(10, "label", 2), targets)`.
    """
    from datasets import Dataset

    columns = {"label": _array(targets), "index": np.arange(len(targets))}
    if groups is not None:
        columns["group"] = _array(groups)
    partitioner.dataset = Dataset.from_dict(columns)
    parts = [partitioner.load_partition(client) for client in range(partitioner.num_partitions)]
    return [np.sort(np.asarray(part["index"], dtype=np.int64)) for part in parts]


def label_counts(parts: Sequence[Indices], targets: Any, classes: int | None = None) -> Counts:
    """Count each label at each client: a matrix clients x labels (of words, where each word has a label)."""
    labels = _array(targets)
    classes = classes or int(labels.max()) + 1
    counts = np.zeros((len(parts), classes), np.int64)
    for client, part in enumerate(parts):
        own = labels[part]
        counts[client] = np.bincount(own[own != IGNORED], minlength=classes)
    return counts


def partition_table(
    parts: Sequence[Indices], targets: Any, labels: Sequence[str] = (), *, rows: int = 20, columns: int = 12
) -> str:
    """Print examples and label counts of each client as a small table.

    With more labels than `columns`, each client's most frequent ones are named instead.

    >>> print(partition_table([np.array([0, 1]), np.array([2])], np.array([0, 1, 1])))
    client  examples  0  1
         0         2  1  1
         1         1  0  1
    """
    counts = label_counts(parts, targets, len(labels) or None)
    names = list(labels) or [str(label) for label in range(counts.shape[1])]
    wide = counts.shape[1] > columns
    lines = [["client", "examples", *(["labels", "most frequent"] if wide else names)]]
    for client, (part, own) in enumerate(zip(parts[:rows], counts, strict=False)):
        shown = _most_frequent(own, names) if wide else [str(count) for count in own]
        lines.append([str(client), str(len(part)), *shown])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    if len(parts) > rows:
        sizes = [len(part) for part in parts]
        text.append(f"... {len(parts)} clients in all, with {min(sizes)} to {max(sizes)} examples")
    return "\n".join(text)


def _most_frequent(own: Any, names: Sequence[str], shown: int = 3) -> list[str]:
    best = [label for label in np.argsort(-own, kind="stable")[:shown] if own[label]]
    share = own / max(int(own.sum()), 1)
    return [str(int((own > 0).sum())), ", ".join(f"{names[label]} {share[label]:.0%}" for label in best)]
