"""Gather the report's content from its input artifacts.

In: the stage's context. Out: `ReportData`: the numbers (report.json), the tables, and the pictures on the page.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from pipelines.spec import Report
from pipelines.store import Manifest, Store, finished_log, local_files, promotion_of, promotion_sentence
from ray_jobs.data.shards import Dataset, Split, open_artifact
from ray_jobs.detection import entries as detected
from ray_jobs.detection.tables import DETECTIONS
from ray_jobs.detection.tables import FILE as DETECTIONS_FILE
from ray_jobs.evaluation.label_issues import FILE, read_issues
from ray_jobs.evaluation.label_issues import headline as headline_of_audit
from ray_jobs.evaluation.multi_label import FILE as SCORES_FILE
from ray_jobs.evaluation.multi_label import SCORES
from ray_jobs.evaluation.rows import CONFUSION, CONFUSION_FILE, PREDICTIONS, ROWS, is_apart, is_reference
from ray_jobs.process.context import Context
from ray_jobs.reporting import (
    clusters,
    costs,
    detections,
    figures,
    lines,
    measures,
    mistakes,
    multi_label,
    provenance,
    studies,
    vtab,
)
from ray_jobs.reporting.answer import answer
from ray_jobs.reporting.drawing import pictures
from ray_jobs.reporting.measures import Entry
from ray_jobs.reporting.verdicts import AnyEntry, labels_text, verdicts, with_intervals

FORMAT_VERSION = 1


@dataclass(frozen=True)
class ReportData:
    """The content of a report.

    `numbers` is report.json; `rows` and `predictions` are tables with the artifact of each row; `figures` are SVGs by
    name, `sheets` the tiles by dataset artifact, `images` the pictures of mistakes by sample id, and `looked` the same,
    tinted by the main model's attention; `inside` are the pictures of each inspection.
    """

    numbers: dict[str, Any]
    rows: Any
    predictions: Any
    figures: dict[str, Markup] = field(default_factory=dict)
    sheets: dict[str, list[pictures.Tiles]] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    looked: dict[str, str] = field(default_factory=dict)
    detected: dict[str, list[str]] = field(default_factory=dict)
    inside: dict[str, pictures.Inside] = field(default_factory=dict)


def gather(context: Context[Report]) -> ReportData:
    """Read the inputs and compute everything that the page shows.

    Raises:
        UserError: the files of an artifact contradict each other; the message names the artifact.
    """
    manifests, store = context.inputs["of"], context.open_store()
    parts = [
        (stage, manifest, _small_files(store, manifest))
        for stage, manifest in zip(context.config.of, manifests, strict=True)
    ]
    # a promotion scores models that other stages have measured
    measuring = [part for part in parts if part[1].job != "promote"]
    rows = measures.join_tables(measuring, "rows.parquet", ROWS)
    predictions = measures.join_tables(measuring, "predictions.parquet", PREDICTIONS)
    scored = multi_label.entries(measures.join_tables(parts, SCORES_FILE, SCORES))
    confusion = measures.join_tables(parts, CONFUSION_FILE, CONFUSION)
    segmented = measures.of_pixels(confusion)
    entries = measures.entries(rows, predictions, {m.key: measures.draw_seed(m) for m in manifests})
    datasets = {manifest.key: open_artifact(store, manifest) for manifest in manifests if manifest.kind == "dataset"}
    tested = _tested_datasets(manifests, datasets)
    measured = _measured(store, manifests)
    embedded = _embedded(store, manifests)
    detectors = detections.by_task(detected.entries(measures.join_tables(measuring, DETECTIONS_FILE, DETECTIONS)))
    numbers = {
        **_scores(store, parts, entries, [*scored, *segmented, *chain(*detectors.values())], datasets, tested),
        **_trainings(parts),
        "measured_in_training": {key: [asdict(curve) for curve in curves] for key, curves in measured.items()},
        "mistakes": _mistakes(entries, tested),
        "stages": provenance.stages(parts),
        "environments": provenance.environments(parts),
    }
    if_any = {
        "other_metrics": _other_metrics(rows, manifests, [*scored, *segmented]),
        "pixel_classes": _pixel_classes(segmented, measures.classes_of_pixels(confusion)),
        "detectors": detections.lines(detectors),
        "doubted_boxes": detections.doubted(detectors, tested),
        "several_labels": multi_label.results(scored, tested),
        "label_issues": _audits(parts),
        "embeddings": _clusters(parts, embedded),
        "promotions": _promotions(parts),
        "inspections": _inspections(parts),
    }
    numbers |= {name: found for name, found in if_any.items() if found}
    without = studies.left_out(numbers)
    tuned = [entry for entry in entries if entry.artifact not in without]
    numbers["costs"] = costs.costs(tuned, parts, {key: len(each.info.class_names) for key, each in tested.items()})
    numbers |= {"studies": found} if (found := studies.studies(numbers)) else {}
    return ReportData(
        _about(context) | answer(numbers) | numbers,
        rows,
        predictions,
        figures=figures.draw(entries, numbers, measured),
        sheets={key: pictures.contact_sheet(dataset) for key, dataset in datasets.items()}
        | {key: clusters.sheet(tested[key], found) for key, found in embedded.items() if key in tested},
        images=_images(numbers, tested),
        detected=detections.pictures(detectors, tested),
        looked=_looked(store, manifests, numbers["mistakes"], tested),
        inside={manifest.key: pictures.inside(folder) for _, manifest, folder in parts if manifest.job == "inspect"},
    )


def _about(context: Context[Report]) -> dict[str, Any]:
    config = context.config
    named = {"title": config.title, "artifact": context.attempt.key, "note": config.note}
    return {"format_version": FORMAT_VERSION, **named, "missing": list(config.missing)}


def _scores(
    store: Store,
    parts: Sequence[provenance.Part],
    entries: Sequence[Entry],
    scored: Sequence[measures.ScoredEntry | detected.Entry],
    datasets: Mapping[str, Dataset],
    tested: Mapping[str, Dataset],
) -> dict[str, Any]:
    """Return the comparisons, accuracies and data sets of report.json."""
    compared: list[AnyEntry] = [*entries]
    compared += [each for each in scored if each.has_interval]
    metrics = {manifest.key: manifest.metrics for _, manifest, _ in parts}
    repeated = {manifest.key: provenance.published_protocol(store, manifest) for _, manifest, _ in parts}
    unknown = {key for key, recorded in metrics.items() if "unknown_training" in recorded}
    uncalibrated = lines.uncalibrated(metrics, _sweeps(parts))
    notes = {key: dataset.info.notes for key, dataset in datasets.items()}
    evaluated = vtab.evaluated([(stage, manifest) for stage, manifest, _ in parts], notes)
    backbones = provenance.backbones(parts)
    return {
        "vtab": vtab.scores(entries, evaluated),
        "verdicts": [
            lines.verdict_line(verdict, tested.get(verdict.method.artifact), unknown) for verdict in verdicts(compared)
        ],
        "accuracies": [
            lines.accuracy_line(
                entry,
                tested.get(entry.artifact),
                metrics[entry.artifact],
                is_calibrated=entry.artifact not in uncalibrated,
            )
            | lines.published_beside(entry, repeated[entry.artifact])
            | {"backbone": backbones.get(entry.artifact)}
            for entry in entries
        ],
        "datasets": [
            _origin(stage, manifest)
            | pictures.describe(datasets[manifest.key])
            | lines.card(datasets[manifest.key].folder)
            | {"trains_on_dev": _trains_on_dev(manifest.key, parts)}
            for stage, manifest, _ in parts
            if manifest.key in datasets
        ],
    }


def _mistakes(entries: Sequence[Entry], tested: Mapping[str, Dataset]) -> dict[str, Any] | None:
    """Describe the main model's errors; None if no entry covers all of test."""
    if (main := mistakes.main_entry(entries)) is None:
        return None
    return lines.mistakes_line(main, tested.get(main.artifact), mistakes.worst(main, entries))


