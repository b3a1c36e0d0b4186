"""The fits of a fine-tuning, each by one process or several: a trial on a fold, and a refit that is scored on test.

In: a task, labelled images. Out: a `Trial` or a `Refit`, also in the ledger (`ray_jobs.tuning.ledger`), so no fit is
done twice. A fit that was running when its attempt ended continues from its checkpoint.

All workers of a fit call `trial` or `refit` together (`run`). The first scores, records and logs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipelines.spec import Finetune
from pipelines.spec.search import ASHA
from pipelines.store import FileEntry, FitName
from ray_jobs.data.shards import Images, multi_hot
from ray_jobs.evaluation import multi_label
from ray_jobs.evaluation.calibration import fit_temperature
from ray_jobs.evaluation.rows import MEAN_AP
from ray_jobs.process.context import Context
from ray_jobs.training import detecting
from ray_jobs.training.checkpoint import CheckpointManager
from ray_jobs.training.evaluators import BATCH, Evaluator, evaluation, predict, score
from ray_jobs.training.fit import Stopping, Trained, Validation, dense_scores, fit
from ray_jobs.training.log import Gauges, LogWriter, Reporting
from ray_jobs.training.task import DIVERGED, DivergenceError, Evaluation, Folds, Task, read_split
from ray_jobs.training.workers import ALONE, Worker, run_group, this_worker
from ray_jobs.tuning.ledger import Ledger, add_images, add_refit, add_trial, images_table, scores_table
from ray_jobs.tuning.trial import CurvePoint, Refit, Refitted, Trial, fit_title, pruned, refit_title, storable
from vit_model.detection.detector import Detector, save_detector
from vit_model.model import Segmenter
from vit_model.weights import save_model

_START_SECONDS = 30 * 86400.0  # wait as long as other stages hold the resources, like a trial of one worker

Report = Callable[[Evaluation], None]
"""Called with each evaluation of a trial of ASHA; raises SystemExit to end the trial."""


def trial(
    context: Context[Finetune],
    task: Task,
    pool: Images,
    folds: Folds,
    fold: int,
    report: Report = lambda evaluation: None,
    worker: Worker = ALONE,
) -> Trial | None:
    """Fit on the first part of a fold, score on the second; write the result to the ledger and return it.

    Workers other than the first return None.
    """
    began, name, title = time.monotonic(), task.trial(fold), fit_title(context.config, task, fold, len(folds))
    inside, outside = (pool.take(rows) for rows in folds[fold])
    stopping = make_stopping(context.config, task.config.steps, report)
    held_out = evaluator(task, outside, worker)
    manager = make_manager(context, str(name), worker)
    writer = None if worker.rank else make_log(context, name)
    try:
        with writer or nullcontext():
            inputs = fetched(context, task), inside, task.learning_rate, task.config.seed, manager
            reporting = Reporting(writer, f"{title}, step")
            fitted = fit(*inputs, reporting, Validation(held_out, stopping, task.config.select_by), worker)
            if writer is None:
                return None
            alone = held_out if worker.world == 1 else evaluator(task, outside)
            result = score_trial(fitted.model, task, alone, stopping, writer)
        outcome = result.outcome
        if task.config.early_stopping is not None and stopping is not None:
            outcome += f", best at step {result.step} of {stopping.evaluations[-1].step}"
    except DivergenceError as error:  # a sweep may include rates that are too high
        if writer is None:
            manager.wait()
            return None
        result, outcome = Trial(accuracy=0.0, loss=DIVERGED, step=task.config.steps), str(error)
    except SystemExit:
        assert stopping is not None
        result = pruned(stopping.evaluations, time.monotonic() - began)
        _record(context, name, result, manager)
        print(f"{title}: {result.outcome}", flush=True)
        raise
    evaluations = storable(stopping.evaluations) if stopping and isinstance(context.config.search, ASHA) else ()
    result = result.model_copy(update={"evaluations": evaluations, "seconds": time.monotonic() - began})
    _record(context, name, result, manager)
    print(f"{title}: {outcome}", flush=True)
    return result


def evaluator(task: Task, images: Images, worker: Worker = ALONE, is_kept: bool = True) -> Evaluator:
    """Return what evaluates a task's models on held-out images; maps of boxes or pixels are as large as in a step."""
    batch = min(BATCH, task.config.batch_size) if task.is_dense else BATCH
    return Evaluator(images, task.contract.preprocessing, worker, batch, is_kept)


def make_stopping(config: Finetune, steps: int, report: Report) -> Stopping | None:
    """Return when a trial of `steps` steps may end early; None if never."""
    if isinstance(config.search, ASHA):
        return Stopping(steps, config.search.evaluations, report=report)
    if (early := config.early_stopping) is not None:
        return Stopping(steps, early.evaluations, early.patience)
    return None


def score_trial(model: Trained, task: Task, held_out: Evaluator, stopping: Stopping | None, writer: LogWriter) -> Trial:
    """Return the results of a trial's model; with early stopping, its best evaluation.

    Raises:
        DivergenceError: the loss is not finite.
    """
    if task.config.early_stopping is not None:
        assert stopping is not None
        return Trial(**stopping.best._asdict())
    if isinstance(model, Detector | Segmenter):
        results, _ = dense_scores(task.config.steps, model, held_out)
        if stopping is None:
            writer.add_evaluation(results)
        return Trial(**results._asdict())
    logits, labels = held_out.logits(model), held_out.labels
    results = evaluation(task.config.steps, logits, labels, task.config.select_by)
    if stopping is None:
        writer.add_evaluation(results)
    if task.contract.is_multi_label:
        thresholds = multi_label.best_thresholds(labels.numpy(), logits.sigmoid().numpy())
        return Trial(**results._asdict(), thresholds=tuple(thresholds))
    return Trial(**results._asdict(), temperature=fit_temperature(logits.numpy(), labels.numpy()))


