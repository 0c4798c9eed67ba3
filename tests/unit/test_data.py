"""Tasks: what they hold, how batches are made, how files are read and refused."""

import gzip
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from comfetch.data import (
    IGNORED,
    TASKS,
    Examples,
    Task,
    accuracy,
    crop_and_flip,
    cross_entropy,
    load_task,
    normalise,
    partition,
    task_of,
)
from comfetch.data.images import CONTENT, MOMENTS, from_split, read_idx
from comfetch.data.pickles import read_batch
from comfetch.data.text import PADDING, UNKNOWN, read_conllu
from comfetch.errors import DataError, OptionError
from comfetch.models import constructor

OWN_TASK = Path(__file__).parents[2] / "examples" / "own_task.py"
real_data = pytest.mark.skipif(
    not os.environ.get("COMFETCH_DATA"),
    reason="runs on real data: set COMFETCH_DATA to the folder that holds the datasets",
)


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMFETCH_DATA", raising=False)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- digits, limits, batches


def test_digits_are_split_for_ever_in_the_same_way() -> None:
    task = load_task("digits")
    assert (len(task.train), len(task.test)) == (1442, 355)
    assert task.checksum == "34152820c3c2c6f5413eb601e0b202913494a3848c63cefc2c5198f14f2b287b"


def test_digits_have_every_class_on_both_sides_in_proportion() -> None:
    task = load_task("digits")
    shares = task.test.targets.bincount() / (task.train.targets.bincount() + task.test.targets.bincount())
    assert len(shares) == task.classes == 10
    assert ((shares - 0.2).abs() < 0.01).all()


def test_digits_are_prepared_to_mean_zero_and_variance_one() -> None:
    task = load_task("digits")
    inputs, targets = task.batch(task.train, torch.arange(len(task.train)))
    assert inputs.shape == (1442, *task.inputs) and inputs.dtype == torch.float32
    assert inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert inputs.std().item() == pytest.approx(1, abs=1e-3)
    assert torch.equal(targets, task.train.targets)


def test_limit_keeps_so_many_examples_drawn_by_the_seed() -> None:
    one, again, other = (load_task("digits", limit=50, seed=seed) for seed in (1, 1, 2))
    assert len(one.train) == len(one.test) == 50
    assert one.checksum == again.checksum != other.checksum
    with pytest.raises(OptionError, match="limit=0 is below 1"):
        load_task("digits", limit=0)


def counting(length: int, **options: object) -> Task:
    examples = Examples(torch.arange(length)[:, None], torch.zeros(length, dtype=torch.int64))
    return task_of("counting", nn.Identity, examples, examples, **options)  # type: ignore[arg-type]


def test_batches_without_a_generator_go_through_all_examples_in_order() -> None:
    task = counting(7)
    batches = [inputs.flatten().tolist() for inputs, _ in task.batches(task.train, 3)]
    assert batches == [[0, 1, 2], [3, 4, 5], [6]]


def test_batches_with_a_generator_are_shuffled_by_it_and_spare_batch_norm_a_single_example() -> None:
    task = counting(7)

    def epoch(seed: int) -> list[int]:
        return torch.cat([inputs for inputs, _ in task.batches(task.train, 3, generator(seed))]).flatten().tolist()

    assert epoch(1) == epoch(1) != epoch(2)
    assert len(epoch(1)) == len(set(epoch(1))) == 6
    assert len(list(task.batches(task.train, 1, generator()))) == 7
    with pytest.raises(OptionError, match="batch size 0 is below 1"):
        next(task.batches(task.train, 0))


def test_a_clients_share_is_its_rows_with_their_groups() -> None:
    examples = Examples(torch.arange(10)[:, None], torch.arange(10) % 2, torch.arange(10) // 5)
    share = examples.at(partition(examples.targets, 2, "natural", groups=examples.groups)[0])
    assert share.groups is not None
    assert len(share) == 5 and len(share.groups.unique()) == 1
    assert torch.equal(share.inputs.flatten() % 2, share.targets)


def test_examples_of_different_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="3 inputs, 2 targets"):
        Examples(torch.zeros(3, 1), torch.zeros(2))


# ---------------------------------------------------------------- loss, metric, images


