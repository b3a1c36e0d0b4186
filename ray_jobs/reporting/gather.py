"""Gathering of the report's content from its input artifacts.

In: the stage's context. Out: `ReportData`: the numbers (report.json), the tables, and the pictures that the page shows.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.spec import Report
from pipelines.store import FitName, LogLine, Manifest, Store, finished_log, local_files
from ray_jobs.data.shards import Dataset, Split, open_artifact
from ray_jobs.evaluation.calibration import balanced_accuracy, calibration_error, is_identified
from ray_jobs.evaluation.label_issues import FILE, read_issues
from ray_jobs.evaluation.label_issues import headline as headline_of_audit
from ray_jobs.evaluation.rows import PREDICTIONS, REAL, ROWS, is_reference
from ray_jobs.process.context import Context
from ray_jobs.reporting import costs, label_issues, measures, mistakes, pictures, plots, provenance, vtab
from ray_jobs.reporting.measures import Entry
from ray_jobs.reporting.verdicts import Verdict, headline, kind, labels_text, question, sentence, verdicts

FORMAT_VERSION = 1
MAX_CONFUSION = 30  # classes; a larger matrix is not readable
MAX_CLASSES = 200  # lines of the table of classes, the worst first


@dataclass(frozen=True)
class ReportData:
    """The content of a report.

    `numbers` is report.json; `rows` and `predictions` are tables with the artifact of each row; `figures` are SVGs by
    name, `sheets` the tiles of each dataset artifact, `images` the pictures of the mistakes by sample id.
    """

    numbers: dict[str, Any]
    rows: Any
    predictions: Any
    figures: dict[str, str] = field(default_factory=dict)
    sheets: dict[str, list[pictures.Tiles]] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)


def gather(context: Context[Report]) -> ReportData:
    """Read the inputs and compute everything that the page shows.

    Raises:
        UserError: the files of an artifact contradict each other; the message names it.
    """
    manifests, store = context.inputs["of"], context.open_store()
    parts = [
        (stage, manifest, _small_files(store, manifest))
        for stage, manifest in zip(context.config.of, manifests, strict=True)
    ]
    rows = measures.join_tables(parts, "rows.parquet", ROWS)
    predictions = measures.join_tables(parts, "predictions.parquet", PREDICTIONS)
    entries = measures.entries(rows, predictions, {m.key: measures.draw_seed(m) for m in manifests})
    datasets = {
        manifest.key: open_artifact(store, manifest) for manifest in manifests if manifest.kind == "dataset"
    }
    tested = _tested_datasets(manifests, datasets)
    main = mistakes.main_entry(entries)
    main_data = tested.get(main.artifact) if main else None
    worst = mistakes.worst(main, entries) if main else []
    metrics = {manifest.key: manifest.metrics for manifest in manifests}
    unknown = {key for key, own in metrics.items() if "unknown_training" in own}
    notes = {key: dataset.info.notes for key, dataset in datasets.items()}
    vtab_evaluations = vtab.evaluated([(stage, manifest) for stage, manifest, _ in parts], notes)
    comparisons, sweeps = verdicts(entries), _sweeps(parts)
    uncalibrated = _uncalibrated(metrics, sweeps)
    curves = [
        {"stage": stage, "artifact": manifest.key, "points": points}
        for stage, manifest, points in _read_json(parts, "curve.json")
    ]
    finetuning = [
        {"stage": stage, "artifact": manifest.key, "draws": draws}
        for stage, manifest, draws in _read_json(parts, "curves.json")
    ]
    measured = {
        manifest.key: found
        for _, manifest, _ in parts
        if (found := measured_in_training(finished_log(store, manifest), manifest))
    }
    classes = {key: len(dataset.info.class_names) for key, dataset in tested.items()}
    costed = costs.costs(entries, parts, classes)
    audits = [
        {
            "stage": stage,
            "artifact": manifest.key,
            "audited": manifest.metrics["audited"],
            "agreement": manifest.metrics["agreement"],
            "headline": headline_of_audit(manifest.metrics),
            **label_issues.describe(read_issues(folder / FILE)),
        }
        for stage, manifest, folder in parts
        if manifest.kind == "audit"
    ]
    numbers: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "title": context.config.title,
        "artifact": context.attempt.key,
        "question": question(comparisons),
        "headline": headline(comparisons, unknown),
        "note": context.config.note,
        "missing": list(context.config.missing),
        "vtab": vtab.scores(entries, vtab_evaluations),
        "verdicts": [_verdict(verdict, tested, unknown) for verdict in comparisons],
        "accuracies": [
            _accuracy(entry, tested, metrics[entry.artifact], entry.artifact not in uncalibrated)
            for entry in entries
        ],
        "costs": costed,
        "datasets": [
            {"stage": stage, "artifact": manifest.key, **pictures.describe(datasets[manifest.key])}
            for stage, manifest, _ in parts
            if manifest.key in datasets
        ],
        "pretraining": curves,
        "finetuning": finetuning,
        "measured_in_training": {key: [asdict(each) for each in found] for key, found in measured.items()},
        "sweeps": sweeps,
        "mistakes": _mistakes(main, main_data, worst),
        "stages": provenance.stages(parts),
        "environments": provenance.environments(parts),
        "protocols": provenance.protocols(parts),
    }
    if other_metrics := measures.other_metrics(rows):
        numbers["other_metrics"] = [line | {"seen": _seen(line, metrics)} for line in other_metrics]
    if audits:
        numbers["label_issues"] = audits
    return ReportData(
        numbers,
        rows,
        predictions,
        figures=_figures(entries, costed, curves, finetuning, measured, sweeps, numbers["mistakes"]),
        sheets={key: pictures.contact_sheet(dataset) for key, dataset in datasets.items()},
        images=_images(main_data, [mistake.sample_id for mistake in worst])
        | _images_of_audits(audits, tested),
    )


def _small_files(store: Store, manifest: Manifest) -> Path:
    """Fetch an input's small files, which hold its numbers, but not its images or weights; return their folder."""
    small = [file for file in manifest.files if re.fullmatch(r"[^/]+\.(json|parquet)", file.path)]
    return local_files(store, manifest, small)


