"""Two results compared: their accuracies side by side, and the differences.

Out: dictionaries for JSON, and a rich table. Text from outside (class and method names) is never read as markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from pipelines.results.accuracies import add_headings, labels_of, table_with_title
from pipelines.results.lookup import find_manifests
from pipelines.spec import RecipeError, nearest, quantity
from pipelines.store import FileEntry, Manifest, Store, local_files, read_manifest
from ray_jobs.detection import entries as detections
from ray_jobs.detection.tables import DETECTIONS
from ray_jobs.detection.tables import FILE as DETECTIONS_FILE
from ray_jobs.evaluation.intervals import FEWEST
from ray_jobs.evaluation.metrics import COMPUTED
from ray_jobs.evaluation.multi_label import FILE as SCORES_FILE
from ray_jobs.evaluation.multi_label import METRICS as OF_SEVERAL
from ray_jobs.evaluation.multi_label import SCORES
from ray_jobs.evaluation.rows import (
    ACCURACY,
    AP,
    CONFUSION,
    CONFUSION_FILE,
    MEAN_AP,
    MEAN_IOU,
    PREDICTIONS,
    REAL,
    ROWS,
)
from ray_jobs.reporting import measures, multi_label, verdicts
from ray_jobs.reporting.verdicts import AnyEntry

_TABLES = ("rows.parquet", "predictions.parquet", SCORES_FILE, DETECTIONS_FILE, CONFUSION_FILE)
_NAMES = ("protocol", "method", "labels_per_class")


class Pair(NamedTuple):
    """Two measurements to compare; on their common images if they were not scored on the same ones."""

    a: AnyEntry
    b: AnyEntry
    of_images: int | None = None
    """How many images the larger one has, if these are fewer."""


class Compared(NamedTuple):
    """Two results, matched: the pairs, what has no counterpart on A and on B, and why."""

    a: str
    b: str
    metric: str
    pairs: list[Pair]
    rest: tuple[list[AnyEntry], ...]
    reasons: list[str]


def as_json(compared: Compared) -> dict[str, Any]:
    """Return {a, b, metric, both, only_a, only_b, reasons}.

    `both` has {task, protocol, method, labels_per_class, a, b, difference}: first the settings that both measured, then
    other methods on the same test images (`_matched`), with null for the names in which the two differ. `only_a` and
    `only_b` have the rest, and `reasons` say why it has no counterpart. Accuracies are {protocol, method,
    labels_per_class, accuracy, low, high, draws, num_images, stage, artifact}, differences {value, low, high, paired}:
    B - A with its 95% interval, as fractions. All three numbers are over the images that both have in common,
    `num_images` of `of_images`. The intervals are not adjusted for multiple comparisons.
    """
    only = [[{"task": entry.task} | measured_line(entry, compared.metric) for entry in rest] for rest in compared.rest]
    return {
        "a": compared.a,
        "b": compared.b,
        "metric": compared.metric,
        "both": [_pair(pair, compared.metric) for pair in compared.pairs],
        "only_a": only[0],
        "only_b": only[1],
        "reasons": compared.reasons,
    }


def match(store: Store, a: str, b: str, metric: str = "accuracy") -> Compared:
    """Match the measurements of two results.

    Args:
        metric: accuracy, or the name of a metric computed from predictions, whose name then replaces `accuracy`. Where
            neither has an accuracy, it means mAP (of several labels per image), AP (of boxes) or mIoU (of masks).

    Raises:
        RecipeError: A or B matches no measured accuracies, or there is no such metric.
    """
    known = list(dict.fromkeys(["accuracy", *(computed.name for computed in COMPUTED), *OF_SEVERAL, AP, MEAN_IOU]))
    if metric not in known:
        raise RecipeError(f"--metric {metric}: no such metric{nearest(metric, known)}")
    measured = [measurements(store, _measured(store, selector)) for selector in (a, b)]
    if metric == ACCURACY and not any(side.entries for side in measured):
        found = {entry.metric for side in measured for entry in side.scored}
        metric = next((other for other in (MEAN_AP, AP, MEAN_IOU) if other in found), ACCURACY)
    sides = [_entries(side, metric) for side in measured]
    for selector, side, of_side in zip((a, b), sides, measured, strict=True):
        if not side:
            few = f": fewer than {FEWEST} test images with annotations" if of_side.has_few else ""
            raise RecipeError(f"{selector}: no {metric} to compare{few}; `report list` shows its other metrics")
    settings = sorted({setting for side in sides for setting in side}, key=_sort_key)
    both = [setting for setting in settings if all(setting in side for side in sides)]
    alone = [[side[setting] for setting in settings if setting in side and setting not in both] for side in sides]
    matches, reasons = _matched(*alone)
    others = set.intersection(*({entry.metric for entry in (*side.entries, *side.scored)} for side in measured))
    if others - {metric} and metric in (ACCURACY, *others):
        reasons.append(f"not compared: {', '.join(sorted(others - {metric}))}, which --metric names")
    pairs = [(sides[0][setting], sides[1][setting]) for setting in both] + matches
    matched = {id(entry) for pair in matches for entry in pair}
    rest = tuple([entry for entry in entries if id(entry) not in matched] for entries in alone)
    return Compared(a, b, metric, [_on_common_images(*pair) for pair in pairs], rest, reasons)


def _on_common_images(a: AnyEntry, b: AnyEntry) -> Pair:
    """Return both entries on the images that they have in common, if there are some."""
    if isinstance(a, measures.Entry) and isinstance(b, measures.Entry) and a.sample_ids != b.sample_ids:
        common = sorted({*a.sample_ids} & {*b.sample_ids})
        if common:
            return Pair(a.of_images(common), b.of_images(common), max(len(a.sample_ids), len(b.sample_ids)))
    return Pair(a, b)


def _matched(a: Sequence[AnyEntry], b: Sequence[AnyEntry]) -> tuple[list[tuple[AnyEntry, AnyEntry]], list[str]]:
    """Match methods of different names on the same test images, such as a ViT and k-NN.

    Returns:
        The matches, and why the rest has none.
    """
    if not (a and b):
        return [], []
    matches: list[tuple[AnyEntry, AnyEntry]] = []
    reasons: list[str] = []
    images = [dict.fromkeys((entry.task, entry.sample_ids) for entry in side) for side in (a, b)]
    for common in (key for key in images[0] if key in images[1]):
        on_images = [[entry for entry in side if (entry.task, entry.sample_ids) == common] for side in (a, b)]
        pairs, missing = _matched_on(*on_images)
        matches += pairs
        reasons += [f"{common[0]}, {reason}" for reason in missing]
    if not (matches or reasons):
        tasks = [", ".join(dict.fromkeys(entry.task for entry in side)) for side in (a, b)]
        note = " (other images)" * (tasks[0] == tasks[1])
        reasons = [f"no pairs: A was scored on {tasks[0]}, B on {tasks[1]}{note}"]
    return matches, reasons


def _matched_on(a: Sequence[AnyEntry], b: Sequence[AnyEntry]) -> tuple[list[tuple[AnyEntry, AnyEntry]], list[str]]:
    """Match methods on the same images: a single method with each of the other side's with the same number of labels.

    If each side has one method in all, the numbers of labels may differ.
    """
    if len(a) == len(b) == 1:
        return [(a[0], b[0])], []
    matches: list[tuple[AnyEntry, AnyEntry]] = []
    reasons: list[str] = []
    labels_a, labels_b = (dict.fromkeys(entry.labels_per_class for entry in side) for side in (a, b))
    common = [labels for labels in labels_a if labels in labels_b]
    for labels in common:
        in_a, in_b = ([entry for entry in side if entry.labels_per_class == labels] for side in (a, b))
        if min(len(in_a), len(in_b)) == 1:
            matches += product(in_a, in_b)
        else:
            label = labels_of({"labels_per_class": labels})
            reasons.append(f"{label}: no pairs, because A has {len(in_a)} methods and B {len(in_b)} others")
    if not common:
        has_a, has_b = (
            ", ".join(labels_of({"labels_per_class": labels}) for labels in side) for side in (labels_a, labels_b)
        )
        reasons.append(f"no pairs: A has {has_a} and B {has_b}; only methods with the same labels are paired")
    return matches, reasons


def comparison_table(comparison: dict[str, Any]) -> Table:
    """Return the result of `as_json` as a table in percent, at most 80 columns wide.

    Measurements that A and B share, with an artifact, are counted and not shown.
    """
    metric = comparison["metric"]
    compared = [line for line in comparison["both"] if not _is_same(line["a"], line["b"])]
    shared = len(comparison["both"]) - len(compared)
    table = table_with_title(f"{metric} %, 95% intervals\nA: {comparison['a']}\nB: {comparison['b']}")
    table.add_column("method", overflow="fold", min_width=18)
    for name in ("A", "B", *(["B - A"] if compared else [])):
        table.add_column(name, justify="right", no_wrap=True)
    lines = [
        *compared,
        *({"task": line["task"], "a": line} for line in comparison["only_a"]),
        *({"task": line["task"], "b": line} for line in comparison["only_b"]),
    ]
    last_heading = None
    for line in lines:
        protocol, labels = of_sides(line, itemgetter("protocol")), of_sides(line, labels_of)
        method = of_sides(line, itemgetter("method"), "\n  ")
        heading = (f"{line['task']}, {protocol},", labels)
        if heading != last_heading:
            add_headings(table, *heading)
        last_heading = heading
        cells = [percent_interval(line.get(side), metric, "", "–") for side in ("a", "b")]
        if compared:
            difference = percent_interval(line.get("difference"), "value", "+", " to ")
            cells.append(difference + "".join(f" {mark}" for mark in _marks(line)))
        table.add_row(*map(Text, (f"  {method}", *cells)))
    unpaired = "† not paired: different test images, annotations or draws of labels"
    notes = [unpaired] if any("†" in _marks(line) for line in lines) else []
    for line in compared:
        if "§" in _marks(line):
            common, of_images = line["b"]["num_images"], line["of_images"]
            notes.append(f"§ over the {common:,} test images that A and B have in common, of {of_images:,}")
    if (count := len(compared)) > 1:
        notes.insert(0, f"the {count} intervals of B - A are not adjusted for multiple comparisons")
    if shared:
        notes.append(f"not shown: {quantity(shared, 'measurement')} that A and B share")
    table.caption = "\n".join(dict.fromkeys([*notes, *comparison["reasons"]])) or None
    return table


def _is_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether both sides are one measurement of one artifact."""
    return all(a[name] == b[name] for name in ("artifact", *_NAMES))


