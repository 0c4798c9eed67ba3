"""Models: sizes, names, meta device, training."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from comfetch.errors import OptionError
from comfetch.models import INITS, MODELS, NORMS, STEMS, constructor, lstm_tagger, mlp, resnet9, resnet18, vit

SHAPES: dict[str, tuple[int, ...]] = {
    "mlp": (1, 8, 8),
    "resnet9": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "lstm-tagger": (50,),
    "vit": (3, 32, 32),
}


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def batch(name: str) -> Tensor:
    shape = SHAPES[name]
    return torch.randint(0, shape[0], (2, 7)) if len(shape) == 1 else torch.randn(2, *shape)


def test_every_registered_model_has_a_case_here() -> None:
    assert set(SHAPES) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_model_gives_one_score_for_each_class_and_trains_every_free_parameter(name: str) -> None:
    model = constructor(name, SHAPES[name], 6)()
    outputs = model(batch(name))
    assert outputs.shape == ((2, 7, 6) if name == "lstm-tagger" else (2, 6))
    outputs.square().sum().backward()
    assert [key for key, one in model.named_parameters() if one.requires_grad and one.grad is None] == []


@pytest.mark.parametrize("name", MODELS)
def test_model_on_the_meta_device_has_the_same_state_names_and_shapes(name: str) -> None:
    build = constructor(name, SHAPES[name], 6)
    with torch.device("meta"):
        meta = build()
    assert all(value.is_meta for value in meta.state_dict().values())
    shapes = [{key: value.shape for key, value in one.state_dict().items()} for one in (meta, build())]
    assert shapes[0] == shapes[1]


def test_resnet18_has_the_papers_size_and_torchvisions_names() -> None:
    model = resnet18()
    assert size(model) == 11_181_642
    names = list(model.state_dict())
    assert names[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert "layer2.0.downsample.0.weight" in names and "layer4.1.bn2.running_var" in names
    assert names[-2:] == ["fc.weight", "fc.bias"]
    assert len(names) == 122


def test_resnet18_starts_as_torchvisions_with_variance_two_over_fan_out() -> None:
    weight = resnet18().get_parameter("layer4.1.conv2.weight")
    assert weight.var().item() == pytest.approx(2 / (512 * 9), rel=0.02)


@pytest.mark.parametrize("build", [resnet9, resnet18])
def test_resnets_start_as_torch_draws_convolutions_where_asked(build: Callable[..., nn.Module]) -> None:
    assert set(INITS) == {"torchvision", "torch"}
    convolutions = [layer for layer in build(init="torch").modules() if isinstance(layer, nn.Conv2d)]
    for layer in convolutions[-4:]:
        fan_in = layer.weight[0].numel()
        assert layer.weight.var().item() == pytest.approx(1 / (3 * fan_in), rel=0.05)
        assert layer.weight.abs().max().item() <= fan_in**-0.5


@pytest.mark.parametrize("stem", STEMS)
def test_resnet18_stem_decides_the_first_resolution(stem: str) -> None:
    model = resnet18(stem=stem)
    images = torch.zeros(1, 3, 32, 32)
    seen: list[int] = []
    model.get_submodule("layer1").register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[-1]))
    model.eval()(images)
    assert seen == [{"imagenet": 8, "cifar": 32}[stem]]


@pytest.mark.parametrize("build", [resnet9, resnet18])
def test_group_norm_leaves_no_running_statistics(build: type) -> None:
    assert "group" in NORMS
    assert list(build(norm="group").buffers()) == []
    assert list(build(norm="batch").buffers()) != []


def test_resnet9_reads_small_grey_images_too() -> None:
    assert resnet9((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(("hidden", "expected"), [(32, 9607), (16, 3799), (8, 1663), (4, 787)])
def test_tagger_has_the_sizes_of_the_notes_without_its_embedding(hidden: int, expected: int) -> None:
    model = lstm_tagger((1000,), 39, hidden=hidden)
    assert size(model) - size(model.embedding) == expected


def test_taggers_second_bias_is_zero_and_stays_so_in_training() -> None:
    model = lstm_tagger((50,), 5)
    optimiser = torch.optim.Adam((one for one in model.parameters() if one.requires_grad), lr=0.1)
    model(torch.randint(0, 50, (4, 6))).square().sum().backward()
    optimiser.step()
    assert type(model.lstm) is nn.LSTM
    assert not model.lstm.get_parameter("bias_hh_l0").any()


def test_padding_after_a_sentence_does_not_change_its_tags() -> None:
    model = lstm_tagger((50,), 5)
    words = torch.randint(2, 50, (3, 6))
    padded = torch.cat([words, torch.zeros(3, 4, dtype=torch.int64)], dim=1)
    assert torch.allclose(model(padded)[:, :6], model(words), atol=1e-6)


def test_mlp_keeps_less_than_half_of_its_bytes_when_its_square_layers_are_four_times_smaller() -> None:
    full = size(mlp())
    square = sum(one.numel() for one in mlp().parameters() if one.dim() == 2 and one.shape[0] == one.shape[1])
    assert (full - square + square / 4) / full < 0.35


def test_vit_has_the_size_of_the_notes() -> None:
    assert size(vit()) == pytest.approx(0.82e6, rel=0.01)


def test_vit_knows_where_a_patch_stands() -> None:
    model = vit().eval()
    image = torch.randn(1, 3, 32, 32)
    assert not torch.allclose(model(image), model(image.roll(8, dims=3)), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "inputs", "options", "message"),
    [
        ("resnet", (3, 32, 32), {}, "model 'resnet' is unknown. Choose one of mlp, resnet9, resnet18"),
        ("resnet18", (3, 32, 32), {"stem": "big"}, "stem 'big' is unknown. Choose one of imagenet, cifar."),
        ("resnet9", (3, 32, 32), {"norm": "none"}, "norm 'none' is unknown. Choose one of batch, group."),
        ("resnet9", (3, 32, 32), {"init": "he"}, "init 'he' is unknown. Choose one of torchvision, torch."),
        ("resnet9", (3, 32, 32), {"width": 3}, "has no option 'width'. Its options are norm, init."),
        ("resnet9", (900,), {}, r"reads images, .* inputs are \(900,\). Choose one of mlp, resnet18"),
        ("lstm-tagger", (3, 32, 32), {}, r"reads words, \(vocabulary,\); the task's inputs are \(3, 32, 32\)"),
        ("vit", (3, 28, 28), {}, "patch=8 does not divide images of 28 x 28"),
        ("vit", (3, 32, 32), {"heads": 3}, "heads=3 does not divide dim=128"),
        ("mlp", (1, 8, 8), {"width": 0}, "width=0 is below 1"),
        ("vit", (3, 32, 32), {"patch": 0}, "patch=0 is below 1"),
        ("mlp", (1, 8, 8), {"width": "wide"}, "width='wide' is not a whole number"),
    ],
)
def test_wrong_model_option_is_refused_at_once(
    name: str, inputs: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        constructor(name, inputs, 10, **options)
