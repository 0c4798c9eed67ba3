import numpy as np
import pytest
import torch

from comfetch.errors import MismatchError, OptionError
from comfetch.transforms import adaptive, chain, error_feedback, momentum, scale, top_k


def updates(count=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [{"a": torch.randn(6, 2, generator=draw), "b": torch.randn(3, generator=draw)} for _ in range(count)]


def test_momentum_accumulates():
    step = momentum(0.5)
    u = np.zeros((6, 2), dtype=np.float32)
    for update in updates():
        out = step(update)
        u = 0.5 * u + update["a"].numpy()
        np.testing.assert_allclose(out["a"].numpy(), u, rtol=1e-6)


def test_error_feedback_loses_nothing():
    step = error_feedback(top_k(0.25))
    given = applied = torch.zeros(6, 2)
    for update in updates():
        given = given + update["a"]
        applied = applied + step(update)["a"]
    torch.testing.assert_close(applied + step.state["a"], given)


def test_top_k_per_layer_keeps_the_fraction_of_each_layer():
    out = top_k(1 / 3)(updates(1)[0])
    assert (out["a"] != 0).sum() == 4
    assert (out["b"] != 0).sum() == 1


def test_global_top_k_compares_across_layers():
    out = top_k(0.5, per="global")({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([30.0, -40.0])})
    assert out["a"].tolist() == [0, 0]
    assert out["b"].tolist() == [30, -40]


def test_top_k_keeps_exactly_k_of_equal_coordinates_and_the_first_ones():
    out = top_k(0.5)({"a": torch.tensor([1.0, -1.0, 1.0, 1.0])})
    assert out["a"].tolist() == [1, -1, 0, 0]


def test_masked_momentum_is_forgotten_where_it_was_applied():
    step = chain(momentum(0.9, masked=True), error_feedback(top_k(0.25)))
    update = updates(1)[0]
    delta = step(update)
    step.applied(delta)
    kept = step.transforms[0].state["a"]
    assert torch.equal(kept != 0, delta["a"] == 0)


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
def test_adaptive_optimisers_equal_their_transcription(kind):
    step = adaptive(kind, rate=0.1, betas=(0.9, 0.99), tau=1e-3)
    m, s = np.zeros((6, 2)), np.full((6, 2), 1e-6)
    for update in updates():
        out = step(update)
        g = update["a"].double().numpy()
        m = 0.9 * m + 0.1 * g
        s = {
            "adam": 0.99 * s + 0.01 * g**2,
            "yogi": s - 0.01 * g**2 * np.sign(s - g**2),
            "adagrad": s + g**2,
        }[kind]
        np.testing.assert_allclose(out["a"].numpy(), 0.1 * m / (np.sqrt(s) + 1e-3), rtol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: chain(momentum(0.9), scale(0.1), error_feedback(top_k(0.2))),
        lambda: chain(adaptive("yogi"), error_feedback(top_k(0.5, per="global"))),
    ],
)
def test_a_chain_goes_on_from_its_state(make):
    whole, first, second = make(), make(), make()
    expected = [whole(update) for update in updates()]
    for update in updates()[:2]:
        first(update)
    second.load_state_dict(first.state_dict())
    for update, wanted in zip(updates()[2:], expected[2:], strict=True):
        out = second(update)
        assert all(torch.equal(out[name], wanted[name]) for name in wanted)


def test_a_state_of_another_shape_is_refused():
    step = momentum(0.9)
    step({"a": torch.zeros(3)})
    with pytest.raises(MismatchError, match="a: the state kept has shape"):
        step({"a": torch.zeros(4)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: momentum(1.0), lambda: momentum(-0.1), lambda: scale(0), lambda: scale(float("nan")), lambda: top_k(0),
        lambda: top_k(1.5), lambda: top_k(0.1, per="world"), lambda: adaptive("sgd"), lambda: adaptive("adam", rate=-1),
    ],
)  # fmt: skip
def test_values_that_cannot_be_meant_are_refused(make):
    with pytest.raises(OptionError):
        make()
