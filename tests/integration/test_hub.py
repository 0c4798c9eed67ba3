"""Images from the Hugging Face hub: the real libraries, in processes of their own, against a hub on the loopback."""

import importlib.util
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comfetch.data.images import NAMES
from tests.integration.loopback_hub import Hub, serving

LOAD = """
import sys
import numpy as np
from comfetch.data import load_task
from comfetch.errors import DataError

for name in sys.argv[1:]:
    try:
        task = load_task(name, "hub")
    except DataError as error:
        print(error)
        continue
    sides = {"train": task.train, "test": task.test}
    arrays = {f"{side}_{part}": getattr(sides[side], part).numpy() for side in sides for part in ("inputs", "targets")}
    np.savez(name, **arrays)
    print(task.checksum)
"""
RUN = "from comfetch.cli import main; main()"
TINY = ("--data-dir", "hub", "--model", "mlp", "--rounds", "1", "--clients", "2", "--batch-size", "8", "--out", "run")
WAYS = "Check the connection, or give the files with --data-dir FOLDER or COMFETCH_DATA."
SIZES = {"train": 60, "test": 20}


@dataclass(frozen=True)
class Source:
    """What the hub has of a task: names, types and order are those of the real repository."""

    repository: str
    config: str
    image: str
    shape: tuple[int, ...]
    labels: dict[str, list[str]]
    batches: tuple[int, ...] = (1,)