def _marks(line: dict[str, Any]) -> list[str]:
    """Return the marks of the notes that apply to a difference."""
    if "difference" not in line:
        return []
    is_part = line["b"]["num_images"] < line["of_images"]
    return ["†"] * (not line["difference"]["paired"]) + ["§"] * is_part


def of_sides(line: Mapping[str, Any], name: Callable[[dict[str, Any]], str], between: str = ", ") -> str:
    """Return the name that both sides of a line of `as_json` share, or each side's: 'A: ViT, B: k-NN'."""
    names = {side.upper(): name(line[side]) for side in ("a", "b") if side in line}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return between.join(f"{side}: {text}" for side, text in names.items())


def percent_interval(numbers: dict[str, Any] | None, name: str, sign: str, between: str) -> str:
    """Return a number, called `name`, and its interval in percent; empty without numbers."""
    if numbers is None:
        return ""
    value, low, high = (f"{100 * numbers[key]:{sign}.1f}" for key in (name, "low", "high"))
    return f"{value} ({low}{between}{high})"


def _sort_key(setting: tuple[Any, ...]) -> tuple[Any, ...]:
    task, protocol, method, labels, stage = setting
    return task, protocol, labels is None, labels or 0, method, stage or ""


def _measured(store: Store, selector: str) -> list[Manifest]:
    """Return the artifacts with measurements that a selector matches; for a report, the ones that it reports."""
    matches = find_manifests(store, selector)
    if [manifest.kind for manifest in matches] == ["report"]:
        inputs = (read_manifest(store, each.job, each.key) for each in matches[0].inputs["of"])
        matches = [manifest for manifest in inputs if manifest is not None]
    if not matches:
        raise RecipeError(f"{selector}: no committed results yet; `vitflow status` shows what its run is doing")
    measured = [manifest for manifest in matches if manifest.kind != "report" and measured_files(manifest)]
    if not measured:
        raise RecipeError(f"{selector}: no measurements; expected an evaluation, a fine-tuned model, a report or a run")
    return measured