def _trains_on_dev(key: str, parts: Sequence[provenance.Part]) -> bool:
    """Return whether stages learn from the labels of a data set's dev split, too."""
    learning = [
        manifest.config["labels"]
        for _, manifest, _ in parts
        if "labels" in manifest.config and key in {each.key for each in manifest.inputs.get("data", [])}
    ]
    return any(labels["per_class"] is None and labels.get("use_dev", True) for labels in learning)


def _trainings(parts: Sequence[provenance.Part]) -> dict[str, Any]:
    """Return the curves of trainings and their sweeps."""
    files = {"pretraining": ("curve.json", "points"), "finetuning": ("curves.json", "draws")}
    curves = {
        job: [_origin(stage, manifest) | {field: read} for stage, manifest, read in _read_json(parts, name)]
        for job, (name, field) in files.items()
    }
    return curves | {"sweeps": [sweep for sweep in _sweeps(parts) if len(sweep["trials"]) > 1]}


def _origin(stage: str, manifest: Manifest) -> dict[str, Any]:
    return {"stage": stage, "artifact": manifest.key}


def _pixel_classes(segmented: Sequence[measures.ScoredEntry], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the classes of pixels of each model that was scored on all of test."""
    return [
        measures.about(entry)
        | {"num_classes": len(classes := measures.by_class(entry, names)), "classes": classes[: lines.MAX_CLASSES]}
        for entry in segmented
        if not is_apart(entry.method) and not is_reference(entry.method)
    ]


def _other_metrics(
    rows: Any, manifests: Sequence[Manifest], scored: Sequence[measures.ScoredEntry]
) -> list[dict[str, Any]]:
    """Return the stored metrics other than accuracy."""
    metrics = {manifest.key: manifest.metrics for manifest in manifests}
    of_detectors = pc.is_in(rows["metric"].cast(pa.string()), pa.array(detected.METRICS))
    others = with_intervals(measures.other_metrics(rows.filter(pc.invert(of_detectors))), scored)
    return [line | {"seen": lines.seen_by(line, metrics)} for line in others]


def _audits(parts: Sequence[provenance.Part]) -> list[dict[str, Any]]:
    """Return the lists of likely wrong labels."""
    return [
        {
            **_origin(stage, manifest),
            "audited": manifest.metrics["audited"],
            "agreement": manifest.metrics["agreement"],
            "headline": headline_of_audit(manifest.metrics),
            **lines.label_issues(read_issues(folder / FILE)),
        }
        for stage, manifest, folder in parts
        if manifest.kind == "audit"
    ]


def _measured(store: Store, manifests: Iterable[Manifest]) -> figures.Measured:
    """Return artifact -> the curves on held-out images of each training."""
    return {
        manifest.key: curves
        for manifest in manifests
        if (curves := figures.measured_in_training(finished_log(store, manifest), manifest))
    }


def _embedded(store: Store, manifests: Iterable[Manifest]) -> dict[str, list[clusters.Cluster]]:
    """Return artifact -> the clusters of each embedding."""
    return {
        manifest.key: found
        for manifest in manifests
        if manifest.kind == "embedding" and (found := clusters.clusters_of(clusters.sampled_files(store, manifest)))
    }


def _clusters(
    parts: Sequence[provenance.Part], embedded: Mapping[str, Sequence[clusters.Cluster]]
) -> list[dict[str, Any]]:
    """Return the clusters of embeddings."""
    return [
        {**_origin(stage, manifest), "clusters": [cluster._asdict() for cluster in embedded[manifest.key]]}
        for stage, manifest, _ in parts
        if manifest.key in embedded
    ]


def _promotions(parts: Sequence[provenance.Part]) -> list[dict[str, Any]]:
    """Return what promotions decided."""
    return [
        _origin(stage, manifest) | decided | {"sentence": promotion_sentence(decided)}
        for stage, manifest, _ in parts
        if (decided := promotion_of(manifest)) is not None
    ]


def _inspections(parts: Sequence[provenance.Part]) -> list[dict[str, Any]]:
    """Return what inspections found."""
    return [
        _origin(stage, manifest) | lines.inspection_line(manifest, folder)
        for stage, manifest, folder in parts
        if manifest.job == "inspect"
    ]


def _small_files(store: Store, manifest: Manifest) -> Path:
    """Fetch an input's small files (its numbers, without images or weights) and return their folder."""
    small = [file for file in manifest.files if re.fullmatch(r"[^/]+\.(json|parquet)", file.path)]
    return local_files(store, manifest, small)


def _tested_datasets(manifests: Iterable[Manifest], datasets: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """Return artifact -> the dataset that it was scored on, for datasets among the report's inputs."""
    return {
        manifest.key: datasets[reference.key]
        for manifest in manifests
        for reference in manifest.inputs.get("data", [])
        if reference.key in datasets
    }


def _read_json(parts: Iterable[provenance.Part], name: str) -> Iterator[tuple[str, Manifest, Any]]:
    """Yield (stage, manifest, content) of every part that has a file of this name."""
    for stage, manifest, folder in parts:
        if (folder / name).is_file():
            yield stage, manifest, json.loads((folder / name).read_text("utf-8"))


def _sweeps(parts: Iterable[provenance.Part]) -> list[dict[str, Any]]:
    return [
        {
            **_origin(stage, manifest),
            "labels": labels_text(manifest.config["labels"]["per_class"], None),
            **sweep,
            **_why_ended(sweep["trials"], manifest.config),
        }
        for stage, manifest, sweep in _read_json(parts, "sweep.json")
        if sweep["trials"]
    ]


def _why_ended(trials: Sequence[dict[str, Any]], config: Mapping[str, Any]) -> dict[str, str]:
    """Return {why_ended}: at which evaluations ASHA ended trials, and why; empty if it ended none."""
    search = config.get("search") or {}
    if search.get("kind") != "asha":
        return {}
    evaluations, factor = search["evaluations"], search["reduction_factor"]
    places: Counter[int] = Counter()
    for trial in trials:
        if "pruned_at" in trial:
            steps = trial["point"].get("steps", config["steps"])
            ends = [math.ceil(steps * part / evaluations) for part in range(1, evaluations + 1)]
            places[ends.index(trial["pruned_at"]) + 1] += 1
    if not places:
        return {}
    counts = ", ".join(f"{count} at evaluation {place}" for place, count in sorted(places.items()))
    why = f"in the lower {factor - 1}/{factor} of the trials evaluated by then"
    return {"why_ended": f"{counts} of {evaluations}, because they were {why}"}


def _images(numbers: Mapping[str, Any], tested: Mapping[str, Dataset]) -> dict[str, str]:
    """Return the mistakes and the likely wrong labels that the page shows as `data:` URLs, by sample id."""
    mains, audits = [numbers["mistakes"], *numbers.get("several_labels", ())], numbers.get("label_issues", ())
    shown: list[tuple[str, Any, tuple[Split, ...]]] = [
        *((main["artifact"], main["worst"], ("test",)) for main in mains if main),
        *((audit["artifact"], audit["issues"], ("train", "dev")) for audit in audits),
    ]
    images: dict[str, str] = {}
    for artifact, records, splits in shown:
        if (dataset := tested.get(artifact)) is None or not records:
            continue
        for split in splits:
            rows = {sample_id: row for row, sample_id in enumerate(dataset.sample_ids(split))}
            present = [record["sample_id"] for record in records if record["sample_id"] in rows]
            urls = pictures.data_urls(dataset, split, [rows[sample_id] for sample_id in present])
            images |= zip(present, urls, strict=True)
    return images


def _looked(
    store: Store, manifests: Iterable[Manifest], main: Mapping[str, Any] | None, tested: Mapping[str, Dataset]
) -> dict[str, str]:
    """Return the main model's mistakes, tinted by its attention, by sample id; empty if it is not a fine-tuned ViT."""
    model = next((each for each in manifests if main and each.key == main["artifact"]), None)
    if model is None or main is None or model.kind != "model" or model.key not in tested:
        return {}
    rows = {sample_id: row for row, sample_id in enumerate(tested[model.key].sample_ids("test"))}
    shown = [mistake["sample_id"] for mistake in main["worst"]]
    urls = pictures.overlays(store, model, tested[model.key], [rows[sample_id] for sample_id in shown])
    return dict(zip(shown, urls, strict=False))
