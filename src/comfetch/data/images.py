"""Load the image tasks, and augment and normalise images by the batch."""

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from comfetch.data.files import HUB, find, missing, read, read_unpacked
from comfetch.data.pickles import matches_official, read_batch
from comfetch.data.task import Examples, Task
from comfetch.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]
Place = str | os.PathLike[str] | None

MOMENTS = {
    "cifar10": ((0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)),
    "cifar100": ((0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)),
    "fashion-mnist": ((0.28604060,), (0.35302424,)),
}
"""Mean and standard deviation of the training pixels / 255, one number a channel."""

NAMES = {
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck",
    "fashion-mnist": "top trouser pullover dress coat sandal shirt sneaker bag boot",
}
"""The classes' names, where there are few."""

CONTENT = {
    "cifar10": "44ec2972b7f45f486f222e79ddfe83dbacbc4688e5859ca924e2dba2481d2c2d",
    "cifar100": "c9086cf2740c12000754eccf02baf8fdc60fdd5f50d67aa19089d44ebb8de18f",
}
"""`Task.checksum` of the genuine images."""

HUB_BATCHES = (4, 3, 2, 5, 1)
"""The order of CIFAR-10's training batches on the hub: as the official archive packs them."""


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...], top: float = 255.0) -> Tensor:
    """Make bytes to floats of mean 0 and variance 1: (x / top - mean) / std, channel by channel."""
    shape = (1, -1, 1, 1)
    shift = torch.tensor(mean, device=images.device).view(shape) * top
    scale = 1 / (torch.tensor(std, device=images.device).view(shape) * top)
    return images.float().sub_(shift).mul_(scale)


