"""Bound and blur what an upload says of a client: clipping and Gaussian noise, in sketch space, for any method.

The unit of privacy is a client. What is protected, what is not, and from whom: docs/privacy.md.
"""

import math
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from comfetch.errors import MismatchError, OptionError
from comfetch.methods.base import Message

PLACES = ("none", "client", "central")
PIECE = 1 << 15
"""Elements that are handled at once: a small client has no room for float64 copies of its largest tensor."""
Noise = Callable[[int], Tensor]
Relative = bool | Collection[str]
"""Which tensors of an upload are new values of received ones; all others, and what was not received, are changes."""


@dataclass(frozen=True)
class Privacy:
    """Where noise is added, and how much.

    Args:
        where: "client": each client adds noise itself, and need not trust the server. "central": the server does, so
            that the noise of the average is smaller by the root of the number of clients. "none": nothing is done.
        clip: largest norm of a client's change, over all its floating point tensors together.
        noise: noise multiplier z: the standard deviation is z · clip, on each upload or (central) on their sum.
        delta: δ for which ε is accounted (`accounting.epsilon`).
    """

    where: str = "none"
    clip: float = 1.0
    noise: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.where not in PLACES:
            raise OptionError(f"where={self.where!r} is not known. Choose one of: {', '.join(PLACES)}.")
        for name in ("clip", "noise"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise OptionError(f"{name}={value!r} is not a number above 0.")
        if not (isinstance(self.delta, int | float) and 0 < self.delta < 1):
            raise OptionError(f"delta={self.delta!r} is not in (0, 1). Choose it well below 1 / number of clients.")

    def protect(
        self, upload: Message, received: Message, seed: int | None = None, relative: Relative = True
    ) -> Message:
        """On a client: received + clip(upload − received) + N(0, (z · clip)²). Only where="client" does anything.

        Args:
            received: the download that the upload answers. Its counters replace the upload's, which would tell steps.
            seed: None takes the noise from the operating system. A number makes it reproducible, for tests and
                simulations: whoever knows or guesses the seed subtracts the noise.
            relative: True if the upload holds new values of what was received; False if it is itself the change, a
                gradient; or the names of those that are new values, such as statistics sent along with gradients.
        """
        if self.where != "client":
            return upload
        return self._blur(upload, received, relative, self.noise * self.clip, normal_noise(seed))

    def protect_centrally(
        self, uploads: list[Message], received: list[Message], seed: int | None = None, relative: Relative = True
    ) -> list[Message]:
        """On the server: clip each of n uploads and add N(0, (z · clip)² / n). Only where="central" does anything.

        The sum has the noise of the Gaussian mechanism, and the uniform mean z · clip / n of it, whatever method makes
        that mean. A single one of the messages that are returned is not private.
        """
        if self.where != "central":
            return uploads
        noise, std = normal_noise(seed), self.noise * self.clip / math.sqrt(max(1, len(uploads)))
        return [self._blur(up, down, relative, std, noise) for up, down in zip(uploads, received, strict=True)]

    def _blur(self, upload: Message, received: Message, relative: Relative, std: float, noise: Noise) -> Message:
        if upload.text != received.text:
            raise MismatchError(f"The upload's text {upload.text} is not the download's: it may tell what noise hides.")
        counters = [name for name, tensor in upload.state.items() if not tensor.is_floating_point()]
        told = sorted(set(counters) - received.state.keys())
        if told:
            raise MismatchError(f"No noise can be added to integers: {', '.join(told)}. Use a method without them.")
        factor = _factor(change_norm(upload, received, relative), self.clip)
        blurred = _rebuild(upload, received, relative, factor, lambda size: std * noise(size))
        return Message({**blurred.state, **{name: received.state[name] for name in counters}}, upload.text)


def check(privacy: Privacy, weighting: str, rule: str, classes: int) -> None:
    """Refuse options under which central noise would not be what `accounting` counts; `classes` are of capacity."""
    problems = []
    if weighting != "uniform":
        problems.append(f"weighting={weighting!r} must be 'uniform': a weight is a factor on what was clipped")
    if rule != "mean":
        problems.append(f"rule={rule!r} must be 'mean': the noise is that of a sum")
    if classes != 1:
        problems.append(f"{classes} capacity classes must be one: each would be averaged by itself, with less noise")
    if privacy.where == "central" and problems:
        raise OptionError(f"Central privacy: {'; '.join(problems)}. Or add the noise on the clients: where='client'.")


def change_norm(upload: Message, received: Message, relative: Relative = True) -> float:
    """Return ‖upload − received‖ over all floating point tensors, weights and statistics alike, summed in float64.

    For `relative` see `Privacy.protect`.
    """
    norms = [
        float(torch.linalg.vector_norm(change))
        for name, tensor in upload.state.items()
        if tensor.is_floating_point()
        for _, change in _changes(name, upload, received, relative)
    ]
    return math.nan if any(math.isnan(norm) for norm in norms) else math.hypot(*norms)


def clip_upload(upload: Message, received: Message, most: float, relative: Relative = True) -> Message:
    """Scale the change of an upload to a norm of at most `most`: received + change · min(1, most / ‖change‖).

    A change that is not finite becomes none, so that every upload has one of bounded norm. Integer tensors pass.
    """
    norm = change_norm(upload, received, relative)
    return upload if norm <= most else _rebuild(upload, received, relative, _factor(norm, most), None)


def add_noise(upload: Message, std: float, seed: int | None = None) -> Message:
    """Add independent N(0, std²) to every floating point value; for `seed` see `Privacy.protect`."""
    noise = normal_noise(seed)
    return _rebuild(upload, Message({}), False, 1.0, lambda size: std * noise(size))


def normal_noise(seed: int | None = None) -> Noise:
    """Make a source of standard normal noise in float64: from the operating system, or reproducible from a seed.

    There is no seed of ours to guess in the first: torch's generator takes 32 bits of its seed, which can be tried out.
    """
    if seed is None:
        return _system_noise
    generator = torch.Generator().manual_seed(seed & (2**63 - 1))
    return lambda size: torch.randn(size, generator=generator, dtype=torch.float64)


def _system_noise(size: int) -> Tensor:
    """Draw by inversion: √2 · erf⁻¹(u), with u uniform on the odd multiples of 2⁻⁵³ between −1 and 1."""
    if not size:
        return torch.zeros(0, dtype=torch.float64)
    words = torch.frombuffer(bytearray(os.urandom(8 * size)), dtype=torch.int64)
    return (words >> 11).double().add_(0.5).mul_(2.0**-52).erfinv_().mul_(math.sqrt(2))


def _factor(norm: float, most: float) -> float:
    """Return what a change of this norm is multiplied by."""
    return min(1.0, most / norm) if norm > 0 and math.isfinite(norm) else 0.0


def _rebuild(upload: Message, received: Message, relative: Relative, factor: float, noise: Noise | None) -> Message:
    """Scale and blur the change in float64, and round once at the end: what is private stays so when rounded."""
    state = dict(upload.state)
    for name, tensor in upload.state.items():
        if tensor.is_floating_point():
            state[name] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            pieces = state[name].view(-1).split(PIECE)
            for piece, (base, change) in zip(pieces, _changes(name, upload, received, relative), strict=True):
                change = change.mul_(factor) if factor else torch.zeros_like(change)
                if noise is not None:
                    change += noise(len(change)).to(change.device)
                piece.copy_(change.add_(base))
    return Message(state, upload.text)


def _changes(
    name: str, upload: Message, received: Message, relative: Relative
) -> Iterator[tuple[Tensor | float, Tensor]]:
    """Go over the pieces of a tensor: what its change starts from, and the change in float64."""
    tensor, base = upload.state[name], received.state.get(name)
    if base is None or not (relative if isinstance(relative, bool) else name in relative):
        for new in tensor.reshape(-1).split(PIECE):
            yield 0.0, new.to(torch.float64, copy=True)
        return
    if base.shape != tensor.shape:
        shapes = f"{tuple(tensor.shape)}, not {tuple(base.shape)} as it was received"
        raise MismatchError(f"{name} has the shape {shapes}: no change can be taken.")
    for new, old in zip(tensor.reshape(-1).split(PIECE), base.reshape(-1).split(PIECE), strict=True):
        yield old, new.double() - old.double()
