"""Studies: what the members of a matrix measured, by what they differ in.

In: lines of report.json. Out: plain dictionaries, one per stage with a matrix and metric. `x` is the axis with the most
numbers, or without numbers the one with the most values; a line is a combination of the other axes, apart from seeds,
over which its values are averaged. On test, only the learning rate whose pretraining is best on dev is shown, for
each combination, if the members differ in more than the rate. If there are two lines, they are subtracted seed by seed;
on a single line, so is the second best from the best.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from scipy.stats import t

from pipelines.spec import quantity
from ray_jobs.evaluation.rows import ACCURACY, AP, MEAN_AP, MEAN_IOU, is_reference
from ray_jobs.reporting.verdicts import labels_text, points

DEV_LOSS, DEV_ACCURACY, ON_TEST = "loss on dev", "accuracy on dev", " on test"
TEST_ACCURACY = f"{ACCURACY}{ON_TEST}"
LEVEL = 0.95  # of the intervals over seeds
FEW = 4  # panels that a headline tells apart
RATE = "learning_rate"  # the axis that is chosen on dev
LABELS = "per_class"  # the axis of the number of labels

Values = dict[float, dict[str, float]]
"""What a line shows: x -> seed -> value."""


class Measured(NamedTuple):
    """A number of a member of a matrix."""

    stage: str
    metric: str
    setting: str
    """what else distinguishes it: the task, the protocol and the labels; or empty"""
    place: dict[str, str]
    """axis -> label, as in the member's name"""
    value: float
    method: str = ""
    trained: tuple[str, float] | None = None
    """DEV_LOSS or DEV_ACCURACY of the pretraining that an evaluation is about"""
    rate: str | None = None
    """the learning rate that was chosen on dev among others, which are left out"""
    artifact: str = ""
    """of an evaluation"""


