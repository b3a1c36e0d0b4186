"""The finetune stage: sweep over learning rates, refit with the best, score on test once (paper, table 4).

In: a dataset and a backbone, or a model size to train from scratch. Out: model.safetensors and config.json (of draw 0's
refit), rows.parquet and predictions.parquet (`ray_jobs.evaluation.rows`), sweep.json {trials, chosen, selected_on},
curves.json, log.jsonl (`pipelines.store.training_log`).

The learning rate is selected by mean accuracy over folds of draw 0's labels (few labels) or by accuracy on dev (all
labels); the lower loss breaks ties. Every draw is then fitted with that rate on all its labels (all labels: train and
dev) and scored on test once. With a single rate there is no sweep. The trials of a sweep only see images of train and
dev; only `refit` opens test.

With `early_stopping` a trial counts with its best evaluation. No image is left to stop a refit by, so it repeats that
trial's steps, with the schedule of all `steps`, up to the one where the trial was best: the median over folds.

A finished trial or refit is never run again: later attempts take it over from the ledger (`ray_jobs.training.ledger`).
One that was running continues from its checkpoint.

    python -m ray_jobs.finetune --spec STORE/artifacts/finetune/<key>/attempts/<n>/attempt.json
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Finetune, check_optimizer, nearest
from pipelines.store import FileEntry, write_log
from ray_jobs.data.shards import Dataset, Images
from ray_jobs.evaluation import rows
from ray_jobs.evaluation.leakage import PRETRAINED, SEEN, Overlap, check_leakage
from ray_jobs.evaluation.supports import Supports
from ray_jobs.process import devices
from ray_jobs.process.stage import Context, Result, model_digest, run_stage
from ray_jobs.training.contract import continued_contract, model_contract
from ray_jobs.training.ledger import Ledger, add_refit, add_trial, open_ledger
from ray_jobs.training.task import DivergenceError, Folds, Place, Refit, Task, Trial, read_split
from vit_model.config import ModelContract, ViTConfig
from vit_model.errors import UserError, reasons
from vit_model.variants import FAMILIES

if TYPE_CHECKING:
    from ray_jobs.training.checkpoint import Saver
    from ray_jobs.training.log import LogWriter

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
    context: Context[Finetune], task: Task, pools: list[Images], folds: Folds, ledger: Ledger
) -> list[dict[str, Any]]:
    """Try rates x folds on draw 0: [{learning_rate, accuracies, losses}] in the order of the configuration.

    With early stopping also [{steps}], where these are the folds' best. Trials in the ledger are not run again.
    """
    rates = task.config.learning_rates
    places = [(rate, fold) for fold in range(len(folds)) for rate in range(len(rates))]
    results: dict[Place, Trial] = {}
    for place in places:
        if (found := ledger.trial(place)) is not None:
            attempt, results[place] = found
            outcome = "diverged" if results[place].loss == DIVERGED else _outcome(results[place])
            print(f"{_name(task.config, place, folds)}: {outcome} (from attempt {attempt})", flush=True)
    if missing := [place for place in places if place not in results]:
        results |= run_trials(context, task, pools, folds, missing)
    trials = []
    for rate, learning_rate in enumerate(rates):
        own = [results[rate, fold] for fold in range(len(folds))]
        accuracies, losses = [each.accuracy for each in own], [each.loss for each in own]
        trials.append({"learning_rate": learning_rate, "accuracies": accuracies, "losses": losses})
        if task.config.early_stopping is not None:
            trials[-1]["steps"] = [each.step for each in own]
    return trials


def last_step(trials: list[dict[str, Any]], chosen: float) -> int:
    """Return the step at which the trials with the chosen rate were best: the median over folds, the lower of two."""
    (best,) = (trial for trial in trials if trial["learning_rate"] == chosen)
    pairs = zip(best["steps"], best["losses"], strict=True)
    return statistics.median_low([step for step, loss in pairs if loss != DIVERGED])


def run_trials(
    context: Context[Finetune], task: Task, pools: list[Images], folds: Folds, places: list[Place]
) -> dict[Place, Trial]:
    """Run the trials at these places with Ray Tune."""
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # nothing reads its CSV and TensorBoard files
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the old output is silent at verbosity 0
    # Tune warns that the files switched off above are missing. It does not need them for a trial's last report.
    logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)
    os.environ["TUNE_WARN_INSUFFICIENT_RESOURCE_THRESHOLD_S"] = "900"  # another stage may hold the cores
    from ray import tune

    resources, concurrent = devices.fit_resources(task.config.threads)
    # Tune's own records are not kept: the ledger has what a later attempt needs.
    with tempfile.TemporaryDirectory(prefix="vitflow-", ignore_cleanup_errors=True) as scratch:
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(
                    _tune_trial,
                    context=context,
                    task=task,
                    pool=pools[0],
                    folds=folds,
                    places=places,
                    refits=len(pools),
                    concurrent=concurrent,
                ),
                resources,
            ),
            param_space={"number": tune.grid_search(list(range(len(places))))},
            tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=concurrent),
            run_config=tune.RunConfig(name="sweep", storage_path=scratch, verbose=0),
        )
        results = {}
        for result in tuner.fit():
            if result.error is not None:
                raise result.error
            assert result.config is not None and result.metrics is not None
            place = places[result.config["number"]]
            results[place] = Trial(*(result.metrics[name] for name in ("accuracy", "loss", "best_step")))
    return results


def _tune_trial(
    parameters: dict[str, int],
    context: Context[Finetune],
    task: Task,
    pool: Images,
    folds: Folds,
    places: list[Place],
    refits: int,
    concurrent: int,
) -> None:
    from ray import tune

    sys.unraisablehook = _show_unraisable
    number = parameters["number"]
    after = steps_after(task.config.steps, concurrent, number, len(places), refits)
    accuracy, loss, step = trial(context, task, pool, folds, places[number], after)
    tune.report({"accuracy": accuracy, "loss": loss, "best_step": step})


def trial(
    context: Context[Finetune], task: Task, pool: Images, folds: Folds, place: Place, after: int = 0
) -> Trial:
    """Fit on the first part of a fold, score on the second; write the result to the ledger and return it."""
    from ray_jobs.training.fit import Stopping, fit, score
    from ray_jobs.training.log import Evaluation

    config, (rate, fold) = task.config, place
    train, validation = folds[fold]
    learning_rate, name = config.learning_rates[rate], _name(config, place, folds)
    data, held_out, noun = pool.take(train), pool.take(validation), f"{name}, step"
    saver, log = make_saver(context, f"trial-{rate}-{fold}"), make_log(context, f"trial-{rate}-{fold}")
    stopping = None if config.early_stopping is None else Stopping(config)
    settings: Any = (config.seed, noun, after, saver, log, held_out, stopping)
    try:
        with log:
            model, *_ = fit(fetched(context, task), data, learning_rate, *settings)
            if stopping is None:
                accuracy, loss, *_ = score(model, task.contract, held_out)
                log.add_evaluation(Evaluation(loss, accuracy))
                result = Trial(accuracy, loss, config.steps)
            else:
                result = stopping.best
        outcome = _outcome(result)
        if stopping is not None:
            outcome += f", best at step {result.step} of {stopping.evaluations[-1][0]}"
    except DivergenceError as error:  # a sweep may include rates that are too high
        result, outcome = Trial(0.0, DIVERGED, config.steps), str(error)
    add_trial(context, place, result)
    saver.remove()
    print(f"{name}: {outcome}", flush=True)
    return result


def _name(config: Finetune, place: Place, folds: Folds) -> str:
    rate, fold = place
    return f"learning rate {config.learning_rates[rate]:g}" + (f", fold {fold}" if len(folds) > 1 else "")


def _outcome(trial: Trial) -> str:
    return f"accuracy {trial.accuracy:.3f}, loss {trial.loss:.3f}"


def _show_unraisable(error: sys.UnraisableHookArgs) -> None:
    """Show an exception that cannot be caught, unless it only ends the process.

    Ray's SIGTERM handler raises SystemExit wherever a finished trial's process happens to be, even in a destructor.
    """
    if not isinstance(error.exc_value, SystemExit):
        sys.__unraisablehook__(error)


def steps_after(steps: int, concurrent: int, number: int, trials: int, refits: int) -> int:
    """Return how many steps the stage does after fit `number`, with `concurrent` fits in parallel.

    Args:
        steps: of each fit.
        number: the fit's place among those that this attempt does: the trials, then the refits, from 0.
        trials: how many trials it does; 0 after the sweep.
        refits: how many refits it does.
    """
    trial_rounds = math.ceil(trials / concurrent)
    this_round = number // concurrent if number < trials else trial_rounds + (number - trials) // concurrent
    return (trial_rounds + math.ceil(refits / concurrent) - this_round - 1) * steps


# ------------------------------------------------------------------------------------------------- the refits


def fetched(context: Context[Finetune], task: Task) -> Task:
    """Return the task with the backbone's folder on this machine, which may differ from the sender's."""
    return task if task.backbone is None else task._replace(backbone=context.input("backbone"))


def make_saver(context: Context[Finetune], fit: str) -> Saver:
    """Return the saver of a fit with this name."""
    from ray_jobs.training.checkpoint import Saver

    # Ray may run a task twice at once, if it has lost sight of a node.
    group = secrets.randbits(32)
    return Saver(context.open_store(), context.attempt, context.config, group=group, fit=fit)


def make_log(context: Context[Finetune], fit: str) -> LogWriter:
    """Return the writer of the log of a fit with this name."""
    from ray_jobs.training.gauges import Gauges
    from ray_jobs.training.log import LogWriter

    return LogWriter(context.open_store(), context.attempt, fit, Gauges(context.attempt, fit).show)


def refit(
    context: Context[Finetune], task: Task, pool: Images, rate: float, draw: int, after: int = 0
) -> Refit:
    """Fit on all of a draw's labels, score on test, and record it in the ledger.

    Draw 0's model becomes the artifact's.
    """
    from ray_jobs.training.fit import fit, score
    from vit_model.weights import save_model

    # Ray runs a finished task again if the node that holds its result is lost.
    last = task.last_step or task.config.steps
    if (finished := Ledger(context, [context.attempt.number]).refit(draw, rate, last)) is not None:
        return finished
    seed, noun = task.config.seed + draw, f"draw {draw}, step"
    name = f"{_refits(task, rate)}{draw}"
    saver = make_saver(context, name)
    with make_log(context, name) as log:
        model, curve, substitutes = fit(fetched(context, task), pool, rate, seed, noun, after, saver, log)
    test = read_split(context.dataset(context.config.cache_gib), "test")
    result = score(model, task.contract, test)
    files: tuple[FileEntry, ...] = ()
    if draw == 0:
        with context.staging() as staging:
            save_model(staging.path, model, task.contract)
        files = staging.files
    finished = Refit(result, curve, substitutes, files)
    add_refit(context, draw, rate, last, finished)
    saver.remove()
    print(f"draw {draw}: test accuracy {result.accuracy:.3f}", flush=True)
    return finished


def _refits(task: Task, rate: float) -> str:
    """Return what the names of the refits begin with.

    On GPUs, results vary a little, and the trials of another attempt may have chosen another rate or last step.
    """
    last = "" if task.last_step is None else f"{task.last_step}-"
    return f"refit-{task.config.learning_rates.index(rate)}-{last}"


def refit_draws(
    context: Context[Finetune], task: Task, pools: list[Images], rate: float, ledger: Ledger
) -> list[Refit]:
    """Refit every draw that is not in the ledger with this rate and the task's last step."""
    refits, last = {}, task.last_step or task.config.steps
    for draw in range(len(pools)):
        if (finished := ledger.refit(draw, rate, last)) is not None:
            refits[draw] = finished
    missing = [draw for draw in range(len(pools)) if draw not in refits]
    refits |= zip(missing, run_refits(context, task, pools, rate, missing), strict=True)
    return [refits[draw] for draw in range(len(pools))]


