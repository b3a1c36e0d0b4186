"""Accuracy and cost of the backbones that were scored in the same way.

In: `Entry`s, and the stages with their cost.json (`ray_jobs.evaluation.cost`). Out: plain dictionaries for report.json,
and the points of plots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ray_jobs.evaluation.cost import COST, Cost
from ray_jobs.evaluation.rows import ACCURACY
from ray_jobs.reporting import provenance
from ray_jobs.reporting.drawing import plots
from ray_jobs.reporting.measures import Entry
from ray_jobs.reporting.provenance import Part
from ray_jobs.reporting.studies import split, without_seeds
from ray_jobs.reporting.verdicts import comparable, is_compared, kind, labels_text


def costs(entries: Sequence[Entry], parts: Sequence[Part], classes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return a group for each task, protocol and number of labels that several backbones were scored with.

    A group's lines are the backbones with a cost.json, the most accurate first. `minus_best` is the paired difference
    from the first one.

    Args:
        classes: artifact -> the number of classes that it was scored on, if that is known.
    """
    known = {manifest.key: cost for _, manifest, folder in parts if (cost := _read(folder)) is not None}
    backbones = provenance.backbones(parts)
    names = {manifest.key: stage for stage, manifest, _ in parts}
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        is_backbone = entry.artifact in known and entry.artifact in backbones
        if is_backbone and kind(entry) == "trained" and is_compared(entry, entries):
            groups.setdefault((entry.task, entry.protocol, entry.labels_per_class), []).append(entry)
    compared = []
    for (task, protocol, labels), group in groups.items():
        keys = [backbones[entry.artifact] for entry in group]
        if len(set(keys)) < 2:
            continue
        ranked = sorted(group, key=lambda entry: -entry.accuracy.value)
        compared.append(
            {
                "task": task,
                "protocol": protocol,
                "labels": labels_text(labels, classes.get(group[0].artifact)),
                "backbones": len(set(keys)),
                "lines": [
                    {
                        "backbone": names.get(backbones[entry.artifact], entry.stage)
                        if keys.count(backbones[entry.artifact]) == 1
                        else entry.stage,
                        "stage": entry.stage,
                        "artifact": entry.artifact,
                        "accuracy": entry.accuracy.value,
                        "low": entry.accuracy.low,
                        "high": entry.accuracy.high,
                        "minus_best": _minus_best(entry, ranked[0]),
                        **known[entry.artifact].model_dump(mode="json"),
                    }
                    for entry in ranked
                ],
            }
        )
    return compared


def points(groups: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, list[plots.CostPoint]]]:
    """Return task -> (label of the cost axis, points of the plot).

    The cost is the measured speed of the forward pass; if the machines differ, or a matrix compares sizes, it is the
    FLOPs per image, which do not depend on the machine. Members of a matrix that differ in their seeds are one point,
    their mean, and have their stage's name.
    """
    by_task: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for group in groups:
        series = f"{group['protocol']}, {group['labels'].partition(' (')[0]}"
        by_task.setdefault(group["task"], []).extend((series, line) for line in group["lines"])
    plotted = {}
    for task, lines in by_task.items():
        is_matrix = any("@" in line["backbone"] for _, line in lines)
        is_speed = not is_matrix and len({(line["device"], line["threads"]) for _, line in lines}) == 1
        unit, cheap = ("images/s", "right") if is_speed else ("GFLOPs per image", "left")
        models: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        for series, line in lines:
            stage, place = split(line["backbone"])
            cost = line["forward"]["images_per_second"] if is_speed else line["gflops"]
            models.setdefault((stage, without_seeds(place), series), []).append((cost, line["accuracy"]))
        plotted[task] = (
            f"{unit}, forward pass ({cheap}: cheaper)",
            [
                plots.CostPoint(stage, series, *map(fmean, zip(*measured, strict=True)))
                for (stage, _, series), measured in models.items()
            ],
        )
    return plotted


def _read(folder: Path) -> Cost | None:
    """Return an artifact's cost; None if its stage does not measure one."""
    path = folder / COST
    return Cost.model_validate_json(path.read_text("utf-8")) if path.is_file() else None


def _minus_best(entry: Entry, best: Entry) -> dict[str, float] | None:
    """Return the paired difference from the best entry; None for itself, or if they were scored on other images."""
    if entry is best or not comparable(entry, best):
        return None
    return entry.minus(best, ACCURACY)._asdict()