def test_loss_and_metric_pass_over_padded_words() -> None:
    outputs, targets = torch.randn(2, 3, 4), torch.tensor([[1, 2, IGNORED], [3, IGNORED, IGNORED]])
    words = torch.stack([outputs[0, 0], outputs[0, 1], outputs[1, 0]])
    assert torch.allclose(cross_entropy(outputs, targets), F.cross_entropy(words, torch.tensor([1, 2, 3])))
    assert accuracy(outputs, targets)[1] == 3
    assert accuracy(F.one_hot(targets.clamp(min=0), 4), targets) == (3, 3)


def test_normalise_is_the_textbook_formula_for_each_channel() -> None:
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    mean, std = MOMENTS["cifar10"]
    textbook = (images / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert torch.allclose(normalise(images, mean, std), textbook, atol=1e-5)


def every_crop(image: Tensor) -> dict[bytes, tuple[int, int, bool]]:
    """Give all 162 results by padding, cutting and mirroring one image the slow way."""
    padded = F.pad(image[None].float(), (4, 4, 4, 4), mode="reflect")[0].to(torch.uint8)
    found = {}
    for top in range(9):
        for left in range(9):
            crop = padded[:, top : top + 32, left : left + 32]
            found[crop.numpy().tobytes()] = (top, left, False)
            found[crop.flip(2).numpy().tobytes()] = (top, left, True)
    return found


def test_augmented_image_is_a_reflected_crop_or_its_mirror_and_all_of_them_occur() -> None:
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    known = every_crop(image)
    augmented = crop_and_flip(image.expand(3000, -1, -1, -1), generator())
    seen = {known[one.numpy().tobytes()] for one in augmented}
    assert len(seen) == 9 * 9 * 2


def test_augmentation_keeps_type_and_shape_and_follows_its_generator() -> None:
    images = torch.randint(0, 256, (16, 3, 32, 24), dtype=torch.uint8)
    one, again, other = (crop_and_flip(images, generator(seed)) for seed in (1, 1, 2))
    assert one.dtype == torch.uint8 and one.shape == images.shape
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_only_training_batches_are_augmented() -> None:
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    examples = Examples(images, torch.zeros(8, dtype=torch.int64))
    task = task_of("images", nn.Identity, examples, examples, augment=crop_and_flip)
    rows = torch.arange(8)
    assert torch.equal(task.batch(task.train, rows)[0], images)
    assert not torch.equal(task.batch(task.train, rows, generator())[0], images)


# ---------------------------------------------------------------- files that are missing or damaged


@pytest.mark.parametrize("name", [name for name in TASKS if name != "digits"])
@pytest.mark.usefixtures("no_data")
def test_missing_data_is_told_with_three_ways_to_provide_it(name: str, tmp_path: Path) -> None:
    if name == "fashion-mnist" and Path("/usr/share/datasets/fashion-mnist").exists():
        pytest.skip("Debian's Fashion-MNIST is installed")
    for place in (None, tmp_path):
        with pytest.raises(DataError, match="one of three ways: --data-dir FOLDER .* COMFETCH_DATA; or "):
            load_task(name, place)


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        load_task("cifar10", tmp_path / "nowhere")
    with pytest.raises(DataError, match="not fetched from the hub. Give a folder"):
        load_task("mnli-pos", "hub")
    monkeypatch.setenv("COMFETCH_DATA", str(tmp_path / "gone"))
    with pytest.raises(DataError, match="COMFETCH_DATA=.*gone is not a folder. Set it to one, or unset it."):
        load_task("ewt-pos")


def test_unknown_task_is_answered_with_all_names() -> None:
    with pytest.raises(DataError, match="'cifar' is unknown. Choose one of digits, cifar10, .*file.py"):
        load_task("cifar")


def test_known_file_of_wrong_length_or_content_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "cifar10_train_0.webp").write_bytes(b"RIFF")
    labels = tmp_path / "labels.npz"
    labels.write_bytes(b"too short")
    with pytest.raises(DataError, match="labels.npz: 9 bytes found, 83,390 expected. Copy the file again."):
        load_task("cifar10", tmp_path)
    labels.write_bytes(bytes(83390))
    with pytest.raises(DataError, match="labels.npz: sha256 [0-9a-f]{64} found, 11f12b71.* expected"):
        load_task("cifar10", tmp_path)
    labels.unlink()
    with pytest.raises(DataError, match="labels.npz: cannot be read .No such file"):
        load_task("cifar10", tmp_path)