def run_refits(
    context: Context[Finetune], task: Task, pools: list[Images], rate: float, draws: list[int]
) -> list[Refit]:
    """Refit these draws, each in a Ray task."""
    import ray

    resources, concurrent = devices.fit_resources(task.config.threads)
    remote = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(refit)
    tasks = []
    for number, draw in enumerate(draws):
        after = steps_after(task.last_step or task.config.steps, concurrent, number, 0, len(draws))
        tasks.append(remote.remote(context, task, pools[draw], rate, draw, after))
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
    ledger = open_ledger(context)
    task = task._replace(attempts=ledger.attempts)
    if (
        len(config.learning_rates) == 1 and config.early_stopping is None
    ):  # nothing to select, so no image is held out
        trials, chosen, selected_on = [], config.learning_rates[0], ONE_RATE
    else:
        trials = sweep(context, task, pools, supports.folds, ledger)
        chosen = choose(trials)
    said = f"chosen on {selected_on}: learning rate {chosen:g}"
    if config.early_stopping is not None:
        task = task._replace(last_step=last_step(trials, chosen))
        said += f", stopped at step {task.last_step} of {config.steps}"
    print(said, flush=True)
    refits = refit_draws(context, task, pools, chosen, ledger)

    accuracy_rows, predictions = tables(task, dataset, refits, chosen, selected_on, overlap)
    with context.staging() as staging:
        rows.write_table(staging.path / "rows.parquet", accuracy_rows, rows.ROWS)
        rows.write_predictions(staging.path / "predictions.parquet", predictions)
        choice: dict[str, Any] = {"trials": trials, "chosen": chosen, "selected_on": selected_on}
        if task.last_step is not None:
            choice["stopped_at"] = task.last_step
        sweep_json = json.dumps(choice, indent=1) + "\n"
        (staging.path / "sweep.json").write_text(sweep_json)
        curves = [{"draw": draw, "points": refit.curve} for draw, refit in enumerate(refits)]
        (staging.path / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
        # An earlier attempt may have chosen another rate.
        write_log(context.open_store(), context.attempt, staging.path, ("trial-", _refits(task, chosen)))
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
    if task.last_step is not None:
        metrics["stopped_at_step"] = task.last_step
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
        check_settings(config, contract)
        return Task(config, contract, None)
    from vit_model.weights import read_contract

    source = read_contract(backbone)
    resolution = config.resolution or source.preprocessing.resolution
    try:
        architecture = source.architecture.for_finetuning(resolution, len(dataset.info.class_names))
        contract = continued_contract(source, architecture, dataset.info, config.eval_crop)
    except ValidationError as error:
        raise UserError(f"fine-tuning {config.backbone}: {reasons(error)}") from error
    check_settings(config, contract)
    return Task(config, contract, backbone)


def check_settings(config: Finetune, contract: ModelContract) -> None:
    """Check what depends on the model and the classes, which the configuration alone does not tell.

    Raises:
        UserError: a setting does not fit them.
    """
    architecture, names = contract.architecture, contract.class_names
    try:
        check_optimizer(config.optimizer, config.steps, architecture.family)
    except ValueError as error:
        raise UserError(str(error)) from None
    if isinstance(config.freeze, int):
        if not isinstance(architecture, ViTConfig):
            raise UserError(
                f"freeze {config.freeze} needs the blocks of a ViT, but the backbone is a ResNet: use freeze: backbone"
            )
        if config.freeze > architecture.num_blocks:
            raise UserError(f"freeze {config.freeze}: the backbone has {architecture.num_blocks} blocks")
        if config.freeze == architecture.num_blocks and config.optimizer.name == "muon":
            raise UserError(
                f"optimizer.name muon is for the matrices of the blocks, and freeze {config.freeze} trains none of"
                " them; use adamw or sgd"
            )
    if config.activation_checkpointing and not isinstance(architecture, ViTConfig):
        raise UserError("activation_checkpointing needs the blocks of a ViT, but the backbone is a ResNet")
    for name in config.class_weights if isinstance(config.class_weights, dict) else ():
        if name not in names:
            raise UserError(f"class_weights: the data has no class {name!r}{nearest(name, names)}")


def labelled(config: Finetune, dataset: Dataset) -> tuple[list[Images], Supports]:
    """Return each draw's images, and the supports that they belong to. Reads train and dev only.

    Raises:
        UserError: there are no training images, or none of a class that `class_weights` names.
    """
    dataset.require("train")
    supports = Supports(dataset.index("train"), dataset.index("dev"), config.labels)
    draws = [Images(dataset, supports.pool.take(rows)) for rows in supports.draws]
    present = {dataset.info.class_names[label] for label in draws[0].labels}
    for name in config.class_weights if isinstance(config.class_weights, dict) else ():
        if name not in present:
            raise UserError(f"class_weights: no image of class {name!r} has a label to train on")
    return draws, supports


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
    if task.last_step is not None:
        settings["stopped_at"] = task.last_step
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
