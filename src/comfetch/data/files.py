"""Find and read the files of a dataset, and refuse those that are missing or damaged."""

import gzip
import hashlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from comfetch.errors import DataError

HUB = "hub"
"""The `data_dir` that means: fetch from the Hugging Face hub."""

KNOWN = {
    "cifar100_test.webp": (17237256, "5103545e67ac0fed17b680f566114a386ad8d5d8aa4b41c188d235a3962f8360"),
    "cifar100_train_0.webp": (17186328, "2cc398b3fb8ca153b7e677846fb1ada2a81af1dd2f467ab3e34d25344c1926a3"),
    "cifar100_train_1.webp": (17230778, "2c80930c167080ea31109c6e565a804cdb0f59902763fafd872604d7a3341f0d"),
    "cifar100_train_2.webp": (17148252, "c938b4a526a95852082c44c6ef74da0ed594eca6a49bf7d8bd305360ef5555d3"),
    "cifar100_train_3.webp": (17198592, "e486bedb9c9f485317428d493b095946ce63e7928dd101830b61bd58420fec0c"),
    "cifar100_train_4.webp": (17184804, "003e8b14ae8c8acbe383d00764ec7183fca85637e6339ebd6692542599d166d3"),
    "cifar10_test.webp": (17138714, "1925251749113162ebc2866d7e46840a66fa4573713aa743599fd9d0370e7362"),
    "cifar10_train_0.webp": (17108202, "33ee1170f92bf498b555fd84884f47b0fd5cf861cd8906ba0494510ca02d8860"),
    "cifar10_train_1.webp": (17150384, "f0cd79b244135a07833be96f5a711f71baf12b52ebbb0558a5e2b87a0fb99d41"),
    "cifar10_train_2.webp": (17160158, "0fc8b7a37cf952720a4edb4401b27e0ac02fc6d8ec3b7a3fc7e7065e74fb0ea8"),
    "cifar10_train_3.webp": (17128486, "3b94be3871dce4b7effe0bd85d7fea95d53946968481a5d323db7a3fbeb0ea3e"),
    "cifar10_train_4.webp": (17110208, "864b5f2f1384951903533f09e5daec38734f154bc6ec7267a7e8fb6008e3942d"),
    "labels.npz": (83390, "11f12b71002d8e779284aa2519a44a093d745fed74913f10df68e115eb7095fc"),
    "mnli_dev_matched_pos.jsonl.gz": (
        711492,
        "5c8158264a5ebac5eb757d4f7e9006a531498229cabc1af610ebae922caed08c",
    ),
    "ud_english_ewt_test.conllu.gz": (
        330912,
        "29c151eee8846d3f3ef7806c126ecac9932af2317c008c6d6b076c5e14950dbe",
    ),
    "ud_english_ewt_train.conllu.gz": (
        2605912,
        "bd47e08c9e18ec12d319e84df2ccdb272ff6de1d0dba5761117d3caf8b358f7b",
    ),
}
"""Bytes and sha256 of the files that come with the project: checked at every reading (0.2 s for CIFAR-10)."""


def folders(data_dir: str | os.PathLike[str] | None, *system: str) -> list[Path]:
    """List where to look: `data_dir` alone if given, else COMFETCH_DATA, then the system's own folders."""
    if data_dir == HUB:
        raise DataError("data_dir hub: this task is not fetched from the hub. Give a folder that holds its files.")
    if data_dir is not None:
        if not Path(data_dir).is_dir():
            raise DataError(f"data_dir {data_dir} is not a folder. Give the folder that holds the dataset.")
        return [Path(data_dir)]
    from_environment = os.environ.get("COMFETCH_DATA")
    if from_environment and not Path(from_environment).is_dir():
        raise DataError(f"COMFETCH_DATA={from_environment} is not a folder. Set it to one, or unset it.")
    return [Path(folder) for folder in (from_environment, *system) if folder]


def find(
    data_dir: str | os.PathLike[str] | None, layouts: Mapping[str, tuple[str, ...]], *system: str
) -> tuple[str, Path] | None:
    """Find the first folder that holds a layout's first file; give the layout's name and that folder.

    Args:
        layouts: name -> files, relative to the folder. The first file stands for the layout: where it is
            found, the others are due, and a missing one is reported by name when it is read.
    """
    for folder in folders(data_dir, *system):
        for name, files in layouts.items():
            if (folder / files[0]).is_file():
                return name, folder
    return None


def missing(task: str, data_dir: str | os.PathLike[str] | None, what: str, third: str) -> DataError:
    """Make the error of a dataset that is nowhere: where it was sought, and the three ways to provide it."""
    places = [str(folder) for folder in folders(data_dir)] or ["COMFETCH_DATA is not set"]
    return DataError(
        f"Task {task}: its data was not found ({', '.join(places)}). Provide it in one of three ways: "
        f"--data-dir FOLDER with {what}; the same folder in the environment as COMFETCH_DATA; or {third}."
    )


def read(path: Path) -> bytes:
    """Read a file whole; check length and sha256 if its name is a known one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}). Copy the dataset again.") from error
    if path.name in KNOWN:
        length, digest = KNOWN[path.name]
        if len(content) != length:
            raise DataError(f"{path}: {len(content):,} bytes found, {length:,} expected. Copy the file again.")
        found = hashlib.sha256(content).hexdigest()
        if found != digest:
            raise DataError(f"{path}: sha256 {found} found, {digest} expected. Copy the file again.")
    return content


def read_unpacked(path: Path) -> bytes:
    """Read a file whole, unpacked if its name ends in .gz (whose own checksum is then checked)."""
    content = read(path)
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged or not gzip ({error}). Copy the file again.") from error
