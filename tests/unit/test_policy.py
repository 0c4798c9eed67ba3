"""Which layers are sketched, to which length, in how many blocks; and what is refused."""

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import comfetch as cf
from comfetch.errors import ComfetchError, ModelError, OptionError
from comfetch.layers import REGISTRY
from comfetch.policy import SMALLEST, make_plan, shorten, spread_factors
from comfetch.settings import POLICIES, Settings


class Block(nn.Module):
    """A residual block as in ResNet."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x).relu()) + self.shortcut(x)


class Residual(nn.Module):
    """A tiny ResNet: every layer but the first, the small and the fragile is worth sketching."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7)
        self.tiny = nn.Conv2d(64, 64, 1)
        self.block1 = Block(64, 128)
        self.block2 = Block(128, 256)
        self.depthwise = nn.Conv2d(256, 256, 7, groups=256)
        self.head = nn.Linear(256, 100)


def plan(model: nn.Module, **settings: Any) -> cf.Plan:
    settings = {"compression": 4, **settings} if "length" not in settings else settings
    return make_plan(model, Settings(**settings))


# ------------------------------------------------------------------------------------------------ which layers


def test_default_policy_leaves_full_what_is_small_or_fragile() -> None:
    found = plan(Residual())
    assert set(found) == {f"block{i}.conv{j}.weight" for i in (1, 2) for j in (1, 2)}
    assert found.kept.pop("depthwise").startswith("depthwise")
    assert found.kept == {
        "stem": "first layer", "tiny": f"below {SMALLEST} weights", "head": "final classifier",
        "block1.shortcut.0": "1x1 shortcut", "block2.shortcut.0": "1x1 shortcut",
    }  # fmt: skip


def test_bottleneck_convolutions_of_1x1_are_no_shortcuts() -> None:
    class Bottleneck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(256, 64, 1), nn.Conv2d(64, 64, 3)
            self.conv3 = nn.Conv2d(64, 256, 1)

    model = nn.Sequential(nn.Conv2d(3, 256, 3), Bottleneck(), nn.Linear(256, 10))
    assert set(plan(model)) == {"1.conv1.weight", "1.conv2.weight", "1.conv3.weight"}


def test_policy_all_sketches_every_supported_layer_and_reports_depthwise_ones() -> None:
    found = plan(Residual(), policy="all")
    assert len(found) == 9
    assert list(found.kept) == ["depthwise"] and "depthwise" in found.kept["depthwise"]


def test_policy_paper_sketches_all_but_the_final_linear_layer_with_lengths_rounded_down() -> None:
    found = plan(Residual(), policy="paper", compression=10)
    assert "head.weight" not in found and len(found) == 8
    assert found["stem.weight"].length == (6, 3)
    assert found["block2.conv1.weight"].length == (25, 128)  # 24 in the other policies
    assert plan(Residual(), compression=10)["block2.conv1.weight"].length == (24, 128)


def test_a_single_layer_is_sketched_whatever_its_size() -> None:
    assert list(plan(nn.Linear(8, 8))) == ["weight"]


def test_only_overrules_the_policy_and_skip_overrules_only() -> None:
    assert set(plan(Residual(), only=["stem", "head"])) == {"stem.weight", "head.weight"}
    assert set(plan(Residual(), only="block*", skip="*.shortcut.0")) == {
        f"block{i}.conv{j}.weight" for i in (1, 2) for j in (1, 2)
    }
    assert "block1.conv1.weight" not in plan(Residual(), skip="block1.*")


@pytest.mark.parametrize("option", ["only", "skip"])
def test_name_that_matches_nothing_is_refused_with_the_layers_there_are(option: str) -> None:
    with pytest.raises(ModelError, match="no layer is called 'blok1'. Layers: stem, tiny, block1.conv1"):
        plan(Residual(), **{option: ["blok1"]})


