"""Describe how each weight of a model is sketched: `WeightPlan` for one weight, `Plan` for a model.

A plan is all that a server needs to sketch, unsketch and lift weights, and all that a client needs to build its small
layers. It is plain data: it prints as a table and travels as JSON.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comfetch import hashing, medians, sketching
from comfetch.errors import MismatchError, OptionError

MODES = ("output", "input", "both")
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Geometry:
    """Say which dimension of a weight is its output: the weight is seen as (groups, outputs, inputs, rest).

    Args:
        shape: full shape of the weight.
        groups: number of independent products stacked along dimension 0.
        transposed: the inputs come first, (inputs, outputs, …), as in transposed convolutions and embeddings.
    """

    shape: tuple[int, ...]
    groups: int = 1
    transposed: bool = False

    @property
    def outputs(self) -> int:
        """Outputs of one group."""
        return self.shape[1] if self.transposed else self.shape[0] // self.groups

    @property
    def inputs(self) -> int:
        """Inputs of one group."""
        return self.shape[0] // self.groups if self.transposed else self.shape[1]


@dataclass(frozen=True)
class WeightPlan:
    """Say how one weight is sketched.

    Args:
        geometry: full shape, and which dimension is which.
        mode: the mode that is sketched: output, input or both.
        length: length of the output and of the input mode; a mode that is not sketched has its full size.
        rows: number of independent sketches.
        blocks: number of equal parts of the other mode, each with its own hash (docs/mathematics.md, 18).
        hash: kind of hash. scale: see `sketching`. key: what this weight's hashes are drawn from.
    """

    geometry: Geometry
    mode: str
    length: tuple[int, int]
    rows: int
    blocks: int
    hash: str
    scale: str
    key: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Full shape."""
        return self.geometry.shape

    @property
    def small_shape(self) -> tuple[int, ...]:
        """Shape of the small weight; with more than one row, they come first."""
        geo, (out, inp) = self.geometry, self.length
        first, second = (geo.groups * inp, out) if geo.transposed else (geo.groups * out, inp)
        shape = (first, second, *geo.shape[2:])
        return (self.rows, *shape) if self.rows > 1 else shape

    @property
    def compression(self) -> float:
        """Elements of the full weight for each element of the small one, all rows counted."""
        return math.prod(self.shape) / math.prod(self.small_shape)

    @property
    def sides(self) -> tuple[str, ...]:
        """Modes that have a hash."""
        return ("output", "input") if self.mode == "both" else (self.mode,)

    def draw(self, side: str, row: int) -> hashing.Hash:
        """Draw the hashes of one side and row: one for each group and block, (groups · blocks, size)."""
        geo = self.geometry
        keys = [
            hashing.fold(self.key, side, row, group, block)
            for group in range(geo.groups)
            for block in range(self.blocks)
        ]
        size, length = self._size_length(side)
        return hashing.draw(keys, size, length, self.hash)

    def sketch(self, full: Tensor) -> Tensor:
        """S = A W, in the shape `small_shape`."""
        self._expect(full, self.shape, "full")
        rows = [self._map("sketch", full, row) for row in range(self.rows)]
        return torch.stack(rows) if self.rows > 1 else rows[0]

    def unsketch(self, small: Tensor) -> Tensor:
        """Ŵ = E S, in the full shape; with more than one row, the median of the estimates."""
        return medians.median(self.unsketch_rows(small))

    def unsketch_rows(self, small: Tensor) -> Tensor:
        """Recover one estimate of the full weight from each row: (rows, *shape)."""
        return torch.stack([self._map("unsketch", s, row) for row, s in enumerate(self._split(small))])

    def lift(self, update: Tensor) -> Tensor:
        """ΔW = A⁺ ΔS, the smallest change of W whose sketch is ΔS."""
        self._expect(update, self.small_shape, "small")
        if self.rows == 1:
            return self._map("lift", update, 0)
        return sketching.solve_least(self.sketch, self.lift_gradient, update)

    def lift_gradient(self, gradient: Tensor) -> Tensor:
        """g_W = Aᵀ g_S: the chain rule, summed over rows (Algorithm 2)."""
        lifted = [self._map("lift_gradient", g, row) for row, g in enumerate(self._split(gradient))]
        return lifted[0] if self.rows == 1 else torch.stack(lifted).sum(0)

    def drop_gradient(self, full: Tensor) -> Tensor:
        """(Aᵀ)⁺ Δ: the small gradient that `lift_gradient` would lift to Δ, or nearest to it. For one row only."""
        if self.rows > 1:
            raise OptionError(f"rows={self.rows}: several rows have no common inverse of their gradients' sum.")
        self._expect(full, self.shape, "full")
        return self._map("drop_gradient", full, 0)

    def fold(self, small: Tensor, length: tuple[int, int]) -> Tensor:
        """Fold a small weight to shorter lengths, as if W had been sketched with `with_length(length)`."""
        if self.hash != "balanced":
            raise OptionError(f"Only balanced hashes fold; this weight has hash={self.hash!r}.")
        shorter = dataclasses.replace(self, length=length)
        rows = []
        for row, s in enumerate(self._split(small)):
            for side in self.sides:
                target = length[0] if side == "output" else length[1]
                maps = self._sketcher(side, row, s.device)
                now = dataclasses.replace(self, rows=1, length=_after(self, shorter, side, folded=False))
                rest = dataclasses.replace(self, rows=1, length=_after(self, shorter, side, folded=True))
                s = rest.join(maps.fold(now.split(s, side), target), side)
            rows.append(s)
        return torch.stack(rows) if self.rows > 1 else rows[0]

    def fresh(self, full: Tensor) -> Tensor:
        """Scale fresh weights so that sketching keeps their norm: W₀ ← P W₀ · ‖W₀‖/‖P W₀‖ (docs/mathematics.md, 8).

        With `count`, which inflates instead, they stay as they are (the paper's runs). With more than one row there
        is no single P: W₀ is scaled by the norm of its recovery.
        """
        if self.scale == "count":
            return full
        seen = self.unsketch(self.sketch(full))
        norm = torch.linalg.vector_norm(seen)
        if norm == 0:
            return full
        return (seen if self.rows == 1 else full) * (torch.linalg.vector_norm(full) / norm)

    def fresh_factor(self) -> Tensor:
        """Return what turns values distributed like those of W into a fresh small weight, for broadcasting.

        In `mean` each element of Ŵ is ± one of S, so S is distributed like W; in the other scales a bucket of load n
        holds √n as much. Empty buckets stay 0.
        """
        return self.load_power(0.0 if self.scale == "mean" else 0.5)

    def load_power(self, power: float) -> Tensor:
        """Return the product of the loads of each small element's buckets to a power; empty buckets give 0.

        It has the small shape, or none where all loads are equal: then it takes no memory.
        """
        rows = []
        for row in range(self.rows):
            total = torch.ones((), dtype=torch.float64)
            for side in self.sides:
                load = self._sketcher(side, row, torch.device("cpu")).load
                factor = torch.where(load > 0, load.clamp(min=1) ** power, 0.0)
                if bool((factor == factor[0, 0]).all()):
                    total = total * factor[0, 0]
                else:
                    factor = factor[:, :, None].expand(*factor.shape, self._other(side))
                    total = total * self._one_row().join(factor, side)
            rows.append(total)
        if all(total.ndim == 0 and total == rows[0] for total in rows):
            return rows[0]
        rows = [total.expand(self._one_row().small_shape) for total in rows]
        return torch.stack(rows) if self.rows > 1 else rows[0]

    def split(self, weight: Tensor, side: str) -> Tensor:
        """Bring a weight, full or small, of one row into the shape (groups · blocks, size of this side, rest)."""
        geo, g = self.geometry, self.blocks
        groups = geo.groups
        x = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        if geo.transposed:
            x = x.transpose(1, 2)
        if side == "output":
            x = x.unflatten(2, (g, -1)).permute(0, 2, 1, 3, 4)
        else:
            x = x.unflatten(1, (g, -1)).permute(0, 1, 3, 2, 4)
        return x.reshape(groups * g, x.shape[2], -1)

    def join(self, parts: Tensor, side: str) -> Tensor:
        """Undo `split`."""
        geo, g = self.geometry, self.blocks
        groups, rest = geo.groups, math.prod(geo.shape[2:])
        x = parts.view(groups, g, parts.shape[1], -1, rest)
        x = x.permute(0, 2, 1, 3, 4).flatten(2, 3) if side == "output" else x.permute(0, 1, 3, 2, 4).flatten(1, 2)
        if geo.transposed:
            x = x.transpose(1, 2)
        return x.reshape(groups * x.shape[1], x.shape[2], *geo.shape[2:])

    def to_json(self) -> dict[str, Any]:
        """Return plain data; the key as text, since JSON readers elsewhere round large integers."""
        return {**dataclasses.asdict(self), "key": f"{self.key:016x}"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "WeightPlan":
        """Read what `to_json` wrote."""
        geo = data["geometry"]
        return cls(
            geometry=Geometry(tuple(geo["shape"]), int(geo["groups"]), bool(geo["transposed"])),
            mode=str(data["mode"]), length=(int(data["length"][0]), int(data["length"][1])), rows=int(data["rows"]),
            blocks=int(data["blocks"]), hash=str(data["hash"]), scale=str(data["scale"]), key=int(data["key"], 16),
        )  # fmt: skip

    def _one_row(self) -> "WeightPlan":
        return dataclasses.replace(self, rows=1)

    def _size_length(self, side: str) -> tuple[int, int]:
        if side == "output":
            return self.geometry.outputs, self.length[0]
        return self.geometry.inputs, self.length[1]

    def _other(self, side: str) -> int:
        """Elements behind each bucket of one side: the other mode's part of a block, times the rest."""
        other = self.length[1] if side == "output" else self.length[0]
        return other // self.blocks * math.prod(self.shape[2:])

    def _sketcher(self, side: str, row: int, device: torch.device) -> sketching.Sketcher:
        return _cached_sketcher(self, side, row, device)

    def _map(self, verb: str, weight: Tensor, row: int) -> Tensor:
        for side in self.sides:
            apply: Map = getattr(self._sketcher(side, row, weight.device), verb)
            weight = self.join(apply(self.split(weight, side)), side)
        return weight

    def _split(self, small: Tensor) -> Tensor:
        self._expect(small, self.small_shape, "small")
        return small if self.rows > 1 else small[None]

    def _expect(self, tensor: Tensor, shape: tuple[int, ...], kind: str) -> None:
        if tuple(tensor.shape) != shape:
            raise MismatchError(f"The {kind} weight has shape {tuple(tensor.shape)}, the plan says {shape}.")


def _after(long: WeightPlan, short: WeightPlan, side: str, folded: bool) -> tuple[int, int]:
    """Return the lengths of a weight before or after its fold along `side`; output is folded before input."""
    if side == "output":
        return (short.length[0], long.length[1]) if folded else long.length
    return short.length if folded else (short.length[0], long.length[1])


@functools.lru_cache(maxsize=1024)
def _cached_sketcher(plan: WeightPlan, side: str, row: int, device: torch.device) -> sketching.Sketcher:
    """Keep the hashes of recent plans: a server sketches the same weights every round."""
    length = plan._size_length(side)[1]
    return sketching.Sketcher(plan.draw(side, row), length, plan.scale).to(device)


class Plan(Mapping[str, WeightPlan]):
    """Say how a whole model is sketched: parameter name -> WeightPlan, and why the other layers stay full."""

    def __init__(self, weights: Mapping[str, WeightPlan], kept: Mapping[str, str] | None = None) -> None:
        self.weights = dict(weights)
        self.kept = dict(kept or {})

    def __getitem__(self, name: str) -> WeightPlan:
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.weights == other.weights

    __hash__ = None  # type: ignore[assignment]

    def sketch(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sketch the planned weights of a full state; the rest passes as it is."""
        return {name: self[name].sketch(x) if name in self.weights else x for name, x in state.items()}

    def unsketch(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Unsketch the planned weights of a small state; the rest passes as it is."""
        return {name: self[name].unsketch(x) if name in self.weights else x for name, x in state.items()}

    def to_json(self) -> str:
        """Write the plan as JSON."""
        weights = {name: plan.to_json() for name, plan in self.weights.items()}
        return json.dumps({"version": 1, "weights": weights, "kept": self.kept})

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` wrote."""
        try:
            data = json.loads(text)
            if data["version"] != 1:
                raise MismatchError(f"The plan has version {data['version']}; this comfetch reads version 1.")
            return cls({k: WeightPlan.from_json(v) for k, v in data["weights"].items()}, data["kept"])
        except MismatchError:
            raise
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise MismatchError(f"Not a plan: {error!r} while reading it.") from error

    def __str__(self) -> str:
        head = ("weight", "full", "small", "mode", "rows", "blocks", "hash", "scale")
        lines = [
            (name, _x(p.shape), _x(p.small_shape), p.mode, str(p.rows), str(p.blocks), p.hash, p.scale)
            for name, p in self.weights.items()
        ]
        table = format_table(head, lines)
        kept = [f"{name} stays full: {why}" for name, why in self.kept.items()]
        return "\n".join([table, *kept])


def format_table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """Lay out a plain text table; columns of numbers are set flush right.

    >>> print(format_table(("name", "n"), [("a", "10"), ("bc", "9")]))
    name   n
    a     10
    bc     9
    """
    columns = list(zip(head, *lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [len(c) > 1 and all(cell[:1].isdigit() or cell in ("", "-") for cell in c[1:]) for c in columns]

    def line(cells: tuple[str, ...]) -> str:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join(line(cells) for cells in [head, *lines])


def _x(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