def crop_and_flip(images: Tensor, generator: Generator, pad: int = 4) -> Tensor:
    """Shift each image by up to `pad` pixels (edges reflected) and mirror every second one, at random.

    Padding, crop and mirror are one gather of the batch's pixels at computed places: no padded copy and no
    loop over images (0.6 ms for 128 CIFAR images on one core).

    Args:
        images: `[batch, channels, height, width]`, of any type.
    """
    batch, channels, height, width = images.shape
    shifts = torch.randint(-pad, pad + 1, (2, batch, 1), generator=generator)
    mirrored = torch.randint(0, 2, (batch, 1), generator=generator, dtype=torch.bool)
    rows = _reflect(torch.arange(height) + shifts[0], height)
    columns = _reflect(torch.arange(width) + shifts[1], width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    places = (rows[:, :, None] * width + columns[:, None, :]).view(batch, 1, -1).to(images.device)
    return images.flatten(2).gather(2, places.expand(-1, channels, -1)).view(images.shape)


def _reflect(places: Tensor, size: int) -> Tensor:
    """Fold places outside 0..size-1 back: -1 becomes 1, and size becomes size - 2."""
    return (size - 1) - ((size - 1) - places.abs()).abs()


def digits(data_dir: Place) -> Task:
    """Load the 1,797 handwritten digits, 8 x 8 pixels of 0..16, that scikit-learn carries.

    Every fifth example of each class is for testing: no random generator, the same split for ever.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("Task digits needs scikit-learn: pip install 'comfetch[data]'.") from error
    bunch = load_digits()
    images, targets = bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.int64)
    testing = _rank_in_class(targets) % 5 == 4
    train, test = (_examples(images[side], targets[side]) for side in (~testing, testing))
    pixels = train.inputs.double() / 16
    return Task(
        name="digits",
        model="mlp",
        train=train,
        test=test,
        inputs=(1, 8, 8),
        classes=10,
        labels=tuple("0123456789"),
        prepare=partial(normalise, mean=(float(pixels.mean()),), std=(float(pixels.std()),), top=16.0),
    )


def _rank_in_class(targets: Array) -> Array:
    """Count the examples of each class from 0, in their order."""
    rank = np.empty_like(targets)
    for label in np.unique(targets):
        places = np.flatnonzero(targets == label)
        rank[places] = np.arange(len(places))
    return rank


def fashion_mnist(data_dir: Place) -> Task:
    """Load Fashion-MNIST (28 x 28 grey) from its four idx files, Debian's or the user's, or the hub."""
    if data_dir == HUB:
        sides = _from_hub("fashion-mnist", "zalando-datasets/fashion_mnist", "image", "label")
    else:
        files = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
        layouts = {
            f"{folder}/*{end}": tuple(f"{folder}/{name}-ubyte{end}" for name in files)
            for folder in (".", "fashion-mnist", "FashionMNIST/raw")
            for end in (".gz", "")
        }
        found = find(data_dir, layouts, "/usr/share/datasets/fashion-mnist")
        if found is None:
            third = "apt install dataset-fashion-mnist (or, with internet, --data-dir hub)"
            what = "train-images-idx3-ubyte.gz and its three sisters"
            raise missing("fashion-mnist", data_dir, what, third)
        arrays = [read_idx(found[1] / name) for name in layouts[found[0]]]
        sides = [(arrays[0][:, None], arrays[1]), (arrays[2][:, None], arrays[3])]
    return _image_task("fashion-mnist", sides, model="resnet9", shape=(1, 28, 28), classes=10)


def read_idx(path: Path) -> Array:
    """Read an array of bytes in the idx format: 0 0 8 rank, the sizes, the bytes."""
    content = read_unpacked(path)
    rank = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    if not rank or len(content) < 4 + 4 * rank:
        raise DataError(f"{path}: not an idx file of bytes. Copy the file again.")
    shape = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    pixels = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
    if len(pixels) != int(np.prod(shape, dtype=object)):
        raise DataError(f"{path}: {len(pixels):,} values found, shape {shape} announced. Copy the file again.")
    return pixels.reshape(shape)


def cifar(data_dir: Place, classes: int) -> Task:
    """Load CIFAR-10 or CIFAR-100 from this project's mosaics, the official python batches, or the hub."""
    name = f"cifar{classes}"
    mosaics = [f"{name}_train_{part}.webp" for part in range(5)] + [f"{name}_test.webp"]
    official = [f"data_batch_{part}" for part in range(1, 6)] + ["test_batch"]
    folder = "cifar-10-batches-py"
    if classes == 100:
        official, folder = ["train", "test"], "cifar-100-python"
    layouts = {
        "mosaics": tuple(mosaics),
        "batches": tuple(f"{folder}/{file}" for file in official),
        "bare": tuple(official),
    }
    if data_dir == HUB:
        columns = ("img", "label" if classes == 10 else "fine_label")
        train, test = _from_hub(name, f"uoft-cs/{name}", *columns)
        train = _sort_batches(*train) if classes == 10 else train
        return _cifar_task(name, [train, test], classes)
    found = find(data_dir, layouts)
    if found is None:
        what = f"{name}_*.webp and labels.npz, or {folder}"
        raise missing(name, data_dir, what, "with internet, --data-dir hub")
    layout, root = found
    paths = [root / file for file in layouts[layout]]
    if layout == "mosaics":
        return _cifar_task(name, _from_mosaics(name, root, paths), classes)
    task = _cifar_task(name, _from_batches(paths, classes), classes)
    if not matches_official(paths) and task.checksum != CONTENT[name]:
        raise DataError(f"{paths[0].parent}: the images are not those of {name}. Copy the files again.")
    return task


def _cifar_task(name: str, sides: list[tuple[Array, Array]], classes: int) -> Task:
    return _image_task(name, sides, model="resnet18", shape=(3, 32, 32), classes=classes, augment=crop_and_flip)


def _image_task(
    name: str, sides: list[tuple[Array, Array]], model: str, shape: tuple[int, ...], classes: int, **more: Any
) -> Task:
    """Check shapes and make the task."""
    for images, targets in sides:
        if images.shape[1:] != shape or images.dtype != np.uint8 or len(images) != len(targets):
            found = f"{images.dtype} images of shape {images.shape} with {len(targets)} labels"
            raise DataError(f"Task {name}: {found} found, uint8 images of {shape} expected. Copy it again.")
    mean, std = MOMENTS[name]
    train, test = (_examples(images, targets) for images, targets in sides)
    prepare = partial(normalise, mean=mean, std=std)
    labels = tuple(NAMES.get(name, "").split())
    return Task(name, model, train, test, shape, classes, labels=labels, prepare=prepare, **more)


def _examples(images: Array, targets: Array) -> Examples:
    own = np.require(images, requirements=["C", "W"])
    return Examples(torch.from_numpy(own), torch.from_numpy(targets.astype(np.int64)))


def _from_mosaics(name: str, root: Path, paths: list[Path]) -> list[tuple[Array, Array]]:
    """Read the six mosaics (100 x 100 images each) and their labels."""
    with np.load(BytesIO(read(root / "labels.npz")), allow_pickle=False) as labels:
        targets = labels[f"{name}_train"], labels[f"{name}_test"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing and decoding run outside Python's lock
        *train, test = pool.map(_mosaic, paths)
    return [(np.concatenate(train), targets[0]), (test, targets[1])]


def _mosaic(path: Path) -> Array:
    """Cut a mosaic into its images, `[10000, 3, 32, 32]`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"{path}: Pillow is needed to read it: pip install 'comfetch[data]'.") from error
    with Image.open(BytesIO(read(path))) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    grid = pixels.reshape(100, 32, 100, 32, 3)
    return np.ascontiguousarray(grid.transpose(0, 2, 4, 1, 3)).reshape(10000, 3, 32, 32)


def _from_batches(paths: list[Path], classes: int) -> list[tuple[Array, Array]]:
    """Read the official batches; the last file is the test set."""
    read_all = [read_batch(path, "labels" if classes == 10 else "fine_labels") for path in paths]
    images, targets = zip(*read_all, strict=True)
    return [(np.concatenate(images[:-1]), np.concatenate(targets[:-1])), (images[-1], targets[-1])]


def _from_hub(task: str, repository: str, image: str, label: str) -> list[tuple[Array, Array]]:
    """Fetch train and test from the Hugging Face hub (a copy is kept in its own cache)."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"Task {task} from the hub: pip install 'comfetch[data]' first.") from error
    try:
        splits = load_dataset(repository)
        return [from_split(splits[side], image, label) for side in ("train", "test")]
    except Exception as error:  # the hub's library raises errors of many kinds, none of them its own
        reason = shorten(str(error.__cause__ or error), 200, placeholder=" …") or type(error).__name__
        raise DataError(
            f"Task {task}: {repository} could not be had from the Hugging Face hub ({reason}). Check the "
            "connection, or give the files with --data-dir FOLDER or COMFETCH_DATA."
        ) from error


def from_split(split: Any, image: str, label: str) -> tuple[Array, Array]:
    """Make arrays of a `datasets` split of pictures and labels."""
    pictures = np.stack([np.asarray(picture) for picture in split[image]])
    pictures = pictures[..., None] if pictures.ndim == 3 else pictures
    return np.ascontiguousarray(pictures.transpose(0, 3, 1, 2)), np.asarray(split[label])


def _sort_batches(images: Array, targets: Array) -> tuple[Array, Array]:
    """Put the hub's training batches of CIFAR-10 into their official order.

    Clients are given rows by number, so one seed divides the images alike only if their order is one.
    """
    order = np.argsort(HUB_BATCHES)
    images, targets = (np.concatenate([np.array_split(rows, 5)[part] for part in order]) for rows in (images, targets))
    return images, targets
