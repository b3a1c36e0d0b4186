"""The plots of the page as inline SVG (`ray_jobs.reporting.drawing.svg`).

In: plain numbers and names. Out: SVG with its legend, the same for the same input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import chain
from typing import Any

import numpy as np
from markupsafe import Markup

from ray_jobs.evaluation.rows import ACCURACY
from ray_jobs.reporting.drawing import svg
from ray_jobs.reporting.drawing.svg import LEFT, RIGHT, WIDTH, Panel, Scale, element, fractions, spread

BOX = 130  # the width of a stage in the drawing of the lineage


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


def few_shot(curves: Sequence[Curve]) -> Markup:
    """Plot accuracy by shots: the mean as a line, the 10th to 90th percentile of the draws as a band."""
    shots = sorted({shot for curve in curves for shot in curve.shots})
    ranges = [np.array([np.percentile(draws, [10, 90]) for draws in curve.draws]).T for curve in curves]
    every = [float(bound) for bounds in ranges for bound in bounds.ravel()]
    panel = Panel(spread(shots, LEFT, RIGHT, is_log=True), fractions(every, 250, 24))
    parts = [panel.axes(svg.numbers(shots), svg.percents(panel.y), "labelled images per class", "test accuracy")]
    for number, (curve, (low, high)) in enumerate(zip(curves, ranges, strict=True)):
        parts.append(panel.band(curve.shots, low, high, number))
        parts.append(panel.line(curve.shots, curve.means, number, ""))
        for shot, mean, least, most in zip(curve.shots, curve.means, low, high, strict=True):
            title = f"{curve.name}, {shot} per class: {mean:.1%}; the middle 80% of the draws {least:.1%} to {most:.1%}"
            parts.append(panel.mark(shot, mean, number, title, shape=number))
    legend = [(curve.name, number, number) for number, curve in enumerate(curves)]
    return svg.figure("Test accuracy by number of labelled images per class", 288, *parts, legend=legend)


def precision_recall(lines: Sequence[Mapping[str, Any]]) -> Markup:
    """Plot the precision of detectors by recall, at an IoU of 50%; the area below a line is AP50.

    Args:
        lines: those of report.json about one data set.
    """
    panel = Panel(Scale(0, 1, LEFT, RIGHT), Scale(0, 1, 250, 24))
    parts = [panel.axes(svg.percents(panel.x), svg.percents(panel.y), "recall", "precision")]
    legend = []
    for number, line in enumerate(lines):
        recalls = np.linspace(0, 1, len(line["precisions"])).tolist()
        name = f"{line['method']} ({line['stage']})"
        parts.append(panel.line(recalls, line["precisions"], number, f"{name}: AP50 {line['AP50'] or 0:.1%}"))
        legend.append((name, number, number))
    return svg.figure("Precision by recall of each detector", 288, *parts, legend=legend)


def costs(unit: str, points: Sequence[CostPoint]) -> Markup:
    """Plot accuracy by cost: a shape per model, and a colour per series, or per model if there is one series."""
    shapes = _numbered(point.name for point in points)
    colours = _numbered(point.series for point in points)
    is_one = len(colours) == 1
    measured = f"test accuracy, {points[0].series}" if is_one else "test accuracy"
    places = [point.cost for point in points]
    x = Scale(min(places) / 1.6, max(places) * 1.6, LEFT, RIGHT, is_log=True)  # room for a tick
    panel = Panel(x, fractions([point.accuracy for point in points], 250, 24))
    parts = [panel.axes(svg.numbers(svg.log_ticks(x.low, x.high)), svg.percents(panel.y), unit, measured)]
    for point in points:
        title = f"{point.name}, {point.series}: {point.accuracy:.1%} at {point.cost:,.4g} {unit.partition(',')[0]}"
        colour = shapes[point.name] if is_one else colours[point.series]
        parts.append(panel.mark(point.cost, point.accuracy, colour, title, shapes[point.name]))
    legend = [(name, shape if is_one else -1, shape) for name, shape in shapes.items()]
    legend += [] if is_one else [(name, colour, 1) for name, colour in colours.items()]
    return svg.figure("Test accuracy by cost, for each backbone", 288, *parts, legend=legend)


def _numbered(names: Any) -> dict[str, int]:
    """Number the distinct names in their order."""
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def loss(
    draws: Sequence[Sequence[Mapping[str, Any]]],
    measured: Sequence[Measured] = (),
    metric: str = ACCURACY,
) -> Markup:
    """Plot training loss by step, one line per draw of labels, and below it the learning rate, shared by all draws.

    If images were held out, `metric` on them is plotted in between, and their loss, dotted, with the training loss.
    """
    steps = [[point["step"] for point in points] for points in draws]
    all_steps = [*chain(*steps), *(step for curve in measured for step in curve.steps)]
    x = spread(all_steps, LEFT, RIGHT, pad=0.01)
    losses = [[point["loss"] for point in points] for points in draws]
    held_out = [value for curve in measured for value in curve.losses]
    above = Panel(x, spread([*chain(*losses), *held_out], 160, 24))
    name = "loss" if held_out else "training loss"
    parts = [above.axes({}, svg.numbers(svg.ticks(*above.y[:2], 4)), "", name)]
    faint = "faint" if len(draws) > 1 else ""
    for number, (own, values) in enumerate(zip(steps, losses, strict=True)):
        draw = f"draw {number}, " * (len(draws) > 1)
        title = f"training loss, {draw}{values[0]:.3g} at step {own[0]:,} to {values[-1]:.3g} at step {own[-1]:,}"
        parts.append(above.line(own, values, 0, title, faint))
    bottom = 160.0
    if measured:
        bottom = 270.0
        accuracies = [accuracy for curve in measured for accuracy in curve.accuracies]
        parts += _held_out(above, Panel(x, fractions(accuracies, bottom, 190)), measured, metric)
    rates = [point["learning_rate"] for point in draws[0]]
    below = Panel(x, Scale(0, max([*rates, 1e-12]) * 1.1, bottom + 84, bottom + 30))
    shown = svg.numbers(svg.ticks(x.low, x.high))
    parts.append(below.axes(shown, svg.numbers(svg.ticks(*below.y[:2], 2)), "step", "learning rate"))
    title = f"learning rate, at most {max(rates):g}, at the end {rates[-1]:g}"
    parts.append(below.line(steps[0], rates, 1, title))
    legend = [(curve.name, number + 2, number) for number, curve in enumerate(measured)]
    return svg.figure(f"{name} and learning rate by step", bottom + 122, *parts, legend=legend)


def _held_out(above: Panel, between: Panel, measured: Sequence[Measured], metric: str) -> list[Markup]:
    """Draw the metric on held-out images, and their losses in the panel of the training loss."""
    parts = [between.axes({}, svg.percents(between.y, 3), "", f"{metric} on held-out images")]
    for number, curve in enumerate(measured):
        parts.append(between.line(curve.steps, curve.accuracies, number + 2, ""))
        for step, accuracy in zip(curve.steps, curve.accuracies, strict=True):
            title = f"{curve.name}, step {step:,}: {metric} {accuracy:.1%}"
            parts.append(between.mark(step, accuracy, number + 2, title, number))
        if curve.losses:
            title = f"{curve.name}: loss {curve.losses[0]:.3g} to {curve.losses[-1]:.3g}"
            parts.append(above.line(curve.steps, curve.losses, number + 2, title, "dotted"))
    return parts


def search(trials: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> Markup:
    """Plot the metric that selects by each searched field: a dot per trial, hollow if ended, a ring for `chosen`.

    A vertical line spans the folds of a trial. If a field's values are not all numbers, its axis has a tick per value.

    Args:
        trials: the trials of a sweep in report.json.
        chosen: the chosen trial.
    """
    points = [trial.get("point") or {"learning_rate": trial["learning_rate"]} for trial in trials]
    fields, columns = list(points[0]), min(2, len(points[0]))
    width, height = (RIGHT - LEFT) if columns == 1 else (RIGHT - LEFT) / 2 - 20, 200
    metric = next((name for trial in trials for name in trial.get("selected_by", ())), "accuracy")
    every = [value for trial in trials for value in _values(trial)]
    parts: list[Markup] = []
    for number, field in enumerate(fields):
        left, top = LEFT + (number % 2) * (width + 40), number // 2 * height + 24
        values = [point[field] for point in points]
        scale, places, names = _searched(values, left, left + width)
        panel = Panel(scale, fractions(every, top + 126, top))
        name = f"validation {metric}" if number == 0 else ""
        parts.append(panel.axes(names, svg.percents(panel.y, 4), "", name))
        parts.append(svg.text(left + width / 2, top + 172, field.replace("_", " ")))
        for place, value, trial in zip(places, values, trials, strict=True):
            parts += _trial(panel, place, f"{field.replace('_', ' ')} {_value(value)}", trial, trial is chosen)
    rows = -(-len(fields) // columns)
    return svg.figure(f"Validation {metric} of each trial", rows * height + 4, *parts)


def _values(trial: Mapping[str, Any]) -> Sequence[float]:
    """Return the metric that selects, in each fold of a trial."""
    values: Sequence[float] = next(iter(trial.get("selected_by", {}).values()), trial["accuracies"])
    return values


def _searched(values: Sequence[Any], left: float, right: float) -> tuple[Scale, list[float], dict[float, str]]:
    """Return the scale of a searched field, the place of each value, and the ticks."""
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        names = sorted({_value(value) for value in values})
        places = [float(names.index(_value(value))) for value in values]
        ticks = {float(number): name for number, name in enumerate(names)}
        return Scale(-0.5, len(names) - 0.5, left, right), places, ticks
    distinct = sorted(set(values))
    is_log = _spans_decades(distinct)
    scale = spread(values, left, right, is_log)
    few = svg.log_ticks(scale.low, scale.high, (1,)) if is_log else svg.ticks(scale.low, scale.high, 4)
    return scale, list(values), svg.numbers(distinct if len(distinct) <= 4 else few)


def _spans_decades(ascending: Sequence[float]) -> bool:
    """Return whether these numbers are better seen on a logarithmic scale."""
    return ascending[0] > 0 and ascending[-1] >= 10 * ascending[0]


def _trial(panel: Panel, place: float, name: str, trial: Mapping[str, Any], is_chosen: bool) -> list[Markup]:
    """Draw a trial: the range of its folds, their mean, and a ring around the chosen one."""
    values = _values(trial)
    mean, is_ended = float(np.mean(values)), "pruned_at" in trial
    folds = f", folds {min(values):.1%} to {max(values):.1%}" if len(values) > 1 else ""
    title = f"{name}: {mean:.1%}{folds}{', ended early' * is_ended}{', chosen' * is_chosen}"
    spans = [panel.line([place, place], [min(values), max(values)], 0, "")] if folds else []
    ring = [panel.mark(place, mean, 1, "", style="ring")] if is_chosen else []
    return [*spans, panel.mark(place, mean, 0, title, style="hollow" if is_ended else ""), *ring]


def study(found: Mapping[str, Any]) -> list[Markup]:
    """Plot a metric by what the members of a matrix differ in: a plot per panel, on the same scales.

    Args:
        found: as `ray_jobs.reporting.studies` returns it.
    """
    lines = [line for panel in found["panels"] for line in panel["lines"]]
    points = [point for line in lines for point in line["points"]]
    every = [point["mean"] + sign * (point["margin"] or 0) for point in points for sign in (-1, 1)]
    places = [*found["ticks"].values()]
    x = spread(places, LEFT, RIGHT, _spans_decades(places))
    is_percent = not found["metric"].startswith("loss")
    shown = "{:.1%}" if is_percent else "{:.4g}"
    panel = Panel(x, fractions(every, 230, 24) if is_percent else spread(every, 230, 24))
    heights = svg.percents(panel.y) if is_percent else svg.numbers(svg.ticks(panel.y.low, panel.y.high))
    few = svg.numbers(places if len(places) <= 6 else places[:: -(-len(places) // 6)])
    labels = {place: label for label, place in found["ticks"].items()}
    name, height = found["x"].replace("_", " "), 268
    if not found["has_order"]:
        rows = 3 if len(places) > 4 else 1  # names of neighbours would overlap
        few = {place: "\n" * (row % rows) + _cut(label) for row, (label, place) in enumerate(found["ticks"].items())}
        name, height = name if rows == 1 else "", height + 12 * (rows - 1)
    colours = _numbered(line["name"] for line in lines)
    drawn = []
    for each in found["panels"]:
        parts = [panel.axes(few, heights, name, found["metric"])]
        for line in each["lines"]:
            colour, points = colours[line["name"]], line["points"]
            if found["has_order"]:
                means = [point["mean"] for point in points]
                parts.append(panel.line([point["x"] for point in points], means, colour, ""))
            for point in points:
                margin = "" if point["margin"] is None else f" ± {shown.format(point['margin'])}"
                if margin:
                    ends = [point["mean"] - point["margin"], point["mean"] + point["margin"]]
                    inside = np.clip(ends, panel.y.low, panel.y.high).tolist()
                    parts.append(panel.line([point["x"]] * 2, inside, colour, "", "faint"))
                title = f"{line['name']} at {labels[point['x']]}: {shown.format(point['mean'])}{margin}".strip()
                parts.append(panel.mark(point["x"], point["mean"], colour, title, shape=colour))
        legend = [
            (line["name"], colours[line["name"]], colours[line["name"]]) for line in each["lines"] if line["name"]
        ]
        drawn.append(svg.figure(f"{found['metric']} by {found['x']}", height, *parts, legend=legend))
    return drawn


def attention(distances: Sequence[Sequence[float]], uniform: float) -> Markup:
    """Plot the mean distance in pixels from a patch to those it attends to, a mark per head of each block.

    Args:
        uniform: the distance of a head that attends to all patches equally.
    """
    blocks, every = range(1, len(distances) + 1), [*chain(*distances)]
    x = Scale(0.5, len(distances) + 0.5, LEFT, RIGHT)
    panel = Panel(x, Scale(0, 1.06 * max(*every, uniform), 250, 24))
    shown = [block for block in blocks if block == 1 or block % max(1, len(distances) // 8) == 0]
    parts = [panel.axes(svg.numbers(shown), svg.numbers(svg.ticks(0, panel.y.high)), "block", "pixels")]
    parts.append(
        panel.line([x.low, x.high], [uniform, uniform], 1, f"all patches equally: {uniform:.1f} pixels", "dotted")
    )
    for block, heads in zip(blocks, distances, strict=True):
        for head, pixels in enumerate(heads, 1):
            parts.append(
                panel.mark(block, pixels, 0, f"block {block}, head {head}: {pixels:.1f} pixels", style="hollow")
            )
    legend = [("a head", 0, 0), ("attends to all patches equally", 1, 0)]
    return svg.figure("Attention distance of each head by block", 288, *parts, legend=legend)


def interval(value: float, line: Mapping[str, Any], scale: Scale, colour: int) -> Markup:
    """Draw a value with its line's interval as a dot and a line; the scale's positions are percents."""
    title = f"{value:.1%}, 95% interval {line['low']:.1%} to {line['high']:.1%}"
    return _dot(line["low"], value, line["high"], scale, title, svg.series(colour))


def difference(verdict: Mapping[str, Any], scale: Scale) -> Markup:
    """Draw a comparison's difference as a dot with its interval, and zero as a line."""
    low, value, high = (verdict[name] for name in ("low", "difference", "high"))
    title = f"{100 * value:+.1f} points, 95% interval {100 * low:+.1f} to {100 * high:+.1f}"
    colour = {"above zero": "good", "below zero": "bad"}.get(verdict["conclusion"], "quiet")
    at = f"{scale.at(0):.2f}%"
    zero = element("line", x1=at, x2=at, y1="0", y2="100%", class_="zero")
    return _dot(low, value, high, scale, title, colour, zero)