def measured_files(manifest: Manifest) -> list[FileEntry]:
    """Return an artifact's files with measurements."""
    return [entry for entry in manifest.files if entry.path in _TABLES]


class Measurements(NamedTuple):
    """What artifacts measured on test.

    Accuracies; other metrics as a report has them; and the results behind these on images with several labels, boxes or
    masks, without those on too few images for an interval.
    """

    entries: list[measures.Entry]
    others: list[dict[str, Any]]
    scored: list[measures.ScoredEntry | detections.Entry]
    has_few: bool
    """Whether results were left out because they are on too few images for an interval."""


def measurements(store: Store, manifests: list[Manifest]) -> Measurements:
    """Return what artifacts measured on test.

    Raises:
        UserError: a table has other columns than this version's.
    """
    parts = [
        (manifest.stage, manifest, local_files(store, manifest, measured_files(manifest))) for manifest in manifests
    ]
    rows = measures.join_tables(parts, "rows.parquet", ROWS)
    predictions = measures.join_tables(parts, "predictions.parquet", PREDICTIONS)
    of_several = multi_label.entries(measures.join_tables(parts, SCORES_FILE, SCORES))
    segmented = measures.of_pixels(measures.join_tables(parts, CONFUSION_FILE, CONFUSION))
    detectors = detections.entries(measures.join_tables(parts, DETECTIONS_FILE, DETECTIONS))
    seeds = {manifest.key: measures.draw_seed(manifest) for manifest in manifests}
    every: list[measures.ScoredEntry | detections.Entry] = [*of_several, *segmented, *detectors]
    scored = [entry for entry in every if entry.has_interval]
    others = verdicts.with_intervals(measures.other_metrics(rows), scored)
    return Measurements(measures.entries(rows, predictions, seeds), others, scored, len(scored) < len(every))


