"""The figures of the page, from the numbers of the report.

In: `Entry`s, the content of report.json, and the logs of trainings. Out: SVG by name (`plots`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from pipelines.spec import FINE_TUNED
from pipelines.store import FitName, LogLine, Manifest
from ray_jobs.evaluation.multi_label import MICRO_F1
from ray_jobs.evaluation.rows import ACCURACY, AP, MEAN_IOU, is_reference
from ray_jobs.reporting import costs
from ray_jobs.reporting.drawing import plots, svg
from ray_jobs.reporting.lines import chosen_trial
from ray_jobs.reporting.measures import Entry

# what evaluations in a training count, by a metric on test: with several labels, not the one that selects
COUNTED = {MICRO_F1: "all labels right", AP: AP, MEAN_IOU: MEAN_IOU}
Measured = Mapping[str, Sequence[plots.Measured]]  # a training's artifact -> its curves


def draw(entries: Sequence[Entry], numbers: Mapping[str, Any], measured: Measured) -> dict[str, Markup]:
    """Draw every plot that has data, by name."""
    figures = {f"cost {task}": plots.costs(*data) for task, data in costs.points(numbers["costs"]).items()}
    figures["lineage"] = plots.lineage(numbers["stages"])
    few_shot = [entry for entry in entries if entry.protocol.startswith("few-shot")]
    for protocol, task in dict.fromkeys((entry.protocol, entry.task) for entry in few_shot):
        alike = [entry for entry in few_shot if (entry.protocol, entry.task) == (protocol, task)]
        figures[f"{protocol} on {task}"] = plots.few_shot(_few_shot_curves(alike))
    losses = {curve["artifact"]: [curve["points"]] for curve in numbers["pretraining"]}
    losses |= {tuned["artifact"]: [draw["points"] for draw in tuned["draws"]] for tuned in numbers["finetuning"]}
    detected = numbers.get("detectors", ())
    for task in dict.fromkeys(line["task"] for line in detected):
        shown = [line for line in detected if line["task"] == task and not is_reference(line["method"])]
        figures[f"precision {task}"] = plots.precision_recall(shown[: svg.COLOURS])
    lines = (*numbers.get("other_metrics", ()), *detected)
    counted = {line["artifact"]: COUNTED[line["metric"]] for line in lines if line["metric"] in COUNTED}
    for artifact, draws in losses.items():
        metric = counted.get(artifact, ACCURACY)
        figures[f"loss {artifact}"] = plots.loss(draws, measured.get(artifact, ()), metric)
    for sweep in numbers["sweeps"]:
        figures[f"search {sweep['artifact']}"] = plots.search(sweep["trials"], chosen_trial(sweep))
    for number, study in enumerate(numbers.get("studies", ())):
        figures |= {f"study {number} {place}": drawn for place, drawn in enumerate(plots.study(study))}
    for inspected in numbers.get("inspections", ()):
        figures[f"attention {inspected['artifact']}"] = plots.attention(
            inspected["distances"], inspected["uniform_pixels"]
        )
    if numbers["mistakes"] and (matrix := numbers["mistakes"]["confusion"]):
        figures["confusion"] = plots.confusion(matrix["class_names"], np.array(matrix["counts"]))
    return figures


def _few_shot_curves(entries: Sequence[Entry]) -> list[plots.Curve]:
    """Return one curve per method and artifact, the most accurate first."""
    lines: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        lines.setdefault((entry.artifact, entry.method), []).append(entry)
    artifacts = {artifact for artifact, _ in lines}
    curves = []
    for (_, method), points in lines.items():
        points = sorted(points, key=lambda entry: entry.labels_per_class or 0)
        name = method if len(artifacts) == 1 else f"{method} ({points[0].stage})"
        draws = tuple(tuple(entry.correct.mean(axis=1).tolist()) for entry in points)
        shots = tuple(entry.labels_per_class or 0 for entry in points)
        curves.append(plots.Curve(name, shots, tuple(entry.accuracy.value for entry in points), draws))
    return sorted(curves, key=lambda curve: -float(np.mean(curve.means)))


def measured_in_training(lines: Sequence[LogLine], manifest: Manifest) -> list[plots.Measured]:
    """Return the curves on dev in the log of a training, or on the held-out labels of the trials with the chosen rate.

    Few-shot accuracy during a pretraining is shown but never used to select.
    """
    curves = []
    for fit, name in _fits(lines, manifest).items():
        evaluated = [line for line in lines if line.fit == fit and line.dev_accuracy is not None]
        losses = tuple(line.dev_loss for line in evaluated if line.dev_loss is not None)
        accuracies = tuple(line.dev_accuracy for line in evaluated if line.dev_accuracy is not None)
        steps = tuple(line.step for line in evaluated)
        curves.append(plots.Measured(name, steps, accuracies, losses if len(losses) == len(steps) else ()))
    watched = [(line.step, line.few_shot) for line in lines if line.few_shot]
    for shots in watched[0][1] if watched else ():
        steps = tuple(step for step, _ in watched)
        accuracies = tuple(by_shots[shots] for _, by_shots in watched)
        curves.append(plots.Measured(f"{shots}, to watch only", steps, accuracies))
    return [curve for curve in curves if curve.steps]


def _fits(lines: Sequence[LogLine], manifest: Manifest) -> dict[str | None, str]:
    """Return {fit: name} of the evaluated fits that the result comes from."""
    if manifest.job == "pretrain":
        return {None: "dev"}
    if manifest.job not in FINE_TUNED or not lines:
        return {}
    number = manifest.metrics.get("trial")
    if number is None:  # without a search, trials are numbered as their rates
        number = manifest.config["learning_rates"].index(manifest.metrics["learning_rate"])
    trials = {
        fit: name.part
        for fit in sorted({line.fit or "" for line in lines})
        if (name := FitName.parse(fit)) and (name.kind, name.number) == ("trial", number)
    }
    return {fit: "held-out labels" if len(trials) == 1 else f"fold {fold}" for fit, fold in trials.items()}
