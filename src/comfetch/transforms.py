"""Server-side steps between the average of the clients' updates and the weights: W ← W − Δ, Δ = chain(g).

Each transform maps an update (name -> tensor) to an update and keeps its own state. g points uphill, as a gradient
does: where clients send weights instead of gradients, g is minus the change of the weights.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from comfetch.errors import MismatchError, OptionError

State = dict[str, Tensor]
Map = Callable[[State], State]


class Transform(Protocol):
    """One server-side step."""

    def __call__(self, update: State) -> State:
        """Transform an update."""

    def applied(self, delta: State) -> None:
        """Take note of what was subtracted from the weights in the end."""

    def state_dict(self) -> State:
        """Return the state, by name."""

    def load_state_dict(self, state: State) -> None:
        """Take a state that `state_dict` returned."""


class _Stateful:
    """Keep named tensors, one or more for each weight: the common part of transforms with a state."""

    def __init__(self) -> None:
        self.state: State = {}

    def applied(self, delta: State) -> None:
        """Ignore what was applied."""

    def state_dict(self) -> State:
        """Return the state, by name."""
        return dict(self.state)

    def load_state_dict(self, state: State) -> None:
        """Take a state that `state_dict` returned."""
        self.state = dict(state)

    def _get(self, name: str, like: Tensor) -> Tensor:
        kept = self.state.get(name)
        if kept is None:
            return torch.zeros_like(like)
        if kept.shape != like.shape:
            raise MismatchError(
                f"{name}: the state kept has shape {tuple(kept.shape)}, the update {tuple(like.shape)}."
            )
        return kept


class chain(_Stateful):
    """Apply transforms one after another.

    >>> step = chain(scale(0.5), scale(0.5))
    >>> step({"w": torch.tensor([4.0])})
    {'w': tensor([1.])}
    """

    def __init__(self, *transforms: Transform) -> None:
        super().__init__()
        self.transforms: Sequence[Transform] = transforms

    def __call__(self, update: State) -> State:
        """Apply all transforms."""
        for transform in self.transforms:
            update = transform(update)
        return update

    def applied(self, delta: State) -> None:
        """Tell all transforms."""
        for transform in self.transforms:
            transform.applied(delta)

    def state_dict(self) -> State:
        """Return the states of all, named by their place."""
        parts = enumerate(self.transforms)
        return {f"{i}.{name}": x for i, part in parts for name, x in part.state_dict().items()}

    def load_state_dict(self, state: State) -> None:
        """Give each transform its part."""
        for i, part in enumerate(self.transforms):
            part.load_state_dict({n.split(".", 1)[1]: x for n, x in state.items() if n.split(".", 1)[0] == str(i)})


class scale(_Stateful):
    """Multiply by a rate: η g."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = _positive("rate", rate)

    def __call__(self, update: State) -> State:
        """Scale every tensor."""
        return {name: self.rate * g for name, g in update.items()}


class momentum(_Stateful):
    """u ← ρ u + g. With `masked`, u is set to 0 where Δ ≠ 0 (FetchSGD's factor masking)."""

    def __init__(self, factor: float = 0.9, masked: bool = False) -> None:
        super().__init__()
        if not 0 <= factor < 1:
            raise OptionError(f"momentum={factor!r} is not in [0, 1).")
        self.factor, self.masked = factor, masked

    def __call__(self, update: State) -> State:
        """Accumulate and return u."""
        self.state = {name: self.factor * self._get(name, g) + g for name, g in update.items()}
        return dict(self.state)

    def applied(self, delta: State) -> None:
        """Mask the momentum that has been applied."""
        if self.masked:
            self.state = {name: torch.where(delta[name] != 0, 0, u) for name, u in self.state.items()}


class top_k:
    """Keep the largest coordinates in magnitude, a fraction of each layer's or of all; set the others to 0.

    Of equal ones the first are kept, so that the choice is the same everywhere.

    >>> top_k(0.5)({"w": torch.tensor([3.0, -4.0])})
    {'w': tensor([ 0., -4.])}
    """

    def __init__(self, fraction: float, per: str = "layer") -> None:
        if not 0 < fraction <= 1:
            raise OptionError(f"top_k={fraction!r} is not in (0, 1]. It is the fraction of coordinates that is kept.")
        if per not in ("layer", "global"):
            raise OptionError(f"per={per!r} is not known. Choose one of: layer, global.")
        self.fraction, self.per = fraction, per

    def __call__(self, update: State) -> State:
        """Select."""
        if self.per == "layer":
            return {name: self._select(v.flatten()).view_as(v) for name, v in update.items()}
        flat = self._select(torch.cat([v.flatten() for v in update.values()]))
        parts = flat.split([v.numel() for v in update.values()])
        return {name: part.view_as(v) for (name, v), part in zip(update.items(), parts, strict=True)}

    def _select(self, flat: Tensor) -> Tensor:
        k = max(1, math.floor(self.fraction * len(flat) + 0.5))
        size = flat.abs()
        bound = size.topk(k).values[-1]
        above = size > bound
        ties = (size == bound).nonzero().squeeze(1)  # frequent: a bucket's coordinates share one magnitude
        above[ties[: k - int(above.sum())]] = True
        return torch.where(above, flat, 0)


class error_feedback(_Stateful):
    """v = e + g ; Δ = select(v) ; e ← v − Δ.

    In sketch space e and g are small, and Δ is full: v_S = e_S + g_S ; Δ = select(lift(v_S)) ; e_S ← v_S − drop(Δ),
    where `drop` is the pseudo-inverse of `lift`, so that what leaves the error is what the lift has added.
    """

    def __init__(self, select: Map) -> None:
        super().__init__()
        self.select = select
        self.lift: Map = dict
        self.drop: Map = dict

    def __call__(self, update: State) -> State:
        """Select from the error and the update, and keep the rest."""
        v = {name: self._get(name, g) + g for name, g in update.items()}
        delta = self.select(self.lift(v))
        dropped = self.drop(delta)
        self.state = {name: v[name] - dropped[name] for name in v}
        return delta


class adaptive(_Stateful):
    """Divide by a running scale of each coordinate (Reddi et al., Adaptive Federated Optimization).

    m ← β₁ m + (1 − β₁) g ; s by kind ; Δ = rate · m / (√s + τ).
    """

    def __init__(
        self, kind: str, rate: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
    ) -> None:
        super().__init__()
        if kind not in SECOND_MOMENTS:
            raise OptionError(f"kind={kind!r} is not known. Choose one of: {', '.join(SECOND_MOMENTS)}.")
        self.kind, self.rate, self.tau = kind, _positive("rate", rate), _positive("tau", tau)
        self.betas = betas

    def __call__(self, update: State) -> State:
        """Update both moments and return the step."""
        delta: State = {}
        for name, g in update.items():
            first, second = f"{name}:first", f"{name}:second"
            m = self.betas[0] * self._get(first, g) + (1 - self.betas[0]) * g
            s = self.state.get(second)
            s = torch.full_like(g, self.tau**2) if s is None else s
            s = SECOND_MOMENTS[self.kind](s, g * g, self.betas[1])
            self.state[first], self.state[second] = m, s
            delta[name] = self.rate * m / (s.sqrt() + self.tau)
        return delta


SECOND_MOMENTS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "adam": lambda s, g2, beta: beta * s + (1 - beta) * g2,
    "yogi": lambda s, g2, beta: s - (1 - beta) * g2 * torch.sign(s - g2),
    "adagrad": lambda s, g2, beta: s + g2,
}


def _positive(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise OptionError(f"{name}={value!r} is not above 0.")
    return value
