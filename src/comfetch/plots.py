"""Draw runs with matplotlib: accuracy curves, label counts of clients, bytes of clients.

A figure is drawn without a state of its own and becomes a PNG file, or SVG text whose ink follows the page's colour.
"""

import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from comfetch.errors import RunError
from comfetch.footprint import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from comfetch.report import Group

INK = "#3a3f47"
"""Lines and text; in SVG it is replaced by the colour of the page's text."""
COLOURS = ("#4c8fd6", "#e0803c", "#35a777", "#cf5f92", "#9470d0", "#b3962a", "#2fa9b5", "#8c8f96")
"""Chosen to be seen on white and on black."""
KINDS = {
    "weights": "#2c6aa8",
    "gradients": "#5797d1",
    "optimiser": "#93bde4",
    "buffers": "#8d8f94",
    "activations": "#d0a553",
}
"""What a client's memory is used for, each with its colour."""
STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": INK, "grid.alpha": 0.15,
    "grid.linewidth": 0.8, "font.size": 11, "axes.titlesize": 12, "figure.constrained_layout.use": True,
    "svg.fonttype": "none", "legend.frameon": False, "axes.axisbelow": True,
}  # fmt: skip


def colour(number: int) -> str:
    """Return the colour of a group by its place; they come again when they are used up."""
    return COLOURS[number % len(COLOURS)]


def accuracy_curves(groups: Sequence["Group"], against: str, legend: bool = False) -> Figure:
    """Draw test accuracy against `rounds`, `bytes` (down and up) or `seconds`, with a band of ± sd over seeds."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure(4.6, 3.4)
        for number, group in enumerate(groups):
            x, y = _positions(group, against), 100 * np.array(group.series("accuracy"))
            mean = y.mean(0)
            axes.plot(x, mean, color=colour(number), lw=2, marker="o", ms=3.5 if len(x) < 40 else 0, label=group.label)
            if len(y) > 1:
                sd = y.std(0, ddof=1)
                axes.fill_between(x, mean - sd, mean + sd, color=colour(number), alpha=0.2, lw=0)
        axes.set(ylabel="test accuracy, %", xlabel=_LABELS[against])
        if against == "bytes":
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: format_bytes(n)))
            axes.xaxis.set_minor_formatter("")
        if against == "rounds":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if legend:
            axes.legend(loc="lower right")
    return figure


_LABELS = {"rounds": "round", "bytes": "bytes down and up, all clients", "seconds": "seconds"}
_SERIES = {"rounds": ("round",), "bytes": ("bytes_down", "bytes_up"), "seconds": ("seconds",)}


def _positions(group: "Group", against: str) -> Any:
    """Return where the rounds stand along the x axis, on average over the runs."""
    by_round = np.sum([group.series(name) for name in _SERIES[against]], axis=0)
    return (by_round if against == "rounds" else by_round.cumsum(1)).mean(0)


def partition_picture(counts: Sequence[Sequence[int]], labels: Sequence[str] = ()) -> Figure:
    """Draw how many examples of each label each client has, as a grid of shades."""
    grid = np.asarray(counts)
    names = list(labels) or [str(label) for label in range(grid.shape[1])]
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = _figure(5.0, min(6.0, max(2.2, 1.2 + 0.22 * len(grid))))
        image = axes.imshow(grid, cmap="Blues", aspect="auto", vmin=0, interpolation="nearest")
        axes.set(xlabel="label", ylabel="client")
        if len(names) <= 20:
            long = max(len(name) for name in names) > 3
            axes.set_xticks(range(len(names)), names, rotation=45 if long else 0, ha="right" if long else "center")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        bar = figure.colorbar(image, ax=axes, label="examples")
        bar.outline.set_visible(False)
        if grid.size <= 120:
            _write_counts(axes, grid)
    return figure


def _write_counts(axes: "Axes", grid: Any) -> None:
    """Write the number into each cell, in an ink that is read on its shade."""
    for (client, label), n in np.ndenumerate(grid):
        ink = "#ffffff" if n > 0.55 * grid.max() else "#10243d"
        axes.text(label, client, str(n), ha="center", va="center", fontsize=8, color=ink)


def footprint_bars(footprints: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw the bytes of a client's training step by kind, one bar for each name."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure(5.0, 1.3 + 0.55 * len(footprints))
        left = np.zeros(len(footprints))
        for kind, shade in KINDS.items():
            sizes = np.array([found.get(kind, 0) for found in footprints.values()], dtype=float)
            axes.barh(range(len(sizes)), sizes, left=left, color=shade, label=kind, height=0.45)
            left += sizes
        for place, (name, total) in enumerate(zip(footprints, left, strict=True)):
            text = f"{name}: {format_bytes(total)}"
            axes.annotate(text, (0, place - 0.26), (2, 0), textcoords="offset points", va="bottom", fontsize=10)
        axes.set_yticks([])
        axes.set_ylim(len(footprints) - 0.6, -0.8)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: format_bytes(n)))
        figure.legend(loc="outside lower center", ncols=3, fontsize=10)
    return figure


def to_svg(figure: Figure, name: str) -> str:
    """Write a figure as SVG to stand in a page: without prologue and fixed size, its ink that of the page.

    Args:
        name: different for each figure of a page, so that their inner names differ, too.
    """
    text = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg))
    return svg.replace(INK, "currentColor")


def to_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    beside = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(beside, format="png", dpi=180)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise RunError(f"{path}: cannot be written. {error.strerror}.") from error


def _figure(width: float, height: float) -> tuple[Figure, "Axes"]:
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()
