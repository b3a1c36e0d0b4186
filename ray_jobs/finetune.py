"""The finetune stage: sweep over learning rates, refit with the best, score on test once (paper, table 4).

In: a dataset and a backbone, or a model size to train from scratch. Out: model.safetensors and config.json (of draw 0's
refit), rows.parquet and predictions.parquet (`ray_jobs.evaluation.rows`), sweep.json {trials, chosen, selected_on},
curves.json.

The learning rate is selected by mean accuracy over folds of draw 0's labels (few labels) or by accuracy on dev (all
labels); the lower loss breaks ties. Every draw is then fitted with that rate on all its labels (all labels: train and
dev) and scored on test once. With a single rate there is no sweep. The trials of a sweep only see images of train and
dev; only `refit` opens test.

    python -m ray_jobs.finetune --spec STORE/artifacts/finetune/<key>/attempts/<n>/attempt.json
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Finetune
from ray_jobs.data.shards import Dataset, Images
from ray_jobs.evaluation import rows
from ray_jobs.evaluation.leakage import PRETRAINED, SEEN, Overlap, check_leakage
from ray_jobs.evaluation.supports import Supports
from ray_jobs.process import devices
from ray_jobs.process.stage import Context, Result, model_digest, run_stage
from ray_jobs.training.contract import model_contract
from ray_jobs.training.task import DivergenceError, Indices, Refit, Task, read_split
from vit_model.config import ModelContract, Preprocessing
from vit_model.errors import UserError, reasons
from vit_model.variants import FAMILIES

PROTOCOL = "fine-tuning"
ONE_RATE = "nothing, one learning rate was given"
DIVERGED = sys.float_info.max  # the loss of a trial that diverged; JSON has no infinity

# ------------------------------------------------------------------------------------------------- the sweep


def choose(trials: list[dict[str, Any]]) -> float:
    """Return the learning rate with the highest mean validation accuracy; the lowest mean loss breaks ties.

    A rate that diverged in some folds ranks below every rate that diverged in fewer. Raises DivergenceError if every
    rate diverged in every fold.
    """

    def rank(trial: dict[str, Any]) -> tuple[float, float, float]:
        losses = [loss for loss in trial["losses"] if loss != DIVERGED]
        # Rates that are compared by loss have the same number of losses, so sums rank as means do.
        return -len(losses), -float(np.mean(trial["accuracies"])), sum(losses)

    best = min(trials, key=rank)
    if set(best["losses"]) == {DIVERGED}:
        raise DivergenceError(
            "learning_rates: training diverged with every rate of the sweep; give lower ones"
        )
    return float(best["learning_rate"])


def sweep(
    context: Context[Finetune], task: Task, pool: Images, folds: list[tuple[Indices, Indices]], scratch: str
) -> list[dict[str, Any]]:
    """Run Ray Tune over rates x folds: [{learning_rate, accuracies, losses}] in the order of the configuration.

    `scratch` is a folder for Tune's own records, which are not kept.
    """
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # nothing reads its CSV and TensorBoard files
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the old output is silent at verbosity 0
    # Tune warns that the files switched off above are missing. It does not need them for a trial's last report.
    logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)
    os.environ["TUNE_WARN_INSUFFICIENT_RESOURCE_THRESHOLD_S"] = "900"  # another stage may hold the cores
    from ray import tune

    rates = task.config.learning_rates
    resources, concurrent = devices.fit_resources(task.config.threads)
    tuner = tune.Tuner(
        tune.with_resources(
            tune.with_parameters(
                _tune_trial, context=context, task=task, pool=pool, folds=folds, concurrent=concurrent
            ),
            resources,
        ),
        param_space={
            "rate": tune.grid_search(list(range(len(rates)))),
            "fold": tune.grid_search(list(range(len(folds)))),
        },
        tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=concurrent),
        run_config=tune.RunConfig(name="sweep", storage_path=scratch, verbose=0),
    )
    metrics = {}
    for result in tuner.fit():
        if result.error is not None:
            raise result.error
        assert result.config is not None and result.metrics is not None
        metrics[result.config["rate"], result.config["fold"]] = result.metrics
    return [
        {
            "learning_rate": rate,
            "accuracies": [metrics[number, fold]["accuracy"] for fold in range(len(folds))],
            "losses": [metrics[number, fold]["loss"] for fold in range(len(folds))],
        }
        for number, rate in enumerate(rates)
    ]


def _tune_trial(
    parameters: dict[str, int],
    context: Context[Finetune],
    task: Task,
    pool: Images,
    folds: list[tuple[Indices, Indices]],
    concurrent: int,
) -> None:
    from ray import tune

    from ray_jobs.training.fit import run_trial

    sys.unraisablehook = _show_unraisable
    number = parameters["fold"] * len(task.config.learning_rates) + parameters["rate"]
    after = steps_after(task.config, len(folds), concurrent, number)
    rate = task.config.learning_rates[parameters["rate"]]
    name = f"learning rate {rate:g}" + (f", fold {parameters['fold']}" if len(folds) > 1 else "")
    try:
        result = run_trial(fetched(context, task), pool, folds[parameters["fold"]], rate, name, after)
    except DivergenceError as error:  # a sweep may include rates that are too high
        print(f"{name}: {error}", flush=True)
        tune.report({"accuracy": 0.0, "loss": DIVERGED})
    else:
        tune.report({"accuracy": result.accuracy, "loss": result.loss})


def _show_unraisable(error: sys.UnraisableHookArgs) -> None:
    """Show an exception that cannot be caught, unless it only ends the process.

    Ray's SIGTERM handler raises SystemExit wherever a finished trial's process happens to be, even in a destructor.
    """
    if not isinstance(error.exc_value, SystemExit):
        sys.__unraisablehook__(error)


def steps_after(config: Finetune, folds: int, concurrent: int, number: int) -> int:
    """Return how many steps the stage does after fit `number`, with `concurrent` fits in parallel.

    Args:
        folds: the folds of the sweep; 0 after the sweep, when `number` counts refits only.
        number: the fit's place among the trials, then the refits, from 0.
    """
    trials = folds * len(config.learning_rates)
    refits = config.labels.draws if config.labels.per_class is not None else 1
    trial_rounds = math.ceil(trials / concurrent)
    this_round = number // concurrent if number < trials else trial_rounds + (number - trials) // concurrent
    return (trial_rounds + math.ceil(refits / concurrent) - this_round - 1) * config.steps


# ------------------------------------------------------------------------------------------------- the refits


def fetched(context: Context[Finetune], task: Task) -> Task:
    """Return the task with the backbone's folder on this machine, which may differ from the sender's."""
    return task if task.backbone is None else task._replace(backbone=context.input("backbone"))


def refit(
    context: Context[Finetune], task: Task, pool: Images, rate: float, draw: int, after: int = 0
) -> Refit:
    """Fit on all of a draw's labels and score on test. Draw 0's model becomes the artifact's."""
    from ray_jobs.training.fit import fit, score
    from vit_model.weights import save_model

    seed, noun = task.config.seed + draw, f"draw {draw}, step"
    model, curve, substitutes = fit(fetched(context, task), pool, rate, seed, noun, after)
    test = read_split(context.dataset(context.config.cache_gib), "test")
    result = score(model, task.contract, test)
    print(f"draw {draw}: test accuracy {result.accuracy:.3f}", flush=True)
    if draw:
        return Refit(result, curve, substitutes, ())
    with context.staging() as staging:
        save_model(staging.path, model, task.contract)
    return Refit(result, curve, substitutes, staging.files)