def studies(numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the studies among the stages of report.json."""
    references = _references(numbers)
    found = [
        study | {"references": references.get((part[0].stage, part[0].metric, part[0].setting), {})}
        for group in _groups(numbers)
        for part in _of_one_method(group)
        if (study := _study(part))
    ]
    # the section about accuracy and cost compares backbones, but not their seeds
    is_elsewhere = bool(numbers["costs"])
    return [each for each in found if is_whole(each) or each["metric"] != TEST_ACCURACY or not is_elsewhere]


def left_out(numbers: Mapping[str, Any]) -> set[str]:
    """Return the evaluations of models whose learning rate is not the one that was chosen on dev."""
    groups = _groups(numbers)
    return {each.artifact for each in chain(*groups)} - {each.artifact for each in chain(*map(_tuned, groups))}


def _groups(numbers: Mapping[str, Any]) -> list[list[Measured]]:
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for each in members(numbers):
        groups.setdefault((each.stage, each.metric, each.setting), []).append(each)
    return [*groups.values()]


def is_whole(study: Mapping[str, Any]) -> bool:
    """Return whether a study is of numbers, or of seeds whose spread it shows."""
    return bool(study["has_order"]) or is_repeated(study)


def is_repeated(study: Mapping[str, Any]) -> bool:
    """Return whether some of a study's values are of several seeds."""
    lines = (line for panel in study["panels"] for line in panel["lines"])
    return any(point["repeats"] > 1 for line in lines for point in line["points"])


def members(numbers: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield the results on dev of pretrainings, and what models reach on test, of members of a matrix."""
    trained: dict[str, tuple[str, float]] = {}
    for curve in numbers["pretraining"]:
        for measured in numbers["measured_in_training"].get(curve["artifact"], ()):
            if measured["name"] == "dev":
                stage, place = split(curve["stage"])
                for metric, values in ((DEV_LOSS, measured["losses"]), (DEV_ACCURACY, measured["accuracies"])):
                    if values:
                        trained[curve["artifact"]] = metric, values[-1]
                        if place:
                            yield Measured(stage, metric, "", place, values[-1])
    for line in _studied(numbers):
        stage, place = split(line["stage"])
        if place and not line["apart"] and not is_reference(line["method"]):
            dev = trained.get(line.get("backbone", ""))
            measured = Measured(stage, line["metric"], _setting(line), place, line["value"], line["method"], dev)
            yield measured._replace(artifact=line["artifact"])


def on_test(numbers: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of everything that was measured on test, with its metric and value."""
    for line in numbers["accuracies"]:
        yield line | {"metric": ACCURACY, "value": line["accuracy"]}
    for line in (*numbers.get("other_metrics", ()), *numbers.get("detectors", ())):
        if line["value"] is not None:  # an AP without a box
            yield line


def _studied(numbers: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of accuracies, mAP, mIoU and AP, with their labels."""
    for line in on_test(numbers):
        if line["metric"] in (ACCURACY, MEAN_AP, MEAN_IOU, AP):
            labels = line["labels"] if "labels" in line else labels_text(line["labels_per_class"], None)
            yield line | {"metric": f"{line['metric']}{ON_TEST}", "labels": labels}


def _references(numbers: Mapping[str, Any]) -> dict[tuple[str, str, str], dict[str, tuple[float, float]]]:
    """Return (stage, metric, setting) -> the lowest and the highest value of each reference, such as pixels."""
    found: dict[tuple[str, str, str], dict[str, tuple[float, float]]] = {}
    for line in _studied(numbers):
        if is_reference(line["method"]):
            setting = split(line["stage"])[0], line["metric"], _setting(line)
            ends = found.setdefault(setting, {})
            low, high = ends.get(line["method"], (1.0, 0.0))
            ends[line["method"]] = min(low, line["value"]), max(high, line["value"])
    return found


def _setting(line: Mapping[str, Any]) -> str:
    """Say what was measured, without the number of labels if that is an axis."""
    labels = [] if LABELS in split(line["stage"])[1] else [line["labels"].partition(" (")[0]]
    return ", ".join([line["task"], line["protocol"], *labels])


def split(member: str) -> tuple[str, dict[str, str]]:
    """Return the stage of a member's name, and its labels by axis: none if its stage has no matrix."""
    stage, _, named = member.partition("@")
    return stage, dict(part.split("=", 1) for part in named.split(",") if "=" in part)


def without_seeds(place: Mapping[str, str]) -> str:
    """Return a member's labels except its seeds, as one text."""
    return ",".join(f"{axis}={label}" for axis, label in place.items() if not is_seed(axis))


def _of_one_method(group: Sequence[Measured]) -> list[list[Measured]]:
    """Return a stage's numbers as one group if each member has one method, and otherwise by method."""
    if len({str(each.place) for each in group}) == len(group):
        return [[*group]]
    methods: dict[str, list[Measured]] = {}
    for each in group:
        methods.setdefault(each.method, []).append(each)
    return [*methods.values()]


def _tuned(group: Sequence[Measured]) -> list[Measured]:
    """Keep, of each combination, the learning rate whose pretraining is the best on dev.

    Without another axis, or without the results on dev, all are kept.
    """

    def without_rate(each: Measured) -> dict[str, str]:
        return {axis: label for axis, label in each.place.items() if axis != RATE}

    def combination(each: Measured) -> str:
        return without_seeds(without_rate(each))

    scores: dict[str, dict[str, list[float]]] = {}
    for each in group:
        if each.trained is None or RATE not in each.place or not combination(each):
            return [*group]
        metric, value = each.trained
        score = -value if metric == DEV_LOSS else value
        scores.setdefault(combination(each), {}).setdefault(each.place[RATE], []).append(score)
    best = {combined: max(rates, key=lambda rate: statistics.mean(rates[rate])) for combined, rates in scores.items()}
    return [
        each._replace(place=without_rate(each), rate=each.place[RATE])
        for each in group
        if each.place[RATE] == best[combination(each)]
    ]


def _study(group: Sequence[Measured]) -> dict[str, Any] | None:
    """Return the study of a stage's metric; None if its members differ in their seeds alone."""
    group = _tuned(group)
    labels: dict[str, dict[str, None]] = {}  # axis -> its labels
    for each in group:
        for axis, label in each.place.items():
            labels.setdefault(axis, {})[label] = None
    axes = {axis: [*found] for axis, found in labels.items() if len(found) > 1 and not is_seed(axis)}
    if not axes:
        return None
    numeric = [axis for axis, found in axes.items() if all(map(_is_number, found))]
    x = max(numeric or axes, key=lambda axis: len(axes[axis]))
    ticks = {label: float(number) for number, label in enumerate(axes[x])}
    if numeric:
        ticks = {label: float(label) for label in sorted(axes[x], key=float)}
    others = sorted((axis for axis in axes if axis != x), key=lambda axis: len(axes[axis]))
    *panel_axes, line_axis = others or [x]
    panels: dict[str, dict[str, Values]] = {}
    rates: dict[tuple[str, str, float], str | None] = {}
    for each in group:
        place = each.place
        panel = ", ".join(f"{axis}={place.get(axis)}" for axis in panel_axes)
        line = f"{line_axis}={place.get(line_axis)}" if others else ""
        seed = ",".join(label for axis, label in place.items() if is_seed(axis))
        rates[panel, line, ticks[place[x]]] = each.rate
        panels.setdefault(panel, {}).setdefault(line, {}).setdefault(ticks[place[x]], {})[seed] = each.value
    methods = {each.method: None for each in group if each.method}
    return {
        "stage": group[0].stage,
        "metric": group[0].metric,
        "methods": " and ".join(methods),
        "setting": group[0].setting,
        "x": x,
        "ticks": ticks,
        "has_order": bool(numeric),
        "panels": [
            {
                "name": panel,
                "lines": [
                    {
                        "name": line,
                        "points": [point | {"rate": rates[panel, line, point["x"]]} for point in _points(values)],
                    }
                    for line, values in lines.items()
                ],
                "difference": _difference(*lines.values()) if len(panels) == 1 and len(lines) == 2 else [],
            }
            for panel, lines in panels.items()
        ],
        "lead": _lead(next(iter(panels[""].values())), group[0].metric) if not others else None,
    }


def _difference(first: Values, second: Values) -> list[dict[str, Any]]:
    """Return the second line minus the first, seed by seed, where both have at least two common seeds."""
    minus = {
        x: {seed: second[x][seed] - value for seed, value in values.items() if seed in second.get(x, {})}
        for x, values in first.items()
    }
    return _points({x: values for x, values in minus.items() if len(values) > 1})


def _lead(values: Values, metric: str) -> dict[str, Any] | None:
    """Return the second best x of the best one's seeds and by how much it is behind; None without several seeds."""
    sign = -1 if metric == DEV_LOSS else 1
    first, *others = sorted(values, key=lambda x: (-sign * statistics.mean(values[x].values()), x))
    alike = [x for x in others if {*values[x]} == {*values[first]} and len(values[x]) > 1]
    if not alike:
        return None
    minus = {seed: sign * (value - values[alike[0]][seed]) for seed, value in values[first].items()}
    return _points({alike[0]: minus})[0] | {"is_next": alike[0] == others[0]}


def _points(values: Values) -> list[dict[str, Any]]:
    """Return {x, mean, margin, repeats} by ascending x; the margin is half of the interval, None for one value."""
    points = []
    for x, seeds in sorted(values.items()):
        some, count = [*seeds.values()], len(seeds)
        scale = t.ppf((1 + LEVEL) / 2, count - 1) / count**0.5 if count > 1 else None
        margin = None if scale is None else float(scale) * statistics.stdev(some)
        points.append({"x": x, "mean": statistics.mean(some), "margin": margin, "repeats": count, "rate": None})
    return points


def best(study: Mapping[str, Any], line: Mapping[str, Any]) -> list[float]:
    """Return where a line has its lowest loss or its highest accuracy, which may be several places."""
    extreme = (min if study["metric"] == DEV_LOSS else max)(point["mean"] for point in line["points"])
    return [point["x"] for point in line["points"] if point["mean"] == extreme]


def question(study: Mapping[str, Any]) -> str:
    """Return what a study answers."""
    panel = study["panels"][0]
    if panel["difference"]:
        return f"Which {panel['lines'][0]['name'].partition('=')[0]} is better, by {study['x']}?"
    return f"Which {study['x']} is best?"


def headline(study: Mapping[str, Any]) -> str:
    """Say where one of two lines lies above the other, or where lines are best; and which reference is above all."""
    means = [point["mean"] for panel in study["panels"] for line in panel["lines"] for point in line["points"]]
    above = {name: low for name, (low, _) in study.get("references", {}).items() if low > max(means)}
    if not above:
        return _where_best(study)
    name = max(above, key=lambda name: above[name])
    return f"{_where_best(study)} All {'means ' * is_repeated(study)}are below {name} ({100 * above[name]:.1f}%)."


def _where_best(study: Mapping[str, Any]) -> str:
    if study["panels"][0]["difference"]:
        return _crossing(study)
    names = {value: label for label, value in study["ticks"].items()}
    all_places = [best(study, line) for panel in study["panels"] for line in panel["lines"]]
    places = [first for first, *_ in all_places]
    counts = {place: places.count(place) for place in sorted(set(places))}
    which = "lowest" if study["metric"] == DEV_LOSS else "highest"
    said = f"the {which} {_measured(study)} is at {study['x']}="
    if len(places) == 1:
        return f"{said}{_listed(names[place] for place in all_places[0])}{_behind(study, names)}."
    fewer = sum(_has_fewer_seeds(study, line) for panel in study["panels"] for line in panel["lines"])
    end = f"; {fewer} of these best values {'are' if fewer > 1 else 'is'} of fewer seeds than others." if fewer else "."
    if study["has_order"] and 1 < len(study["panels"]) <= FEW:
        return f"{said}{_listed(_range(study, panel, names) for panel in study['panels'])}{end}"
    if len(counts) == 1:
        return f"{said}{names[places[0]]} in all {quantity(len(places), 'setting')}{end}"
    several = [f"{names[place]} in {count}" for place, count in counts.items()]
    return f"{said}{_listed(several)} of {quantity(len(places), 'setting')}{end}"


def _range(study: Mapping[str, Any], panel: Mapping[str, Any], names: Mapping[float, str]) -> str:
    """Say between which x the lines of a panel are best."""
    places = [best(study, line)[0] for line in panel["lines"]]
    ends = dict.fromkeys((names[min(places)], names[max(places)]))
    return f"{' to '.join(ends)} with {panel['name']}"


def _behind(study: Mapping[str, Any], names: Mapping[float, str]) -> str:
    """Say by how much the second best of a single line is behind, or that the best was measured once; or nothing."""
    if _has_fewer_seeds(study, study["panels"][0]["lines"][0]):
        return ", of fewer seeds than others"
    if not (lead := study.get("lead")) or lead["mean"] == 0:
        return ""
    amount, low, high = (_shown(study, lead["mean"] + side * lead["margin"]) for side in (0, -1, 1))
    how = " more" if study["metric"] == DEV_LOSS else " points less"
    which = "the next" if lead["is_next"] else "the next of the same seeds"
    return f"; {which}, {names[lead['x']]}, has {amount}{how} (95% interval over seeds {low} to {high})"


def _has_fewer_seeds(study: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    """Return whether a line's best value is of fewer seeds than another of its values."""
    repeats = {point["x"]: point.get("repeats", 1) for point in line["points"]}
    return min(repeats[x] for x in best(study, line)) < max(repeats.values())


def _crossing(study: Mapping[str, Any]) -> str:
    """Say at which x the second line lies above the first, at which below, and where the seeds do not tell."""
    names = {value: label for label, value in study["ticks"].items()}
    first, second = (line["name"] for line in study["panels"][0]["lines"])
    places: dict[str, list[str]] = {"above": [], "below": [], "not told": []}
    for point in study["panels"][0]["difference"]:
        low, high = point["mean"] - point["margin"], point["mean"] + point["margin"]
        side = "above" if low > 0 else "below" if high < 0 else "not told"
        sign = -1 if side == "below" else 1
        shown = [_shown(study, sign * value) for value in (point["mean"], *(low, high)[::sign])]
        unit = "" if study["metric"] == DEV_LOSS else " points"
        places[side].append(f"{names[point['x']]} ({shown[0]}{unit}, 95% interval {shown[1]} to {shown[2]})")
    of = _measured(study) + " (lower is better)" * (study["metric"] == DEV_LOSS)
    told = [f"{side} {first} at {study['x']}={_listed(places[side])}" for side in ("above", "below") if places[side]]
    parts = [f"in {of}, {second} lies {' and '.join(told)}"] if told else []
    if places["not told"]:
        them = "them" if told else f"{first} and {second}, in {of},"
        parts.append(f"the seeds do not tell {them} apart at {study['x']}={_listed(places['not told'])}")
    return f"{'; '.join(parts)}."


def _measured(study: Mapping[str, Any]) -> str:
    setting = f" ({study['setting']})" if study["setting"] else ""
    return f"{study['metric']} of {study['stage']}{setting}"


def _shown(study: Mapping[str, Any], value: float) -> str:
    return f"{value:.3f}".replace("-", "−") if study["metric"] == DEV_LOSS else points(value, sign="")


def _listed(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def is_seed(axis: str) -> bool:
    """Return whether an axis's values are seeds, which are averaged over."""
    return axis.rpartition(".")[2] == "seed"


def _is_number(label: str) -> bool:
    """Return whether a label is a finite number."""
    try:
        return abs(float(label)) < float("inf")
    except ValueError:
        return False
