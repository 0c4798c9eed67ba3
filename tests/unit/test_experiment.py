"""Options that would change nothing are refused, by name, with a remedy that works."""

import dataclasses

import pytest

from comfetch.errors import OptionError
from comfetch.experiment import HEEDED, NEEDS, PRESETS, Experiment
from comfetch.methods import METHODS

VALUES = {
    "alpha": 0.1, "unequal": True, "trim": 0.2, "top_k_per": "global", "factor_masking": True, "privacy_clip": 2.0,
    "privacy_noise": 0.5, "privacy_delta": 1e-6,
}  # fmt: skip
"""A value for each option that needs another one, other than its default."""
SKETCHED = {
    "mode": "input", "rows": 3, "blocks": "4", "hash": "random", "scale": "count", "spread": 0.25, "policy": "all",
    "redraw": 2, "space": "sketch", "capacities": "1,2",
}  # fmt: skip
"""A value for each option of the sketch that some methods do not heed."""
GIVEN = {"top_k": 0.1, "server_momentum": 0.5}
"""A value for each option that is needed, where any will do."""


def test_every_option_that_needs_another_one_has_a_case():
    assert VALUES.keys() == NEEDS.keys()
    assert SKETCHED.keys() < HEEDED.keys()


@pytest.mark.parametrize("name", VALUES)
def test_an_option_that_changes_nothing_is_refused_and_its_remedies_work(name):
    other, wanted = NEEDS[name]
    options = {name: VALUES[name], **({"server_momentum": 0.0} if other == "server_momentum" else {})}
    with pytest.raises(OptionError, match=f"^{name}={VALUES[name]!r} changes nothing with {other}=.*: set {other}"):
        Experiment.of(options)
    for value in wanted or [GIVEN[other]]:
        made = Experiment.of({**options, other: value})
        made.make_method()
        assert getattr(made, name) == VALUES[name]
        assert Experiment.of(made.options()) == made
    del options[name]
    Experiment.of(options)


def test_all_options_that_change_nothing_are_named_at_once():
    with pytest.raises(OptionError, match=r"^alpha=0\.1 changes nothing.*\ntrim=0\.2 changes nothing"):
        Experiment.of({"trim": 0.2, "alpha": 0.1})


@pytest.mark.parametrize("name", SKETCHED)
def test_a_method_without_sketches_refuses_their_options(name):
    with pytest.raises(OptionError, match=f"^{name}={SKETCHED[name]!r}: qsgd would not heed this") as refused:
        Experiment.of({"method": "qsgd", name: SKETCHED[name]})
    for method in str(refused.value).partition("takes it: ")[2].rstrip(".").split(", "):
        assert HEEDED[name][0] in {f.name for f in dataclasses.fields(METHODS[method])} or name == "policy"
        Experiment.of({"method": method, name: SKETCHED[name]})


def test_blocks_are_the_preset_s_where_the_method_sketches_for_clients_of_one_size():
    def blocks(**options):
        return Experiment.of(options).blocks

    assert (blocks(), blocks(preset="paper"), blocks(blocks="auto")) == ("4", "1", "auto")
    assert (blocks(method="fedavg"), blocks(capacities="1,2"), blocks(preset="paper", capacities="1,2")) == (
        "auto", "auto", "1",
    )  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_what_a_preset_sets_is_refused_by_no_method(method, preset):
    made = Experiment.of({"method": method, "preset": preset})
    assert Experiment.of(made.options()) == made
