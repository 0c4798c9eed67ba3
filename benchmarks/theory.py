"""Check the paper's two theorems by numbers: the rate of Theorem 1, and the prediction-error bound of Appendix F.

    python -m benchmarks.theory             # compute what is missing, write records and pictures (a few minutes)
    python -m benchmarks.theory rate        # only one of: rate, step, prediction, weights
    python -m benchmarks.theory pictures    # draw the pictures from the records

Records and pictures are in `benchmarks/results/theory`.

**rate**: Algorithm 1 (one stochastic gradient a client and round, momentum 0.9, error feedback with the largest tenth),
run by the library on two problems whose constants are known: least squares and logistic regression with one weight of
256 coordinates, sketched to 32 by the paper's random hash. For each T there is a run of T rounds with the theorem's
step, η = (1 − ρ)/(2 L̃ √T), where L̃ is the true smoothness of the sketched objective f̃: L · (largest load)² for
`count`, L for `isometric`. Noted is ‖∇f̃‖² over all examples: its mean over the rounds, which the proof bounds, and its
least, which the theorem states.

**step**: the same with the step that the theorem prints, with L d/c in place of L̃, plain SGD, and larger compressions.

**prediction**: ReLU nets y = ψ(W_L … ψ(W₁ x)) of depth 1 to 8 without biases, and the same nets with each W replaced by
its recovery Ŵ from a sketch: the distance of their outputs, against the bound as printed, with c = ‖W‖²_F/ε², and
against what the proof's induction gives with the true norms of Ŵ − W, Ŵ and W.

**weights**: the same at depth 1 for weights of different size, as the printed bound is quadratic in W.
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comfetch import hashing, sketching
from comfetch.data import Examples, Task
from comfetch.federation import make_federation
from comfetch.methods import Comfetch, Local
from comfetch.records import read_json, write_json
from comfetch.transforms import chain, error_feedback, momentum, scale, top_k

RESULTS = Path(__file__).parent / "results" / "theory"
SIZE, COMPRESSION = 256, 8
EXAMPLES, CLIENTS, BATCH = 1024, 2, 8
ROUNDS = (10, 30, 100, 300, 1000, 3000, 10000)
SEEDS = (0, 1, 2)
MOMENTUM, KEPT = 0.9, 0.1
SCALES = ("count", "isometric")
FITTED = 1000
"""The slope is fitted from this T on: in shorter runs the start shows."""

WIDTH, DEPTHS, INPUTS, KEYS = 64, tuple(range(1, 9)), 64, 20
RECOVERIES: dict[str, dict[str, Any]] = {
    "count, 1 sketch": {"scale": "count", "rows": 1},
    "count, median of 7": {"scale": "count", "rows": 7},
    "projection, 1 sketch": {"scale": "isometric", "rows": 1},
}
"""Seven sketches are what the theorem asks for: log(64/0.1) = 6.5."""
LENGTH = 16
SIZES = tuple(10.0**power for power in range(-6, 2))


@dataclass(frozen=True)
class Problem:
    """An objective f(w) = mean of loss(x · w, y) over examples, with the derivative of the loss and its curvature."""

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    curvature: float
    inputs: Tensor
    targets: Tensor

    @property
    def smoothness(self) -> float:
        """L: the largest eigenvalue of the Hessian, or a bound on it."""
        return self.curvature * float(torch.linalg.matrix_norm(self.inputs, 2)) ** 2 / len(self.inputs)

    def value(self, w: Tensor) -> float:
        """f(w)."""
        return float(self.loss(self.inputs @ w, self.targets))

    def gradient(self, w: Tensor) -> Tensor:
        """∇f(w)."""
        return self.inputs.T @ self.slope(self.inputs @ w, self.targets) / len(self.inputs)

    def task(self) -> Task:
        """Make a task for the library's driver."""
        examples = Examples(self.inputs.float(), self.targets.float()[:, None])
        return Task(self.name, linear, examples, examples, (SIZE,), 1, loss=self.loss, metric=lambda o, t: (0, len(t)))


def linear() -> nn.Module:
    """Build the weight w, which starts at 0."""
    layer = nn.Linear(SIZE, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(layer)


def _half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean() / 2


def _logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.softplus(-targets * outputs).mean()


def problems(seed: int) -> dict[str, Problem]:
    """Draw the two problems: features whose variances fall from 1 to 0.1, and noisy targets."""
    draw = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=draw, dtype=torch.float64)).Q
    spread = torch.logspace(0, -1, SIZE, dtype=torch.float64).sqrt()
    x = torch.randn(EXAMPLES, SIZE, generator=draw, dtype=torch.float64) * spread @ turn
    true = torch.randn(SIZE, generator=draw, dtype=torch.float64) / math.sqrt(SIZE)
    noise = torch.randn(EXAMPLES, generator=draw, dtype=torch.float64)
    luck = torch.rand(EXAMPLES, generator=draw, dtype=torch.float64)
    signs = torch.where(luck < torch.sigmoid(4 * x @ true), 1.0, -1.0).double()
    return {
        "least squares": Problem("least squares", _half_square, lambda o, y: o - y, 1.0, x, x @ true + noise / 2),
        "logistic regression": Problem(
            "logistic regression", _logistic, lambda o, y: -y * torch.sigmoid(-y * o), 0.25, x, signs
        ),
    }