def _record(context: Context[Finetune], name: FitName, result: Trial, manager: CheckpointManager) -> None:
    add_trial(context, name, result)
    manager.remove()


def refit(context: Context[Finetune], task: Task, pool: Images, draw: int, worker: Worker = ALONE) -> Refitted | None:
    """Fit on all of a draw's labels, score on test, and record it in the ledger.

    Draw 0's model becomes the artifact's. Workers other than the first return None.
    """
    # Ray runs a finished task again if the node that holds its result is lost.
    if worker.world == 1 and (finished := Ledger(context, []).refit(task, draw)) is not None:
        return finished
    name, title = task.refit(draw), refit_title(context.config, draw)
    manager = make_manager(context, str(name), worker)
    with nullcontext() if worker.rank else make_log(context, name) as writer:
        started, reporting = fetched(context, task), Reporting(writer, f"{title}, step")
        seed = task.config.seed + draw
        fitted = fit(started, pool, task.learning_rate, seed, manager, reporting, worker=worker)
    if worker.rank:
        return None
    test = read_split(context.dataset(context.config.cache_gib), "test")
    result, images, mean_ap = score_refit(task, fitted.model, test)
    files: tuple[FileEntry, ...] = ()
    if draw == 0:
        with context.staging() as staging:
            if isinstance(fitted.model, Detector):
                save_detector(staging.path, fitted.model, detecting.detector_contract(task))
            else:
                save_model(staging.path, fitted.model, task.contract)
        files = staging.files
    record = Refit(
        accuracy=result.accuracy,
        loss=result.loss,
        metrics=result.metrics,
        step=task.steps,
        temperature=task.temperature,
        thresholds=task.thresholds,
        point=task.point,
        images=add_images(context, draw, images),
        mean_ap=mean_ap,
        curve=tuple(CurvePoint.model_validate(point) for point in fitted.curve),
        substitutes=fitted.substitutes,
        files=files,
    )
    add_refit(context, draw, record)
    manager.remove()
    print(f"{title}: {record.on_test}", flush=True)
    return Refitted(record, images)


def score_refit(task: Task, model: Trained, test: Images) -> tuple[Evaluation, pa.Table, float | None]:
    """Return a refit's results on test, the table of its images for the ledger, and its mAP, with ReaL's labels, too.

    Raises:
        DivergenceError: the loss is not finite.
    """
    if isinstance(model, Detector | Segmenter):
        return *dense_scores(task.steps, model, evaluator(task, test, is_kept=False)), None
    logits = predict(model, task.contract, test)
    if task.contract.is_multi_label:
        results = evaluation(task.steps, logits, torch.from_numpy(test.labels))
        return results, scores_table(logits.sigmoid().numpy()), results.metrics[MEAN_AP]
    result = score(logits, test.labels, task.temperature)
    real = test.rows["labels"].combine_chunks()
    mean_ap, images = None, np.flatnonzero(real.value_lengths().fill_null(0).to_numpy())
    if len(images):
        # rank the images by the logarithm of a class's probability, which has fewer ties than the probability
        truth, logs = multi_hot(real.take(pa.array(images)), logits.shape[1]), logits.log_softmax(dim=1)
        mean_ap = multi_label.mean_ap(truth, logs[torch.from_numpy(images)].numpy())
    return Evaluation(task.steps, result.accuracy, result.loss), images_table(result), mean_ap


def run(function: Callable[..., Any], context: Context[Finetune], *arguments: Any) -> Any:
    """Call `trial` or `refit` in this process, or in each of the configured workers; return what the first returns."""
    config, group = context.config, secrets.randbits(32)
    if config.workers == 1:
        return function(context, *arguments)
    settings = {"function": function, "arguments": (context, *arguments), "group": group}
    name = f"{context.attempt.submission_id}-{group}"
    return run_group(_worker, settings, config.workers, config.threads or 1, name, _START_SECONDS)


def _worker(settings: dict[str, Any]) -> Any:
    return settings["function"](*settings["arguments"], worker=this_worker(settings["group"]))


def fetched(context: Context[Finetune], task: Task) -> Task:
    """Return the task with the backbone's folder on this machine, which may differ from the sender's folder."""
    return task if task.backbone is None else task._replace(backbone=context.input("backbone"))


def make_manager(context: Context[Finetune], fit: str, worker: Worker) -> CheckpointManager:
    """Return a worker's checkpoint manager for a fit."""
    # Ray may run a task twice at once, if it has lost sight of a node.
    group = worker.group if worker.world > 1 else secrets.randbits(32)
    return CheckpointManager(
        context.open_store(), context.attempt, context.config, worker._replace(group=group), fit=fit
    )


def make_log(context: Context[Finetune], name: FitName) -> LogWriter:
    """Return the log writer of a fit."""
    fit = str(name)
    return LogWriter(context.open_store(), context.attempt, fit, Gauges(context.attempt, fit).show)
