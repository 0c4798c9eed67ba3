"""Find the few features that matter among a million, in the memory of a few thousand: MISSION.

    python examples/mission.py

MISSION (Aghazadeh et al. 2018) fits a sparse linear model to a stream of sparse examples. Its gradient steps are added
to a count sketch, and only the heaviest coefficients are ever read back:

    S ← S + H(η · (y − x β) x)   ;   β ← the k largest coefficients of Hᵀ S

So nobody, no client and no server, holds a vector of all features. That is why it stands here and not among
`comfetch.methods`: there the server holds the full weights of a torch model. The hash is the library's, on 64-bit keys:
it is computed for the features of an example only, never for all.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from comfetch import hashing

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Example = tuple[np.ndarray, np.ndarray, float]
"""Names of the features that are not 0, their values, and the target."""


@dataclass
class Sketch:
    """A count sketch of a vector of any size, `rows` times `length` numbers; a coefficient is the median of its rows.

    A feature that does not matter seems to if it meets heavy ones in most rows. Many are seen, so there are seven.
    """

    length: int
    rows: int = 7
    key: int = 0
    table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.table = np.zeros((self.rows, self.length), dtype=np.float32)
        self.keys = np.array([hashing.fold(self.key, "row", row) for row in range(self.rows)], dtype=np.uint64)

    def add(self, features: np.ndarray, values: np.ndarray) -> None:
        """S ← S + H v for the v whose entries are given."""
        bucket, sign = self.hash(features)
        for row in range(self.rows):
            np.add.at(self.table[row], bucket[row], sign[row] * values)

    def query(self, features: np.ndarray) -> np.ndarray:
        """Read some coefficients."""
        bucket, sign = self.hash(features)
        return np.median(np.take_along_axis(self.table, bucket, axis=1) * sign, axis=0)

    def hash(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return bucket and sign of features, (rows, features)."""
        with np.errstate(over="ignore"):
            state = hashing.mix(self.keys)[:, None] + (features.astype(np.uint64) + np.uint64(1)) * GOLDEN
            places, signs = hashing.mix(state), hashing.mix(state ^ GOLDEN)
        bucket = (places >> np.uint64(32)) * np.uint64(self.length) >> np.uint64(32)
        return bucket.astype(np.int64), 1.0 - 2.0 * (signs >> np.uint64(63)).astype(np.float64)


@dataclass
class Mission:
    """Sparse linear regression: a sketch of all coefficients, and the k heaviest of them by name."""

    sketch: Sketch
    k: int = 50
    lr: float = 0.02
    heavy: dict[int, float] = field(default_factory=dict)

    def step(self, example: Example) -> float:
        """Take one step on an example, and return its squared error."""
        features, values, target = example
        beta = np.array([self.heavy.get(int(j), 0.0) for j in features])
        error = target - float(values @ beta)
        self.sketch.add(features, self.lr * error * values)
        candidates = np.union1d(features, np.fromiter(self.heavy, dtype=np.int64, count=len(self.heavy)))
        found = self.sketch.query(candidates)
        order = np.argsort(-np.abs(found), kind="stable")[: self.k]
        self.heavy = {int(candidates[i]): float(found[i]) for i in order}
        return error**2

    @property
    def nbytes(self) -> int:
        """Bytes of the sketch, and of the names and values of the heavy coefficients."""
        return self.sketch.table.nbytes + 12 * self.k


def stream(true: dict[int, float], features: int, examples: int, seed: int) -> Iterator[Example]:
    """Draw sparse examples: half of the true features, and forty others; the target is linear, with a little noise."""
    rng = np.random.default_rng(seed)
    names = np.array(sorted(true))
    for _ in range(examples):
        present = names[rng.random(len(names)) < 0.5]
        used = np.union1d(present, rng.integers(features, size=40))
        values = rng.standard_normal(len(used))
        target = sum(true.get(int(j), 0.0) * x for j, x in zip(used, values, strict=True))
        yield used, values, target + 0.1 * rng.standard_normal()


def run(features: int = 1_000_000, length: int = 2048, heavy: int = 20, examples: int = 4000, seed: int = 0) -> float:
    """Fit a stream, print what was found, and return the part of the true features that is among the heaviest."""
    rng = np.random.default_rng(seed)
    names = rng.choice(features, size=heavy, replace=False)
    true = {
        int(j): float(b) for j, b in zip(names, rng.choice([-1.0, 1.0], heavy) * rng.uniform(1, 3, heavy), strict=True)
    }
    model = Mission(Sketch(length))
    started = time.perf_counter()
    errors = [model.step(example) for example in stream(true, features, examples, seed + 1)]
    heaviest = sorted(model.heavy, key=lambda j: -abs(model.heavy[j]))[:heavy]
    found = len(set(heaviest) & true.keys()) / heavy
    worst = max((abs(model.heavy[j] - true[j]) for j in heaviest if j in true), default=np.inf)
    print(
        f"{features:,} features, {heavy} of them matter; {examples:,} examples in {time.perf_counter() - started:.1f} s"
    )
    print(f"memory: {model.nbytes:,} bytes; the coefficients themselves would take {4 * features:,}")
    print(f"squared error: {np.mean(errors[:100]):.2f} at first, {np.mean(errors[-100:]):.3f} in the end")
    print(f"found: {found:.0%} of the features that matter, coefficients to {worst:.2f}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=2048, help="numbers in each of the sketch's seven rows")
    parser.add_argument("--heavy", type=int, default=20, help="features that matter")
    parser.add_argument("--examples", type=int, default=4000)
    options = parser.parse_args()
    run(options.features, options.length, options.heavy, options.examples)