def _tested_datasets(manifests: Iterable[Manifest], datasets: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """Return artifact -> the dataset that it was scored on, if that is among the report's inputs."""
    return {
        manifest.key: datasets[reference.key]
        for manifest in manifests
        for reference in manifest.inputs.get("data", [])
        if reference.key in datasets
    }


def _classes(entry: Entry, tested: Mapping[str, Dataset]) -> int | None:
    dataset = tested.get(entry.artifact)
    return len(dataset.info.class_names) if dataset else None


def _verdict(verdict: Verdict, tested: Mapping[str, Dataset], unknown: Container[str]) -> dict[str, Any]:
    method, reference, classes = verdict.method, verdict.reference, _classes(verdict.method, tested)
    return {
        "task": method.task,
        "protocol": method.protocol,
        "labels_per_class": method.labels_per_class,
        "labels": labels_text(method.labels_per_class, classes),
        "method": method.method,
        "artifact": method.artifact,
        "reference": reference.method,
        "reference_kind": kind(reference),
        "reference_protocol": reference.protocol,
        "reference_artifact": reference.artifact,
        "accuracy": verdict.accuracy,
        "reference_accuracy": verdict.reference_accuracy,
        "difference": verdict.difference.value,
        "low": verdict.difference.low,
        "high": verdict.difference.high,
        "detectable": verdict.detectable,
        "adjusted_low": verdict.adjusted.low,
        "adjusted_high": verdict.adjusted.high,
        "draws": verdict.draws,
        "num_images": len(method.sample_ids),
        "conclusion": verdict.conclusion,
        "unknown_training": method.artifact in unknown,
        "sentence": sentence(verdict, classes, unknown),
    }


def _accuracy(
    entry: Entry,
    tested: Mapping[str, Dataset],
    metrics: Mapping[str, float | int | str],
    is_calibrated: bool,
) -> dict[str, Any]:
    entry_kind = kind(entry)
    return {
        "task": entry.task,
        "protocol": entry.protocol,
        "labels_per_class": entry.labels_per_class,
        "labels": labels_text(entry.labels_per_class, _classes(entry, tested)),
        "method": entry.method,
        "stage": entry.stage,
        "artifact": entry.artifact,
        "accuracy": entry.accuracy.value,
        "low": entry.accuracy.low,
        "high": entry.accuracy.high,
        "draws": len(entry.draws),
        "num_images": len(entry.sample_ids),
        "balanced_accuracy": float(
            np.mean([balanced_accuracy(entry.labels, draw) for draw in entry.correct])
        ),
        "probabilities": _probabilities(entry, is_calibrated),
        "apart": entry_kind == "apart",
        "seen": "" if entry_kind in ("pixels", "untrained") else provenance.seen_in_training(metrics),
        "selected_on": list(entry.selected_on),
        "settings": [json.loads(settings) for settings in entry.settings],
    }


def _seen(line: Mapping[str, Any], metrics: Mapping[str, Mapping[str, float | int | str]]) -> str:
    """Describe which test images the model of a line was trained on; empty if it has no trained model."""
    if is_reference(line["method"]):
        return ""
    return provenance.seen_in_training(metrics[line["artifact"]])


def _probabilities(entry: Entry, is_calibrated: bool) -> dict[str, Any] | None:
    """Describe the probabilities of a method that has them, as means over draws; the rates are fractions.

    `top5_accuracy` is None if test has no more than five classes. `calibrated` is of probabilities after temperature
    scaling, or None. With ReaL's labels, of which an image has
    several, there is no such description.
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
        "top5_accuracy": float(entry.in_top5.mean(dtype=np.float64)) if entry.labels.max() >= 5 else None,
        "nll": float(entry.nll.mean(dtype=np.float64)),
        "calibration_error": _calibration_error(entry.probabilities, entry.correct),
        "calibrated": scaled,
    }


def _uncalibrated(
    metrics: Mapping[str, Mapping[str, float | int | str]], sweeps: Iterable[Mapping[str, Any]]
) -> set[str]:
    """Return the artifacts whose temperature the held-out images do not identify."""
    accuracies = {sweep["artifact"]: _chosen_accuracies(sweep) for sweep in sweeps}
    return {
        key
        for key, own in metrics.items()
        if "temperature" in own and not is_identified(float(own["temperature"]), accuracies.get(key, ()))
    }


def _chosen_accuracies(sweep: Mapping[str, Any]) -> Sequence[float]:
    """Return the accuracies on the images that the chosen trial held out, one per fold."""
    name, chosen = (
        ("number", sweep["chosen_trial"]) if "kind" in sweep else ("learning_rate", sweep["chosen"])
    )
    return next(trial["accuracies"] for trial in sweep["trials"] if trial[name] == chosen)


def _calibration_error(probabilities: np.ndarray, correct: np.ndarray) -> float:
    return float(np.mean([calibration_error(*draw) for draw in zip(probabilities, correct, strict=True)]))


def _mistakes(
    main: Entry | None, dataset: Dataset | None, worst: Sequence[mistakes.Mistake]
) -> dict[str, Any] | None:
    """Describe the main model's errors, with class and file names if the dataset is an input; None without scores."""
    if main is None:
        return None
    classes = dataset.info.class_names if dataset else ()

    def name(label: int) -> str:
        return classes[label] if dataset else f"class {label}"

    index = (
        dataset.index("test").select(["sample_id", "key"]).to_pydict()
        if dataset
        else {"sample_id": [], "key": []}
    )
    files = dict(zip(index["sample_id"], index["key"], strict=True))
    num_classes = len(classes) or 1 + max(main.labels.max(), main.predictions.max())
    per_class = mistakes.per_class(main, num_classes)
    counts = (
        mistakes.confusion(main, len(classes)).tolist() if dataset and len(classes) <= MAX_CONFUSION else None
    )
    return {
        "task": main.task,
        "method": main.method,
        "protocol": main.protocol,
        "artifact": main.artifact,
        "stage": main.stage,
        "labels": labels_text(main.labels_per_class, len(classes) if dataset else None),
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
        "confusion": None if counts is None else {"class_names": list(classes), "counts": counts},
    }


def _read_json(parts: Iterable[provenance.Part], name: str) -> Iterator[tuple[str, Manifest, Any]]:
    """Yield (stage, manifest, content) of every part that has a file of this name."""
    for stage, manifest, folder in parts:
        if (folder / name).is_file():
            yield stage, manifest, json.loads((folder / name).read_text("utf-8"))


def _sweeps(parts: Iterable[provenance.Part]) -> list[dict[str, Any]]:
    return [
        {
            "stage": stage,
            "artifact": manifest.key,
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
    why = f"among the lower {factor - 1}/{factor} of the trials evaluated there before"
    return {"why_ended": f"{counts} of {evaluations}, because they were {why}"}


def measured_in_training(lines: Sequence[LogLine], manifest: Manifest) -> list[plots.Measured]:
    """Return what the log of a training says of dev, or of what the trials with the chosen rate held out.

    Few-shot accuracy during a pretraining is only watched: nothing is selected by it.
    """
    found = []
    for fit, name in _fits(lines, manifest).items():
        own = [line for line in lines if line.fit == fit and line.dev_accuracy is not None]
        losses = tuple(line.dev_loss for line in own if line.dev_loss is not None)
        accuracies = tuple(line.dev_accuracy for line in own if line.dev_accuracy is not None)
        steps = tuple(line.step for line in own)
        found.append(plots.Measured(name, steps, accuracies, losses if len(losses) == len(own) else ()))
    watched = [(line.step, line.few_shot) for line in lines if line.few_shot]
    for shots in watched[0][1] if watched else ():
        steps = tuple(step for step, _ in watched)
        accuracies = tuple(by_shots[shots] for _, by_shots in watched)
        found.append(plots.Measured(f"{shots}, to watch only", steps, accuracies))
    return [each for each in found if each.steps]


def _fits(lines: Sequence[LogLine], manifest: Manifest) -> dict[str | None, str]:
    """Return {fit: name} of those that were evaluated and that the result comes from."""
    if manifest.job == "pretrain":
        return {None: "dev"}
    if manifest.job != "finetune" or not lines:
        return {}
    if (
        number := manifest.metrics.get("trial")
    ) is None:  # without a search, trials are numbered as their rates
        number = manifest.config["learning_rates"].index(manifest.metrics["learning_rate"])
    names = {fit: FitName.parse(fit) for fit in sorted({line.fit or "" for line in lines})}
    trials = {
        fit: name.part
        for fit, name in names.items()
        if name and (name.kind, name.number) == ("trial", number)
    }
    return {fit: "held-out labels" if len(trials) == 1 else f"fold {fold}" for fit, fold in trials.items()}


def _figures(
    entries: Sequence[Entry],
    costed: Sequence[Mapping[str, Any]],
    curves: Sequence[dict[str, Any]],
    finetuning: Sequence[dict[str, Any]],
    measured: Mapping[str, Sequence[plots.Measured]],
    sweeps: Sequence[dict[str, Any]],
    errors: dict[str, Any] | None,
) -> dict[str, str]:
    """Draw every plot that has data, by name."""
    figures = {f"cost {task}": plots.costs(each) for task, each in costs.points(costed).items()}
    few_shot = [entry for entry in entries if entry.protocol.startswith("few-shot")]
    for protocol, task in dict.fromkeys((entry.protocol, entry.task) for entry in few_shot):
        own = [entry for entry in few_shot if (entry.protocol, entry.task) == (protocol, task)]
        figures[f"{protocol} on {task}"] = plots.few_shot(_few_shot_curves(own))
    for curve in curves:
        figures[f"loss {curve['artifact']}"] = plots.loss(
            [curve["points"]], measured.get(curve["artifact"], ())
        )
    for tuned in finetuning:
        draws = [draw["points"] for draw in tuned["draws"]]
        figures[f"loss {tuned['artifact']}"] = plots.loss(draws, measured.get(tuned["artifact"], ()))
    for sweep in sweeps:
        if "kind" in sweep:
            figures[f"search {sweep['artifact']}"] = plots.search(
                plots.Search(
                    points=tuple(trial["point"] for trial in sweep["trials"]),
                    accuracies=tuple(float(np.mean(trial["accuracies"])) for trial in sweep["trials"]),
                    pruned=tuple("pruned_at" in trial for trial in sweep["trials"]),
                    chosen=[trial["number"] for trial in sweep["trials"]].index(sweep["chosen_trial"]),
                )
            )
    of_rates = [sweep for sweep in sweeps if "kind" not in sweep]
    for labels in dict.fromkeys(sweep["labels"] for sweep in of_rates):
        panels = [
            plots.Sweep(
                name=sweep["stage"],
                learning_rates=tuple(trial["learning_rate"] for trial in sweep["trials"]),
                accuracies=tuple(tuple(trial["accuracies"]) for trial in sweep["trials"]),
                chosen=sweep["chosen"],
            )
            for sweep in of_rates
            if sweep["labels"] == labels
        ]
        figures[f"sweep {labels}"] = plots.sweeps(panels)
    if errors and errors["confusion"]:
        matrix = errors["confusion"]
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


def _images(
    dataset: Dataset | None, sample_ids: Sequence[str], splits: Sequence[Split] = ("test",)
) -> dict[str, str]:
    """Return the images of these splits with these ids as `data:` URLs, by id."""
    images: dict[str, str] = {}
    if dataset is None or not sample_ids:
        return images
    for split in splits:
        rows = {sample_id: row for row, sample_id in enumerate(dataset.sample_ids(split))}
        present = [sample_id for sample_id in sample_ids if sample_id in rows]
        urls = pictures.data_urls(dataset, split, [rows[sample_id] for sample_id in present])
        images |= zip(present, urls, strict=True)
    return images


def _images_of_audits(audits: Sequence[Mapping[str, Any]], tested: Mapping[str, Dataset]) -> dict[str, str]:
    """Return the images with likely wrong labels that the page shows, by id."""
    images: dict[str, str] = {}
    for audit in audits:
        shown = [issue["sample_id"] for issue in audit["issues"]]
        images |= _images(tested.get(audit["artifact"]), shown, ("train", "dev"))
    return images
