"""The stages finetune and detect: sweep over rates or search, refit with the best, score test once (paper, table 4).

In: a dataset and a backbone, or a model size to train from scratch. Out: model.safetensors and config.json (of draw 0's
refit), rows.parquet and predictions.parquet (`ray_jobs.evaluation.rows`), sweep.json {trials, chosen, selected_on}, and
with a search {kind, chosen_trial, chosen_point}; curves.json, log.jsonl
(`pipelines.store.training_log`), cost.json (`ray_jobs.evaluation.cost`).

With `masks`, the model classifies the pixels of masks (`ray_jobs.training.segmenting`), has mIoU in place of accuracy,
and writes confusion.parquet. The stage detect trains a detector (`ray_jobs.training.detecting`), has AP in place of
accuracy, and writes detections.parquet (`ray_jobs.tuning.detections`). Neither writes cost.json.

A point, {field: value}, has a learning rate, and with `search` values of other fields. It is selected by mean accuracy
over folds of draw 0's labels (few labels) or by accuracy on dev (all labels); the lower loss breaks ties. Every draw is
then fitted with that point on all its labels (all labels: train and dev) and scored on test once. With a single rate
there is no sweep. The trials of a sweep only see images of train and dev; only `refit` opens test.

With `early_stopping` a trial's result is its best evaluation. A refit has no images left to stop by, so it takes the
same steps, with the schedule of all `steps`, and ends at the step where the trial was best (the median over folds).

A finished trial or refit is never rerun: later attempts reuse it from the ledger (`ray_jobs.tuning.ledger`). One that
was running continues from its checkpoint.

    python -m ray_jobs.finetune --spec STORE/artifacts/finetune/<key>/attempts/<n>/attempt.json
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Finetune
from pipelines.spec.search import ASHA, Optuna
from pipelines.store import FitName, write_log
from ray_jobs.data.shards import Dataset, Images
from ray_jobs.evaluation import multi_label, rows
from ray_jobs.evaluation.artifact import CONFUSIONS, TestedPixels, score_pixels
from ray_jobs.evaluation.cost import Cost, write_cost
from ray_jobs.evaluation.leakage import PRETRAINED, SEEN, Overlap, check_leakage
from ray_jobs.evaluation.rows import ACCURACY, MEAN_AP, PROBABILITIES
from ray_jobs.evaluation.supports import Supports
from ray_jobs.process import cluster
from ray_jobs.process.context import Context, Result, model_digest
from ray_jobs.process.stage import run_stage
from ray_jobs.training.task import Task, at_point, describe, make_task, read_split
from ray_jobs.tuning import detections
from ray_jobs.tuning.ledger import Ledger, open_ledger
from ray_jobs.tuning.points import points
from ray_jobs.tuning.runner import (
    choose,
    held_out_temperature,
    last_step,
    run_refit,
    sweep,
)
from ray_jobs.tuning.trial import Refitted, TriedPoint
from vit_model.errors import UserError
from vit_model.variants import FAMILIES

PROTOCOL, SEGMENTATION = "fine-tuning", "fine-tuned segmentation"
ONE_RATE = "nothing, one learning rate was given"


def main(context: Context[Finetune]) -> Result:
    """Check the backbone for leakage, sweep, choose, refit, score, write.

    Raises:
        UserError: the backbone was trained on test images, see `check_leakage`; or every learning rate diverged.
    """
    config = context.config
    dataset = context.dataset(config.cache_gib)
    task = make_task(config, dataset, context.input("backbone") if config.backbone else None)
    if task.backbone is not None:
        from ray_jobs.training.fit import backbone_changes

        for line in backbone_changes(task):
            print(line, flush=True)
    pools, supports = labelled(config, dataset)
    dataset.require("test")
    overlap = check_leakage(context, dataset, supports.pool.take(supports.rows))
    ledger = open_ledger(context)
    task = task._replace(attempts=ledger.attempts)
    choice = select(context, task, pools, supports, ledger)
    task = chosen_task(task, choice, dataset)
    refits = refit_draws(context, task, pools, ledger)
    cost = None if task.is_dense else measure_cost(context, task)
    return write(context, task, dataset, choice, refits, overlap, cost)


class Choice(NamedTuple):
    """The points that were tried, the chosen one, and what it was selected on; without a sweep, it has no trials."""

    sweep: list[TriedPoint]
    chosen: TriedPoint
    selected_on: str


def select(context: Context[Finetune], task: Task, pools: list[Images], supports: Supports, ledger: Ledger) -> Choice:
    """Sweep, and choose a point, unless there is only one and nothing else to choose.

    Raises:
        UserError: ASHA needs dev, but there is none; or see `sweep` and `choose`.
    """
    config = context.config
    known = [] if isinstance(config.search, Optuna) else points(config)
    chooses = config.early_stopping is not None or task.contract.is_multi_label  # a step, or thresholds
    if len(known) == 1 and not chooses:  # nothing to select, so no image is held out
        return Choice([], TriedPoint(0, known[0], []), ONE_RATE)
    if isinstance(config.search, ASHA) and len(supports.folds) > 1:
        raise UserError("search.kind asha needs dev, but the data set has none; use random or optuna")
    tried = sweep(context, task, pools, supports.folds, ledger)
    by = "" if task.metric == ACCURACY else f", by {task.metric}"
    return Choice(tried, choose(tried), supports.selected_on + by)


def chosen_task(task: Task, choice: Choice, dataset: Dataset) -> Task:
    """Return the task of the refits, and print its point."""
    number, point, trials = choice.chosen
    task = at_point(task, number, point, dataset)._replace(temperature=held_out_temperature(trials))
    if thresholds := multi_label.mean_thresholds([each.thresholds for each in trials if each.thresholds]):
        contract = task.contract.model_copy(update={"thresholds": thresholds})
        task = task._replace(thresholds=thresholds, contract=contract)
    message = f"chosen on {choice.selected_on}" if trials else "nothing to choose"
    message += f": {describe(point)}"
    if task.config.early_stopping is not None:
        task = task._replace(last_step=last_step(trials))
        message += f", stopped at step {task.last_step} of {task.config.steps}"
    print(message, flush=True)
    return task


def refit_draws(context: Context[Finetune], task: Task, pools: list[Images], ledger: Ledger) -> list[Refitted]:
    """Refit every draw that is not in the ledger, and return all refits."""
    refits = {draw: finished for draw in range(len(pools)) if (finished := ledger.refit(task, draw)) is not None}
    missing = [draw for draw in range(len(pools)) if draw not in refits]
    refits |= zip(missing, run_refits(context, task, pools, missing), strict=True)
    return [refits[draw] for draw in range(len(pools))]


def run_refits(context: Context[Finetune], task: Task, pools: list[Images], draws: list[int]) -> list[Refitted]:
    """Refit these draws in Ray tasks; with several workers, as many in parallel as the cluster has room for."""
    arguments = [(context, task, pools[draw], draw) for draw in draws]
    if task.config.workers > 1:
        _, concurrent = cluster.fit_resources(task.config.threads or 1, task.config.workers)
        with ThreadPoolExecutor(concurrent) as threads:
            return [*threads.map(lambda refit: run_refit(*refit), arguments)]
    return cluster.in_tasks(run_refit, arguments, task.config.threads or 1)


def measure_cost(context: Context[Finetune], task: Task) -> Cost:
    """Measure the model's cost in a Ray task with the resources of a fit by one worker."""
    (cost,) = cluster.in_tasks(_cost, [(context, task)], task.config.threads or 1)
    return cost


