"""Pictures of runs: drawn, self-contained, in the page's ink."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from comfetch.errors import RunError
from comfetch.plots import INK, accuracy_curves, footprint_bars, partition_picture, to_png, to_svg
from comfetch.report import Group, Run


def make_group(label: str, *runs: list[float]) -> Group:
    return Group(
        label,
        [
            Run(
                Path("run"),
                {},
                [
                    {"round": n + 1, "accuracy": a, "bytes_down": 10**6, "bytes_up": 10**6, "seconds": 2.0}
                    for n, a in enumerate(accuracies)
                ],
                {},
                {},
            )
            for accuracies in runs
        ],
    )


@pytest.mark.parametrize(
    ("against", "positions"),
    [("rounds", [1, 2, 3]), ("bytes", [2e6, 4e6, 6e6]), ("seconds", [2, 4, 6])],
)
def test_curves_stand_at_rounds_bytes_and_seconds_so_far(against: str, positions: list[float]) -> None:
    figure = accuracy_curves([make_group("a", [0.2, 0.4, 0.6], [0.4, 0.6, 0.8, 0.9])], against)
    (line,) = figure.axes[0].lines
    assert np.allclose(line.get_xdata(), positions) and np.allclose(line.get_ydata(), [30, 50, 70])
    assert len(figure.axes[0].collections) == 1  # the band


def test_one_run_has_no_band_and_the_legend_is_drawn_on_demand() -> None:
    figure = accuracy_curves([make_group("one", [0.5, 0.6]), make_group("two", [0.5, 0.7])], "bytes", legend=True)
    assert not figure.axes[0].collections
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["one", "two"]


def test_svg_stands_in_a_page_in_its_ink() -> None:
    svg = to_svg(accuracy_curves([make_group("a", [0.5, 0.6])], "rounds"), "curve")
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg") and "width" not in root.attrib and "viewBox" in root.attrib
    assert INK not in svg and "currentColor" in svg and "<metadata" not in svg
    assert "test accuracy, %" in svg  # text is text, not outlines
    assert to_svg(accuracy_curves([make_group("a", [0.5, 0.6])], "rounds"), "curve") == svg


def test_figures_of_one_page_share_no_names() -> None:
    curves = accuracy_curves([make_group("a", [0.5, 0.6])], "rounds")
    clips = [set(re.findall(r'clipPath id="([^"]+)"', to_svg(curves, name))) for name in ("one", "two")]
    assert clips[0] and not clips[0] & clips[1]


@pytest.mark.parametrize(("clients", "labels"), [(3, 10), (100, 40)])
def test_partitions_are_drawn(clients: int, labels: int) -> None:
    counts = np.arange(clients * labels).reshape(clients, labels).tolist()
    figure = partition_picture(counts, [f"label {n}" for n in range(labels)])
    assert figure.axes[0].images[0].get_array().shape == (clients, labels)
    assert len(figure.axes[0].texts) == (clients * labels if clients * labels <= 120 else 0)
    to_svg(figure, "partition")


def test_footprints_are_drawn_as_stacked_bars() -> None:
    sizes = {"weights": 10, "gradients": 20, "optimiser": 30, "buffers": 0, "activations": 40, "download": 99}
    axes = footprint_bars({"full model": sizes, "small": {name: n // 2 for name, n in sizes.items()}}).axes[0]
    assert [text.get_text() for text in axes.texts] == ["full model: 100 B", "small: 50 B"]
    assert sum(bar.get_width() for bar in axes.patches) == 150


def test_png_is_whole_or_absent(tmp_path: Path) -> None:
    figure = accuracy_curves([make_group("a", [0.5, 0.6])], "bytes", legend=True)
    to_png(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RunError, match="cannot be written"):
        to_png(figure, tmp_path / "none" / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
