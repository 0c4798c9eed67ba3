"""Modules of torch that reach into their children: keep them from reading a small weight as a full one.

`nn.TransformerEncoderLayer` and `nn.TransformerEncoder` have a fast path in evaluation that passes `linear1.weight`
and the like to a fused kernel. It is switched off while one of their layers is sketched, and on again by `unsketch`.
"""

from typing import Any

from torch import nn

from comfetch.layers.base import SketchedLayer

OFF: dict[type[nn.Module], dict[str, Any]] = {
    nn.TransformerEncoderLayer: {"activation_relu_or_gelu": 0},
    nn.TransformerEncoder: {"use_nested_tensor": False, "enable_nested_tensor": False},
}


def guard(model: nn.Module) -> None:
    """Switch off fast paths over sketched layers."""
    for module in model.modules():
        if any(isinstance(child, SketchedLayer) for child in module.modules()):
            for parent, switches in OFF.items():
                if isinstance(module, parent):
                    before = {name: getattr(module, name) for name in switches if hasattr(module, name)}
                    module.__dict__.setdefault("_before_sketch", before)
                    for name in before:
                        setattr(module, name, switches[name])


def unguard(model: nn.Module) -> None:
    """Switch the fast paths on again that `guard` switched off."""
    for module in model.modules():
        for name, value in module.__dict__.pop("_before_sketch", {}).items():
            setattr(module, name, value)