def _cost(context: Context[Finetune], task: Task) -> Cost:
    from ray_jobs.training.cost import finetuning_cost
    from ray_jobs.tuning.fits import fetched

    return finetuning_cost(fetched(context, task))


def write(
    context: Context[Finetune],
    task: Task,
    dataset: Dataset,
    choice: Choice,
    refits: list[Refitted],
    overlap: Overlap,
    cost: Cost | None,
) -> Result:
    """Write all files except the model's, and return the stage's result."""
    found, predictions, more = tables(task, dataset, refits, choice.selected_on, overlap)
    sweep_json = json.dumps(_sweep(context.config, task, choice), indent=1) + "\n"
    curves = [
        {"draw": draw, "points": [point.model_dump() for point in done.record.curve]}
        for draw, done in enumerate(refits)
    ]
    names = {str(task.refit(draw)) for draw in range(len(refits))}

    def has_fit(fit: str | None) -> bool:
        """Return whether a fit is a trial or one of `refits`; an earlier attempt may have refitted another point."""
        name = FitName.parse(fit)
        return name is not None and (name.kind == "trial" or fit in names)

    with context.staging() as staging:
        rows.write_table(staging.path / "rows.parquet", found, rows.ROWS)
        rows.write_predictions(staging.path / "predictions.parquet", predictions)
        for name, parts in more.items():
            rows.write_parquet(staging.path / name, pa.concat_tables(parts))
        (staging.path / "sweep.json").write_text(sweep_json)
        (staging.path / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
        if cost is not None:
            write_cost(staging.path, cost)
        write_log(context.open_store(), context.attempt, staging.path, has_fit)
    metric = task.metric if task.metric in (MEAN_AP, rows.AP, rows.MEAN_IOU) else ACCURACY
    model_files = refits[0].record.files
    digest = {
        "model": model_digest(model_files),
        "rows": rows.digest_rows(found, rows.ROWS),
        "sweep": sha256(sweep_json),  # the report reads it, so it is part of the content
    }
    metrics: dict[str, float | int | str] = {
        "learning_rate": task.learning_rate,
        **_on_test(found, metric),
        **_parameters(task),
        "substitutes": sum(done.record.substitutes for done in refits),
        **overlap.metrics,
    }
    best = choice.chosen
    on_dev = (best.accuracy if metric == ACCURACY else best.selecting) if choice.sweep else None
    chosen: dict[str, float | int | None] = {
        f"validation_{metric}": on_dev,
        "temperature": task.temperature,
        "trial": None if context.config.search is None else choice.chosen.number,
        "stopped_at_step": task.last_step,
    }
    metrics |= {name: value for name, value in chosen.items() if value is not None}
    return Result(sha256(canonical_json(digest)), (*model_files, *staging.files), metrics)


def _sweep(config: Finetune, task: Task, choice: Choice) -> dict[str, Any]:
    """Return the content of sweep.json."""
    content: dict[str, Any] = {
        "trials": [point.in_sweep(config) for point in choice.sweep],
        "chosen": task.learning_rate,
        "selected_on": choice.selected_on,
    }
    if config.search is not None:
        number, point, _ = choice.chosen
        content |= {"kind": config.search.kind, "chosen_trial": number, "chosen_point": point}
    if task.last_step is not None:
        content["stopped_at"] = task.last_step
    return content


def labelled(config: Finetune, dataset: Dataset) -> tuple[list[Images], Supports]:
    """Return each refit's images, and their supports. Reads train and dev only.

    Raises:
        UserError: there are no training images, or a class in `class_weights` has none.
    """
    dataset.require("train")
    supports = Supports(dataset.index("train"), dataset.index("dev"), config.labels)
    draws = config.refits * [Images(dataset, supports.pool.take(rows)) for rows in supports.draws]
    if isinstance(config.class_weights, dict) and not config.masks:  # a set with several labels per image refuses them
        present = {dataset.info.class_names[label] for label in draws[0].labels}
        for name in config.class_weights:
            if name not in present:
                raise UserError(f"class_weights: class {name!r} has no labelled image to train on; remove it")
    return draws, supports


def tables(
    task: Task, dataset: Dataset, refits: list[Refitted], selected_on: str, overlap: Overlap
) -> tuple[list[rows.Row], list[pa.Table], dict[str, list[pa.Table]]]:
    """Return the rows of rows.parquet, the tables of predictions.parquet, and the tables of each other file."""
    config = task.config
    is_biases_only = config.freeze == "all_but_biases"
    settings: dict[str, Any] = {"learning_rate": task.learning_rate}
    settings |= {name: getattr(config, name) for name in ("steps", "batch_size", "augment")}
    changed = {
        "stopped_at": task.last_step,
        "color_jitter": config.color_jitter,
        "randaugment": config.randaugment and config.randaugment.model_dump(),
        "mixup": config.mixup,
        "cutmix": config.cutmix,
        "lora": config.lora and config.lora.model_dump(mode="json"),
        "class_weights": None if "class_weights" in task.point else config.class_weights,
        "freeze": config.freeze if is_biases_only else None,
        "checkpoint": config.checkpoints().get("backbone"),
    }
    settings |= {name: value for name, value in changed.items() if value}
    settings |= {path: value for path, value in task.point.items() if path not in settings}
    if task.objects:
        return detections.tables(task, dataset, refits, selected_on, settings, overlap)
    family = FAMILIES[task.contract.architecture.family]
    start = "from scratch" if task.backbone is None else PRETRAINED
    if config.labels.per_class is not None and overlap.labels_seen:
        start = SEEN  # it was trained on more of these labels than labels_per_class says
    method = f"{family}, {start}" + ", LoRA" * (config.lora is not None) + ", biases only" * is_biases_only
    if task.is_dense:
        method += ", frozen" * (config.freeze == "backbone")
        return _segmented(dataset, method, refits, selected_on, settings, overlap)
    test = read_split(dataset, "test")
    is_multi_label = task.contract.is_multi_label
    if is_multi_label:
        settings["thresholds"] = selected_on if task.thresholds else multi_label.THRESHOLD
    truth = None if is_multi_label else rows.truth_of(dataset, overlap.seen)
    found: list[rows.Row] = []
    predictions: list[pa.Table] = []
    scores: list[pa.Table] = []
    for draw, done in enumerate(refits):
        common = {
            "protocol": PROTOCOL,
            "method": method,
            "labels_per_class": config.labels.per_class,
            "draw": draw,
        }
        if truth is None:
            values = np.stack(done.images["scores"].to_numpy())
            results = multi_label.Scored(test.labels, values, multi_label.reaches(values, task.thresholds))
            named, ids = common | {"task": dataset.info.name}, dataset.sample_ids("test")
            more, images = multi_label.scored(named, ids, results, overlap.seen, selected_on, settings)
            found += more
            scores += images
            continue
        labels, probabilities = predicted(done), done.images.select(PROBABILITIES.names)
        for row, images in rows.scored(common, truth, labels, selected_on, settings, probabilities):
            found.append(row)
            predictions.append(images)
        found += rows.mean_ap_of_real(common, truth, done.record.mean_ap, selected_on, settings)
    return found, predictions, {multi_label.FILE: scores} if scores else {}


def _segmented(
    dataset: Dataset, method: str, refits: list[Refitted], selected_on: str, settings: dict[str, Any], overlap: Overlap
) -> tuple[list[rows.Row], list[pa.Table], dict[str, list[pa.Table]]]:
    """Return the rows of a segmentation, no predictions of classes, and the tables of confusion.parquet."""
    classes = len(dataset.info.mask_classes)
    scored = [
        pair
        for draw, done in enumerate(refits)
        for pair in score_pixels(
            dataset,
            SEGMENTATION,
            TestedPixels(
                method,
                draw,
                np.stack(done.images[CONFUSIONS].to_numpy()).reshape(-1, classes, classes),
                selected_on,
                settings,
                overlap.seen,
            ),
        )
    ]
    return [row for row, _ in scored], [], {rows.CONFUSION_FILE: [table for _, table in scored]}


def predicted(refit: Refitted) -> NDArray[np.int64]:
    """Return a refit's predicted labels [n] for the test images."""
    labels: NDArray[np.int64] = refit.images["prediction"].to_numpy().astype(np.int64)
    return labels


def _parameters(task: Task) -> dict[str, int]:
    """Return how many weights the model has, and how many each refit trained, with LoRA's, if these are not all."""
    restricted = task.config.freeze is not None or task.config.lora is not None
    if not restricted and not task.objects:
        return {"parameters": task.contract.architecture.num_parameters}
    from ray_jobs.training.fit import parameters

    whole, trained = parameters(task)
    return {"parameters": whole} | ({"trained_parameters": trained} if restricted else {})


def _on_test(found: list[rows.Row], metric: str) -> dict[str, float]:
    """Return the mean over refits of a metric on the test images that were not seen in training; empty if all were.

    With several refits, also return the standard deviation (ddof 1).
    """
    values = [
        row["value"]
        for row in found
        if row["metric"] == metric
        and row["method"] != rows.MEDIAN_BOX
        and not row["method"].endswith(rows.ON_SEEN)
        and not row["task"].endswith(rows.REAL)
    ]
    if not values:
        return {}
    metrics = {f"test_{metric}": float(np.mean(values))}
    if len(values) > 1:
        metrics[f"test_{metric}_std"] = float(np.std(values, ddof=1))
    return metrics


if __name__ == "__main__":
    run_stage("finetune")