def algorithm(
    kind: str, rate: float, key: int, compression: float = COMPRESSION, rho: float = MOMENTUM, kept: float | None = KEPT
) -> Comfetch:
    """Make Algorithm 1 with a fixed hash: momentum, rate, error feedback."""
    steps = [momentum(rho)] if rho else []
    server = chain(*steps, scale(rate), *([error_feedback(top_k(kept))] if kept else []))
    sketch = {"mode": "input", "policy": "all", "blocks": 1, "hash": "random", "scale": kind}
    local = Local("sgd", rate, steps=1, batch_size=BATCH)
    return Comfetch(compression, key, local, server, uploads="gradient", sketch=sketch)


def load(method: Comfetch) -> float:
    """Return the largest load of the method's hash."""
    return float(next(iter(method.plan(linear).values())).load_power(1.0).max())


def true_smoothness(problem: Problem, kind: str, compression: float, key: int) -> float:
    """L̃ = L ‖R‖²: R = HᵀH has the norm of the largest load, a projection has 1."""
    return problem.smoothness * (load(algorithm(kind, 1.0, key, compression)) ** 2 if kind == "count" else 1.0)


def path(method: Comfetch, problem: Problem, rounds: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Run the method, and give ∇f̃(w) = R ∇f(R w) and ∇f(R w) before each round."""
    federation = make_federation(method, problem.task(), clients=CLIENTS, seed=seed)
    server = federation.start()
    plan = next(iter(method.plan(federation.build).values()))

    def seen(w: Tensor) -> Tensor:
        return plan.unsketch(plan.sketch(w[None]))[0]

    for _ in range(rounds):
        w = server.weights["0.weight"][0].double()
        full = problem.gradient(seen(w))
        yield seen(full), full
        server, _ = federation.round(server)


def follow(method: Comfetch, problem: Problem, rounds: int, seed: int) -> dict[str, Any]:
    """Run the method, and note what the theorem speaks of: the squared norm of ∇f̃ in each round."""
    sketched, full = [], []
    for small, large in path(method, problem, rounds, seed):
        sketched.append(float(small.square().sum()))
        full.append(float(large.square().sum()))
    return {
        "mean": statistics.fmean(sketched), "least": min(sketched), "first": sketched[0], "last": sketched[-1],
        "full_first": full[0], "full_last": full[-1],
    }  # fmt: skip


def rates() -> list[dict[str, Any]]:
    """List the runs of `rate`."""
    return [
        {"problem": name, "scale": kind, "rounds": rounds, "seed": seed}
        for rounds in ROUNDS for name in ("least squares", "logistic regression") for kind in SCALES for seed in SEEDS
    ]  # fmt: skip


def measure_rate(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case of `rate`."""
    problem = problems(case["seed"])[case["problem"]]
    smooth = true_smoothness(problem, case["scale"], COMPRESSION, case["seed"])
    rate = (1 - MOMENTUM) / (2 * smooth * math.sqrt(case["rounds"]))
    method = algorithm(case["scale"], rate, case["seed"])
    found = follow(method, problem, case["rounds"], case["seed"])
    return {**case, "smoothness": problem.smoothness, "smoothness_sketched": smooth, "rate": rate, **found}


def steps() -> list[dict[str, Any]]:
    """List the runs of `step`."""
    return [
        {"compression": compression, "rounds": rounds, "printed": printed}
        for compression in (8, 64) for rounds in (16, 64, 256, 1024) for printed in (True, False)
    ]  # fmt: skip


def measure_step(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case of `step`: plain SGD on least squares with `count`."""
    problem, compression = problems(0)["least squares"], case["compression"]
    stated = problem.smoothness * SIZE / math.floor(SIZE / compression)
    true = true_smoothness(problem, "count", compression, 0)
    rate = 1 / (2 * (stated if case["printed"] else true) * math.sqrt(case["rounds"]))
    found = follow(algorithm("count", rate, 0, compression, 0.0, None), problem, case["rounds"], 0)
    return {**case, "smoothness_printed": stated, "smoothness_sketched": true, "rate": rate, **found}


def recover(weight: Tensor, key: int, scale: str, rows: int, length: int = LENGTH) -> Tensor:
    """Recover a weight from its sketch along the outputs: the median of k estimates."""
    small = sketching.sketch_rows(weight, key, length, rows, scale=scale)
    return sketching.unsketch_rows(small, key, len(weight), scale=scale)


def recovery_norm(key: int, scale: str, rows: int, length: int = LENGTH) -> float:
    """λ̂ of the theorem: the largest singular value of H⁻¹H; with a median, of the recovery of the identity."""
    return _norm(recover(torch.eye(WIDTH, dtype=torch.float64), key, scale, rows, length))


def printed_bound(weights: list[Tensor], recovery: list[float], length: int) -> float:
    """Σ_j λ_j ⋯ λ_L d² ε² λ̂_1 ⋯ λ̂_(j−1) for ‖x‖ = 1, with ε² = max ‖W‖²_F / c; g_0 = d² ε² for one layer."""
    squared = max(float(w.square().sum()) for w in weights) / length
    if len(weights) == 1:
        return WIDTH**2 * squared
    norms = [_norm(w) for w in weights]
    return WIDTH**2 * squared * sum(
        math.prod(norms[j:]) * math.prod(recovery[:j]) for j in range(len(weights))
    )  # fmt: skip


def induction_bound(weights: list[Tensor], recovered: list[Tensor]) -> float:
    """Σ_j λ_(j+1) ⋯ λ_L ‖Ŵ_j − W_j‖ ‖Ŵ_1‖ ⋯ ‖Ŵ_(j−1)‖ for ‖x‖ = 1: the proof's induction, nothing estimated."""
    full, small = [_norm(w) for w in weights], [_norm(w) for w in recovered]
    errors = [_norm(b - a) for a, b in zip(weights, recovered, strict=True)]
    return sum(math.prod(full[j + 1 :]) * errors[j] * math.prod(small[:j]) for j in range(len(weights)))


def network(weights: list[Tensor], x: Tensor) -> Tensor:
    """ψ(W_L … ψ(W₁ x))."""
    for weight in weights:
        x = (weight @ x).relu()
    return x


def predictions() -> list[dict[str, Any]]:
    """List the cases of `prediction`."""
    return [{"recovery": name, "depth": depth} for name in RECOVERIES for depth in DEPTHS]


def measure_prediction(case: dict[str, Any], size: float = 1.0) -> dict[str, Any]:
    """Measure the error of recovered nets over keys and inputs of norm 1, in units of the full net's output."""
    how, depth = RECOVERIES[case["recovery"]], case["depth"]
    draw = torch.Generator().manual_seed(0)
    errors, printed, induced = [], [], []
    for key in range(KEYS):
        weights = [size * _fresh(draw) for _ in range(depth)]
        x = F.normalize(torch.randn(WIDTH, INPUTS, generator=draw, dtype=torch.float64), dim=0)
        keys = [hashing.fold(key, "layer", layer) for layer in range(depth)]
        recovered = [recover(w, k, **how) for w, k in zip(weights, keys, strict=True)]
        full = network(weights, x)
        norm = full.norm(dim=0)
        errors += ((network(recovered, x) - full).norm(dim=0) / norm).tolist()
        unit = float(norm.median())
        printed.append(printed_bound(weights, [recovery_norm(k, **how) for k in keys], LENGTH) / unit)
        induced.append(induction_bound(weights, recovered) / unit)
    low, middle, high = torch.tensor(errors).quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    return {
        **case, "error": middle, "error_low": low, "error_high": high, "error_most": max(errors),
        "printed": statistics.median(printed), "induction": statistics.median(induced),
    }  # fmt: skip


def sizes() -> list[dict[str, Any]]:
    """List the cases of `weights`."""
    return [{"recovery": "count, 1 sketch", "depth": 1, "size": size} for size in SIZES]


def measure_size(case: dict[str, Any]) -> dict[str, Any]:
    """Measure one case of `weights`."""
    return measure_prediction(case, case["size"])


def _fresh(draw: torch.Generator) -> Tensor:
    """Draw a weight that keeps the norm of what passes it and a ReLU (He)."""
    return torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64) * math.sqrt(2 / WIDTH)


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


PARTS: dict[str, tuple[Callable[[], list[dict[str, Any]]], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "rate": (rates, measure_rate),
    "step": (steps, measure_step),
    "prediction": (predictions, measure_prediction),
    "weights": (sizes, measure_size),
}


def read(part: str) -> list[dict[str, Any]]:
    """Read the records of a part."""
    found: list[dict[str, Any]] = read_json(RESULTS / f"{part}.json").get("rows", [])
    return found


def compute(part: str, say: Callable[[str], None]) -> None:
    """Compute the cases of a part that have no record yet."""
    cases, measure = PARTS[part]
    for case in cases():
        rows = read(part)
        if not any(case.items() <= row.items() for row in rows):
            write_json(RESULTS / f"{part}.json", {"torch": torch.__version__, "rows": [*rows, measure(case)]})
            say(f"{part}: {json.dumps(case)}")


def main() -> None:
    """Read the command line."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or [*PARTS, "pictures"]
    if unknown := [name for name in wanted if name not in (*PARTS, "pictures")]:
        sys.exit(f"Not known: {', '.join(unknown)}. Choose from: {', '.join((*PARTS, 'pictures'))}.")
    for part in wanted:
        if part != "pictures":
            compute(part, partial(print, flush=True))
    from benchmarks import theory_pictures

    theory_pictures.draw(RESULTS)


if __name__ == "__main__":
    main()
