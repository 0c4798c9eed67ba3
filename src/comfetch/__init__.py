"""Federated learning of networks that are too large for the clients that train them.

>>> import comfetch as cf, torch
>>> model = cf.sketch(lambda: torch.nn.Linear(512, 512), compression=8)
>>> model(torch.zeros(2, 512)).shape
torch.Size([2, 512])
"""

from comfetch.api import sketch
from comfetch.convert import plan_of, unsketch
from comfetch.errors import ComfetchError
from comfetch.files import load, save
from comfetch.footprint import Footprint, footprint
from comfetch.groups import parameter_groups
from comfetch.layers import register_layer
from comfetch.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "ComfetchError", "Footprint", "Plan", "footprint", "load", "parameter_groups", "plan_of", "register_layer", "save",
    "sketch", "unsketch",
]  # fmt: skip
