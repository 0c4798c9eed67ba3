"""Load the part-of-speech tasks: sentences as rows of word numbers, one tag a word."""

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from comfetch.data.files import find, missing, read_unpacked
from comfetch.data.task import IGNORED, Examples, Task
from comfetch.errors import DataError

PADDING, UNKNOWN = 0, 1
"""The word numbers after a sentence's end and of words outside the vocabulary."""

Place = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Sentence:
    """Hold a sentence's words and tags, and the number of what it belongs to (a document, a prompt)."""

    words: list[str]
    tags: list[str]
    group: int


def ewt(data_dir: Place, name: str = "ewt-pos", column: int = 3) -> Task:
    """Load the English Web Treebank with universal tags (column 3) or Penn tags (column 4).

    Its documents are the natural groups. Besides this project's .conllu.gz the treebank's own files are
    read, as a clone of its repository holds them. The development set is not used.
    """
    layouts = {
        "project": ("ud_english_ewt_train.conllu.gz", "ud_english_ewt_test.conllu.gz"),
        "treebank": ("en_ewt-ud-train.conllu", "en_ewt-ud-test.conllu"),
        "clone": ("UD_English-EWT/en_ewt-ud-train.conllu", "UD_English-EWT/en_ewt-ud-test.conllu"),
    }
    found = find(data_dir, layouts)
    if found is None:
        third = "git clone https://github.com/UniversalDependencies/UD_English-EWT and give that folder"
        raise missing(name, data_dir, "ud_english_ewt_{train,test}.conllu.gz", third)
    train, test = (read_conllu(found[1] / file, column) for file in layouts[found[0]])
    return _tagging(name, train, test, grouped_by="document")


def read_conllu(path: Path, column: int) -> list[Sentence]:
    """Read the sentences of a CoNLL-U file; multiword ranges (1-2) and empty nodes (1.1) are left out."""
    sentences: list[Sentence] = []
    words: list[str] = []
    tags: list[str] = []
    document = 0
    for number, line in enumerate([*_text(path).split("\n"), ""], start=1):
        if line.startswith("# newdoc"):
            document += 1
        elif not line and words:
            sentences.append(Sentence(words, tags, document))
            words, tags = [], []
        elif line and line[0] != "#":
            fields = line.split("\t")
            if len(fields) != 10:
                found = f"{len(fields)} columns found, 10 expected"
                raise DataError(f"{path}, line {number}: {found}. Copy the file again.")
            if fields[0].isdigit():
                words.append(fields[1])
                tags.append(fields[column])
    if not sentences:
        raise DataError(f"{path}: no sentence found. Copy the file again.")
    return sentences


def mnli(data_dir: Place) -> Task:
    """Load MultiNLI's dev-matched sentences with automatic Penn tags; every tenth prompt is for testing.

    A prompt's premise and hypotheses share words, so they stay on one side, and are one natural group.
    """
    layouts = {"project": ("mnli_dev_matched_pos.jsonl.gz",)}
    found = find(data_dir, layouts)
    if found is None:
        third = "write a task of your own over sentences that you have (examples/own_task.py)"
        raise missing("mnli-pos", data_dir, layouts["project"][0], third)
    path = found[1] / layouts["project"][0]
    rows = [json.loads(line) for line in _text(path).splitlines()]
    sentences = [Sentence(row["tokens"], row["tags"], row["prompt"]) for row in rows]
    test = [sentence for sentence in sentences if sentence.group % 10 == 0]
    train = [sentence for sentence in sentences if sentence.group % 10]
    return _tagging("mnli-pos", train, test, grouped_by="prompt")


def _text(path: Path) -> str:
    try:
        return read_unpacked(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error}). Copy the file again.") from error


def vocabulary(sentences: Iterable[Sentence]) -> dict[str, int]:
    """Give numbers from 2 to the lower-cased words that occur twice, the most frequent first.

    Words met once count as unknown: so the unknown word is trained too.
    """
    counts = Counter(word.lower() for sentence in sentences for word in sentence.words)
    frequent = [word for word, count in counts.items() if count > 1]
    frequent.sort(key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(frequent, start=UNKNOWN + 1)}


def encode(sentences: list[Sentence], words: dict[str, int], tags: dict[str, int]) -> Examples:
    """Make padded rows of word and tag numbers."""
    longest = max(len(sentence.words) for sentence in sentences)
    inputs = np.full((len(sentences), longest), PADDING, dtype=np.int64)
    targets = np.full((len(sentences), longest), IGNORED, dtype=np.int64)
    for row, sentence in enumerate(sentences):
        end = len(sentence.words)
        inputs[row, :end] = [words.get(word.lower(), UNKNOWN) for word in sentence.words]
        targets[row, :end] = [tags[tag] for tag in sentence.tags]
    groups = torch.tensor([sentence.group for sentence in sentences])
    return Examples(torch.from_numpy(inputs), torch.from_numpy(targets), groups)


def _tagging(name: str, train: list[Sentence], test: list[Sentence], grouped_by: str) -> Task:
    """Make the task; words are numbered by the training side alone."""
    words = vocabulary(train)
    labels = sorted({tag for sentence in (*train, *test) for tag in sentence.tags})
    tags = {tag: number for number, tag in enumerate(labels)}
    return Task(
        name=name,
        model="lstm-tagger",
        train=encode(train, words, tags),
        test=encode(test, words, tags),
        inputs=(UNKNOWN + 1 + len(words),),
        classes=len(labels),
        labels=tuple(labels),
        grouped_by=grouped_by,
        padded=True,
    )
