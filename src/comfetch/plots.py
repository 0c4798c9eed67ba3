"""Draw runs with matplotlib: accuracy curves, fronts, label counts of clients, bytes of clients.

A figure is drawn without a state of its own and becomes a PNG file, or SVG text whose ink follows the page's colour.
"""

import contextlib
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

from comfetch.errors import RunError
from comfetch.footprint import format_bytes
from comfetch.labels import Label, place_labels
from comfetch.pareto import Axis, Point, front

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from comfetch.report import Group

INK = "#3a3f47"
"""Lines and text; in SVG it is replaced by the colour of the page's text."""
COLOURS = ("#4c8fd6", "#e0803c", "#35a777", "#cf5f92", "#9470d0", "#b3962a", "#2fa9b5", "#8c8f96")
"""Chosen to be seen on white and on black."""
MARKERS = ("o", "s", "^", "D", "v")
NAME = 50
"""Letters of a name that fit beside a bar."""
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


def marker(number: int) -> str:
    """Return the marker of a group by its place: another one when the colours come again."""
    return MARKERS[number // len(COLOURS) % len(MARKERS)]


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
            text = f"{shorten(name, NAME, placeholder='…')}: {format_bytes(total)}"
            axes.annotate(
                text, (0, place - 0.26), (2, 0), textcoords="offset points", va="bottom", fontsize=10
            ).set_in_layout(False)  # long names must not squeeze the bars
        axes.set_yticks([])
        axes.set_ylim(len(footprints) - 0.6, -0.8)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: format_bytes(n)))
        figure.legend(loc="outside lower center", ncols=3, fontsize=10)
    return figure


def pareto_picture(found: Sequence[Point], axis: Axis) -> Figure:
    """Draw accuracy against a cost, a point for each group of runs, and the front of those that none beats."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure(7.2, 5.4)
        best = front(found)
        axes.set_xscale("log")
        low, high = (pick(point.cost for point in found) for pick in (min, max))
        room = max(4.0, high / low) ** 0.15 * (max(1.0, 4 / (high / low)) ** 0.5)
        axes.set_xlim(low / room, high * room)
        steps = [*best, Point("", high * room, best[-1].accuracy)]
        xs, ys = [point.cost for point in steps], [point.accuracy for point in steps]
        axes.plot(xs, ys, drawstyle="steps-post", color=INK, lw=1.2, alpha=0.55, zorder=1)
        for number, point in enumerate(found):
            axes.errorbar(
                point.cost, point.accuracy, point.spread or None, color=colour(number), marker=marker(number),
                ms=8 if point in best else 6, mew=1.2, mfc=colour(number) if point in best else "none", lw=1, zorder=2,
            )  # fmt: skip
        _stretch(axes, found)
        axes.set(ylabel="test accuracy, %", xlabel=axis.title)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: axis.write(n)))
        axes.xaxis.set_minor_formatter("")
        labels = [Label(point.cost, point.accuracy, point.label, colour(n)) for n, point in enumerate(found)]
        level = [((a.cost, a.accuracy), (b.cost, a.accuracy)) for a, b in itertools.pairwise(steps)]
        upright = [((p.cost, p.accuracy - p.spread), (p.cost, p.accuracy + p.spread)) for p in found if p.spread]
        place_labels(figure, axes, labels, level + upright)
    return figure


def _stretch(axes: "Axes", found: Sequence[Point]) -> None:
    """Scale accuracy by the logarithm of the error, so that good runs stand apart though a poor one is shown."""
    axes.set_yscale("function", functions=(lambda a: -np.log10(101 - np.minimum(a, 100)), lambda y: 101 - 10**-y))
    ends = [p.accuracy + side * (p.spread or 0) for p in found for side in (-1, 1)]
    low, high = (-np.log10(101 - np.clip(end, 0, 100)) for end in (min(ends), max(ends)))
    room = max(0.02, 0.08 * (high - low))
    bottom, top = (float(np.clip(101 - 10**-y, 0, 100)) for y in (low - room, high + room))
    axes.set_ylim(bottom, top)
    steps = (step for step in (20, 10, 5, 2, 1, 0.5, 0.2, 0.1) if (top - bottom) / step >= 3)
    ticks, near = list[float](), 0.05 * (high - low + 2 * room)
    for step in steps:  # coarse ones first; finer ones only where they find room
        for tick in np.arange(np.ceil(bottom / step) * step, top + 1e-9, step):
            place = -np.log10(101 - tick)
            if all(abs(place + np.log10(101 - other)) > near for other in ticks) and len(ticks) < 9:
                ticks.append(float(tick))
    axes.yaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.yaxis.set_minor_locator(FixedLocator([]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda a, _: f"{a:.3g}"))


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
