"""Sketched layers: one file for each family, found by exact type in a registry."""

from comfetch.layers import attention, conv, embedding, linear, recurrent
from comfetch.layers.base import REGISTRY, Product, Recipe, SketchedLayer, meta_copy, register_layer

__all__ = [
    "REGISTRY", "Product", "Recipe", "SketchedLayer", "attention", "conv", "embedding", "linear", "meta_copy",
    "recurrent", "register_layer",
]  # fmt: skip