def python2_batch(images: np.ndarray, labels: list[int], key: bytes = b"labels") -> bytes:
    """Write a batch opcode by opcode as Python 2 and old numpy did: strings of bytes, `numpy.core`."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    pixels = images.tobytes()
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R(K\x01"
    array += number(images.shape[0]) + number(images.shape[1]) + b"\x86" + dtype + b"\x89"
    array += b"T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(key) + listed + b"u."


IMAGES = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)


@pytest.mark.parametrize("writer", ["python 2", "python 3"])
def test_python_batch_gives_its_images_and_labels(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    batch = {b"data": IMAGES, b"labels": [3, 1, 2, 0]}
    content = python2_batch(IMAGES, [3, 1, 2, 0]) if writer == "python 2" else pickle.dumps(batch, protocol=4)
    path.write_bytes(content)
    images, targets = read_batch(path, "labels")
    assert np.array_equal(images.reshape(4, 3072), IMAGES)
    assert targets.tolist() == [3, 1, 2, 0]


class Hostile:
    """Run a command when unpickled by a reader that trusts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_hostile_pickle_is_refused_and_does_nothing(tmp_path: Path) -> None:
    path, trace = tmp_path / "data_batch_1", tmp_path / "trace"
    path.write_bytes(pickle.dumps({b"data": Hostile(trace), b"labels": [0]}))
    with pytest.raises(DataError, match=r"not a python batch of CIFAR \(UnpicklingError: it asks for posix.system"):
        read_batch(path, "labels")
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", python2_batch(IMAGES, [0])[:-900], b"not a pickle"])
def test_damaged_python_batch_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(content)
    with pytest.raises(DataError, match="test_batch: not a python batch of CIFAR"):
        read_batch(path, "labels")


def test_python_batches_with_other_images_are_not_taken_for_cifar(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(python2_batch(IMAGES, [3, 1, 2, 0]))
    for place in (tmp_path, folder):
        with pytest.raises(DataError, match="the images are not those of cifar10"):
            load_task("cifar10", place)
    (folder / "data_batch_5").unlink()
    with pytest.raises(DataError, match="data_batch_5: cannot be read"):
        load_task("cifar10", tmp_path)


def idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + struct.pack(f">B{array.ndim}I", array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("end", [".gz", ""])
def test_fashion_mnist_is_read_from_idx_files(end: str, tmp_path: Path) -> None:
    pack = gzip.compress if end else bytes
    images = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    labels = np.arange(20, dtype=np.uint8) % 10
    for side, rows in (("train", slice(0, 15)), ("t10k", slice(15, 20))):
        (tmp_path / f"{side}-images-idx3-ubyte{end}").write_bytes(pack(idx(images[rows])))
        (tmp_path / f"{side}-labels-idx1-ubyte{end}").write_bytes(pack(idx(labels[rows])))
    task = load_task("fashion-mnist", tmp_path)
    assert (len(task.train), len(task.test), task.inputs) == (15, 5, (1, 28, 28))
    assert torch.equal(task.train.inputs[:, 0], torch.from_numpy(images[:15]))
    assert task.test.targets.tolist() == labels[15:].tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(idx(IMAGES))[:-20], "damaged or not gzip"),
        (b"plain", "damaged or not gzip"),
        (gzip.compress(b"\0\0\x0d\x01" + bytes(8)), "not an idx file of bytes"),
        (gzip.compress(b"\0\0\x08\x03\0\0"), "not an idx file of bytes"),
        (gzip.compress(idx(IMAGES)[:-1]), r"12,287 values found, shape \(4, 3072\) announced"),
        (gzip.compress(b"\0\0\x08\x02" + b"\xff" * 8), r"0 values found, shape \(4294967295, 4294967295\)"),
    ],
    ids=["cut", "plain", "wrong type", "cut header", "too short", "absurd shape"],
)
def test_damaged_idx_file_is_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"train-images-idx3-ubyte.gz: {message}"):
        read_idx(path)


