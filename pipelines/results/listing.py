"""The rows of `vitflow list`: runs, artifacts by kind, checkpoints. The columns of the table, and more for JSON."""

from __future__ import annotations

import json
from typing import Any, get_args

from pipelines.engine.runs import all_runs
from pipelines.engine.submission import reached
from pipelines.results.lookup import jobs_of, recipe_and_stage, score
from pipelines.spec import BEST, LAST, WEIGHTS, Kind, RecipeError, nearest
from pipelines.store import (
    Attempt,
    Layout,
    Manifest,
    Store,
    StoreDamaged,
    alias_names,
    all_manifests,
    checkpoints,
    kept_checkpoints,
    local_file,
    read_alias,
    read_attempt,
    warn,
)

# In the names of an evaluation's metrics: rows that lists of the best leave out (`rows.is_apart`); other metrics.
_APART = (", on test images", ", settings chosen on test")
_OTHERS = (", mAP", ", mIoU", ", macro-F1", ", micro-F1")

KINDS = {f"{kind}s": kind for kind in get_args(Kind)}
COLUMNS = {
    "runs": ("run", "status", "stages", "created"),
    "datasets": ("recipe/stage", "name", "key", "images", "classes", "finished", "run"),
    "models": ("recipe/stage", "alias", "key", "job", "parameters", "accuracy", "finished", "run"),
    "detectors": ("recipe/stage", "alias", "key", "task", "parameters", "AP", "finished", "run"),
    "evaluations": ("recipe/stage", "key", "job", "task", "best", "finished", "run"),
    "audits": ("recipe/stage", "key", "task", "audited", "label_issues", "finished", "run"),
    "embeddings": ("recipe/stage", "key", "task", "images", "finished", "run"),
    "predictions": ("recipe/stage", "key", "task", "images", "finished", "run"),
    "inspections": ("recipe/stage", "key", "task", "images", "finished", "run"),
    "reports": ("recipe/stage", "key", "title", "finished", "run", "page"),
    "checkpoints": ("recipe/stage", "checkpoint", "accuracy", "key", "created", "run"),
}


def list_kind(store: Store, kind: str) -> list[dict[str, Any]]:
    """Return a row per run, artifact or checkpoint, oldest first, with the columns in COLUMNS and more.

    Raises:
        RecipeError: there is no such kind.
    """
    if kind == "runs":
        return _runs(store)
    if kind == "checkpoints":
        return _checkpoints(store)
    if kind not in KINDS:
        raise RecipeError(f"--kind {kind}: no such kind{nearest(kind, COLUMNS)}")
    names = {}
    if "task" in COLUMNS[kind]:
        names = {data.key: dataset_name(data) for data in all_manifests(store, *jobs_of("dataset"))}
    is_named = KINDS[kind] in WEIGHTS
    aliases = _aliases(store) if is_named else {}
    return [
        {
            "key": manifest.key,
            "stage": manifest.stage,
            "recipe/stage": recipe_and_stage(manifest),
            **({"alias": ", ".join(aliases.get(manifest.key, ())) or None} if is_named else {}),
            "job": manifest.job,
            **_described(store, manifest, names),
            "run": manifest.run,
            "finished": manifest.finished[:19],
            "user": manifest.user,
            "content_digest": manifest.content_digest,
            "bytes": sum(file.size for file in manifest.files),
            "metrics": manifest.metrics,
        }
        for manifest in all_manifests(store, *jobs_of(KINDS[kind]))
    ]


def _aliases(store: Store) -> dict[str, list[str]]:
    """Return the aliases that name each model, by key."""
    aliases: dict[str, list[str]] = {}
    for name in alias_names(store):
        try:
            record = read_alias(store, name)
        except StoreDamaged as error:
            warn(f"{error}; ignoring @{name}")
            continue
        if record is not None and record.target is not None:
            aliases.setdefault(record.target.key, []).append(f"@{name}")
    return aliases


def _checkpoints(store: Store) -> list[dict[str, Any]]:
    """Return a row per checkpoint: named ones of finished pretrainings, and unnamed ones to resume from."""
    manifests = {manifest.key: manifest for manifest in all_manifests(store, "pretrain")}
    unfinished = [key for key in store.names("artifacts/pretrain") if key not in manifests]
    rows = []
    for key in (*manifests, *unfinished):
        made = manifests.get(key)
        try:
            rows += _resumable_checkpoints(store, key) if made is None else _named_checkpoints(store, made)
        except StoreDamaged as error:
            warn(f"{error}; ignoring its checkpoints")
    return rows


