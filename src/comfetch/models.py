"""Build the models that tasks use, with torch alone.

Every constructor takes the shape of one input and the number of classes, then options by name, as in
`resnet18((3, 32, 32), 10, norm="group")`. All of them can be built on the meta device.
"""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from comfetch.errors import OptionError

Choice = TypeVar("Choice")
Norm = Callable[[int], nn.Module]


def mlp(inputs: tuple[int, ...] = (1, 8, 8), classes: int = 10, *, width: int = 512, depth: int = 3) -> nn.Sequential:
    """Build a multilayer perceptron with `depth` hidden layers of `width` units.

    All but the first are square. On small images they hold nine tenths of the weights, so that they are worth
    sketching: on digits, four times smaller ones leave 30 % of all bytes.
    """
    sizes = [torch.Size(inputs).numel(), *[width] * depth]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels)


NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": _group_norm}
"""`group` has no running statistics, which clients with different data share badly."""


def _init_torchvision(model: nn.Module) -> None:
    """Draw the weights of convolutions as torchvision's ResNets do: normal, variance 2 / fan-out."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _init_torch(model: nn.Module) -> None:
    """Leave convolutions as torch draws them: uniform, variance 1 / (3 fan-in)."""


INITS = {"torchvision": _init_torchvision, "torch": _init_torch}
"""How the weights of convolutions are drawn. The paper's published code leaves it to torch."""


class _Residual(nn.Module):
    """Add a block's output to its input: y = x + block(x)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Run the block beside the identity."""
        y: Tensor = x + self.block(x)
        return y


def resnet9(
    inputs: tuple[int, ...] = (3, 32, 32), classes: int = 10, *, norm: str = "batch", init: str = "torchvision"
) -> nn.Sequential:
    """Build the ResNet-9 of the DAWNBench entries: four convolutions, two residual pairs, one maximum."""
    (channels, _, _), make_norm = _image("resnet9", inputs), _choice("norm", norm, NORMS)

    def layer(before: int, after: int, *pool: nn.Module) -> nn.Sequential:
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        return nn.Sequential(convolution, make_norm(after), nn.ReLU(), *pool)

    def residual(width: int) -> nn.Module:
        return _Residual(nn.Sequential(layer(width, width), layer(width, width)))

    model = nn.Sequential(
        layer(channels, 64),
        layer(64, 128, nn.MaxPool2d(2)),
        residual(128),
        layer(128, 256, nn.MaxPool2d(2)),
        layer(256, 512, nn.MaxPool2d(2)),
        residual(512),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )
    _choice("init", init, INITS)(model)
    return model


class _BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, named as in torchvision."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = norm(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = norm(after)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))

    def forward(self, x: Tensor) -> Tensor:
        """Compute relu(shortcut(x) + bn2(conv2(relu(bn1(conv1(x))))))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y = self.relu(y + shortcut)
        return y


class ResNet18(nn.Module):
    """ResNet-18 with the parameter names of torchvision's."""

    def __init__(
        self, channels: int, classes: int, stem: tuple[int, int], norm: Norm, init: Callable[[nn.Module], None]
    ) -> None:
        super().__init__()
        kernel, stride = stem
        self.conv1 = nn.Conv2d(channels, 64, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if stride > 1 else nn.Identity()
        before = 64
        for number, width in enumerate((64, 128, 256, 512), start=1):
            first = _BasicBlock(before, width, stride=1 if width == 64 else 2, norm=norm)
            self.add_module(f"layer{number}", nn.Sequential(first, _BasicBlock(width, width, 1, norm)))
            before = width
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)
        init(self)

    def forward(self, x: Tensor) -> Tensor:
        """Give `[batch, classes]` for images `[batch, channels, height, width]`."""
        x = x.contiguous(memory_format=torch.channels_last)  # the faster layout for pooling and normalisation on CPUs
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


STEMS = {"imagenet": (7, 2), "cifar": (3, 1)}
"""Kernel and stride of the first convolution; `imagenet` (the paper's) is followed by a pooling of 3 x 3."""


def resnet18(
    inputs: tuple[int, ...] = (3, 32, 32),
    classes: int = 10,
    *,
    stem: str = "imagenet",
    norm: str = "batch",
    init: str = "torchvision",
) -> ResNet18:
    """Build ResNet-18: the paper's by default, with a 3 x 3 stem (`cifar`) or group norm if asked."""
    channels, _, _ = _image("resnet18", inputs)
    choices = _choice("stem", stem, STEMS), _choice("norm", norm, NORMS), _choice("init", init, INITS)
    return ResNet18(channels, classes, *choices)