def _dot(low: float, value: float, high: float, scale: Scale, title: str, colour: str, *parts: Markup) -> Markup:
    """Draw a dot and its interval; without a viewBox, so it is as wide as its cell while the dot stays round."""
    first, middle, last = (f"{scale.at(place):.2f}%" for place in (low, value, high))
    span = element("line", x1=first, x2=last, y1="50%", y2="50%")
    dot = element("circle", cx=middle, cy="50%", r=3.5)
    return element("svg", element("g", *parts, span, dot, title=title), class_=f"dots {colour}")


def axis(scale: Scale, sign: str = "") -> Markup:
    """Return the ticks of `interval`s and `difference`s, in percent or points."""
    found = next(found for most in (3, 4, 5) if len(found := svg.ticks(scale.low, scale.high, most)) > 1)
    texts = [
        element(
            "text",
            f"{100 * tick:{sign if tick else ''}g}".replace("-", "−"),
            x=f"{scale.at(tick):.2f}%",
            y=14,
            text_anchor="middle",
        )
        for tick in found
    ]
    return element("svg", *texts, class_="dots", aria_hidden="true")


def lineage(stages: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw what each stage was made from, left to right; members of a matrix share a box, with their time added up.

    Args:
        stages: the stages of report.json.
    """
    names = {stage["artifact"]: stage["stage"].partition("@")[0] for stage in stages}
    members: dict[str, list[Mapping[str, Any]]] = {}
    for stage in stages:
        members.setdefault(names[stage["artifact"]], []).append(stage)
    before = {
        name: {names[key] for each in group for keys in each["inputs"].values() for key in keys if key in names}
        - {name}
        for name, group in members.items()
    }
    depth: dict[str, int] = {}
    for name in TopologicalSorter(before).static_order():
        depth[name] = max((depth[other] + 1 for other in before[name]), default=0)
    deepest, used = max(depth.values()), set().union(*before.values())
    # results stand at the right
    depth |= {name: deepest for name in members if name not in used and before[name]}
    columns = [[name for name in members if depth[name] == level] for level in range(deepest + 1)]
    width, height = BOX + 28, 46 * max(map(len, columns))
    places = {
        name: (level * width, (row + 0.5) * height / len(column))
        for level, column in enumerate(columns)
        for row, name in enumerate(column)
    }
    parts = [_edge(places[other], places[name]) for name in members for other in sorted(before[name])]
    for name, group in members.items():
        parts.append(_node(*places[name], name, group))
    return svg.figure("What each result was made from", height, *parts, width=len(columns) * width - 28)


def _edge(start: tuple[float, float], end: tuple[float, float]) -> Markup:
    x, left = start[0] + BOX, end[0]
    path = f"M{x:g} {start[1]:.1f}C{x + 20:g} {start[1]:.1f} {left - 20:g} {end[1]:.1f} {left:g} {end[1]:.1f}"
    return element("path", d=path, class_="edge", aria_hidden="true")


def _node(x: float, y: float, name: str, group: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw a stage as a box with its job and its time."""
    seconds, count = sum(stage["seconds"] for stage in group), len(group)
    about = f"{group[0]['job']}{f' ×{count}' if count > 1 else ''}, {seconds:,.0f} s"
    parts = [
        element("rect", x=x, y=y - 18, width=BOX, height=36, rx=5, class_="node"),
        svg.text(x + 7, y - 3, _cut(name), "start", class_="name"),
        svg.text(x + 7, y + 11, about, "start", class_="about"),
    ]
    return element("g", *parts, title=f"{name}: {about}")


def confusion(class_names: Sequence[str], counts: np.ndarray) -> Markup:
    """Plot counts of predictions (columns) by label (rows), correct blue, wrong orange, shaded by share of the row."""
    size, shares = len(class_names), counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    names = [_cut(name) for name in class_names]
    longest = max(map(len, names))
    left = max(54.0, 24.0 + 6.5 * longest)
    cell = min(38.0, max(13.0, (WIDTH - left) / size))  # a line of text
    top = 24 + (6.5 * longest if (is_turned := longest > 3) else 12)
    look = {"class_": "small"} if cell < 18 else {}
    parts = [svg.text(left, 12, "prediction →", "start"), svg.text(left - 8, 12, "label ↓", "end")]
    for place, name in enumerate(names):
        middle = (place + 0.5) * cell
        x, y = left + middle, top - 6
        turn = {"transform": f"rotate(-90 {x + 4:.1f} {y:.1f})"} if is_turned else {}
        parts.append(svg.text(x + 4 * is_turned, y, name, "start" if is_turned else "middle", **turn, **look))
        parts.append(svg.text(left - 8, top + middle + 4, name, "end", **look))
    for row, column in zip(*counts.nonzero(), strict=True):
        share, is_correct = shares[row, column], row == column
        opacity = 0.12 + 0.6 * share if is_correct else min(0.9, 0.2 + 2 * share)
        x, y = left + column * cell, top + row * cell
        said = f"{class_names[row]} predicted as {class_names[column]}: {counts[row, column]:,} ({share:.1%})"
        box = {"x": x, "y": y, "width": cell, "height": cell, "fill_opacity": float(opacity)}
        parts.append(element("rect", class_=svg.series(int(not is_correct)), title=said, **box))
        if size <= 15:
            label = f"{counts[row, column]:g}"
            parts.append(svg.text(x + cell / 2, y + cell / 2 + 4, label, class_="count", aria_hidden="true"))
    label, width = "Confusion matrix: labels down, predictions across", max(WIDTH, left + size * cell + 4)
    return svg.figure(label, top + size * cell + 4, *parts, width=width)


def _value(value: Any) -> str:
    """Return a value that is not a number as a label under an axis."""
    if isinstance(value, dict):
        return "\n".join(f"{name.replace('_', ' ')} {inner}" for name, inner in value.items())
    return "none" if value is None else _cut(str(value))


def _cut(name: str) -> str:
    """Shorten a name to fit under an axis."""
    return name if len(name) <= 16 else f"{name[:15]}…"