def _named_checkpoints(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    kept, dev_accuracies = kept_checkpoints(store, manifest), _dev_accuracies(store, manifest)
    by_step = {step: [f"step:{step}"] for step in kept.steps}
    by_step[kept.steps[-1]].append(LAST)
    if kept.best is not None:
        by_step[kept.best].append(BEST)
    return [
        _checkpoint(manifest.key, manifest, step, names, dev_accuracies.get(step), manifest.finished)
        for step, names in by_step.items()
    ]


def _dev_accuracies(store: Store, manifest: Manifest) -> dict[int, float]:
    """Return the accuracies on dev that a pretraining measured, by step."""
    if (path := local_file(store, manifest, "curve.json")) is None:
        return {}
    curve = json.loads(path.read_text())
    return {point["step"]: point["dev_accuracy"] for point in curve if point["dev_accuracy"] is not None}


def _resumable_checkpoints(store: Store, key: str) -> list[dict[str, Any]]:
    rows = []
    for checkpoint in reversed(checkpoints(store, "pretrain", key)):
        attempt = read_attempt(store, Layout.attempt("pretrain", key, checkpoint.attempt))
        rows.append(_checkpoint(key, attempt, checkpoint.step, [], None, checkpoint.created))
    return rows


def _checkpoint(
    key: str, made: Manifest | Attempt | None, step: int, names: list[str], accuracy: float | None, created: str
) -> dict[str, Any]:
    """Return the row of a checkpoint; one without names is to resume from."""
    return {
        "key": key,
        "stage": made and made.stage,
        "recipe/stage": made and recipe_and_stage(made),
        "step": step,
        "checkpoint": ", ".join(names) or f"to resume at step {step:,}",
        "names": names,
        "dev_accuracy": accuracy,
        "accuracy": None if accuracy is None else f"{accuracy:.1%} dev",
        "created": created[:19],
        "run": made and made.run,
    }


def dataset_name(manifest: Manifest) -> str:
    """Return the name of an ingest's images in rows and reports."""
    source = manifest.config.get("source", {})
    return str(source.get("name") or source.get("kind", ""))


def _runs(store: Store) -> list[dict[str, Any]]:
    return [
        {
            "run": run.run,
            "pipeline": run.pipeline,
            "status": run.status,
            "stages": f"{run.done}/{run.stages}",
            "created": run.created[:19],
        }
        for run in all_runs(store, reached(None, None))
    ]


def _described(store: Store, manifest: Manifest, names: dict[str, str]) -> dict[str, Any]:
    """Return an artifact's columns in the list of its kind; `names` has the datasets' names by key."""
    metrics = manifest.metrics

    def counts(*wanted: str) -> dict[str, Any]:
        return {name: metrics.get(name) for name in wanted}

    task = ", ".join(names.get(reference.key, "?") for reference in manifest.inputs.get("data", ()))
    if manifest.kind == "dataset":
        return {"name": dataset_name(manifest), **counts("images", "classes")}
    if manifest.kind == "model":
        return {**counts("parameters"), "accuracy": score(manifest)}
    if manifest.kind == "detector":
        return {"task": task, **counts("parameters"), "AP": score(manifest)}
    if manifest.job == "promote":
        return {"task": task, "best": f"{manifest.config['against']}: {metrics.get('verdict')}"}
    if manifest.kind == "evaluation":  # the best is chosen on test, so it is not an unbiased result
        scores = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, float) and not any(part in name for part in _APART)
        }
        of_accuracy = {name: value for name, value in scores.items() if not name.partition(" @ ")[0].endswith(_OTHERS)}
        scores = of_accuracy or scores
        best = max(scores, key=lambda name: scores[name], default=None)
        return {"task": task, "best": None if best is None else f"{scores[best]:.1%} {best}"}
    if manifest.kind == "audit":
        return {"task": task, **counts("audited", "label_issues")}
    if manifest.kind in ("embedding", "prediction", "inspection"):
        return {"task": task, **counts("images")}
    return {"title": manifest.config.get("title"), "page": f"{store.uri}/{manifest.folder}/report.html"}
