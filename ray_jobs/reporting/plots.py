"""Plots as inline SVG, with the page's colour variables, and text in the page's font.

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
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

# matplotlib only writes fixed colours, so these are placeholders, which `_inline` replaces by the page's variables.
INK, FAINT = "#0a0b01", "#0a0b02"
SERIES = tuple(f"#0a0c{number:02x}" for number in range(1, 7))
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)"} | {
    colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)
}
_MARKERS = "osD^vP*X<>dph"
_FOLDS = (*SERIES[2:], SERIES[1])  # SERIES[0] is the training's
_RING = {"color": SERIES[1], "marker": "o", "fillstyle": "none", "markersize": 10, "markeredgewidth": 2}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vitflow",
    "text.usetex": False,
    "text.parse_math": False,
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
    "axes.axisbelow": True,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.titlesize": 10.5,
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 9.5),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), FAINT),
    "grid.linewidth": 0.5,
    **dict.fromkeys(("xtick.major.size", "ytick.major.size", "xtick.minor.size"), 0),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
}


@dataclass(frozen=True)
class Curve:
    """A method's accuracy at each number of shots: the mean and the draws (fractions)."""

    name: str
    shots: tuple[int, ...]
    means: tuple[float, ...]
    draws: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Measured:
    """Accuracies (fractions) on held-out images after some steps of a training, and losses if they were measured."""

    name: str
    steps: tuple[int, ...]
    accuracies: tuple[float, ...]
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class CostPoint:
    """A model's accuracy (a fraction) in one series, and its cost."""

    name: str
    series: str
    cost: float
    accuracy: float


def few_shot(curves: Sequence[Curve]) -> str:
    """Plot accuracy by shots: the mean as a line, the 10th to 90th percentile of the draws as a band."""
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
        axes.set(xlabel="labelled images per class", ylabel="test accuracy")
        _percent_axis(axes)
        axes.legend(loc="lower right")
    return out[0]


def costs(unit: str, points: Sequence[CostPoint]) -> str:
    """Plot accuracy by cost, a colour per series and a marker per model."""
    series = dict(zip(dict.fromkeys(point.series for point in points), cycle(SERIES)))
    markers = dict(zip(dict.fromkeys(point.name for point in points), cycle(_MARKERS)))
    with _figure(5.6, 3.9) as (figure, out):
        axes = figure.subplots()
        for point in points:
            axes.plot(point.cost, point.accuracy, markers[point.name], color=series[point.series])
        for name, marker in markers.items():
            axes.plot([], [], marker, color=INK, fillstyle="none", label=name)
        for name, colour in series.items():
            axes.plot([], [], "s", color=colour, label=name)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        places = [point.cost for point in points]
        axes.set_xlim(min(places) / 1.6, max(places) * 1.6)  # room for a tick
        axes.set(xlabel=unit, ylabel="test accuracy")
        _percent_axis(axes)
        figure.legend(loc="outside lower center", ncols=2)
    return out[0]


def loss(draws: Sequence[Sequence[Mapping[str, Any]]], measured: Sequence[Measured] = ()) -> str:
    """Plot training loss by step, one line per draw of labels, and below it the learning rate, shared by all draws.

    If images were held out, their accuracy is plotted in between, and their loss with the training loss.
    """
    with _figure(5.6, 5.0 if measured else 3.5) as (figure, out):
        above, *between, below = figure.subplots(
            3 if measured else 2, sharex=True, height_ratios=(3, 2, 1.4) if measured else (3, 1)
        )
        for points in draws:
            steps, losses = [point["step"] for point in points], [point["loss"] for point in points]
            above.plot(steps, losses, color=SERIES[0], alpha=1 if len(draws) == 1 else 0.5)
        for number, curve in enumerate(measured):
            style = _fold_style(number) | {"label": curve.name}
            between[0].plot(curve.steps, curve.accuracies, **style)
            if curve.losses:
                above.plot(curve.steps, curve.losses, linestyle=":", **style)
        for axes in between:
            axes.legend(fontsize="small")
            axes.set(ylabel="accuracy")
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        above.set(ylabel="loss" if any(curve.losses for curve in measured) else "training loss")
        below.plot(steps, [point["learning_rate"] for point in draws[0]], color=SERIES[1])
        below.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
        below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for axes in (above, *between, below):
            axes.grid(axis="y")
        figure.align_ylabels()
    return out[0]


