"""Make one state of many uploads: the weighted mean, or a robust rule that a few hostile clients cannot move far.

Uploads are linear in the weights under one key, so all rules work on sketches as they are.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from comfetch.errors import OptionError
from comfetch.medians import sort_rows
from comfetch.methods.base import State, Upload
from comfetch.transforms import Transform

WEIGHTINGS = ("examples", "uniform")
RULES = ("mean", "median", "trimmed-mean")
ANEW = "anew"
STATISTICS = ("averaged", ANEW)
LARGE = 1 << 15
"""Elements of a tensor from which work on it, not the call, takes the time; robust rules sort so many at once."""


@dataclass(frozen=True)
class Averaging:
    """How uploads become one state.

    Args:
        weighting: weight of a client in the mean: its number of "examples", or "uniform".
        rule: "mean", or coordinate-wise "median" or "trimmed-mean" over the clients. Those two count every client once:
            an example count is what a hostile client says of itself.
        trim: fraction of clients that the trimmed mean cuts at each end of every coordinate.
        statistics: batch norm's running statistics in a test: "averaged" like all else, or taken "anew" from examples
            of the clients (`comfetch.batchnorm`). None leaves it to the method: averaged, unless its channels roll.
    """

    weighting: str = "examples"
    rule: str = "mean"
    trim: float = 0.1
    statistics: str | None = None

    def __post_init__(self) -> None:
        choices = {"weighting": WEIGHTINGS, "rule": RULES, "statistics": STATISTICS}
        for option, known in choices.items():
            value = getattr(self, option)
            if value not in known and (option, value) != ("statistics", None):
                raise OptionError(f"{option}={value!r} is not known. Choose one of: {', '.join(known)}.")
        if not (isinstance(self.trim, int | float) and 0 <= self.trim < 0.5):
            raise OptionError(f"trim={self.trim!r} is not in [0, 0.5). It is the part of clients cut at each end.")

    def __call__(self, uploads: list[Upload]) -> State:
        """Average the floating point tensors, in the order of the clients and not of arrival.

        Integer tensors, such as the counters of batch norm, are never averaged: they are left out.
        """
        states = [upload.message.state for upload in _by_client(uploads)]
        names = [name for name, tensor in states[0].items() if tensor.is_floating_point()]
        if self.rule != "mean":
            return {name: self._robust([state[name] for state in states]) for name in names}
        if len(states) == 1:  # the mean of a pool
            return {name: states[0][name] for name in names}
        weights = self.weights(uploads)
        total = sum(weights)
        mean: State = {}
        for group in _groups(states[0], names):
            sums = torch._foreach_mul([states[0][name] for name in group], weights[0] / total)
            for state, weight in zip(states[1:], weights[1:], strict=True):
                torch._foreach_add_(sums, [state[name] for name in group], alpha=weight / total)
            mean.update(zip(group, sums, strict=True))
        return {name: mean[name] for name in names}

    def weights(self, uploads: list[Upload]) -> list[float]:
        """Return the weight of each client, in the order of their ids; they do not sum to 1."""
        if self.rule == "mean" and self.weighting == "examples":
            return [float(upload.client.examples) for upload in _by_client(uploads)]
        return [float(upload.count) for upload in _by_client(uploads)]

    def _robust(self, tensors: list[Tensor]) -> Tensor:
        """Apply the rule to one tensor of each client, some coordinates at a time: no stack of all is ever made."""
        n = len(tensors)
        cut = (n - 1) // 2
        if self.rule == "trimmed-mean":
            cut = min(cut, math.floor(self.trim * n + 1e-9))  # 0.29 · 100 is 28.999999999999996
        out = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
        parts = [tensor.reshape(-1).split(LARGE) for tensor in tensors]
        for target, *columns in zip(out.view(-1).split(LARGE), *parts, strict=True):
            kept = sort_rows(columns)[cut : n - cut]
            torch.div(functools.reduce(torch.add, kept), len(kept), out=target)
        return out


def step_from(sent: State, mean: State, trained: Iterable[str], transform: Transform, kept: State) -> State:
    """Return S − transform(S − mean) of the trained weights, and the mean of what is averaged besides.

    S is what the clients were sent, so that S − mean is what they changed, and nothing else.

    Args:
        kept: what the transform kept before, `Server.transforms`; its `state_dict` is what it keeps now.
    """
    transform.load_state_dict(kept)
    delta = transform({name: sent[name] - mean[name] for name in trained})
    transform.applied(delta)
    return {**sent, **mean, **{name: sent[name] - change for name, change in delta.items()}}


def _groups(state: State, names: list[str]) -> list[list[str]]:
    """Put small tensors together, to save calls, and each large one alone, so that its sum stays in the cache."""
    small = [name for name in names if state[name].numel() < LARGE]
    return [small] * bool(small) + [[name] for name in names if state[name].numel() >= LARGE]


def _by_client(uploads: list[Upload]) -> list[Upload]:
    return sorted(uploads, key=lambda upload: upload.client.id)
