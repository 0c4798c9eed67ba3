"""Partitions: every kind keeps its promises for all labels, clients and seeds."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comfetch.data import IGNORED, KINDS, from_flower, label_counts, partition, partition_table
from comfetch.errors import DataError, OptionError

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))
GROUPS = np.arange(1000) // 20


def divided(kind: str, seed: int = 0, clients: int = 10, **options: object) -> list[np.ndarray]:
    return partition(LABELS, clients, kind, seed=seed, groups=GROUPS, **options)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=120),
    clients=st.integers(1, 20),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 2**31),
)
def test_every_example_has_one_client_and_no_client_is_empty(
    kind: str, labels: list[int], clients: int, alpha: float, seed: int
) -> None:
    groups = np.arange(len(labels)) // 3
    try:
        parts = partition(np.array(labels), clients, kind, alpha=alpha, seed=seed, groups=groups)
    except DataError as error:
        assert re.search("Take .*fewer", str(error))
        return
    assert len(parts) == clients and all(len(part) for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_the_same_partition_and_another_seed_another(kind: str) -> None:
    first, again, other = divided(kind, 1), divided(kind, 1), divided(kind, 2)
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert any(not np.array_equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_local_sets_are_equal_but_for_one_example(kind: str) -> None:
    sizes = {len(part) for part in divided(kind, clients=7, alpha=0.1)}
    assert sizes <= {142, 143}


def test_unequal_dirichlet_sets_differ_in_size() -> None:
    sizes = [len(part) for part in divided("dirichlet", equal=False, alpha=0.5)]
    assert max(sizes) > 2 * min(sizes) and sum(sizes) == 1000


@pytest.mark.parametrize("equal", [True, False])
def test_small_alpha_skews_labels_and_large_alpha_does_not(equal: bool) -> None:
    def largest_share(alpha: float) -> float:
        counts = label_counts(divided("dirichlet", alpha=alpha, equal=equal, clients=5), LABELS)
        return float((counts / counts.sum(1, keepdims=True)).max(1).mean())

    assert largest_share(0.05) > 0.35 > 0.2 > largest_share(1000.0)


def test_equal_dirichlet_draws_each_clients_mixture_from_the_distribution_asked_for() -> None:
    labels = np.repeat(np.arange(4), 5000)
    draws = [label_counts(partition(labels, 4, "dirichlet", seed=seed), labels) for seed in range(200)]
    shares = np.array(draws).reshape(-1, 4) / 5000
    assert shares.mean(0) == pytest.approx([0.25] * 4, abs=0.02)
    # Dirichlet(1, 1, 1, 1) has a standard deviation of 0.194; the common stock takes some of it.
    assert 0.13 < shares.std() < 0.2


def test_first_and_last_client_are_skewed_alike() -> None:
    largest = np.array([label_counts(divided("dirichlet", seed, alpha=0.3), LABELS).max(1) for seed in range(200)])
    assert largest[:, 0].mean() == pytest.approx(largest[:, -1].mean(), rel=0.1)


def test_capped_division_is_that_of_the_published_code() -> None:
    """Its rule once more, in plain lists: label by label, and who has a fair part already gets none."""
    random = np.random.RandomState(101)
    while True:
        sets: list[list[int]] = [[] for _ in range(5)]
        for label in range(10):
            rows = np.where(label == LABELS)[0]
            random.shuffle(rows)
            shares = random.dirichlet([0.5] * 5)
            open_shares = [share if len(own) < 1000 / 5 else 0.0 for share, own in zip(shares, sets, strict=True)]
            ends = (np.cumsum(np.array(open_shares) / sum(open_shares)) * len(rows)).astype(int)
            for own, start, end in zip(sets, [0, *ends], [*ends[:-1], len(rows)], strict=False):
                own += rows[start:end].tolist()
        if min(map(len, sets)) >= 10:
            break
    ours = divided("dirichlet-capped", 101, 5, alpha=0.5)
    assert [part.tolist() for part in ours] == [sorted(own) for own in sets]


def test_capped_division_leaves_the_last_labels_to_few_clients() -> None:
    held = np.mean([label_counts(divided("dirichlet-capped", seed), LABELS) > 0 for seed in range(50)], axis=(0, 1))
    assert held[0] > 0.95 and held[-1] < 0.75
    largest = max(len(part) for seed in range(50) for part in divided("dirichlet-capped", seed))
    assert largest < 2 * 100


def test_shards_give_each_client_few_labels() -> None:
    counts = label_counts(divided("shards", shards=2), LABELS)
    assert ((counts > 0).sum(1) <= 2).all()


def test_natural_groups_stay_whole_and_loads_are_even() -> None:
    parts = divided("natural", clients=7)
    owners = [set(GROUPS[part].tolist()) for part in parts]
    assert sum(len(own) for own in owners) == len(set().union(*owners)) == 50
    assert {len(part) for part in parts} <= {140, 160}


def test_a_client_for_each_group_gets_just_that_group() -> None:
    assert all(len(set(GROUPS[part].tolist())) == 1 for part in divided("natural", clients=50))


def test_tensors_are_taken_as_arrays_are() -> None:
    ours, theirs = partition(torch.from_numpy(LABELS), 4), partition(LABELS, 4)
    assert all(np.array_equal(one, two) for one, two in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("kind", "clients", "options", "error", "message"),
    [
        (
            "random",
            2,
            {},
            OptionError,
            "partition 'random' is unknown. Choose one of iid, dirichlet, dirichlet-capped, shards",
        ),
        ("iid", 0, {}, OptionError, "clients=0 is below 1"),
        ("iid", 1001, {}, DataError, "1000 examples are too few for 1001 clients"),
        ("dirichlet", 2, {"alpha": 0.0}, OptionError, "alpha=0.0 is not a positive number"),
        ("dirichlet", 2, {"alpha": float("nan")}, OptionError, "alpha=nan is not a positive number"),
        ("dirichlet", 100, {"alpha": 1e-4, "equal": False}, DataError, "Take a larger alpha, fewer clients, or"),
        ("dirichlet-capped", 2, {"alpha": 0.0}, OptionError, "alpha=0.0 is not a positive number"),
        ("dirichlet-capped", 90, {"alpha": 0.01}, DataError, "with less than 10 examples in 1000 draws. Take a larger"),
        ("shards", 2, {"shards": 0}, OptionError, "shards=0 is below 1"),
        ("shards", 600, {"shards": 2}, DataError, "1000 examples are too few for 600 x 2 shards"),
        ("natural", 51, {}, DataError, "50 groups are too few for 51 clients"),
        ("natural", 2, {"groups": None}, DataError, "needs groups, and this task has none"),
        ("natural", 2, {"groups": [1, 2]}, DataError, "2 groups for 1000 examples"),
    ],
)
def test_impossible_partition_is_refused_with_a_remedy(
    kind: str, clients: int, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        partition(LABELS, clients, kind, **{"groups": GROUPS, **options})  # type: ignore[arg-type]


def test_remedies_of_the_unequal_split_work() -> None:
    for options in ({"alpha": 10.0}, {"clients": 2, "alpha": 0.01}, {"alpha": 1e-4, "equal": True}):
        wish = {"clients": 50, "equal": False, **options}
        assert all(len(part) for part in divided("dirichlet", **wish))  # type: ignore[arg-type]


def test_labels_of_words_are_divided_by_iid_or_groups_only() -> None:
    tags = np.full((30, 5), IGNORED)
    tags[:, :3] = 1
    with pytest.raises(DataError, match="a label for each word. Choose one of iid, natural."):
        partition(tags, 3, "dirichlet")
    assert label_counts(partition(tags, 3, "iid"), tags, 2).tolist() == [[0, 30]] * 3


def test_table_names_frequent_labels_when_there_are_many_and_ends_when_there_are_many_clients() -> None:
    labels = np.repeat(np.arange(30), 10)
    table = partition_table(partition(labels, 30, "shards", shards=1), labels).splitlines()
    assert table[0].split() == ["client", "examples", "labels", "most", "frequent"]
    assert table[1].endswith("100%") and len(table) == 22
    assert table[-1] == "... 30 clients in all, with 10 to 10 examples"


@pytest.mark.slow
def test_partitioners_of_flower_can_be_used() -> None:
    flower = pytest.importorskip("flwr_datasets.partitioner")
    parts = from_flower(flower.DirichletPartitioner(5, "label", 0.5, seed=1), LABELS)
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    natural = from_flower(flower.NaturalIdPartitioner("group"), LABELS, GROUPS)
    ours = divided("natural", clients=50)
    assert sorted(map(tuple, natural)) == sorted(map(tuple, ours))
