"""Studies: what the members of a matrix measured, by what they differ in.

In: lines of report.json. Out: plain dictionaries, one per stage with a matrix and metric. `x` is the axis with the most
numbers, or without numbers the one with the most values; a line is a combination of the other axes, apart from seeds,
over which its values are averaged.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from scipy.stats import t

from pipelines.spec import quantity
from ray_jobs.evaluation.rows import is_reference
from ray_jobs.reporting.verdicts import sort_of_learning

DEV_LOSS, DEV_ACCURACY, TEST_ACCURACY = "loss on dev", "accuracy on dev", "accuracy on test"
LEVEL = 0.95  # of the intervals over seeds


class Measured(NamedTuple):
    """A number of a member of a matrix."""

    stage: str
    metric: str
    setting: str
    """what else distinguishes it: the task, the protocol and the labels; or empty"""
    place: dict[str, str]
    """axis -> label, as in the member's name"""
    value: float


def studies(numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the studies among the stages of report.json."""
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for each in members(numbers):
        groups.setdefault((each.stage, each.metric, each.setting), []).append(each)
    found = [study for group in groups.values() if (study := _study(group)) is not None]
    # the section about accuracy and cost compares backbones
    return [each for each in found if each["has_order"] or each["metric"] != TEST_ACCURACY or not numbers["costs"]]


def members(numbers: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield the results on dev of pretrainings, and the accuracies on test of models, of members of a matrix."""

    def of(member: str, metric: str, setting: str, value: float) -> Iterator[Measured]:
        stage, _, named = member.partition("@")
        place = {
            axis: label for axis, is_there, label in (part.partition("=") for part in named.split(",")) if is_there
        }
        if place:
            yield Measured(stage, metric, setting, place, value)

    for curve in numbers["pretraining"]:
        for measured in numbers["measured_in_training"].get(curve["artifact"], ()):
            if measured["name"] == "dev":
                for metric, values in ((DEV_LOSS, measured["losses"]), (DEV_ACCURACY, measured["accuracies"])):
                    if values:
                        yield from of(curve["stage"], metric, "", values[-1])
    for line in numbers["accuracies"]:
        if not line["apart"] and not is_reference(line["method"]):
            learning = sort_of_learning(line["protocol"])
            setting = f"{line['method']} on {line['task']}, {learning}, {line['labels'].partition(' (')[0]}"
            yield from of(line["stage"], TEST_ACCURACY, setting, line["accuracy"])


def _study(group: Sequence[Measured]) -> dict[str, Any] | None:
    """Return the study of a stage's metric; None if its members differ in their seeds alone."""
    labels: dict[str, dict[str, None]] = {}  # axis -> its labels
    for each in group:
        for axis, label in each.place.items():
            labels.setdefault(axis, {})[label] = None
    axes = {axis: [*found] for axis, found in labels.items() if len(found) > 1 and not _is_seed(axis)}
    if not axes:
        return None
    numeric = [axis for axis, found in axes.items() if all(map(_is_number, found))]
    x = max(numeric or axes, key=lambda axis: len(axes[axis]))
    ticks = {label: float(label) for label in sorted(axes[x], key=float)} if numeric else _numbered(axes[x])
    others = sorted((axis for axis in axes if axis != x), key=lambda axis: len(axes[axis]))
    *panel_axes, line_axis = others or [x]
    panels: dict[str, dict[str, dict[float, list[float]]]] = {}
    for each in group:
        place = each.place
        panel = ", ".join(f"{axis}={place.get(axis)}" for axis in panel_axes)
        line = f"{line_axis}={place.get(line_axis)}" if others else ""
        panels.setdefault(panel, {}).setdefault(line, {}).setdefault(ticks[place[x]], []).append(each.value)
    return {
        "stage": group[0].stage,
        "metric": group[0].metric,
        "setting": group[0].setting,
        "x": x,
        "ticks": ticks,
        "has_order": bool(numeric),
        "panels": [
            {"name": panel, "lines": [{"name": line, "points": _points(values)} for line, values in lines.items()]}
            for panel, lines in panels.items()
        ],
    }


def _numbered(labels: Sequence[str]) -> dict[str, float]:
    return {label: float(number) for number, label in enumerate(labels)}


def _points(values: Mapping[float, Sequence[float]]) -> list[dict[str, Any]]:
    """Return {x, mean, margin, repeats} by ascending x; the margin is half of the interval, None for one value."""
    points = []
    for x, some in sorted(values.items()):
        count = len(some)
        scale = t.ppf((1 + LEVEL) / 2, count - 1) / count**0.5 if count > 1 else None
        margin = None if scale is None else float(scale) * statistics.stdev(some)
        points.append({"x": x, "mean": statistics.mean(some), "margin": margin, "repeats": count})
    return points


def best(study: Mapping[str, Any], line: Mapping[str, Any]) -> float:
    """Return where a line is best: its lowest loss or its highest accuracy."""
    sign = 1 if study["metric"] == DEV_LOSS else -1
    return float(min(line["points"], key=lambda point: sign * point["mean"])["x"])


def headline(study: Mapping[str, Any]) -> str:
    """Say where the lines of a study are best."""
    names = {value: label for label, value in study["ticks"].items()}
    places = [best(study, line) for panel in study["panels"] for line in panel["lines"]]
    counts = {place: places.count(place) for place in sorted(set(places))}
    which = "lowest" if study["metric"] == DEV_LOSS else "highest"
    said = f"the {which} {study['metric']} of {study['stage']} is at {study['x']}="
    if len(places) == 1:
        return f"{said}{names[places[0]]}."
    if len(counts) == 1:
        return f"{said}{names[places[0]]} in all {quantity(len(places), 'setting')}."
    several = [f"{names[place]} in {count}" for place, count in counts.items()]
    return f"{said}{_listed(several)} of {quantity(len(places), 'setting')}."


def _listed(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}"


def _is_seed(axis: str) -> bool:
    """Return whether an axis's values are seeds, which are averaged over."""
    return axis.rpartition(".")[2] == "seed"


def _is_number(label: str) -> bool:
    """Return whether a label is a finite number."""
    try:
        return abs(float(label)) < float("inf")
    except ValueError:
        return False
