"""Clipping and noise of uploads, and what sketches of one key allow: secure sums, but no privacy of their own."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest
from torch import Tensor, nn

from comfetch import sketching
from comfetch.errors import MismatchError, OptionError
from comfetch.methods import Client, Message, Upload
from comfetch.methods.averaging import Averaging
from comfetch.plan import Geometry, WeightPlan
from comfetch.privacy import PIECE, Privacy, add_noise, change_norm, check, clip_upload, normal_noise

COUNTER = "1.num_batches_tracked"


def received() -> Message:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    return Message({name: t.clone() for name, t in model.state_dict().items()}, {"round": "3"})


def upload(size: float = 1.0, seed: int = 1) -> Message:
    draw, down = torch.Generator().manual_seed(seed), received()
    state = {
        name: t + size * torch.randn(t.shape, generator=draw) if t.is_floating_point() else t + 7
        for name, t in down.state.items()
    }
    return Message(state, down.text)


def floats(message: Message) -> np.ndarray:
    return np.concatenate([t.double().numpy().ravel() for t in message.state.values() if t.is_floating_point()])


def equal(a: Message, b: Message) -> bool:
    return (
        a.text == b.text
        and a.state.keys() == b.state.keys()
        and all(torch.equal(a.state[n], b.state[n]) for n in a.state)
    )


def test_the_norm_is_over_weights_and_statistics_alike() -> None:
    wanted = np.linalg.norm(floats(upload()) - floats(received()))
    assert change_norm(upload(), received()) == pytest.approx(wanted, rel=1e-12)
    assert change_norm(upload(), received(), False) == pytest.approx(np.linalg.norm(floats(upload())), rel=1e-12)


def test_the_norm_of_many_pieces_is_summed_in_float64() -> None:
    values = torch.full((3, PIECE), 1e-3)
    assert change_norm(Message({"w": values}), Message({"w": 0 * values})) == pytest.approx(
        float(values[0, 0]) * math.sqrt(3 * PIECE), rel=1e-12
    )


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_a_clipped_change_keeps_its_direction_and_has_at_most_the_norm(size: float, most: float) -> None:
    up, down = upload(size), received()
    clipped = clip_upload(up, down, most)
    before, after = floats(up) - floats(down), floats(clipped) - floats(down)
    factor = min(1.0, most / np.linalg.norm(before))
    np.testing.assert_allclose(after, factor * before, atol=1e-6 * (1 + np.abs(floats(clipped)).max()))
    assert change_norm(clipped, down) <= most + 1e-6 * (1 + np.linalg.norm(floats(clipped)))
    assert torch.equal(clipped.state[COUNTER], up.state[COUNTER])
    if factor == 1:
        assert clipped is up


def test_gradients_are_clipped_themselves_and_statistics_beside_them_are_not_drawn_to_zero() -> None:
    up, down = upload(), received()
    values = [name for name in up.state if "running" in name]
    clipped = clip_upload(up, down, 0.01, values)
    assert float(clipped.state["0.weight"].norm()) < 0.01
    torch.testing.assert_close(clipped.state["1.running_var"], torch.ones(4), atol=0.01, rtol=0)
    assert change_norm(clipped, down, values) == pytest.approx(0.01, rel=1e-4)
    assert float(clip_upload(up, down, 0.01, False).state["1.running_var"].norm()) < 0.01


def test_what_was_not_received_is_itself_a_change() -> None:
    sent = Message({"update": torch.tensor([3.0, 4.0])})
    assert change_norm(sent, received()) == 5
    assert clip_upload(sent, received(), 1.0).state["update"].tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_change_that_is_not_finite_becomes_none(value: float) -> None:
    up = upload()
    up.state["0.bias"][0] = value
    clipped = clip_upload(up, received(), 1.0)
    assert (floats(clipped) == floats(received())).all()


def test_another_shape_is_refused_by_name() -> None:
    with pytest.raises(MismatchError, match=r"0.bias has the shape \(5,\), not \(4,\)"):
        change_norm(Message({"0.bias": torch.zeros(5)}), received())


@pytest.mark.parametrize("seed", [None, 5])
def test_noise_is_normal_and_independent_of_piece_and_tensor(seed: int | None) -> None:
    state = {"a": torch.zeros(3, PIECE), "b": torch.zeros(PIECE), "empty": torch.zeros(0), "n": torch.tensor(3)}
    noisy = add_noise(Message(state), 0.25, seed).state
    parts = [*noisy["a"].double().numpy(), noisy["b"].double().numpy()]
    for part in parts:
        assert kstest(part / 0.25, "norm").pvalue > 1e-7
    correlations = np.corrcoef(parts)[~np.eye(4, dtype=bool)]
    assert np.abs(correlations).max() < 6 / math.sqrt(PIECE)
    assert noisy["n"] == 3
    assert noisy["empty"].shape == (0,)


def test_noise_of_the_system_never_repeats_and_has_tails() -> None:
    first, second = (normal_noise()(1 << 18) for _ in range(2))
    assert not torch.equal(first, second)
    assert bool(torch.isfinite(first).all())
    assert float(first.abs().max()) > 4


def test_whoever_knows_the_seed_subtracts_the_noise() -> None:
    privacy, down = Privacy("client", clip=100.0, noise=3.0), received()
    sent = privacy.protect(upload(), down, seed=9)
    noise = privacy.protect(down, down, seed=9)
    found = floats(sent) - (floats(noise) - floats(down))
    np.testing.assert_allclose(found, floats(upload()), atol=1e-4)


def test_seeds_of_torch_have_32_bits_which_is_why_the_system_gives_the_noise() -> None:
    assert torch.equal(normal_noise(5)(9), normal_noise(5 + 2**32)(9))


def test_a_client_clips_and_then_adds_noise_of_the_size_of_the_clip() -> None:
    down = Message({"w": torch.ones(200, 500)}, {"round": "1"})
    up = Message({"w": down.state["w"] + torch.randn(200, 500)}, {"round": "1"})
    sent = Privacy("client", clip=2.0, noise=0.5).protect(up, down, seed=0)
    clipped = clip_upload(up, down, 2.0)
    noise = (sent.state["w"] - clipped.state["w"]).double()
    assert float(noise.std()) == pytest.approx(1.0, rel=0.01)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.02)


def test_protected_uploads_carry_the_received_counters() -> None:
    up, down = upload(), received()
    assert up.state[COUNTER] == 7
    assert Privacy("client").protect(up, down).state[COUNTER] == 0
    assert Privacy("central").protect_centrally([up], [down])[0].state[COUNTER] == 0


def test_a_change_that_is_not_finite_cannot_be_told_from_none() -> None:
    broken = upload()
    broken.state["0.bias"][0] = math.nan
    privacy = Privacy("client")
    assert equal(privacy.protect(broken, received(), seed=1), privacy.protect(received(), received(), seed=1))


def test_what_noise_cannot_hide_is_refused() -> None:
    privacy, down = Privacy("client"), received()
    with pytest.raises(MismatchError, match="No noise can be added to integers: places"):
        privacy.protect(Message({"places": torch.tensor([1, 2])}, down.text), down)
    with pytest.raises(MismatchError, match="it may tell what noise hides"):
        privacy.protect(Message(down.state, {**down.text, "loss": "0.3"}), down)


def test_nothing_is_done_elsewhere() -> None:
    up, down = upload(), received()
    for where in ("none", "central"):
        assert Privacy(where).protect(up, down) is up
    for where in ("none", "client"):
        assert Privacy(where).protect_centrally([up], [down])[0] is up


def test_central_noise_of_the_sum_is_the_mechanisms_and_the_uniform_mean_has_an_nth_of_it() -> None:
    n, privacy = 16, Privacy("central", clip=2.0, noise=1.5)
    down = Message({"w": torch.zeros(400, 250)})
    ups = [Message({"w": torch.randn(400, 250) * (i + 1)}) for i in range(n)]
    hidden = privacy.protect_centrally(ups, [down] * n, seed=0)
    clipped = [clip_upload(up, down, 2.0) for up in ups]

    def mean(messages: list[Message]) -> Tensor:
        return Averaging("uniform")([Upload(Client(i, 1), m) for i, m in enumerate(messages)])["w"]

    noise = (mean(hidden) - mean(clipped)).double()
    assert float(noise.std()) * n == pytest.approx(privacy.noise * privacy.clip, rel=0.01)
    assert all(change_norm(clip, down) <= 2.0 * (1 + 1e-6) for clip in clipped)


def test_central_noise_is_reproducible_only_with_a_seed() -> None:
    ups, downs = [upload(seed=1), upload(seed=2)], [received()] * 2
    first, again, other = (Privacy("central").protect_centrally(ups, downs, seed) for seed in (4, 4, None))
    assert all(equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(
        first[0].state["0.bias"] - ups[0].state["0.bias"], first[1].state["0.bias"] - ups[1].state["0.bias"]
    )


def test_options_that_central_noise_does_not_cover_are_refused_with_what_must_change() -> None:
    central = Privacy("central")
    with pytest.raises(
        OptionError, match="weighting='examples' must be 'uniform'.*rule='median' must be 'mean'.*3 cap"
    ):
        check(central, "examples", "median", 3)
    check(central, "uniform", "mean", 1)
    for where in ("client", "none"):
        check(dataclasses.replace(central, where=where), "examples", "median", 3)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"where": "cloud"}, "where='cloud' is not known. Choose one of: none, client, central"),
        ({"clip": 0}, "clip=0 is not a number above 0"), ({"noise": math.nan}, "noise=nan is not a number above 0"),
        ({"noise": math.inf}, "noise=inf"), ({"delta": 0}, r"delta=0 is not in \(0, 1\)"),
        ({"delta": 1.0}, "delta=1.0"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_meant_are_refused(options: dict, complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        Privacy(**options)


def test_a_sketch_is_no_privacy_a_sparse_change_is_read_off_a_few_of_them() -> None:
    change = torch.zeros(512)
    change[[3, 77, 300]] = torch.tensor([5.0, -2.0, 9.0])
    draws = sketching.sketch_rows(change, key=1, length=64, rows=7)
    assert torch.equal(sketching.unsketch_rows(draws, key=1, size=512), change)


MODULUS, STEP = 2**32, 2.0**-16


def masked(updates: list[Tensor], seed: int) -> list[Tensor]:
    """Encode updates in steps modulo 2³², each with masks that it shares with every other and that cancel."""
    words = [torch.round(update.double() / STEP).long() % MODULUS for update in updates]
    for a, b in itertools.combinations(range(len(updates)), 2):
        draw = torch.Generator().manual_seed(seed + len(updates) * a + b)
        mask = torch.randint(MODULUS, words[a].shape, generator=draw)
        words[a], words[b] = (words[a] + mask) % MODULUS, (words[b] - mask) % MODULUS
    return words


def unmasked_mean(words: list[Tensor]) -> Tensor:
    total = torch.stack(words).sum(0) % MODULUS
    return torch.where(total < MODULUS // 2, total, total - MODULUS).double() * STEP / len(words)


def plan(key: int) -> WeightPlan:
    return WeightPlan(Geometry((48, 10)), "output", (12, 10), rows=1, blocks=5, hash="balanced", scale="mean", key=key)


def test_masked_sums_of_sketches_of_one_key_lift_to_the_average() -> None:
    full = [torch.randn(48, 10, dtype=torch.float64) for _ in range(5)]
    small = [plan(7).sketch(x) for x in full]
    words = masked(small, seed=100)
    secret = words[0].double() / MODULUS
    assert kstest(secret.flatten().numpy(), "uniform").pvalue > 1e-4
    lifted = plan(7).lift(unmasked_mean(words))
    torch.testing.assert_close(lifted, plan(7).lift(torch.stack(small).mean(0)), atol=STEP / 2, rtol=0)
    torch.testing.assert_close(lifted, torch.stack([plan(7).lift(s) for s in small]).mean(0), atol=STEP / 2, rtol=0)


def test_masked_sums_of_sketches_of_different_keys_mean_nothing() -> None:
    full = [torch.randn(48, 10, dtype=torch.float64) for _ in range(5)]
    small = [plan(key).sketch(x) for key, x in enumerate(full)]
    wanted = torch.stack([plan(key).lift(s) for key, s in enumerate(small)]).mean(0)
    mean = unmasked_mean(masked(small, seed=100))
    for key in range(5):
        assert float((plan(key).lift(mean) - wanted).norm() / wanted.norm()) > 0.5