SOURCES = {
    "cifar10": Source(
        "uoft-cs/cifar10", "plain_text", "img", (32, 32, 3), {"label": NAMES["cifar10"].split()}, (4, 3, 2, 5, 1)
    ),
    "cifar100": Source(
        "uoft-cs/cifar100", "cifar100", "img", (32, 32, 3),
        {"fine_label": [f"fine {n}" for n in range(100)], "coarse_label": [f"coarse {n}" for n in range(20)]},
    ),
    "fashion-mnist": Source(
        "zalando-datasets/fashion_mnist", "fashion_mnist", "image", (28, 28), {"label": NAMES["fashion-mnist"].split()}
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Genuine:
    """A task's pixels and labels in their official order, and the files of its repository."""

    pixels: dict[str, np.ndarray]
    labels: dict[str, dict[str, np.ndarray]]
    files: dict[str, bytes]


def make(source: Source, seed: int) -> Genuine:
    datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    random = np.random.default_rng(seed)
    pixels = {side: random.integers(0, 256, (size, *source.shape), np.uint8) for side, size in SIZES.items()}
    labels = {
        side: {column: random.integers(0, len(names), size) for column, names in source.labels.items()}
        for side, size in SIZES.items()
    }
    kinds = {column: datasets.ClassLabel(names=names) for column, names in source.labels.items()}
    features = datasets.Features({source.image: datasets.Image(), **kinds})
    files = {"README.md": card(source), ".gitattributes": b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"}
    for side, size in SIZES.items():
        batches = source.batches if side == "train" else (1,)
        order = np.concatenate([np.split(np.arange(size), len(batches))[batch - 1] for batch in batches])
        columns = {column: rows[order].tolist() for column, rows in labels[side].items()}
        pictures = [image.fromarray(pixels[side][row]) for row in order]
        content = io.BytesIO()
        datasets.Dataset.from_dict({source.image: pictures, **columns}, features=features).to_parquet(content)
        files[f"{source.config}/{side}-00000-of-00001.parquet"] = content.getvalue()
    return Genuine(pixels, labels, files)


def card(source: Source) -> bytes:
    """Write the dataset's card with the fields of the real ones (JSON is YAML too)."""
    columns = [
        {"name": column, "dtype": {"class_label": {"names": {str(number): name for number, name in enumerate(names)}}}}
        for column, names in source.labels.items()
    ]
    information = {
        "config_name": source.config,
        "features": [{"name": source.image, "dtype": "image"}, *columns],
        "splits": [{"name": side, "num_bytes": 1000.0, "num_examples": size} for side, size in SIZES.items()],
        "download_size": 2000,
        "dataset_size": 2000.0,
    }
    files = [{"split": side, "path": f"{source.config}/{side}-*"} for side in SIZES]
    configs = [{"config_name": source.config, "data_files": files, "default": True}]
    return f"---\n{json.dumps({'dataset_info': information, 'configs': configs})}\n---\n\n# Card\n".encode()


def start(code: str, *arguments: str, hub: str, home: Path) -> "subprocess.Popen[str]":
    """Start Python code in the folder `home`, which is the cache of the hub's library too."""
    kept = {key: value for key, value in os.environ.items() if not re.match("(?i)HF_|HUGGING|.*proxy$|COMFETCH", key)}
    settings = {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # counted by a third host
        "NO_PROXY": "127.0.0.1,localhost",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=home, env={**kept, **settings}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]", code: int = 0) -> tuple[list[str], list[str]]:
    """Wait for a process; give the lines of its output and of its errors."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out.splitlines(), err.splitlines()


@pytest.fixture(scope="module")
def genuine() -> dict[str, Genuine]:
    return {name: make(source, seed) for seed, (name, source) in enumerate(SOURCES.items())}


@pytest.fixture(scope="module")
def hub(genuine: dict[str, Genuine]) -> Iterator[Hub]:
    repositories = {SOURCES[name].repository: one.files for name, one in genuine.items()}
    with serving(Hub(repositories, xet={"uoft-cs/cifar100"})) as hub:
        yield hub


@dataclass(frozen=True)
class Fetched:
    home: Path
    checksums: dict[str, str]


@pytest.fixture(scope="module")
def fetched(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Fetched:
    """Fetch all three tasks, in one process."""
    home = tmp_path_factory.mktemp("home")
    out, _ = finish(start(LOAD, *SOURCES, hub=hub.url, home=home))
    return Fetched(home, dict(zip(SOURCES, out, strict=True)))


@pytest.mark.parametrize("name", SOURCES)
def test_task_from_the_hub_holds_the_images_and_labels_of_its_repository(
    name: str, genuine: dict[str, Genuine], fetched: Fetched
) -> None:
    label = next(iter(SOURCES[name].labels))
    with np.load(fetched.home / f"{name}.npz") as arrays:
        for side in SIZES:
            pixels = genuine[name].pixels[side]
            pixels = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
            assert arrays[f"{side}_inputs"].dtype == np.uint8
            assert np.array_equal(arrays[f"{side}_inputs"], pixels)
            assert np.array_equal(arrays[f"{side}_targets"], genuine[name].labels[side][label])


@pytest.mark.usefixtures("fetched")
def test_each_file_is_fetched_once_from_the_storage_that_holds_it(hub: Hub) -> None:
    places = [asked.split("/")[1] for asked in hub.asked if asked.startswith(("GET /lfs/", "GET /chunks/"))]
    in_chunks = importlib.util.find_spec("hf_xet") is not None
    assert places.count("chunks") == (2 if in_chunks else 0)
    assert len(places) == 6


def test_run_trains_on_the_hubs_images(hub: Hub, fetched: Fetched, tmp_path: Path) -> None:
    out, _ = finish(start(RUN, "run", "cifar10", *TINY, hub=hub.url, home=tmp_path))
    assert "Accuracy" in out[-1]
    environment: dict[str, Any] = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["data"] == fetched.checksums["cifar10"]
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 1


def test_what_a_hub_does_not_have_is_told_with_the_other_ways(genuine: dict[str, Genuine], tmp_path: Path) -> None:
    whole = genuine["cifar100"].files.items()
    damaged = {path: body[:-9] if path.endswith(".parquet") else body for path, body in whole}
    with serving(Hub({"uoft-cs/cifar100": damaged}, mute={"zalando-datasets/fashion_mnist"})) as hub:
        out, _ = finish(start(LOAD, *SOURCES, hub=hub.url, home=tmp_path))
    reasons = ("Dataset 'uoft-cs/cifar10' doesn't exist on the Hub", "Parquet magic bytes not found", "Couldn't find")
    for (name, source), told, reason in zip(SOURCES.items(), out, reasons, strict=True):
        assert told.startswith(f"Task {name}: {source.repository} could not be had from the Hugging Face hub (")
        assert told.endswith(WAYS) and reason in told


@pytest.mark.slow
def test_without_a_hub_the_kept_copy_serves_and_a_missing_one_is_told(fetched: Fetched, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    # Side by side: the hub's library tries for 23 seconds.
    cached = start(LOAD, "cifar10", hub=nobody, home=fetched.home)
    missing = start(RUN, "run", "cifar10", *TINY, hub=nobody, home=tmp_path)
    assert finish(cached)[0] == [fetched.checksums["cifar10"]]
    out, err = finish(missing, code=2)
    assert not out and not (tmp_path / "run").exists()
    assert err[-1].startswith("comfetch: Task cifar10: uoft-cs/cifar10 could not be had") and err[-1].endswith(WAYS)
    assert sum(WAYS in line for line in err) == 1