def run_refits(context: Context[Finetune], task: Task, pools: list[Images], rate: float) -> list[Refit]:
    """Refit every draw, each in a Ray task."""
    import ray

    resources, concurrent = devices.fit_resources(task.config.threads)
    remote = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(refit)
    tasks = [
        remote.remote(context, task, pool, rate, draw, steps_after(task.config, 0, concurrent, draw))
        for draw, pool in enumerate(pools)
    ]
    refits: list[Refit] = ray.get(tasks)
    return refits


# ------------------------------------------------------------------------------------------------- the stage


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
    if len(config.learning_rates) == 1:  # nothing to select, so no image is held out
        trials, chosen, selected_on = [], config.learning_rates[0], ONE_RATE
    else:
        with tempfile.TemporaryDirectory(prefix="vitflow-", ignore_cleanup_errors=True) as scratch:
            trials = sweep(context, task, pools[0], supports.folds, scratch)
        chosen = choose(trials)
    print(f"chosen on {selected_on}: learning rate {chosen:g}", flush=True)
    refits = run_refits(context, task, pools, chosen)

    accuracy_rows, predictions = tables(task, dataset, refits, chosen, selected_on, overlap)
    with context.staging() as staging:
        rows.write_table(staging.path / "rows.parquet", accuracy_rows, rows.ROWS)
        rows.write_predictions(staging.path / "predictions.parquet", predictions)
        ledger = {"trials": trials, "chosen": chosen, "selected_on": selected_on}
        sweep_json = json.dumps(ledger, indent=1) + "\n"
        (staging.path / "sweep.json").write_text(sweep_json)
        curves = [{"draw": draw, "points": refit.curve} for draw, refit in enumerate(refits)]
        (staging.path / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
    files = (*refits[0].files, *staging.files)
    digest = {"model": model_digest(refits[0].files), "rows": rows.digest_rows(accuracy_rows, rows.ROWS)}
    digest["sweep"] = sha256(sweep_json)  # the report reads it, so it is part of the content
    metrics: dict[str, float | int | str] = {
        "learning_rate": chosen,
        **_test_accuracy(dataset, refits, overlap),
        "parameters": task.contract.architecture.num_parameters,
        "substitutes": sum(refit.substitutes for refit in refits),
        **overlap.metrics,
    }
    if trials:
        (best,) = (trial for trial in trials if trial["learning_rate"] == chosen)
        metrics["validation_accuracy"] = float(np.mean(best["accuracies"]))
    return Result(content_digest=sha256(canonical_json(digest)), files=files, metrics=metrics)


def _test_accuracy(dataset: Dataset, refits: list[Refit], overlap: Overlap) -> dict[str, float]:
    """Return the mean over draws on the test images that were not seen in training; empty if all were."""
    unseen = ~overlap.seen
    if not unseen.any():
        return {}
    correct = [refit.score.predictions == dataset.labels("test") for refit in refits]
    return {"test_accuracy": float(np.mean([draw_correct[unseen].mean() for draw_correct in correct]))}


def make_task(config: Finetune, dataset: Dataset, backbone: Path | None) -> Task:
    """Return the task with its model's contract: the backbone's with a new head and resolution, or a new model's."""
    if backbone is None:
        assert config.model is not None and config.resolution is not None
        contract = model_contract(config.model, config.resolution, dataset.info, config.eval_crop)
        return Task(config, contract, None)
    from vit_model.weights import read_contract

    source = read_contract(backbone)
    resolution = config.resolution or source.preprocessing.resolution
    names = dataset.info.class_names
    changed = {"resolution": resolution} | (config.eval_crop.model_dump() if config.eval_crop else {})
    try:
        contract = ModelContract(
            architecture=source.architecture.for_finetuning(resolution, len(names)),
            class_names=names,
            preprocessing=Preprocessing(**(source.preprocessing.model_dump() | changed)),
            training_data=dataset.info.content_digest,
            license=source.license,
        )
    except ValidationError as error:
        raise UserError(f"fine-tuning {config.backbone}: {reasons(error)}") from error
    return Task(config, contract, backbone)


def labelled(config: Finetune, dataset: Dataset) -> tuple[list[Images], Supports]:
    """Return each draw's images, and the supports that they belong to. Reads train and dev only."""
    dataset.require("train")
    supports = Supports(dataset.index("train"), dataset.index("dev"), config.labels)
    return [Images(dataset, supports.pool.take(rows)) for rows in supports.draws], supports


def tables(
    task: Task, dataset: Dataset, refits: list[Refit], chosen: float, selected_on: str, overlap: Overlap
) -> tuple[list[rows.Row], list[Any]]:
    """Return the rows of rows.parquet and the tables of predictions.parquet."""
    config = task.config
    settings: dict[str, Any] = {
        "learning_rate": chosen,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "augment": config.augment,
    }
    if config.randaugment is not None:
        settings["randaugment"] = config.randaugment.model_dump()
    settings |= {name: alpha for name in ("mixup", "cutmix") if (alpha := getattr(config, name))}
    if checkpoint := config.checkpoints().get("backbone"):
        settings["checkpoint"] = checkpoint
    truth = rows.truth_of(dataset, overlap.seen)
    family = FAMILIES[task.contract.architecture.family]
    start = "from scratch" if task.backbone is None else PRETRAINED
    if config.labels.per_class is not None and overlap.labels_seen:
        start = SEEN  # it has learned from more of these labels than labels_per_class says
    accuracy_rows, predictions = [], []
    for draw, refit in enumerate(refits):
        common = {
            "protocol": PROTOCOL,
            "method": f"{family}, {start}",
            "labels_per_class": config.labels.per_class,
            "draw": draw,
        }
        labels, probabilities = refit.score.predictions, refit.score.probabilities
        for row, images in rows.scored(common, truth, labels, selected_on, settings, probabilities):
            accuracy_rows.append(row)
            predictions.append(images)
    return accuracy_rows, predictions


if __name__ == "__main__":
    run_stage("finetune")
