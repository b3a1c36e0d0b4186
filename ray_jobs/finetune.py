"""The finetune stage: sweep over learning rates or a search, refit with the best, score on test once (paper, table 4).

In: a dataset and a backbone, or a model size to train from scratch. Out: model.safetensors and config.json (of draw 0's
refit), rows.parquet and predictions.parquet (`ray_jobs.evaluation.rows`), sweep.json {trials, chosen, selected_on}, and
with a search {kind, chosen_trial, chosen_point}; curves.json, log.jsonl
(`pipelines.store.training_log`), cost.json (`ray_jobs.evaluation.cost`).

A point, {field: value}, has a learning rate, and with `search` values of other fields. It is selected by mean accuracy
over folds of draw 0's labels (few labels) or by accuracy on dev (all labels); the lower loss breaks ties. Every draw is
then fitted with that point on all its labels (all labels: train and dev) and scored on test once. With a single rate
there is no sweep. The trials of a sweep only see images of train and dev; only `refit` opens test.

With `early_stopping` a trial counts with its best evaluation. No image is left to stop a refit by, so it repeats that
trial's steps, with the schedule of all `steps`, up to the one where the trial was best: the median over folds.

A finished trial or refit is never run again: later attempts take it over from the ledger (`ray_jobs.training.ledger`).
One that was running continues from its checkpoint.

    python -m ray_jobs.finetune --spec STORE/artifacts/finetune/<key>/attempts/<n>/attempt.json
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Finetune
from pipelines.spec.search import ASHA, Optuna
from pipelines.store import write_log
from ray_jobs.data.shards import Dataset, Images
from ray_jobs.evaluation import rows
from ray_jobs.evaluation.cost import Cost, write_cost
from ray_jobs.evaluation.leakage import PRETRAINED, SEEN, Overlap, check_leakage
from ray_jobs.evaluation.supports import Supports
from ray_jobs.process import cluster
from ray_jobs.process.context import Context, Result, model_digest
from ray_jobs.process.stage import run_stage
from ray_jobs.training.ledger import Ledger, open_ledger
from ray_jobs.training.search import describe, points
from ray_jobs.training.sweep import choose, held_out_temperature, last_step, steps_after, sweep
from ray_jobs.training.task import Refit, Task, at_point, make_task
from ray_jobs.training.trials import fetched, refits_prefix, run_refit
from vit_model.errors import UserError
from vit_model.variants import FAMILIES

PROTOCOL = "fine-tuning"
ONE_RATE = "nothing, one learning rate was given"


def refit_draws(context: Context[Finetune], task: Task, pools: list[Images], ledger: Ledger) -> list[Refit]:
    """Refit every draw that is not in the ledger with the task's point and last step."""
    refits, last = {}, task.last_step or task.config.steps
    for draw in range(len(pools)):
        if (finished := ledger.refit(draw, task.point, last, task.temperature)) is not None:
            refits[draw] = finished
    missing = [draw for draw in range(len(pools)) if draw not in refits]
    refits |= zip(missing, run_refits(context, task, pools, missing), strict=True)
    return [refits[draw] for draw in range(len(pools))]


def run_refits(context: Context[Finetune], task: Task, pools: list[Images], draws: list[int]) -> list[Refit]:
    """Refit these draws, each in a Ray task; with several workers, as many at once as the cluster has room for."""
    import ray

    config = task.config
    resources, concurrent = cluster.fit_resources(config.threads, config.workers)
    given = []
    for number, draw in enumerate(draws):
        after = steps_after(task.last_step or config.steps, concurrent, number, 0, len(draws))
        given.append((context, task, pools[draw], draw, after))
    if config.workers > 1:
        with ThreadPoolExecutor(concurrent) as threads:
            return [*threads.map(lambda arguments: run_refit(*arguments), given)]
    remote = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(run_refit)
    refits: list[Refit] = ray.get([remote.remote(*arguments) for arguments in given])
    return refits


