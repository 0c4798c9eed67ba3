"""Federated learning of networks that are too large for the clients that train them.

>>> import comfetch as cf, torch
>>> model = cf.sketch(lambda: torch.nn.Linear(512, 512), compression=8)
>>> model(torch.zeros(2, 512)).shape
torch.Size([2, 512])
"""

from typing import Any

from comfetch import methods
from comfetch.api import sketch
from comfetch.convert import plan_of, unsketch
from comfetch.errors import ComfetchError
from comfetch.files import load, save
from comfetch.footprint import Footprint, footprint
from comfetch.groups import parameter_groups
from comfetch.layers import register_layer
from comfetch.plan import Plan
from comfetch.transforms import adaptive, chain, error_feedback, momentum, scale, top_k

__version__ = "0.1.0"

__all__ = [
    "ComfetchError", "Footprint", "Plan", "adaptive", "chain", "error_feedback", "footprint", "load", "methods",
    "momentum", "parameter_groups", "plan_of", "register_layer", "save", "scale", "simulate", "sketch", "top_k",
    "unsketch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the driver when it is asked for: it needs the `data` extra, which a small client does not have."""
    if name == "simulate":
        from comfetch.simulation import simulate

        return simulate
    raise AttributeError(f"module 'comfetch' has no attribute {name!r}")
