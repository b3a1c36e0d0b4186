"""What a run ends with: where the time went, the best result if no report says more, and the commands to go on with."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from pipelines.commands.common import store_option
from pipelines.engine.durations import in_hours, longest
from pipelines.engine.plan import PlannedStage
from pipelines.recipe.pipeline import Pipeline
from pipelines.spec import Finetune, quantity
from pipelines.store import Manifest, Store, promotion_of, promotion_sentence

OF_IMAGES = {
    "ingest": ("key, reason", "quarantine"),
    "embed": ("key, split, label, feature", "images"),
    "predict": ("key, split, prediction, probability", "images"),
    "audit": ("sample_id, file, split, label, suggested", "label_issues"),  # as `exclude` reads it
}
"""Job -> what to show of its images: columns and their table."""


def time_line(seconds: float, taken: Mapping[str, float]) -> str:
    """Say how long a run took, and which of its stages that ran (with their seconds) took longest."""
    return f"took {in_hours(seconds)}" + (f"; longest: {longest(taken)}" if len(taken) > 1 else "")


def promotion_lines(stages: Sequence[PlannedStage]) -> Iterator[str]:
    """Say what the promotions of a run decided."""
    for stage in stages:
        if stage.manifest is not None and (decided := promotion_of(stage.manifest)) is not None:
            yield promotion_sentence(decided)


def best_lines(store: Store, stages: Sequence[PlannedStage]) -> Iterator[str]:
    """Yield the highest test accuracy of each task, or mAP, AP or mIoU, with its interval and protocol."""
    # with numpy and scipy
    from pipelines.results.compare import measurements
    from ray_jobs.evaluation.rows import is_apart, is_reference
    from ray_jobs.reporting.verdicts import labels_text, of_metric

    manifests = [stage.manifest for stage in stages if stage.manifest is not None]
    # a promotion scores models that other stages have measured
    made = measurements(store, [manifest for manifest in manifests if manifest.job != "promote"])
    every = [*made.entries, *made.scored]
    entries = [each for each in every if not (is_apart(each.method) or is_reference(each.method))]
    for task, metric in dict.fromkeys((entry.task, entry.metric) for entry in entries):
        measured = [(each.interval(metric), each) for each in entries if (each.task, each.metric) == (task, metric)]
        interval, best = max(measured, key=lambda pair: pair[0].value)
        value, low, high = (f"{100 * number:.1f}" for number in interval)
        which = f"the best of {len(measured)} results on test is " * (len(measured) > 1)
        yield (
            f"{task}: {which}{value}%{of_metric(metric)} (95% CI {low} to {high}), {best.method} ({best.protocol},"
            f" {labels_text(best.labels_per_class, None)},"
            f" {len(best.sample_ids):,} test images, stage {best.stage})"
        )


def next_commands(store: Store, pipeline: Pipeline, stages: Sequence[PlannedStage]) -> Iterator[str]:
    """Yield commands for the fine-tuned model that was best on held-out images; test plays no part in the choice."""
    tuned = [stage for stage in stages if isinstance(stage.config, Finetune) and stage.manifest is not None]
    where = store_option(store.uri)
    for stage in stages:
        if stage.manifest is None or stage.config.job not in OF_IMAGES:
            continue
        left_out = int(stage.manifest.metrics.get("quarantined", 0))
        if stage.config.job != "ingest" or left_out:
            why = f"  # why {stage.name} left out {quantity(left_out, 'image')}" * bool(left_out)
            yield f"{_images(stage.manifest, *OF_IMAGES[stage.config.job])}{where}{why}"
    if not tuned:
        return
    best = max(tuned, key=_rank)
    model = f"{pipeline.name}/{best.name}"
    data = next(stage.manifest for stage in stages if stage.name in best.config.inputs()["data"])
    yield f"vitflow predict {shlex.quote(model)} IMAGE...{where}"
    yield f"vitflow export {shlex.quote(model)} --format onnx --output FOLDER{where}"
    if data is not None:
        yield f"{_images(data, 'key, split', 'images')}{where}  # which image is in which split"


def _images(manifest: Manifest, columns: str, table: str) -> str:
    """Return the command that prints an artifact's images as CSV."""
    sql = f"SELECT {columns} FROM {table} WHERE starts_with(artifact, '{manifest.key[:12]}')"  # noqa: S608
    return f'vitflow report query "{sql}" --csv'


def _rank(stage: PlannedStage) -> tuple[bool, float, bool, bool]:
    assert isinstance(stage.config, Finetune) and stage.manifest is not None
    metrics = stage.manifest.metrics
    measured = (f"validation_{metric}" for metric in ("accuracy", "mAP", "AP", "mIoU"))
    held_out = float(next((metrics[name] for name in measured if name in metrics), 0.0))
    config = stage.config
    return config.labels.per_class is None, held_out, config.backbone is not None, config.freeze is None
