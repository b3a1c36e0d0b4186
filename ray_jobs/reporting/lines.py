"""The lines of report.json about comparisons, accuracies, mistakes and likely wrong labels.

In: `Verdict`s and `Entry`s, the datasets that they were scored on, and the metrics of their artifacts. Out: plain
dictionaries.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.spec.published import Published
from pipelines.store import Manifest
from ray_jobs.data.columns import CONFLICT
from ray_jobs.data.shards import Dataset
from ray_jobs.evaluation.calibration import calibration_error, is_identified
from ray_jobs.evaluation.intervals import detectable_difference
from ray_jobs.evaluation.rows import MOST_FREQUENT, REAL, is_apart, is_reference
from ray_jobs.reporting import mistakes, provenance
from ray_jobs.reporting.measures import Entry, about
from ray_jobs.reporting.verdicts import Verdict, kind, labels_text, sentence

MAX_CONFUSION = 30  # classes; a larger matrix is unreadable
MAX_CLASSES = 200  # lines of the table of classes, the worst first
MAX_ISSUES = 100  # images with a likely wrong label
MAX_PAIRS = 10  # pairs of label and suggested class
MAX_QUARANTINED = 50  # images that ingest left out
Metrics = Mapping[str, float | int | str]


def verdict_line(verdict: Verdict, dataset: Dataset | None, unknown: Container[str]) -> dict[str, Any]:
    """Return a comparison's line; `unknown` are the artifacts whose training images are unknown.

    Its metric's name stands for both values: accuracy and reference_accuracy, or mAP and reference_mAP.
    """
    method, reference, classes = verdict.method, verdict.reference, _num_classes(dataset)
    metric = method.metric
    return {
        **about(method),
        "labels_per_class": method.labels_per_class,
        "labels": labels_text(method.labels_per_class, classes),
        "reference": reference.method,
        "reference_kind": kind(reference),
        "reference_protocol": reference.protocol,
        "reference_artifact": reference.artifact,
        "metric": metric,
        metric: verdict.value,
        f"reference_{metric}": verdict.reference_value,
        "difference": verdict.difference.value,
        "low": verdict.difference.low,
        "high": verdict.difference.high,
        "detectable": detectable_difference(verdict.difference),
        "adjusted_low": verdict.adjusted.low,
        "adjusted_high": verdict.adjusted.high,
        "other_differences": [{"metric": name, **interval._asdict()} for name, interval in verdict.others.items()],
        "draws": verdict.draws,
        "num_images": len(method.sample_ids),
        "conclusion": verdict.conclusion,
        "unknown_training": method.artifact in unknown,
        "sentence": sentence(verdict, classes, unknown),
    }


def _num_classes(dataset: Dataset | None) -> int | None:
    return len(dataset.info.class_names) if dataset else None


def accuracy_line(entry: Entry, dataset: Dataset | None, recorded: Metrics, is_calibrated: bool) -> dict[str, Any]:
    """Return an accuracy's line, with the other metrics of its predictions.

    Args:
        recorded: the metrics of the entry's artifact.
    """
    entry_kind = kind(entry)
    return {
        **about(entry),
        "labels_per_class": entry.labels_per_class,
        "labels": labels_text(entry.labels_per_class, _num_classes(dataset)),
        "accuracy": entry.accuracy.value,
        "low": entry.accuracy.low,
        "high": entry.accuracy.high,
        "draws": len(entry.draws),
        "num_images": len(entry.sample_ids),
        "metrics": [{"metric": name, **interval._asdict()} for name, interval in entry.metrics.items()],
        "probabilities": _probabilities(entry, is_calibrated),
        "apart": entry_kind == "apart",
        "seen": "" if entry_kind in ("pixels", "untrained") else provenance.seen_in_training(recorded),
        "selected_on": [] if entry.method.startswith(MOST_FREQUENT) else list(entry.selected_on),
        "settings": [json.loads(settings) for settings in entry.settings],
    }


def published_beside(entry: Entry, repeated: Published | None) -> dict[str, str]:
    """Return {published}: the number whose protocol is the entry's, and whether our interval contains it; or {}.

    The published numbers are about all test images, and the original labels.
    """
    is_part = is_apart(entry.method) or entry.task.endswith(REAL)
    if repeated is None or is_part or len(entry.sample_ids) != repeated.test_images:
        return {}
    is_inside = entry.accuracy.low <= repeated.accuracy / 100 <= entry.accuracy.high
    where = "inside" if is_inside else "outside"
    return {"published": f"published: {repeated.accuracy:.2f}%, {repeated.source}; {where} this 95% interval"}


def seen_by(line: Mapping[str, Any], metrics: Mapping[str, Metrics]) -> str:
    """Describe which test images the model of a line was trained on; empty if it has no trained model."""
    if line["protocol"] == "baseline" or is_reference(line["method"]):
        return ""
    return provenance.seen_in_training(metrics[line["artifact"]])


def _probabilities(entry: Entry, is_calibrated: bool) -> dict[str, Any] | None:
    """Describe a method's probabilities, as means over draws; rates are fractions.

    None if the method has no probabilities, or with ReaL's labels, because an image may have several. `top5_accuracy`
    is None if test has ten classes or fewer; `calibrated` is None without temperature scaling.
    """
    if entry.task.endswith(REAL) or entry.nll is None or entry.in_top5 is None:
        return None
    scaled = None
    if is_calibrated and entry.calibrated_nll is not None and entry.calibrated_probabilities is not None:
        scaled = {
            "nll": float(entry.calibrated_nll.mean(dtype=np.float64)),
            "calibration_error": _calibration_error(entry.calibrated_probabilities, entry.correct),
        }
    return {
        "top5_accuracy": float(entry.in_top5.mean(dtype=np.float64)) if entry.labels.max() >= 10 else None,
        "nll": float(entry.nll.mean(dtype=np.float64)),
        "calibration_error": _calibration_error(entry.probabilities, entry.correct),
        "calibrated": scaled,
    }


def uncalibrated(metrics: Mapping[str, Metrics], sweeps: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the artifacts with a temperature that the held-out images do not identify."""
    accuracies = {sweep["artifact"]: chosen_trial(sweep)["accuracies"] for sweep in sweeps}
    return {
        key
        for key, recorded in metrics.items()
        if "temperature" in recorded and not is_identified(float(recorded["temperature"]), accuracies.get(key, ()))
    }