def test_nothing_to_sketch_is_an_error_with_reasons_and_its_remedy_works() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(ModelError, match="Nothing to sketch in this Sequential") as error:
        plan(model)
    assert "0: first layer" in str(error.value) and "2: final classifier" in str(error.value)
    assert "policy='all'" in str(error.value) and "only=[...]" in str(error.value)
    assert all(t.__name__ in str(error.value) for t in REGISTRY)
    assert len(plan(model, policy="all")) == 2
    assert len(plan(model, only=["2"])) == 1


def test_model_without_any_layer_is_nothing_to_sketch() -> None:
    with pytest.raises(ModelError, match="Nothing to sketch"):
        plan(nn.ReLU(), policy="all")


class MyLinear(nn.Linear):
    pass


def test_large_subclass_is_kept_with_a_warning_whose_remedies_work(registry: dict) -> None:
    model = nn.Sequential(nn.Linear(8, 128), MyLinear(128, 128), nn.Linear(128, 128), nn.Linear(128, 2))
    with pytest.warns(UserWarning, match="1 stays full: MyLinear is a subclass of Linear; sketch it by register_layer"):
        found = plan(model)
    assert "1" in found.kept and list(found) == ["2.weight"]
    assert list(plan(model, skip="1")) == ["2.weight"]  # no warning
    cf.register_layer(MyLinear)(registry[nn.Linear])
    assert list(plan(model)) == ["1.weight", "2.weight"]


def test_small_subclass_is_kept_without_a_warning() -> None:
    model = nn.Sequential(nn.Linear(8, 128), MyLinear(128, 4), nn.Linear(4, 4096), nn.Linear(4096, 2))
    assert "subclass" in plan(model).kept["1"]


def test_shared_module_is_planned_once_under_all_its_names() -> None:
    layer = nn.Linear(128, 128)
    found = plan(nn.Sequential(layer, nn.ReLU(), layer), policy="all")
    assert list(found) == ["0.weight", "2.weight"]
    assert found["0.weight"] is found["2.weight"]


# ------------------------------------------------------------------------------------------------ ties


