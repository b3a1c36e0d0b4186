"""Plots as SVG to be put inside a page: its colours are the page's variables, its text is text in the page's font.

In: plain numbers and names. Out: SVG, the same bytes for the same input. The page defines --ink, --faint and
--series-1 .. --series-6, for light and dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

# matplotlib writes fixed colours; these stand for the page's variables, and are put in their place afterwards.
INK, FAINT = "#0a0b01", "#0a0b02"
SERIES = tuple(f"#0a0c{number:02x}" for number in range(1, 7))
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)"} | {
    colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)
}
_MARKERS = "osD^vP"
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "vitflow", "font.size": 10, "font.family": "DejaVu Sans",
    "axes.labelsize": 10, "axes.titlesize": 10.5,
    "legend.fontsize": 9.5, "xtick.labelsize": 9.5, "ytick.labelsize": 9.5, "text.color": INK, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": FAINT, "grid.color": FAINT, "grid.linewidth": 0.5,
    "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False, "text.usetex": False,
    "text.parse_math": False, "figure.constrained_layout.use": True,
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """A method's accuracy at each number of shots: the mean and the draws behind it (fractions)."""

    name: str
    shots: tuple[int, ...]
    means: tuple[float, ...]
    draws: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Sweep:
    """Learning rates tried, and the validation accuracy of each in each fold (fractions)."""

    name: str
    learning_rates: tuple[float, ...]
    accuracies: tuple[tuple[float, ...], ...]
    chosen: float


def few_shot(curves: Sequence[Curve]) -> str:
    """Accuracy against shots a class: the mean as a line, the draws as a band from the 10th to the 90th percentile."""
    with _figure(5.6, 3.5) as (figure, out):
        axes = figure.subplots()
        for number, curve in enumerate(curves):
            colour = SERIES[number % len(SERIES)]
            low, high = np.array([np.percentile(draws, [10, 90]) for draws in curve.draws]).T
            axes.fill_between(curve.shots, low, high, color=colour, alpha=0.14, linewidth=0)
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(curve.shots, curve.means, color=colour, marker=marker, markersize=5, label=curve.name)
        shots = sorted({shot for curve in curves for shot in curve.shots})
        _logarithmic(axes, shots, [f"{shot}" for shot in shots])
        axes.set(xlabel="labelled images a class", ylabel="test accuracy")
        _percent_axis(axes)
        axes.legend(loc="lower right")
    return out[0]


def loss(draws: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Training loss by step, a line for each draw of labels, and the learning rate, which they share, under it on its
    own axis."""
    with _figure(5.6, 3.5) as (figure, out):
        above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        for points in draws:
            steps = [point["step"] for point in points]
            above.plot(
                steps,
                [point["loss"] for point in points],
                color=SERIES[0],
                alpha=1 if len(draws) == 1 else 0.5,
            )
        above.set(ylabel="training loss")
        below.plot(steps, [point["learning_rate"] for point in draws[0]], color=SERIES[1])
        below.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
        below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for axes in (above, below):
            axes.grid(axis="y")
        figure.align_ylabels()
    return out[0]


def sweeps(panels: Sequence[Sweep]) -> str:
    """Validation accuracy against learning rate, one panel a sweep, folds as dots; the chosen rate is ringed."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with _figure(5.6, 0.5 + 2.5 * rows) as (figure, out):
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
        for panel, axes in zip(panels, grid, strict=False):
            rates, folds = zip(*sorted(zip(panel.learning_rates, panel.accuracies, strict=True)), strict=True)
            means = [float(np.mean(fold)) for fold in folds]
            for rate, fold in zip(rates, folds, strict=True):
                axes.plot([rate] * len(fold), fold, ".", color=SERIES[0], alpha=0.45, markersize=5)
            axes.plot(rates, means, color=SERIES[0])
            chosen = rates.index(panel.chosen)
            ring = {"marker": "o", "fillstyle": "none", "markersize": 10, "markeredgewidth": 2}
            axes.plot(rates[chosen], means[chosen], color=SERIES[1], **ring)
            _logarithmic(axes, rates, [_short(rate) for rate in rates])
            axes.set(title=panel.name, xlabel="learning rate")
            _percent_axis(axes)
        for axes in list(grid):
            axes.remove()
        figure.supylabel("validation accuracy", fontsize=10)
    return out[0]


def confusion(class_names: Sequence[str], counts: np.ndarray) -> str:
    """Counts of predictions (columns) by label (rows); the shade is the share of the row, right blue, wrong orange."""
    size, shares = len(class_names), counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    names = [name if len(name) <= 16 else f"{name[:15]}…" for name in class_names]
    with _figure(5.6, 5.2 if size > 6 else 3.8) as (figure, out):
        axes = figure.subplots()
        for row, column in zip(*counts.nonzero(), strict=True):
            share, right = shares[row, column], row == column
            alpha = 0.12 + 0.6 * share if right else min(0.9, 0.2 + 2 * share)
            corner, colour = (column - 0.5, row - 0.5), SERIES[0 if right else 1]
            axes.add_patch(Rectangle(corner, 1, 1, linewidth=0, facecolor=colour, alpha=alpha))
            if size <= 15:
                axes.text(column, row, f"{counts[row, column]:g}", ha="center", va="center", fontsize=8.5)
        turned = max(len(name) for name in names) > 2
        axes.set_xticks(range(size), names, rotation=90 if turned else 0)
        axes.set_yticks(range(size), names)
        axes.set(
            xlim=(-0.5, size - 0.5),
            ylim=(size - 0.5, -0.5),
            xlabel="prediction",
            ylabel="label",
            aspect="equal",
        )
    return out[0]


def _short(rate: float) -> str:
    """'3e-4': every rate of a sweep in the same little room."""
    mantissa, exponent = f"{rate:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _percent_axis(axes: Any) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.grid(axis="y")


def _logarithmic(axes: Any, places: Sequence[float] | np.ndarray, names: Sequence[str]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(places, names)
    axes.xaxis.set_minor_formatter(NullFormatter())
    if len(places) == 1:  # a logarithmic axis of one place would show a whole decade
        axes.set_xlim(places[0] / 2, places[0] * 2)


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure in inches; when the block has ended the list holds its SVG."""
    out: list[str] = []
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # The browser draws the text: that matplotlib's own font lacks a letter of a class name does not matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure = Figure(figsize=(width, height))
        yield figure, out
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        out.append(_inline(file.getvalue()))


def _inline(svg: str) -> str:
    """The <svg> element alone, as wide as its place, in the page's colours, with only the ids that are used."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r' width="[\d.]+pt"| height="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(
        r"<style.*?</style>", "", svg, count=1
    )  # it would hold for the whole page, which has its own
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(f": {colour}", f": {variable}")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))

    def keep_used(tag: re.Match[str]) -> str:
        return tag.group(0) if tag.group(2) in used else tag.group(1)

    return re.sub(r'(?<=<)(\w+) id="([^"]+)"', keep_used, svg)