def measure_cost(context: Context[Finetune], task: Task) -> Cost:
    """Measure what the model costs, in a Ray task with the resources of a fit by one worker."""
    import ray

    resources, _ = cluster.fit_resources(task.config.threads)
    remote = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(_cost)
    cost: Cost = ray.get(remote.remote(context, task))
    return cost


def _cost(context: Context[Finetune], task: Task) -> Cost:
    from ray_jobs.training.cost import finetuning_cost

    return finetuning_cost(fetched(context, task))


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
    selected_on = supports.selected_on
    dataset.require("test")
    overlap = check_leakage(context, dataset, supports.pool.take(supports.rows))
    ledger = open_ledger(context)
    task = task._replace(attempts=ledger.attempts)
    known = [] if isinstance(config.search, Optuna) else points(config)
    if len(known) == 1 and config.early_stopping is None:  # nothing to select, so no image is held out
        trials, folds, number, point, selected_on = [], 0, 0, known[0], ONE_RATE
    else:
        folds = len(supports.folds)
        if isinstance(config.search, ASHA) and folds > 1:
            raise UserError(
                f"search.kind {config.search.kind} needs dev, but the data set has none; use random or optuna"
            )
        trials = sweep(context, task, pools, supports.folds, ledger)
        chosen = choose(trials)
        number = chosen.get("number", trials.index(chosen))
        point = chosen.get("point") or known[number]
    task = at_point(task, number, point, dataset)
    said = f"{f'chosen on {selected_on}' if trials else 'nothing to choose'}: {describe(point)}"
    if config.early_stopping is not None:
        task = task._replace(last_step=last_step(chosen))
        said += f", stopped at step {task.last_step} of {task.config.steps}"
    print(said, flush=True)
    places = [task.place(fold) for fold in range(folds)]
    task = task._replace(temperature=held_out_temperature(ledger, places))
    refits = refit_draws(context, task, pools, ledger)
    cost = measure_cost(context, task)

    accuracy_rows, predictions = tables(task, dataset, refits, selected_on, overlap)
    with context.staging() as staging:
        rows.write_table(staging.path / "rows.parquet", accuracy_rows, rows.ROWS)
        rows.write_predictions(staging.path / "predictions.parquet", predictions)
        choice: dict[str, Any] = {"trials": trials, "chosen": task.learning_rate, "selected_on": selected_on}
        if config.search is not None:
            choice |= {"kind": config.search.kind, "chosen_trial": number, "chosen_point": point}
        if task.last_step is not None:
            choice["stopped_at"] = task.last_step
        sweep_json = json.dumps(choice, indent=1) + "\n"
        (staging.path / "sweep.json").write_text(sweep_json)
        curves = [{"draw": draw, "points": done.curve} for draw, done in enumerate(refits)]
        (staging.path / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
        write_cost(staging.path, cost)
        # An earlier attempt may have chosen another rate.
        write_log(context.open_store(), context.attempt, staging.path, ("trial-", refits_prefix(task)))
    files = (*refits[0].files, *staging.files)
    digest = {"model": model_digest(refits[0].files), "rows": rows.digest_rows(accuracy_rows, rows.ROWS)}
    digest["sweep"] = sha256(sweep_json)  # the report reads it, so it is part of the content
    metrics: dict[str, float | int | str] = {
        "learning_rate": task.learning_rate,
        **_test_accuracy(dataset, refits, overlap),
        "parameters": task.contract.architecture.num_parameters,
        **_trained_parameters(task),
        "substitutes": sum(refit.substitutes for refit in refits),
        **overlap.metrics,
    }
    if trials:
        metrics["validation_accuracy"] = float(np.mean(chosen["accuracies"]))
    if task.temperature is not None:
        metrics["temperature"] = task.temperature
    if config.search is not None:
        metrics["trial"] = number
    if task.last_step is not None:
        metrics["stopped_at_step"] = task.last_step
    return Result(content_digest=sha256(canonical_json(digest)), files=files, metrics=metrics)


def labelled(config: Finetune, dataset: Dataset) -> tuple[list[Images], Supports]:
    """Return each refit's images, and the supports that they belong to. Reads train and dev only.

    Raises:
        UserError: there are no training images, or none of a class that `class_weights` names.
    """
    dataset.require("train")
    supports = Supports(dataset.index("train"), dataset.index("dev"), config.labels)
    draws = config.refits * [Images(dataset, supports.pool.take(rows)) for rows in supports.draws]
    present = {dataset.info.class_names[label] for label in draws[0].labels}
    for name in config.class_weights if isinstance(config.class_weights, dict) else ():
        if name not in present:
            raise UserError(f"class_weights: no image of class {name!r} has a label to train on")
    return draws, supports


def tables(
    task: Task, dataset: Dataset, refits: list[Refit], selected_on: str, overlap: Overlap
) -> tuple[list[rows.Row], list[Any]]:
    """Return the rows of rows.parquet and the tables of predictions.parquet."""
    config = task.config
    settings: dict[str, Any] = {
        "learning_rate": task.learning_rate,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "augment": config.augment,
    }
    if task.last_step is not None:
        settings["stopped_at"] = task.last_step
    if config.randaugment is not None:
        settings["randaugment"] = config.randaugment.model_dump()
    settings |= {name: alpha for name in ("mixup", "cutmix") if (alpha := getattr(config, name))}
    if config.lora is not None:
        settings["lora"] = config.lora.model_dump(mode="json")
    if config.freeze == "all_but_biases":
        settings["freeze"] = config.freeze
    if checkpoint := config.checkpoints().get("backbone"):
        settings["checkpoint"] = checkpoint
    settings |= {path: value for path, value in task.point.items() if path not in settings}
    truth = rows.truth_of(dataset, overlap.seen)
    family = FAMILIES[task.contract.architecture.family]
    start = "from scratch" if task.backbone is None else PRETRAINED
    if config.labels.per_class is not None and overlap.labels_seen:
        start = SEEN  # it has learned from more of these labels than labels_per_class says
    if config.lora is not None:
        start += ", LoRA"
    if config.freeze == "all_but_biases":
        start += ", biases only"
    accuracy_rows, predictions = [], []
    for draw, done in enumerate(refits):
        common = {
            "protocol": PROTOCOL,
            "method": f"{family}, {start}",
            "labels_per_class": config.labels.per_class,
            "draw": draw,
        }
        labels, probabilities = done.score.predictions, done.score.probabilities
        for row, images in rows.scored(common, truth, labels, selected_on, settings, probabilities):
            accuracy_rows.append(row)
            predictions.append(images)
        accuracy_rows += rows.mean_ap_of_real(common, truth, done.score.mean_ap, selected_on, settings)
    return accuracy_rows, predictions


def _trained_parameters(task: Task) -> dict[str, int]:
    """Return how many weights each refit trained, those of LoRA's matrices included; nothing if it trained all."""
    if task.config.freeze is None and task.config.lora is None:
        return {}
    from ray_jobs.training.estimates import trained_parameters

    return {"trained_parameters": trained_parameters(task)}


def _test_accuracy(dataset: Dataset, refits: list[Refit], overlap: Overlap) -> dict[str, float]:
    """Return the mean over refits on the test images that were not seen in training; empty if all were.

    Of several refits also the standard deviation (ddof 1).
    """
    unseen = ~overlap.seen
    if not unseen.any():
        return {}
    labels = dataset.labels("test")
    accuracies = [float(np.mean((done.score.predictions == labels)[unseen])) for done in refits]
    metrics = {"test_accuracy": float(np.mean(accuracies))}
    if len(accuracies) > 1:
        metrics["test_accuracy_std"] = float(np.std(accuracies, ddof=1))
    return metrics


if __name__ == "__main__":
    run_stage("finetune")
