"""Cut models to a width: every hidden layer keeps a part of its channels; the model's inputs and outputs stay."""

from comfetch.widths.axes import Axis, Index, Widths, add_at, cut, first_channels, plan_widths
from comfetch.widths.shrink import Narrowed, count_weights, narrow, narrow_to, shrink, shrink_empty

__all__ = [
    "Axis",
    "Index",
    "Narrowed",
    "Widths",
    "add_at",
    "count_weights",
    "cut",
    "first_channels",
    "narrow",
    "narrow_to",
    "plan_widths",
    "shrink",
    "shrink_empty",
]