class Language(nn.Module):
    """An embedding and an output layer that share one weight."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.inner = nn.Linear(64, 256)
        self.outer = nn.Linear(256, 64)
        self.head = nn.Linear(64, 1000, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.outer(self.inner(self.embedding(ids)).relu()))


def test_tied_weights_stay_full_together_by_default() -> None:
    assert set(plan(Language())) == {"inner.weight", "outer.weight"}


def test_layer_tied_to_one_that_stays_full_stays_full() -> None:
    found = plan(Language(), policy="all", skip="head")
    assert set(found) == {"inner.weight", "outer.weight"}
    assert found.kept["embedding"] == "tied to head.weight, which stays full"


def test_tie_that_would_be_broken_is_refused_and_the_remedy_works() -> None:
    with pytest.raises(ModelError, match="embedding.weight and head.weight are one weight") as error:
        plan(Language(), policy="all")
    assert "skip=['embedding', 'head']" in str(error.value)
    assert set(plan(Language(), policy="all", skip=["embedding", "head"])) == {"inner.weight", "outer.weight"}


def test_naming_one_of_two_tied_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="embedding shares its weight with head.weight, which stays full"):
        plan(Language(), only=["embedding", "inner"])


def test_layer_that_shares_its_bias_stays_full() -> None:
    model = nn.Sequential(nn.Linear(8, 128), nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128))
    model[1].bias = model[2].bias
    found = plan(model, policy="all")
    assert set(found) == {"0.weight", "3.weight"}
    assert found.kept == {"1": "its bias is also 2.bias", "2": "its bias is also 1.bias"}
    with pytest.raises(ModelError, match="its bias is also 2.bias"):
        plan(model, only=["1"])
    model[0].weight = nn.Parameter(torch.zeros(128, 8))
    assert set(plan(model, only=["0", "3"])) == {"0.weight", "3.weight"}


# ------------------------------------------------------------------------------------------------ what is refused


def test_hooks_are_refused_and_removing_them_helps() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 2))
    handle = model[1].register_forward_hook(lambda *_: None)
    model[2].register_full_backward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="2 problems") as error:
        plan(model)
    assert "1: it has hooks" in str(error.value) and "2: it has hooks" in str(error.value)
    handle.remove()
    assert list(plan(model, skip="2")) == ["1.weight"]


def test_weight_norm_is_refused_and_its_remedies_work() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm is deprecated, and still used
        nn.utils.weight_norm(model[1])
    with pytest.raises(ModelError, match="1: its weight is not a parameter"):
        plan(model)
    assert list(plan(model, skip="1")) == ["2.weight"]
    nn.utils.remove_weight_norm(model[1])
    assert list(plan(model)) == ["1.weight", "2.weight"]


def test_parametrised_layer_is_kept_with_a_warning() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 2))
    nn.utils.parametrizations.spectral_norm(model[1])
    with pytest.warns(UserWarning, match="1 stays full: ParametrizedLinear is a subclass of Linear"):
        assert list(plan(model)) == ["2.weight"]


def test_embedding_with_max_norm_is_refused_and_its_remedies_work() -> None:
    model = nn.Sequential(nn.Embedding(1000, 64, max_norm=1.0), nn.Linear(64, 512), nn.Linear(512, 2))
    with pytest.raises(ModelError, match="0: max_norm rescales .* skip=\\['0'\\]"):
        plan(model, policy="all")
    assert set(plan(model, policy="all", skip=["0"])) == {"1.weight", "2.weight"}
    model[0].max_norm = None
    assert len(plan(model, policy="all")) == 3


def test_lazy_layers_are_refused_and_one_batch_helps() -> None:
    model = nn.Sequential(nn.LazyLinear(512), nn.ReLU(), nn.LazyLinear(512), nn.Linear(512, 2))
    with pytest.raises(ModelError, match="Run one batch through the model first") as error:
        plan(model)
    assert "0.weight" in str(error.value) and "2.weight" in str(error.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.zeros(2, 64))
    assert list(plan(model)) == ["2.weight"]


def test_all_problems_are_reported_at_once() -> None:
    model = nn.Sequential(
        nn.Embedding(1000, 64, max_norm=1.0), nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 2)
    )
    model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="5 problems") as error:
        plan(model, length={"1": 9999, "2": 0}, skip="nothing", only=["1", "2"])
    for problem in (
        "0: max_norm", "skip: no layer is called 'nothing'", "1: it has hooks", "1.weight: length 9999",
        "2.weight: length 0",
    ):  # fmt: skip
        assert problem in str(error.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"compression": 0.25}, "compression=0.25 is below 1. It is a factor: 4 means four times smaller."),
        ({"compression": "4"}, "not a number"),
        ({"spread": -0.5}, "spread=-0.5 is not between 0, where all layers shrink alike, and 1"),
        ({"spread": 1.5}, "spread=1.5 is not between"),
        ({"spread": "0.5"}, "spread='0.5' is not between"),
        ({"spread": float("nan")}, "spread=nan is not between"),
        ({"compression": True}, "not a number"),
        ({"compression": float("nan")}, "not a number"),
        ({"compression": float("inf")}, "not a number"),
        ({"length": 0}, "length=0 is not a whole number of at least 1"),
        ({"length": 2.5}, "length=2.5 is not a whole number of at least 1"),
        ({"length": True}, "length=True is not a whole number"),
        ({"key": -1}, "key=-1"),
        ({"key": 1.5}, "key=1.5"),
        ({"mode": "outputs"}, "mode='outputs' is not known. Choose one of: output, input, both."),
        ({"rows": 0}, "rows=0"),
        ({"rows": 1.0}, "rows=1.0"),
        ({"blocks": 0}, "blocks=0"),
        ({"blocks": "many"}, "blocks='many' is neither 'auto' nor"),
        ({"hash": "sha"}, "hash='sha' is not known. Choose one of: balanced, random."),
        ({"scale": "unit"}, "scale='unit' is not known. Choose one of: mean, isometric, count."),
        ({"policy": "none"}, f"policy='none' is not known. Choose one of: {', '.join(POLICIES)}."),
    ],
)
def test_option_that_cannot_be_meant_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message) as error:
        plan(nn.Linear(64, 64), **settings)
    assert isinstance(error.value, ComfetchError) and isinstance(error.value, ValueError)


# ------------------------------------------------------------------------------------------------ lengths and blocks


@pytest.mark.parametrize(
    "size, compression, length",
    [
        (512, 4, 128), (512, 10, 48), (500, 10, 48), (520, 10, 56), (64, 10, 6), (64, 8, 8), (72, 8, 8), (96, 8, 16),
        (100, 2, 48), (7, 2, 3), (3, 8, 1), (10, 1, 10), (13, 1, 13), (9, 1.1, 8), (12, 1.01, 8), (16, 1.9, 8),
    ],
)  # fmt: skip
def test_lengths_of_8_and_more_are_multiples_of_8(size: int, compression: float, length: int) -> None:
    assert shorten(size, compression) == length
    assert plan(nn.Linear(4, size), compression=compression)["weight"].length[0] == length


@pytest.mark.parametrize("size, compression, length", [(512, 10, 51), (64, 10, 6), (3, 8, 1), (90, 3, 30), (49, 7, 7)])
def test_lengths_of_the_paper_are_rounded_down(size: int, compression: float, length: int) -> None:
    assert shorten(size, compression, exact=True) == length


@given(
    sizes=st.lists(st.integers(1, 10**8), min_size=1, max_size=30),
    compression=st.floats(1, 1000), spread=st.floats(0, 1),
)  # fmt: skip
@example(sizes=[100], compression=1 + 2**-52, spread=0.5)
@example(sizes=[100, 7], compression=1 + 1e-10, spread=1.0)
def test_spread_keeps_the_number_of_weights(sizes: list[int], compression: float, spread: float) -> None:
    factors = spread_factors(sizes, compression, spread)
    assert all(factor >= 1 for factor in factors)
    kept = sum(n / factor for n, factor in zip(sizes, factors, strict=True))
    assert kept == pytest.approx(sum(sizes) / compression)
    shrunk = [(n, factor) for n, factor in zip(sizes, factors, strict=True) if factor > 1]
    for n, factor in shrunk:
        assert factor / shrunk[0][1] == pytest.approx((n / shrunk[0][0]) ** spread)


def test_large_layers_are_compressed_harder_at_the_same_number_of_weights() -> None:
    even, spread = (plan(Residual(), compression=8, spread=s) for s in (0, 0.5))
    small, large = "block1.conv1.weight", "block2.conv2.weight"
    assert spread[small].compression < even[small].compression
    assert spread[large].compression > even[large].compression
    assert sum(math.prod(p.small_shape) for p in spread.values()) == pytest.approx(
        sum(math.prod(p.small_shape) for p in even.values()), rel=0.05
    )
    assert [p.blocks for p in even.values()] == [8] * 4
    assert spread[small].blocks < spread[large].blocks  # each layer has about as many as its own compression


def test_a_layer_that_spread_would_not_compress_stays_full() -> None:
    found = plan(Residual(), compression=1.5, spread=1)
    assert set(found.kept) - set(plan(Residual(), compression=1.5).kept) == {"block1.conv1", "block1.conv2"}
    assert found.kept["block1.conv1"] == "spread=1 leaves nothing to save"
    assert (
        len(plan(Residual(), compression=1, spread=1)) == 4
    )  # nothing is saved anywhere: all are sketched as they are


def test_both_modes_share_the_compression_by_its_square_root_with_one_block() -> None:
    found = plan(nn.Linear(256, 512), mode="both", compression=16)["weight"]
    assert (found.length, found.blocks) == ((128, 64), 1)
    assert plan(nn.Linear(256, 512), mode="both", compression=16, blocks=8)["weight"].blocks == 1


def test_each_row_has_the_length_of_a_single_one() -> None:
    assert plan(nn.Linear(64, 64), rows=3)["weight"].small_shape == (3, 16, 64)


@pytest.mark.parametrize(
    "inputs, compression, blocks",
    [
        (512, 10, 8),
        (512, 16, 16),
        (512, 12, 8),
        (512, 12.1, 16),
        (30, 4, 3),
        (30, 8, 6),
        (7, 4, 1),
        (7, 4.1, 7),
        (1, 9, 1),
    ],
)
def test_automatic_blocks_are_the_nearest_divisor_and_the_smaller_at_a_tie(
    inputs: int, compression: float, blocks: int
) -> None:
    assert plan(nn.Linear(inputs, 64), compression=compression)["weight"].blocks == blocks
    assert plan(nn.Linear(64, inputs), compression=compression, mode="input")["weight"].blocks == blocks


@pytest.mark.parametrize("asked, blocks", [(1, 1), (5, 4), (6, 4), (7, 8), (100, 64)])
def test_number_of_blocks_that_does_not_divide_falls_to_the_nearest_divisor(asked: int, blocks: int) -> None:
    found = plan(nn.Linear(64, 64), blocks=asked)
    assert found["weight"].blocks == blocks
    assert str(blocks) in str(found).split()


def test_blocks_lie_inside_each_group() -> None:
    found = plan(nn.Conv2d(60, 32, 3, groups=4), compression=4)["weight"]
    assert (found.geometry.outputs, found.geometry.inputs) == (8, 15)
    assert (found.length, found.blocks) == ((2, 15), 3)


def test_given_length_is_taken_as_it_is() -> None:
    found = plan(nn.Sequential(nn.Linear(64, 100), nn.Linear(100, 30)), length=33, policy="all")
    assert found["0.weight"].length == (33, 64)
    assert found.kept == {"1": "length 33 is not below its size"}


def test_length_for_all_layers_is_at_most_the_size_of_a_mode() -> None:
    found = plan(nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 512)), length=16, mode="both", policy="all")
    assert [found["0.weight"].length, found["1.weight"].length] == [(16, 4), (16, 16)]


def test_layer_with_weights_of_different_sizes_takes_one_length() -> None:
    model = nn.LSTM(8, 64)
    found = plan(model, length=16, mode="input")
    assert found["weight_ih_l0"].length[1] == 8
    assert found["weight_hh_l0"].length[1] == 16


def test_blocks_for_a_given_length_follow_the_compression_it_means() -> None:
    assert plan(nn.Linear(64, 64), length=8)["weight"].blocks == 8


def test_lengths_by_name_choose_the_layers_too() -> None:
    found = plan(Residual(), length={"block1.conv*": 20, "head": 50})
    assert {name: p.length[0] for name, p in found.items()} == {
        "block1.conv1.weight": 20, "block1.conv2.weight": 20, "head.weight": 50,
    }  # fmt: skip
    both = plan(nn.Sequential(nn.Linear(64, 64)), length={"0": (8, 16)}, mode="both")
    assert both["0.weight"].length == (8, 16)


def test_length_by_any_name_of_a_shared_layer_is_found() -> None:
    layer = nn.Linear(128, 128)
    found = plan(nn.ModuleDict({"a": layer, "b": layer}), length={"b": 32})
    assert found["a.weight"].length == found["b.weight"].length == (32, 128)


def test_length_beyond_the_layer_is_refused_with_its_size() -> None:
    with pytest.raises(ModelError, match="0.weight: length 65 is not between 1 and 64, the number of its outputs"):
        plan(nn.Sequential(nn.Linear(8, 64)), length={"0": 65})


def test_layer_in_only_but_not_among_the_lengths_is_refused_and_naming_it_helps() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pytest.raises(ModelError, match="1.weight: length says nothing about it"):
        plan(model, length={"0": 8}, only=["0", "1"])
    assert len(plan(model, length={"0": 8, "1": 16}, only=["0", "1"])) == 2
    assert len(plan(model, length={"0": 8}, only=["0"])) == 1


def test_keys_differ_by_layer_and_by_key_but_not_by_length() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    one, other, shorter = (plan(model, policy="all", key=k, compression=c) for k, c in ((0, 2), (1, 2), (0, 4)))
    assert len({one["0.weight"].key, one["1.weight"].key, other["0.weight"].key}) == 3
    assert one["0.weight"].key == shorter["0.weight"].key