def _fold_style(number: int) -> dict[str, Any]:
    """Return the colour and the marker of a fold; the first five folds differ in both."""
    return {
        "color": _FOLDS[number % len(_FOLDS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 4,
    }


def search(trials: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> str:
    """Plot validation accuracy by each searched field: a dot per trial, hollow if it was ended, a ring for `chosen`.

    A vertical line spans the folds of a trial. If a field's values are not all numbers, its axis has a tick per value.

    Args:
        trials: the trials of a sweep in report.json.
        chosen: the chosen trial.
    """
    points = [trial.get("point") or {"learning_rate": trial["learning_rate"]} for trial in trials]
    means = [float(np.mean(trial["accuracies"])) for trial in trials]
    best = trials.index(chosen)
    with _panels(len(points[0])) as (grid, out):
        for field, axes in zip(points[0], grid, strict=True):
            values = [point[field] for point in points]
            is_number = all(
                isinstance(value, int | float) and not isinstance(value, bool) for value in values
            )
            names = sorted({_value(value) for value in values})
            places = values if is_number else [names.index(_value(value)) for value in values]
            for place, accuracy, trial in zip(places, means, trials, strict=True):
                fill = "none" if "pruned_at" in trial else SERIES[0]
                axes.vlines(place, min(trial["accuracies"]), max(trial["accuracies"]), color=SERIES[0])
                axes.plot(place, accuracy, "o", color=SERIES[0], markerfacecolor=fill, markersize=4)
            axes.plot(places[best], means[best], **_RING)
            if not is_number:
                axes.set_xticks(range(len(names)), names)
                axes.set_xlim(-0.5, len(names) - 0.5)
            elif min(places) > 0 and max(places) >= 10 * min(places):
                few = sorted(set(places))
                powers = [10.0**power for power in range(-12, 12) if few[0] <= 10.0**power <= few[-1]]
                ticks = few if len(few) <= 5 else powers
                _logarithmic(axes, ticks, [f"{tick:g}" for tick in ticks])
            axes.set(xlabel=field.replace("_", " "))
    return out[0]


@contextmanager
def _panels(count: int) -> Iterator[tuple[list[Any], list[str]]]:
    """Yield the axes of `count` panels of validation accuracy in two columns, and `_figure`'s list."""
    columns = min(2, count)
    rows = -(-count // columns)
    with _figure(5.6, 0.5 + 2.5 * rows) as (figure, out):
        grid = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
        yield grid[:count], out
        for axes in grid[:count]:
            _percent_axis(axes)
        for axes in grid[count:]:
            axes.remove()
        figure.supylabel("validation accuracy", fontsize=10)


def confusion(class_names: Sequence[str], counts: np.ndarray) -> str:
    """Plot counts of predictions (columns) by label (rows), correct blue, wrong orange, shaded by share of the row."""
    size, shares = len(class_names), counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    names = [_cut(name) for name in class_names]
    with _figure(5.6, 5.2 if size > 6 else 3.8) as (figure, out):
        axes = figure.subplots()
        for row, column in zip(*counts.nonzero(), strict=True):
            share, correct = shares[row, column], row == column
            alpha = 0.12 + 0.6 * share if correct else min(0.9, 0.2 + 2 * share)
            corner, colour = (column - 0.5, row - 0.5), SERIES[0 if correct else 1]
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


def _value(value: Any) -> str:
    """Return a value that is not a number as a label under an axis."""
    if isinstance(value, dict):
        return "\n".join(f"{name.replace('_', ' ')} {inner}" for name, inner in value.items())
    return "none" if value is None else _cut(str(value))


def _cut(name: str) -> str:
    """Shorten a name to fit under an axis."""
    return name if len(name) <= 16 else f"{name[:15]}…"


def _percent_axis(axes: Any) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.grid(axis="y")


def _logarithmic(axes: Any, places: Sequence[float] | np.ndarray, names: Sequence[str]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(places, names)
    axes.xaxis.set_minor_formatter(NullFormatter())
    if len(places) == 1:  # a logarithmic axis with one tick would show a whole decade
        axes.set_xlim(places[0] / 2, places[0] * 2)


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Figure, list[str]]]:
    """Yield a figure of this size in inches, and a list that holds its SVG after the block."""
    out: list[str] = []
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # The browser draws the text, so it does not matter if matplotlib's font lacks a letter of a class name.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure = Figure(figsize=(width, height))
        yield figure, out
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        out.append(_inline(file.getvalue()))


def _inline(svg: str) -> str:
    """Return the <svg> element without a fixed size, in the page's colours, and without unused ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r' width="[\d.]+pt"| height="[\d.]+pt"', "", svg, count=2)
    # A style element would apply to the whole page.
    svg = re.sub(r"<style.*?</style>", "", svg, count=1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(f": {colour}", f": {variable}")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))

    def keep_used(tag: re.Match[str]) -> str:
        return tag.group(0) if tag.group(2) in used else tag.group(1)

    return re.sub(r'(?<=<)(\w+) id="([^"]+)"', keep_used, svg)