def chosen_trial(sweep: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the chosen trial of a sweep."""
    name, chosen = ("number", sweep["chosen_trial"]) if "kind" in sweep else ("learning_rate", sweep["chosen"])
    return next(trial for trial in sweep["trials"] if trial[name] == chosen)


def _calibration_error(probabilities: np.ndarray, correct: np.ndarray) -> float:
    return float(np.mean([calibration_error(*draw) for draw in zip(probabilities, correct, strict=True)]))


def mistakes_line(main: Entry, dataset: Dataset | None, worst: Sequence[mistakes.Mistake]) -> dict[str, Any]:
    """Describe the main model's errors, with class and file names if the dataset is an input."""
    classes = dataset.info.class_names if dataset else ()

    def name(label: int) -> str:
        return classes[label] if dataset else f"class {label}"

    index = dataset.index("test").select(["sample_id", "key"]).to_pylist() if dataset else ()
    files = dict(row.values() for row in index)
    per_class = mistakes.per_class(main, len(classes) or 1 + max(main.labels.max(), main.predictions.max()))
    confusion = None
    if dataset and len(classes) <= MAX_CONFUSION:
        pairs = (main.labels * len(classes) + main.predictions).ravel()
        counts = np.bincount(pairs, minlength=len(classes) ** 2).reshape(len(classes), -1)
        confusion = {"class_names": list(classes), "counts": counts.tolist()}
    return {
        **about(main),
        "labels": labels_text(main.labels_per_class, _num_classes(dataset)),
        "draws": len(main.draws),
        "num_images": len(main.sample_ids),
        "ever_wrong": int((~main.correct).any(axis=0).sum()),
        "always_wrong": int((~main.correct).all(axis=0).sum()),
        "worst": [
            {
                **asdict(mistake),
                "label_name": name(mistake.label),
                "prediction_name": name(mistake.prediction),
                "file": files.get(mistake.sample_id),
            }
            for mistake in worst
        ],
        "num_classes": len(per_class),
        "classes": [
            {
                **asdict(result),
                "name": name(result.label),
                "confused_name": None if result.confused_with is None else name(result.confused_with),
            }
            for result in per_class[:MAX_CLASSES]
        ],
        "confusion": confusion,
    }


def card(folder: Path) -> dict[str, Any]:
    """Describe what ingest counted, in sentences, and list images that it left out, with the reason.

    `conflicting` counts the images with the same bytes as an image of another class.
    """
    left_out = pq.read_table(folder / "quarantine.parquet").slice(0, MAX_QUARANTINED).to_pylist()
    quarantine = [{name: row[name] for name in ("key", "reason")} for row in left_out]
    if not (path := folder / "card.json").is_file():  # of an earlier version
        return {"card": [], "quarantine": quarantine, "conflicting": 0}
    counted = json.loads(path.read_text("utf-8"))
    formats = ", ".join(f"{count:,} {name}" for name, count in counted["formats"].items())
    width, height = counted["sizes"]["width"], counted["sizes"]["height"]
    sides = (
        ""
        if width["least"] == width["most"] and height["least"] == height["most"]
        else (f", {width['least']} × {height['least']} to {width['most']} × {height['most']} pixels")
    )
    copies = ", ".join(f"{each['images']:,} {each['kind']} ({each['done']})" for each in counted["copies"])
    read = f"Formats: {formats}; {counted['bytes'] / 2**20:,.1f} MiB{sides}."
    conflicting = sum(each["images"] for each in counted["copies"] if each["kind"] == CONFLICT)
    sentences = [read, *([f"Copies: {copies}."] if copies else [])]
    return {"card": sentences, "quarantine": quarantine, "conflicting": conflicting}


def label_issues(table: pa.Table) -> dict[str, Any]:
    """Return the number of likely wrong labels, the first MAX_ISSUES, and the most frequent pairs of classes."""
    labels, suggested = table["label"].to_pylist(), table["suggested"].to_pylist()
    counts = Counter(zip(labels, suggested, strict=True))
    pairs = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {
        "num_issues": len(table),
        "issues": table.slice(0, MAX_ISSUES).to_pylist(),
        "pairs": [{"label": label, "suggested": other, "images": count} for (label, other), count in pairs[:MAX_PAIRS]],
    }


def inspection_line(manifest: Manifest, folder: Path) -> dict[str, Any]:
    """Return an inspection's attention distances in pixels, of each block's heads, and what they are compared with."""
    table = pq.read_table(folder / "attention_distance.parquet").to_pydict()
    distances: list[list[float]] = [[] for _ in range(max(table["block"]))]
    for block, pixels in zip(table["block"], table["pixels"], strict=True):
        distances[block - 1].append(pixels)
    backbone = manifest.config["backbone"]
    name = backbone if isinstance(backbone, str) else f"{backbone['stage']} at {backbone['checkpoint']}"
    return {"backbone": name, "split": manifest.config["split"], **manifest.metrics, "distances": distances}