def _entries(measured: Measurements, metric: str) -> dict[tuple[Any, ...], AnyEntry]:
    """Return {(task, protocol, method, labels per class, stage): `AnyEntry`}; the stage only if several measured it."""
    entries: list[AnyEntry] = [entry for entry in measured.scored if metric in entry.metrics]
    if metric == ACCURACY:
        entries += measured.entries
    elif any(metric == computed.name for computed in COMPUTED):
        entries += [entry for entry in measured.entries if not entry.task.endswith(REAL)]
    settings = [(entry.task, entry.protocol, entry.method, entry.labels_per_class) for entry in entries]
    return {
        (*setting, entry.stage if settings.count(setting) > 1 else None): entry
        for setting, entry in zip(settings, entries, strict=True)
    }


def _pair(pair: Pair, metric: str) -> dict[str, Any]:
    a: Any = pair.a  # both are of one kind
    b: Any = pair.b
    is_paired = a.labels_per_class == b.labels_per_class and verdicts.comparable(a, b)
    sides = [measured_line(side, metric) for side in (a, b)]
    if a.artifact == b.artifact and a.method == b.method:
        value = low = high = 0.0  # the same result
    elif is_paired:
        value, low, high = b.minus(a, metric)
    else:
        # the interval of a difference of independent measurements (Zou and Donner 2008, "square-and-add")
        first, second = sides
        value = second[metric] - first[metric]
        low = value - math.hypot(second[metric] - second["low"], first["high"] - first[metric])
        high = value + math.hypot(second["high"] - second[metric], first[metric] - first["low"])
    named = {name: sides[0][name] if sides[0][name] == sides[1][name] else None for name in _NAMES}
    return {
        "task": a.task,
        **named,
        "a": sides[0],
        "b": sides[1],
        "difference": {"value": value, "low": low, "high": high, "paired": is_paired},
        "of_images": pair.of_images or max(side["num_images"] for side in sides),
    }


def measured_line(entry: AnyEntry, metric: str) -> dict[str, Any]:
    """Describe a metric of an entry."""
    value, low, high = entry.interval(metric)
    return {
        **{name: getattr(entry, name) for name in _NAMES},
        metric: value,
        "low": low,
        "high": high,
        "draws": len(entry.draws),
        "num_images": len(entry.sample_ids),
        "stage": entry.stage,
        "artifact": entry.artifact,
    }