def test_split_of_the_hub_becomes_arrays() -> None:
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    pixels = IMAGES.reshape(4, 32, 32, 3)
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"img": [image.fromarray(one) for one in pixels], "label": [1, 2, 3, 4]}
    images, targets = from_split(datasets.Dataset.from_dict(rows, features=features), "img", "label")
    assert np.array_equal(images, pixels.transpose(0, 3, 1, 2))
    assert targets.tolist() == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "fashion-mnist"])
def test_hub_out_of_reach_is_told_with_the_other_ways(name: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    code = (
        "from comfetch.data import load_task\n"
        "from comfetch.errors import DataError\n"
        f"try: load_task({name!r}, 'hub')\n"
        "except DataError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "could not be had from the Hugging Face hub" in done.stdout
    assert "--data-dir FOLDER or COMFETCH_DATA" in done.stdout


# ---------------------------------------------------------------- sentences


def conllu(*sentences: str, document: str = "one") -> str:
    """Write sentences of word/TAG/penn, each a document's."""
    lines = [f"# newdoc id = {document}"]
    for sentence in sentences:
        lines.append(f"# text = {sentence}")
        for number, token in enumerate(sentence.split(), start=1):
            word, tag, penn = token.split("/")
            lines.append(f"{number}\t{word}\t_\t{tag}\t{penn}\t_\t_\t_\t_\t_")
        lines.append("")
    return "\n".join(lines) + "\n"


TRAIN = conllu("the/DET/DT dog/NOUN/NN runs/VERB/VBZ", "The/DET/DT dog/NOUN/NN") + conllu(
    "runs/VERB/VBZ", document="two"
)
TEST = conllu("dog/NOUN/NN sleeps/VERB/VBZ !/PUNCT/.")


@pytest.fixture
def treebank(tmp_path: Path) -> Path:
    folder = tmp_path / "UD_English-EWT"
    folder.mkdir()
    (folder / "en_ewt-ud-train.conllu").write_text(TRAIN, encoding="utf-8")
    (folder / "en_ewt-ud-test.conllu").write_text(TEST, encoding="utf-8")
    return folder


def test_a_clone_of_the_treebank_provides_the_task(treebank: Path) -> None:
    tasks = [load_task("ewt-pos", place) for place in (treebank, treebank.parent)]
    assert tasks[0].checksum == tasks[1].checksum
    assert tasks[0].labels == ("DET", "NOUN", "PUNCT", "VERB")
    assert load_task("ewt-pos:penn", treebank).labels == (".", "DT", "NN", "VBZ")


def test_words_are_numbered_by_the_training_side_and_others_are_unknown(treebank: Path) -> None:
    task = load_task("ewt-pos", treebank)
    assert task.inputs == (5,)  # padding, unknown, dog, runs, the
    assert task.train.inputs.tolist() == [[4, 2, 3], [4, 2, PADDING], [3, PADDING, PADDING]]
    assert task.train.targets.tolist() == [[0, 1, 3], [0, 1, IGNORED], [3, IGNORED, IGNORED]]
    assert task.test.inputs.tolist() == [[2, UNKNOWN, UNKNOWN]]


def test_documents_are_the_natural_groups_of_the_treebank(treebank: Path) -> None:
    task = load_task("ewt-pos", treebank)
    parts = partition(task.train.targets, 2, "natural", groups=task.train.groups)
    assert sorted(part.tolist() for part in parts) == [[0, 1], [2]]
    assert task.grouped_by == "document"


def test_batch_of_sentences_is_cut_to_its_longest(treebank: Path) -> None:
    task = load_task("ewt-pos", treebank)
    inputs, targets = task.batch(task.train, torch.tensor([1, 2]))
    assert inputs.shape == targets.shape == (2, 2)


def test_multiword_ranges_and_empty_nodes_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "some.conllu"
    rest = "\t_" * 5
    rows = [
        f"1-2\tdon't\t_\t_\t_{rest}",
        f"1\tdo\t_\tAUX\tVB{rest}",
        f"2\tn't\t_\tPART\tRB{rest}",
        f"2.1\tgo\t_\tVERB\tVB{rest}",
    ]
    path.write_text("\n".join(rows), encoding="utf-8")
    (sentence,) = read_conllu(path, 3)
    assert (sentence.words, sentence.tags) == (["do", "n't"], ["AUX", "PART"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1\tword\tNOUN\n", "line 1: 3 columns found, 10 expected"),
        (b"# nothing\n", "no sentence found"),
        (b"1\t\xff\n", "not UTF-8 text"),
    ],
)
def test_damaged_treebank_is_refused_by_file_and_line(content: bytes, message: str, treebank: Path) -> None:
    (treebank / "en_ewt-ud-test.conllu").write_bytes(content)
    with pytest.raises(DataError, match=f"en_ewt-ud-test.conllu.*{message}"):
        load_task("ewt-pos", treebank)


# ---------------------------------------------------------------- tasks of the user's own


def fitted_accuracy(task: Task) -> float:
    assert callable(task.model)
    torch.manual_seed(0)
    model, shuffler = task.model(), generator()
    task.check(task.model)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(8):
        for inputs, targets in task.batches(task.train, 64, shuffler):
            optimiser.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimiser.step()
    right, counted = task.metric(model(task.test.inputs), task.test.targets)
    return right / counted


def test_example_of_an_own_task_loads_and_learns() -> None:
    task = load_task(str(OWN_TASK))
    assert (len(task.train), len(task.test), task.inputs, task.classes) == (3000, 1000, (20,), 3)
    assert fitted_accuracy(task) > 0.9


def test_example_with_groups_can_be_divided_by_them() -> None:
    task = load_task(f"{OWN_TASK}:grouped")
    assert task.grouped_by == "sensor"
    assert len(partition(task.train.targets, 10, "natural", groups=task.train.groups)) == 10


def test_own_task_is_found_by_import_path_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(OWN_TASK, tmp_path / "found_here.py")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert load_task("found_here:task").classes == 3
    assert sys.path == before


class Squares(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index), float(index * index)]), index % 3


