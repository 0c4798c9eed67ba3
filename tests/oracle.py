"""Short transcriptions of the mathematics with explicit matrices H: what the library must agree with.

Everything here is written from docs/mathematics.md, in numpy and with loops, and shares only the drawing of hashes
with the library.
"""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import comfetch as cf
from comfetch import hashing
from comfetch.layers import REGISTRY, SketchedLayer
from comfetch.plan import WeightPlan

compiles = pytest.mark.filterwarnings(  # dynamo does both itself
    "ignore:.*autograd.function.Function.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
"""Mark of tests that use torch.compile."""


def quiet_sketch(model: nn.Module, **options: Any) -> Any:
    """Sketch a model that exists, without the warning about the energy it loses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sketching lost")
        return cf.sketch(model, **options)


def hash_matrix(index: np.ndarray, sign: np.ndarray, length: int) -> np.ndarray:
    """H, length × size, with H[index[j], j] = sign[j]."""
    matrix = np.zeros((length, len(index)))
    for j, (bucket, s) in enumerate(zip(index, sign, strict=True)):
        matrix[bucket, j] = s
    return matrix


def draw_matrix(key: int, size: int, length: int, kind: str) -> np.ndarray:
    """H of one key."""
    index, sign = hashing.draw([key], size, length, kind)
    return hash_matrix(index[0], sign[0], length)


def sketching_matrix(h: np.ndarray, scale: str) -> np.ndarray:
    """A of ruling 8."""
    return np.diag(_power(h, {"count": 0.0, "isometric": -0.5, "mean": -1.0}[scale])) @ h


def expanding_matrix(h: np.ndarray, scale: str) -> np.ndarray:
    """E of ruling 8."""
    return h.T @ np.diag(_power(h, {"count": 0.0, "isometric": -0.5, "mean": 0.0}[scale]))


def _power(h: np.ndarray, power: float) -> np.ndarray:
    load = (h * h).sum(1)
    return np.where(load > 0, np.maximum(load, 1) ** power, 0.0)


def dense_sketch(plan: WeightPlan, full: np.ndarray, row: int = 0) -> np.ndarray:
    """S = A W of one row, block by block."""
    return _blockwise(plan, full, row, lambda h: sketching_matrix(h, plan.scale), to_small=True)


def dense_unsketch(plan: WeightPlan, small: np.ndarray, row: int = 0) -> np.ndarray:
    """Ŵ = E S of one row, block by block."""
    return _blockwise(plan, small, row, lambda h: expanding_matrix(h, plan.scale), to_small=False)


def dense_small_gradient(plan: WeightPlan, full: np.ndarray, row: int = 0) -> np.ndarray:
    """Eᵀ times a full gradient, of one row, block by block."""
    return _blockwise(plan, full, row, lambda h: expanding_matrix(h, plan.scale).T, to_small=True)


def dense_full_gradient(plan: WeightPlan, small: np.ndarray, row: int = 0) -> np.ndarray:
    """Aᵀ times a small gradient, of one row, block by block."""
    return _blockwise(plan, small, row, lambda h: sketching_matrix(h, plan.scale).T, to_small=False)


def dense_lift(plan: WeightPlan, small: np.ndarray, row: int = 0) -> np.ndarray:
    """A⁺ times a small change, of one row, block by block."""
    return _blockwise(plan, small, row, lambda h: np.linalg.pinv(sketching_matrix(h, plan.scale)), to_small=False)


def stacked_sketching_matrix(plan: WeightPlan) -> np.ndarray:
    """Build the matrix of all rows of `plan.sketch`, column by column: (rows · small, full)."""
    n = math.prod(plan.shape)
    columns = []
    for j in range(n):
        unit = np.zeros(n)
        unit[j] = 1
        columns.append(
            np.stack([dense_sketch(plan, unit.reshape(plan.shape), row) for row in range(plan.rows)]).ravel()
        )
    return np.stack(columns, axis=1)


def _blockwise(
    plan: WeightPlan, weight: np.ndarray, row: int, matrix: Callable[[np.ndarray], np.ndarray], to_small: bool
) -> np.ndarray:
    """Multiply each block of each group with its own matrix: (new × old) along the output or the input mode."""
    geo = plan.geometry
    groups, blocks = geo.groups, plan.blocks
    x = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    if geo.transposed:
        x = x.transpose(0, 2, 1, 3)
    for side in plan.sides:
        index, sign = plan.draw(side, row)
        length = plan.length[0 if side == "output" else 1]
        out = []
        for group in range(groups):
            parts = np.split(x[group], blocks, axis=1 if side == "output" else 0)
            done = []
            for block, part in enumerate(parts):
                p = group * blocks + block
                m = matrix(hash_matrix(index[p], sign[p], length))
                done.append(np.einsum("ab,bcr->acr" if side == "output" else "ab,cbr->car", m, part))
            out.append(np.concatenate(done, axis=1 if side == "output" else 0))
        x = np.stack(out)
    if geo.transposed:
        x = x.transpose(0, 2, 1, 3)
    return x.reshape(groups * x.shape[1], x.shape[2], *geo.shape[2:])


def median(rows: Tensor) -> Tensor:
    """Median over dimension 0, for even k the mean of the middle two."""
    ordered = torch.sort(rows, dim=0).values
    k = len(rows)
    return (ordered[(k - 1) // 2] + ordered[k // 2]) / 2


def randomise(layer: nn.Module) -> None:
    """Give every parameter new random values, so that nothing rests on S being a sketch of something."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()


def tensors(output: Any) -> list[Tensor]:
    """List the floating tensors of an output, whatever its structure."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, tuple | list):
        return [t for part in output for t in tensors(part)]
    return []


Call = Callable[[nn.Module], Any]


def check_oracle(sketched: SketchedLayer, call: Call, inputs: list[Tensor], tolerance: float = 1e-9) -> None:
    """Check a sketched layer against full ones with Ŵ = E S: outputs, and all gradients.

    `call` runs a layer on `inputs`. With k rows, the layer must be linear in its weight; the outputs are the median
    of those of k full layers.
    """
    rows = next(iter(sketched.plans.values())).rows
    twins = [_twin(sketched, row) for row in range(rows)]
    for tensor in inputs:
        tensor.grad = None
    got = tensors(call(sketched))
    alone = [tensors(call(twin)) for twin in twins]
    wanted = [median(torch.stack(same)) for same in zip(*alone, strict=True)]
    assert len(got) == len(wanted)
    cotangents = [torch.randn_like(t) for t in wanted]
    for a, b in zip(got, wanted, strict=True):
        close(a, b, tolerance, "output")
    learners = list(sketched.parameters()) + inputs
    _backward(got, cotangents)
    got_grads = [_grad(t) for t in learners]
    for tensor in inputs:
        tensor.grad = None
    _backward(wanted, cotangents)
    for (name, _), found in zip(sketched.named_parameters(), got_grads, strict=False):
        full = [_grad(dict(twin.named_parameters())[name]) for twin in twins]
        if name in sketched.plans:
            plan = sketched.plans[name]
            small = [
                torch.from_numpy(dense_small_gradient(plan, g.double().numpy(), row)) for row, g in enumerate(full)
            ]
            expected = torch.stack(small) if rows > 1 else small[0]
        else:
            expected = torch.stack(full).sum(0)
        close(found, expected, tolerance, f"gradient of {name}")
    for found, tensor in zip(got_grads[len(learners) - len(inputs) :], inputs, strict=True):
        close(found, _grad(tensor), tolerance, "gradient of the input")


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Compare relative to the largest value wanted."""
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)}, not {tuple(wanted.shape)}"
    size = max(1.0, float(wanted.detach().double().abs().max())) if wanted.numel() else 1.0
    difference = (found.detach().double() - wanted.detach().double()).abs()
    worst = float(difference.max()) / size if wanted.numel() else 0.0
    assert worst <= tolerance, f"{what} differs by {worst:.2e} of its size"  # NaN fails, too


