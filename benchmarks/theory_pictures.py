"""Draw the pictures of `benchmarks.theory` from its records."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks import theory
from comfetch.plots import INK, STYLE, colour, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[dict[str, Any]]


def draw(folder: Path) -> None:
    """Draw what there are records for."""
    if rows := theory.read("rate"):
        to_png(rate(rows), folder / "rate.png")
    if rows := theory.read("prediction"):
        to_png(prediction(rows), folder / "prediction.png")
    if rows := theory.read("weights"):
        to_png(weights(rows), folder / "weights.png")


def rate(rows: Rows) -> Figure:
    """Draw the squared gradient norm of the sketched objective against T, in units of its first value."""
    names = list(dict.fromkeys(row["problem"] for row in rows))
    with mpl.rc_context(STYLE):
        figure, panels = _panels(len(names), 4.4, 3.9)
        for axes, name in zip(panels, names, strict=True):
            for number, kind in enumerate(theory.SCALES):
                for what, style, marker, label in (
                    ("mean", "-", "o", "mean of all rounds"),
                    ("least", "--", "v", "least of all rounds"),
                ):
                    x, y, low, high = seeds(rows, name, kind, what)
                    axes.plot(
                        x, y, style, color=colour(number), marker=marker, ms=4.5, lw=1.8, label=f"{kind}, {label}"
                    )
                    axes.fill_between(x, low, high, color=colour(number), alpha=0.18, lw=0)
            x = sorted({row["rounds"] for row in rows})
            guide = [1.6 * (t / x[0]) ** -0.5 for t in x]
            axes.plot(x, guide, color=INK, lw=1.2, ls=":")
            axes.annotate(r"$\propto 1/\sqrt{T}$", (x[0], guide[0]), (14, -4), textcoords="offset points", fontsize=11)
            axes.set(xscale="log", yscale="log", title=name, xlabel="rounds T of the run")
        panels[0].set_ylabel(r"$\Vert\nabla\tilde f\,\Vert^2$, 1 at the start")
        _legend(figure, panels[0], 2)
    return figure


def seeds(rows: Rows, name: str, kind: str, what: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return T, and the geometric mean, the least and the largest over seeds of a relative gradient norm."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["problem"] == name and row["scale"] == kind:
            found.setdefault(row["rounds"], []).append(row[what] / row["first"])
    x = sorted(found)
    return x, [statistics.geometric_mean(found[t]) for t in x], [min(found[t]) for t in x], [max(found[t]) for t in x]


def prediction(rows: Rows) -> Figure:
    """Draw measured error and bounds against depth, one panel for each way of recovery."""
    names = list(dict.fromkeys(row["recovery"] for row in rows))
    with mpl.rc_context(STYLE):
        figure, panels = _panels(len(names), 3.5, 4.1)
        for axes, name in zip(panels, names, strict=True):
            chosen = [row for row in rows if row["recovery"] == name]
            _errors(axes, chosen, [row["depth"] for row in chosen])
            axes.set(title=name, xlabel="depth", xticks=list(theory.DEPTHS))
        panels[0].set_ylabel("‖ỹ − ŷ‖ / ‖ŷ‖")
        panels[0].annotate(
            "as large as the output", (8, 1), (2, -12), textcoords="offset points", ha="right", fontsize=9
        )
        _legend(figure, panels[0], 3)
    return figure


def weights(rows: Rows) -> Figure:
    """Draw measured error and bounds of one layer against the size of its weights."""
    with mpl.rc_context(STYLE):
        figure, panels = _panels(1, 5.6, 3.6)
        _errors(panels[0], rows, [row["size"] for row in rows])
        panels[0].set(xscale="log", xlabel="factor on the weights", ylabel="‖ỹ − ŷ‖ / ‖ŷ‖", title="depth 1, count")
        _legend(figure, panels[0], 3)
    return figure


def _errors(axes: "Axes", rows: Rows, x: Sequence[float]) -> None:
    for number, (name, label) in enumerate((("printed", "bound as printed"), ("induction", "induction, true norms"))):
        axes.plot(
            x, [r[name] for r in rows], color=colour(number + 1), marker="sd"[number], ms=4.5, lw=1.8, label=label
        )
    low, high = ([row[name] for row in rows] for name in ("error_low", "error_high"))
    axes.fill_between(x, low, high, color=colour(0), alpha=0.25, lw=0)
    axes.plot(x, [row["error"] for row in rows], color=colour(0), marker="o", ms=4.5, lw=1.8, label="measured")
    axes.axhline(1, color=INK, lw=1.2, ls=":")
    axes.set_yscale("log")


def _panels(count: int, width: float, height: float) -> tuple[Figure, list["Axes"]]:
    figure = Figure(figsize=(width * count, height))
    return figure, list(figure.subplots(1, count, sharey=True, squeeze=False)[0])


def _legend(figure: Figure, axes: "Axes", columns: int) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=10)