class Stream(IterableDataset[tuple[list[float], int]]):
    def __iter__(self) -> Iterator[tuple[list[float], int]]:
        return ((row.tolist(), label) for row, label in (Squares()[index] for index in range(12)))


def test_data_may_be_tensors_or_any_torch_dataset() -> None:
    tensors = (torch.stack([Squares()[row][0] for row in range(12)]), torch.arange(12) % 3)
    sources = [tensors, TensorDataset(*tensors), Squares(), Stream(), Examples(*tensors)]
    tasks = [task_of("squares", nn.Identity, source, source) for source in sources]
    assert {task.checksum for task in tasks} == {tasks[0].checksum}
    assert tasks[0].classes == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([(torch.zeros(2), 0), (torch.zeros(3), 1)], "cannot be stacked .* Give tensors of one shape"),
        ((torch.tensor([[float("nan")]]), torch.tensor([0])), "NaN or infinite values"),
        ((torch.zeros(2, 1), torch.tensor([0])), "2 inputs, 1 targets"),
        ((torch.zeros(1, 1), torch.tensor([0]), torch.tensor([0])), "3 tensors found. Give two"),
        ((torch.zeros(1, 1), torch.tensor([-1])), "targets from -1 to -1"),
        ((torch.zeros(1, 1), torch.tensor([0.5])), "targets are torch.float32"),
        ((torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)), "no train examples"),
        (5, "int found. Give a torch Dataset"),
    ],
)
def test_unfit_data_of_the_user_is_refused(data: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        task_of("mine", nn.Identity, data, data)


@pytest.mark.parametrize(
    ("source", "suffix", "message"),
    [
        ("x = 1", "", "has no function task. Write it, or name another."),
        ("def task(): return 1, 2", "", "returned a tuple of 2. Return .model constructor, train, test. or a Task"),
        ("def task(): return None", "", "returned NoneType"),
        ("def task(): raise KeyError('oh')", "", "failed: KeyError: 'oh'. Mend its file."),
        ("def task(:", "", "failed: SyntaxError"),
        ("import nowhere_at_all", "", "failed: ModuleNotFoundError"),
        ("task = 3", ":other", "has no function other"),
    ],
)
def test_broken_task_file_is_refused_by_name(source: str, suffix: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source, encoding="utf-8")
    with pytest.raises(DataError, match=f"mine.py{suffix}.* {message}"):
        load_task(f"{path}{suffix}")


def test_task_file_or_module_that_is_not_there_is_told() -> None:
    with pytest.raises(DataError, match="gone.py does not exist"):
        load_task("gone.py")
    with pytest.raises(DataError, match="failed: ModuleNotFoundError"):
        load_task("gone_module:task")


def test_model_that_does_not_fit_the_task_is_told_before_training() -> None:
    task = load_task(str(OWN_TASK))
    with pytest.raises(OptionError, match=r"gives outputs of shape \(2, 7\), \(2, 3\) expected"):
        task.check(lambda: nn.Linear(20, 7))
    with pytest.raises(OptionError, match=r"its model fails on torch.float32 inputs of shape \(2, 20\)"):
        task.check(lambda: nn.Linear(21, 3))


def test_every_named_model_that_fits_passes_the_check_and_an_mlp_on_words_does_not(treebank: Path) -> None:
    words, digits = load_task("ewt-pos", treebank), load_task("digits")
    words.check(constructor("lstm-tagger", words.inputs, words.classes))
    for name in ("mlp", "resnet9", "resnet18", "vit"):
        digits.check(constructor(name, digits.inputs, digits.classes))
    with pytest.raises(OptionError, match="Task ewt-pos: its model fails on torch.int64 inputs"):
        words.check(constructor("mlp", words.inputs, words.classes))


# ---------------------------------------------------------------- the real datasets


@real_data
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_has_its_published_moments_and_checksum(name: str) -> None:
    task = load_task(name)
    assert (len(task.train), len(task.test)) == (50_000, 10_000)
    assert set(task.train.targets.bincount().tolist()) == {50_000 // task.classes}
    assert task.checksum == CONTENT[name]
    inputs, _ = task.batch(task.train, torch.arange(50_000))
    assert inputs.mean((0, 2, 3)).tolist() == pytest.approx([0] * 3, abs=1e-4)
    assert inputs.std((0, 2, 3)).tolist() == pytest.approx([1] * 3, abs=1e-4)


@real_data
@pytest.mark.slow
def test_cifar_from_python_batches_equals_cifar_from_mosaics(tmp_path: Path) -> None:
    mosaics = load_task("cifar10")
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = torch.cat([mosaics.train.inputs, mosaics.test.inputs]).view(6, 10_000, 3072).numpy()
    targets = torch.cat([mosaics.train.targets, mosaics.test.targets]).view(6, 10_000).tolist()
    for part, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        (folder / name).write_bytes(python2_batch(pixels[part], targets[part]))
    assert load_task("cifar10", tmp_path).checksum == mosaics.checksum


@real_data
def test_changed_mosaic_is_refused_by_name(tmp_path: Path) -> None:
    source = Path(os.environ["COMFETCH_DATA"])
    for path in source.glob("cifar10_*.webp"):
        (tmp_path / path.name).symlink_to(path)
    shutil.copy(source / "labels.npz", tmp_path)
    damaged = tmp_path / "cifar10_train_3.webp"
    content = bytearray(damaged.read_bytes())
    content[1_000_000] ^= 1
    damaged.unlink()
    damaged.write_bytes(content)
    with pytest.raises(DataError, match="cifar10_train_3.webp: sha256"):
        load_task("cifar10", tmp_path)


@real_data
@pytest.mark.parametrize(("name", "tags"), [("ewt-pos", 17), ("ewt-pos:penn", 49)])
def test_treebank_has_its_published_size(name: str, tags: int) -> None:
    task = load_task(name)
    assert (len(task.train), len(task.test), task.classes) == (12_544, 2_077, tags)
    assert int((task.train.targets != IGNORED).sum()) == 204_577


@real_data
def test_one_prompts_sentences_are_on_one_side() -> None:
    task = load_task("mnli-pos")
    assert (len(task.train) + len(task.test), task.classes) == (13_149, 44)
    assert task.train.groups is not None and task.test.groups is not None
    assert not set(task.train.groups.tolist()) & set(task.test.groups.tolist())
    assert 0.08 < len(task.test) / 13_149 < 0.12