def _twin(sketched: SketchedLayer, row: int) -> Any:
    """Return the full layer of one row, its weights made by the transcription above."""
    twin = sketched.unsketched()
    for name, plan in sketched.plans.items():
        small = sketched.get_parameter(name).detach()
        one = small[row] if plan.rows > 1 else small
        value = torch.from_numpy(dense_unsketch(plan, one.double().numpy(), row)).to(small.dtype)
        if plan.rows == 1:
            close(twin.get_parameter(name), value, 1e-12 if small.dtype == torch.float64 else 1e-2, "unsketch")
        with torch.no_grad():
            twin.get_parameter(name).copy_(value)
    return twin


def _grad(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        return torch.zeros_like(tensor)
    return tensor.grad.to_dense().clone() if tensor.grad.is_sparse else tensor.grad.clone()


def _backward(outputs: list[Tensor], cotangents: list[Tensor]) -> None:
    pairs = [(t, g.to(t.dtype)) for t, g in zip(outputs, cotangents, strict=True) if t.requires_grad]
    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def assert_same_outputs(sketched: nn.Module, *inputs: Any, tolerance: float = 1e-5) -> None:
    """Check that a sketched model equals its unsketched one, in eval mode and in training."""
    full = cf.unsketch(sketched)
    for training in (False, True):
        a, b = copy.deepcopy(sketched).train(training), copy.deepcopy(full).train(training)
        for found, wanted in zip(tensors(a(*inputs)), tensors(b(*inputs)), strict=True):
            close(found, wanted, tolerance, "output in training" if training else "output in eval")


SCHEMES = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(("output", "input", "both")),
        "blocks": st.sampled_from((1, 2)),
        "hash": st.sampled_from(("balanced", "random")),
        "scale": st.sampled_from(("mean", "isometric", "count")),
    }
)


def half_sketched(layer: nn.Module, mode: str = "output", rows: int = 1, blocks: int = 2, **options: str) -> Any:
    """Sketch a layer to half its size, with small weights drawn anew."""
    recipe = REGISTRY[type(layer)](layer)
    assert not isinstance(recipe, str)
    plans = {}
    for name, geo in recipe.weights.items():
        out, inp = geo.outputs, geo.inputs
        length = (out if mode == "input" else out // 2, inp if mode == "output" else inp // 2)
        g = 1 if mode == "both" else blocks
        plan = {"hash": "balanced", "scale": "mean", **options}
        plans[name] = WeightPlan(geo, mode, length, rows, g, key=hashing.fold(0, name), **plan)
    small = recipe.build(layer, plans)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.normal_(std=0.4)
    return small
