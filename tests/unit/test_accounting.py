"""Privacy accounting: against closed forms, computed here by other means, and the library's other accountants."""

import dataclasses
import math
import re
import sys
from pathlib import Path

import dp_accounting
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfetch.accounting import ADJACENCIES, epsilon, noise_for, participations
from comfetch.errors import OptionError
from comfetch.privacy import Privacy


def delta_of(eps: float, sigma: float) -> float:
    """δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ) of the Gaussian mechanism of sensitivity 1 (Balle and Wang 2018)."""

    def phi(x: float) -> float:
        return (1 + math.erf(x / math.sqrt(2))) / 2

    return phi(1 / (2 * sigma) - eps * sigma) - math.exp(eps) * phi(-1 / (2 * sigma) - eps * sigma)


@pytest.mark.parametrize(("noise", "delta"), [(0.8, 1e-5), (1.0, 1e-5), (2.0, 1e-3), (5.0, 1e-6), (0.5, 0.1)])
@pytest.mark.parametrize("rounds", [1, 3])
def test_epsilon_is_that_of_the_closed_form(noise: float, delta: float, rounds: int) -> None:
    found = epsilon(Privacy("central", noise=noise, delta=delta), rounds)
    assert delta_of(found, noise / math.sqrt(rounds)) == pytest.approx(delta, rel=1e-6)


def test_epsilon_is_below_the_classical_bound_where_that_one_holds() -> None:
    # σ = √(2 ln(1.25/δ)) / ε suffices for ε < 1 (Dwork and Roth 2014, Theorem A.1)
    for eps in (0.1, 0.5, 0.9):
        noise = math.sqrt(2 * math.log(1.25 / 1e-5)) / eps
        assert epsilon(Privacy("central", noise=noise), 1) < eps


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (4.0, 100), (20.0, 1000)])
def test_epsilon_is_that_of_the_composition_of_privacy_losses(noise: float, rounds: int) -> None:
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(noise), rounds)
    found = epsilon(Privacy("central", noise=noise), rounds)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-4)
    renyi = dp_accounting.rdp.RdpAccountant()
    renyi.compose(dp_accounting.GaussianDpEvent(noise), rounds)
    assert found < renyi.get_epsilon(1e-5)


@given(st.floats(0.3, 50), st.integers(1, 1000), st.floats(1e-9, 0.1), st.floats(1.01, 3))
def test_more_noise_fewer_rounds_and_larger_delta_mean_more_privacy(
    noise: float, rounds: int, delta: float, more: float
) -> None:
    privacy = Privacy("central", noise=noise, delta=delta)
    eps = epsilon(privacy, rounds)
    assert epsilon(dataclasses.replace(privacy, noise=noise * more), rounds) <= eps
    assert epsilon(privacy, rounds + 1) >= eps
    assert epsilon(dataclasses.replace(privacy, delta=delta * more), rounds) <= eps


@given(st.floats(0.05, 50), st.integers(1, 1000), st.sampled_from(["client", "central"]), st.floats(1e-9, 1e-3))
def test_the_noise_for_an_epsilon_gives_it_and_a_little_less_noise_does_not(
    target: float, rounds: int, where: str, delta: float
) -> None:
    privacy = Privacy(where, delta=delta)
    noise = noise_for(target, privacy, rounds)
    assert epsilon(dataclasses.replace(privacy, noise=noise), rounds) <= target
    assert epsilon(dataclasses.replace(privacy, noise=noise * 0.999), rounds) > target


def test_noise_on_clients_is_accounted_for_the_replacement_of_all_data() -> None:
    client, central = Privacy("client", noise=2.0), Privacy("central", noise=1.0)
    assert epsilon(client, 5) == epsilon(central, 5) == epsilon(dataclasses.replace(central, noise=2.0), 5, "replace")
    assert epsilon(client, 5, "zero-out") < epsilon(client, 5)
    assert set(ADJACENCIES) == {"zero-out", "replace"}


def test_the_size_of_the_clip_does_not_matter_and_no_rounds_or_no_noise_need_no_accountant() -> None:
    assert epsilon(Privacy("central", clip=7.0), 3) == epsilon(Privacy("central"), 3)
    assert epsilon(Privacy("client"), 0) == 0
    assert epsilon(Privacy("none"), 3) == math.inf


def test_the_table_of_the_page_is_true() -> None:
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for noise, cells in rows:
        runs = [(where, rounds) for where in ("central", "client") for rounds in (1, 10, 100, 1000)]
        for (where, rounds), cell in zip(runs, cells.split(" | "), strict=True):
            assert float(cell) == pytest.approx(epsilon(Privacy(where, noise=float(noise)), rounds), rel=5e-3)


def test_a_client_is_counted_once_a_round() -> None:
    assert participations([[0, 1], [1, 1], [2]]) == 2
    assert participations([]) == 0


def test_options_that_cannot_be_meant_are_refused() -> None:
    privacy = Privacy("client")
    for rounds in (-1, 1.5, True):
        with pytest.raises(OptionError, match="rounds=.* is not a whole number"):
            epsilon(privacy, rounds)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="adjacency='edit' is not known. Choose one of: zero-out, replace"):
        epsilon(privacy, 1, "edit")
    for target in (0, -1, math.inf, math.nan):
        with pytest.raises(OptionError, match="epsilon=.* is not a number above 0"):
            noise_for(target, privacy, 1)
    with pytest.raises(OptionError, match="No noise is added with where='none'"):
        noise_for(1.0, Privacy(), 1)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(OptionError, match="pip install 'comfetch\\[privacy\\]'"):
        epsilon(Privacy("client"), 1)
