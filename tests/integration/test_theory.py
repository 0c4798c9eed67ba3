"""The paper's theorems, checked by numbers: the rate of Theorem 1, and the prediction-error bound of Appendix F."""

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import theory
from benchmarks.result_tables import rate_slopes
from comfetch.federation import make_federation

PROBLEMS = ("least squares", "logistic regression")


def seen(kind: str, compression: float = theory.COMPRESSION) -> Tensor:
    """R, one row at a time."""
    plan = theory.algorithm(kind, 1.0, 0, compression).plan(theory.linear)["0.weight"]
    rows = torch.eye(theory.SIZE, dtype=torch.float64)
    return torch.stack([plan.unsketch(plan.sketch(row[None]))[0] for row in rows])


@pytest.mark.parametrize("name", PROBLEMS)
def test_closed_gradients_are_those_of_autograd(name: str) -> None:
    problem = theory.problems(0)[name]
    w = torch.randn(theory.SIZE, dtype=torch.float64, requires_grad=True)
    problem.loss(problem.inputs @ w, problem.targets).backward()
    assert w.grad is not None
    assert torch.allclose(problem.gradient(w.detach()), w.grad)


@pytest.mark.parametrize("kind", theory.SCALES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_noted_gradient_is_the_lifted_gradient_of_the_sketched_model(name: str, kind: str) -> None:
    problem = theory.problems(0)[name]
    method = theory.algorithm(kind, 0.01, 0)
    task = problem.task()
    federation = make_federation(method, task, clients=theory.CLIENTS, seed=0)
    server = federation.start()
    noted = theory.path(method, problem, 4, 0)
    for _ in range(3):
        small, _ = next(noted)
        model = federation.client_model(server, federation.clients[0])
        model.zero_grad()
        task.loss(model(task.train.inputs), task.train.targets).backward()
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        lifted = method.plan(federation.build)["0.weight"].lift_gradient(gradient)[0]
        assert torch.allclose(lifted.double(), small, rtol=1e-3, atol=1e-5)
        server, _ = federation.round(server)


@pytest.mark.parametrize("compression", [8, 64])
def test_sketched_objective_is_smooth_by_the_square_of_the_load_and_not_by_the_load(compression: int) -> None:
    problem = theory.problems(0)["least squares"]
    hessian = problem.inputs.T @ problem.inputs / theory.EXAMPLES
    largest = {}
    for kind in theory.SCALES:
        recovery = seen(kind, compression)
        largest[kind] = float(torch.linalg.eigvalsh(recovery.T @ hessian @ recovery)[-1])
    assert float(torch.linalg.eigvalsh(hessian)[-1]) == pytest.approx(problem.smoothness)
    for kind in theory.SCALES:
        assert largest[kind] <= theory.true_smoothness(problem, kind, compression, 0) * (1 + 1e-9)
    printed = problem.smoothness * compression
    assert largest["count"] > 2 * printed, "the theorem's L d/c is too small"


@pytest.mark.parametrize("kind", theory.SCALES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradient_of_the_sketched_objective_falls_at_the_rate_of_the_theorem(name: str, kind: str) -> None:
    found = {
        rounds: theory.measure_rate({"problem": name, "scale": kind, "rounds": rounds, "seed": 0})
        for rounds in (30, 120)
    }
    assert found[120]["mean"] / found[30]["mean"] < 0.75
    assert found[120]["last"] < found[120]["first"] / 2


def test_recorded_slopes_are_at_least_those_of_the_theorem() -> None:
    slopes = rate_slopes("mean")
    assert len(slopes) == len(PROBLEMS) * len(theory.SCALES)
    assert all(-0.8 < slope < -0.4 for slope in slopes.values()), slopes
    assert all(slope < -0.5 for slope in rate_slopes("least").values())


@pytest.mark.parametrize("how", theory.RECOVERIES.values(), ids=theory.RECOVERIES)
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_no_error_is_above_the_induction_with_true_norms(depth: int, how: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(depth)
    for key in range(5):
        weights = [torch.randn(theory.WIDTH, theory.WIDTH, generator=draw, dtype=torch.float64) for _ in range(depth)]
        recovered = [theory.recover(w, key + layer, **how) for layer, w in enumerate(weights)]
        x = torch.nn.functional.normalize(torch.randn(theory.WIDTH, 16, generator=draw, dtype=torch.float64), dim=0)
        errors = (theory.network(recovered, x) - theory.network(weights, x)).norm(dim=0)
        assert float(errors.max()) <= theory.induction_bound(weights, recovered) * (1 + 1e-9)


def test_printed_bound_says_nothing_at_any_depth_and_is_broken_by_small_weights() -> None:
    rows = theory.read("prediction")
    assert {row["depth"] for row in rows} == set(theory.DEPTHS)
    assert all(row["error_most"] < row["printed"] for row in rows)
    assert all(row["printed"] > 1000 for row in rows)
    small = theory.measure_size({"recovery": "count, 1 sketch", "depth": 1, "size": 1e-6})
    assert small["error_low"] > small["printed"]
    assert small["error_most"] < small["induction"] * 2


def test_the_errors_of_one_layer_are_those_that_the_loads_predict() -> None:
    found = {row["recovery"]: row["error"] for row in theory.read("prediction") if row["depth"] == 1}
    load = theory.WIDTH / theory.LENGTH
    assert found["count, 1 sketch"] == pytest.approx(math.sqrt(load - 1), rel=0.15)
    assert found["projection, 1 sketch"] == pytest.approx(math.sqrt(1 - 1 / load), rel=0.15)


def test_records_can_be_computed_again() -> None:
    for part, case in (
        ("prediction", {"recovery": "count, 1 sketch", "depth": 2}),
        ("step", {"compression": 8, "rounds": 16, "printed": True}),
        ("rate", {"problem": "least squares", "scale": "count", "rounds": 10, "seed": 0}),
    ):
        recorded = next(row for row in theory.read(part) if case.items() <= row.items())
        again = theory.PARTS[part][1](case)
        assert again.keys() == recorded.keys()
        numbers = [name for name, value in again.items() if isinstance(value, float)]
        assert statistics.fmean(again[n] / recorded[n] for n in numbers) == pytest.approx(1, rel=1e-3)