class LSTMTagger(nn.Module):
    """Tag each word: embedding, LSTM, linear layer.

    The paper's LSTM has one bias vector, torch's has two whose sum alone matters. The second is kept at zero
    and not trained: so the layer stays an `nn.LSTM`, with its kernels and its state names, and the trained
    parameters are those of the paper. (Leaving it out would need a subclass, which is no `nn.LSTM` to
    the registry of layers; a constant input in its place would have the bias sketched with the weights.)
    """

    def __init__(self, vocabulary: int, classes: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        nn.init.zeros_(self.lstm.get_parameter("bias_hh_l0")).requires_grad_(False)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, words: Tensor) -> Tensor:
        """Give `[batch, length, classes]` for word numbers `[batch, length]`.

        Padding stands at the end, where it cannot reach the outputs of the words before it.
        """
        states, _ = self.lstm(self.embedding(words))
        scores: Tensor = self.classifier(states)
        return scores


def lstm_tagger(
    inputs: tuple[int, ...] = (10000,), classes: int = 39, *, embedding: int = 32, hidden: int = 32
) -> LSTMTagger:
    """Build the tagger of the paper's language experiment."""
    if len(inputs) != 1:
        raise _unfit("lstm-tagger", "words, (vocabulary,)", inputs)
    return LSTMTagger(inputs[0], classes, embedding, hidden)


class _Patches(nn.Module):
    """Cut images into patches, map each to a vector, and add its learned position."""

    def __init__(self, channels: int, patch: int, count: int, dim: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(channels, dim, patch, patch)
        self.position = nn.Parameter(torch.empty(count, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the positions; whoever materialises a meta model calls this, as for torch's own layers."""
        nn.init.normal_(self.position, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Give `[batch, patches, dim]`."""
        patches: Tensor = self.projection(images).flatten(2).transpose(1, 2)
        return patches + self.position


class _Block(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, dim: int, heads: int, widening: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.linear1 = nn.Linear(dim, widening * dim)
        self.linear2 = nn.Linear(widening * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the patches, then each patch's features."""
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.linear2(nn.functional.gelu(self.linear1(self.norm2(x))))
        return x


class _Mean(nn.Module):
    """Average over the patches."""

    def forward(self, x: Tensor) -> Tensor:
        """Give `[batch, dim]` for `[batch, patches, dim]`."""
        return x.mean(1)


def vit(
    inputs: tuple[int, ...] = (3, 32, 32),
    classes: int = 10,
    *,
    dim: int = 128,
    depth: int = 4,
    heads: int = 4,
    patch: int = 8,
    widening: int = 4,
) -> nn.Sequential:
    """Build a small vision transformer that averages its patches: 0.82 M parameters by default."""
    channels, height, width = _image("vit", inputs)
    if height % patch or width % patch:
        raise OptionError(f"patch={patch} does not divide images of {height} x {width}. Take one that does.")
    if dim % heads:
        raise OptionError(f"heads={heads} does not divide dim={dim}. Take a divisor.")
    count = (height // patch) * (width // patch)
    blocks = [_Block(dim, heads, widening) for _ in range(depth)]
    patches = _Patches(channels, patch, count, dim)
    return nn.Sequential(patches, *blocks, nn.LayerNorm(dim), _Mean(), nn.Linear(dim, classes))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "resnet9": resnet9,
    "resnet18": resnet18,
    "lstm-tagger": lstm_tagger,
    "vit": vit,
}
"""Every model that has a name, and what builds it."""


def constructor(name: str, inputs: tuple[int, ...], classes: int, **options: Any) -> Callable[[], nn.Module]:
    """Bind a model's name, a task's shape and options to a constructor without arguments; check them all now.

    >>> constructor("mlp", (1, 8, 8), 10, width=64)()[-1]
    Linear(in_features=64, out_features=10, bias=True)
    """
    build = _choice("model", name, MODELS)
    known = dict(list(inspect.signature(build).parameters.items())[2:])
    for option, value in options.items():
        if option not in known:
            raise OptionError(f"model {name} has no option {option!r}. Its options are {', '.join(known)}.")
        if isinstance(known[option].default, int):
            _check_size(f"model {name}: {option}", value)
    bound = partial(build, inputs, classes, **options)
    with torch.device("meta"):  # wrong sizes are found here, and no memory is taken
        bound()
    return bound


def _choice(option: str, name: str, choices: dict[str, Choice]) -> Choice:
    if name not in choices:
        raise OptionError(f"{option} {name!r} is unknown. Choose one of {', '.join(choices)}.")
    return choices[name]


def _check_size(option: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(f"{option}={value!r} is not a whole number. Give one from 1 on.")
    if value < 1:
        raise OptionError(f"{option}={value} is below 1. Give a whole number from 1 on.")


def _image(model: str, inputs: tuple[int, ...]) -> tuple[int, int, int]:
    if len(inputs) != 3:
        raise _unfit(model, "images, (channels, height, width)", inputs)
    return inputs[0], inputs[1], inputs[2]


def _unfit(model: str, wanted: str, inputs: tuple[int, ...]) -> OptionError:
    others = ", ".join(other for other in MODELS if other != model)
    return OptionError(f"model {model} reads {wanted}; the task's inputs are {inputs}. Choose one of {others}.")
