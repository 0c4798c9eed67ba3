"""Account for differential privacy: the (ε, δ) that a client has after its rounds, by Google's dp-accounting.

Each round in which a client takes part is a Gaussian mechanism with noise z · clip, and k of them, each chosen in
knowledge of those before, are together exactly one with noise z · clip / √k (Dong, Roth and Su 2022). Its ε is the
exact one (Balle and Wang 2018).

Nothing is claimed for the sampling of clients. Amplification by sampling needs a choice that the adversary does not
know; here it follows from the key and the round, which are public. In return it is certain which rounds are a client's:
in the others it says nothing, so only its own count (`participations`).
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from comfetch.errors import OptionError
from comfetch.privacy import Privacy

ADJACENCIES = {"zero-out": 1, "replace": 2}
"""What neighbours differ in, with the distance of a client's two contributions in units of `clip`.

zero-out: one client sends its change, or takes part and sends none. For the sum this is to add or remove one client;
that it takes part is public either way. replace: one client's data are exchanged for any other.
"""
USUAL = {"client": "replace", "central": "zero-out"}
"""What local differential privacy means, and what is usual for the average of a trusted server."""


def epsilon(privacy: Privacy, rounds: int, adjacency: str | None = None) -> float:
    """Return the ε of a client that takes part in `rounds` rounds, at the δ of `privacy`.

    Args:
        rounds: the client's own, at worst all of the run; `participations` counts those of clients drawn by a key.
        adjacency: one of ADJACENCIES; if not given, "replace" for noise on clients and "zero-out" for central noise.
    """
    distance = _distance(privacy, rounds, adjacency)
    if rounds == 0:
        return 0.0
    if privacy.where == "none":
        return math.inf
    sigma = privacy.noise / (distance * math.sqrt(rounds))
    return float(_gaussian().get_epsilon_gaussian(sigma, privacy.delta))


def noise_for(target: float, privacy: Privacy, rounds: int, adjacency: str | None = None) -> float:
    """Return the smallest noise multiplier for which `epsilon` is at most `target`; that of `privacy` is not used."""
    distance = _distance(privacy, rounds, adjacency)
    if privacy.where == "none" or rounds == 0:
        raise OptionError(f"No noise is added with where={privacy.where!r} and rounds={rounds}.")
    if not 0 < target < math.inf:
        raise OptionError(f"epsilon={target!r} is not a number above 0.")
    sigma = float(_gaussian().get_sigma_gaussian(target, privacy.delta))
    return sigma * distance * math.sqrt(rounds) * (1 + 1e-9)  # the library's root may lie on either side


def participations(schedule: Iterable[Iterable[int]]) -> int:
    """Count the rounds of the client that takes part most often, from the ids of each round's clients.

    >>> participations([[0, 1], [1, 2], [1, 0]])
    3
    """
    return max(Counter(client for clients in schedule for client in set(clients)).values(), default=0)


def _distance(privacy: Privacy, rounds: int, adjacency: str | None) -> int:
    adjacency = USUAL.get(privacy.where, "zero-out") if adjacency is None else adjacency
    if adjacency not in ADJACENCIES:
        raise OptionError(f"adjacency={adjacency!r} is not known. Choose one of: {', '.join(ADJACENCIES)}.")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
        raise OptionError(f"rounds={rounds!r} is not a whole number of at least 0.")
    return ADJACENCIES[adjacency]


def _gaussian() -> Any:
    try:
        from dp_accounting import gaussian_mechanism
    except ImportError as error:
        raise OptionError("Privacy accounting needs dp-accounting: pip install 'comfetch[privacy]'.") from error
    return gaussian_mechanism
