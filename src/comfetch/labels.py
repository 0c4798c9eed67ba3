"""Put names beside the points of a picture so that they do not lie on each other."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

SIZE = 9
DISTANCES = (7, 14, 24, 36, 50, 66, 84)
"""In points. Beyond the first, a line leads to the label."""
ANGLES = (0, 180, 90, 270, 35, 145, 325, 215)
WIDER = 1.12
"""A browser's font may be wider than the one that is measured."""
POINT = 5
Line = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Label:
    """A name for the point (x, y), in its colour."""

    x: float
    y: float
    text: str
    colour: str


def place_labels(figure: Figure, axes: Axes, labels: Sequence[Label], lines: Sequence[Line] = ()) -> None:
    """Write a label beside each point: in the nearest free place, or where it covers least.

    Args:
        lines: what else is drawn and better left free, from one point to another, upright or level.
    """
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    scale = figure.dpi / 72
    spots = [axes.transData.transform((label.x, label.y)).tolist() for label in labels]
    taken = [Bbox.from_extents(x, y, x, y).padded(POINT * scale) for x, y in spots]
    taken += [Bbox(axes.transData.transform(np.sort(line, axis=0))).padded(scale) for line in lines]
    inside = axes.get_window_extent(renderer)
    crowd = [sum(math.dist(spot, other) < 60 * scale for other in spots) for spot in spots]
    for number in sorted(range(len(spots)), key=lambda n: -crowd[n]):
        label = labels[number]
        measured = axes.text(0, 0, label.text, fontsize=SIZE)
        size = measured.get_window_extent(renderer)
        measured.remove()
        offset, box = min(
            _candidates(spots[number], size.width * WIDER, size.height, scale),
            key=lambda c: _covered(c[1], taken, inside, c[0]),
        )
        taken.append(box)
        leads: dict[str, Any] = {
            "arrowstyle": "-", "lw": 0.8, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3, "color": label.colour,
        }  # fmt: skip
        axes.annotate(
            label.text, (label.x, label.y), offset, textcoords="offset points", fontsize=SIZE, va="center",
            ha="left" if offset[0] > 1 else "right" if offset[0] < -1 else "center", color=label.colour,
            arrowprops=leads if math.hypot(*offset) > DISTANCES[0] + 1 else None,
        )  # fmt: skip


def _candidates(
    spot: Sequence[float], width: float, height: float, scale: float
) -> list[tuple[tuple[float, float], Bbox]]:
    """Return the offsets of a label, in points, and the boxes that it would take."""
    found = []
    for distance, angle in itertools.product(DISTANCES, ANGLES):
        dx, dy = (distance * part(math.radians(angle)) for part in (math.cos, math.sin))
        x, y = spot[0] + dx * scale, spot[1] + dy * scale
        left = x if dx > 1 else x - width if dx < -1 else x - width / 2
        found.append(((dx, dy), Bbox.from_bounds(left, y - height / 2, width, height)))
    return found


def _covered(box: Bbox, taken: Sequence[Bbox], inside: Bbox, offset: tuple[float, float]) -> tuple[float, float]:
    """Return how much of a box lies on others or outside, and how far it is from its point."""
    others = sum(_common(box, other) for other in taken)
    outside = box.width * box.height - _common(box, inside)
    return round(others + outside, 3), math.hypot(*offset)


def _common(a: Bbox, b: Bbox) -> float:
    width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return max(0.0, width) * max(0.0, height)
