"""The fits of a fine-tuning, each by one process or several: a trial on a fold, and a refit that is scored on test.

In: a task, labelled images. Out: a `Trial` or a `Refit`, also in the ledger (`ray_jobs.training.ledger`), so no fit
is done twice. One that was running when its attempt ended continues from its checkpoint.

All workers of a fit call `trial` or `refit` together (`run_trial`, `run_refit`). The first scores, records and logs.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from pipelines.spec import Finetune
from pipelines.spec.search import ASHA
from pipelines.store import FileEntry
from ray_jobs.data.shards import Images
from ray_jobs.process.context import Context
from ray_jobs.training.ledger import Ledger, add_refit, add_trial
from ray_jobs.training.search import describe
from ray_jobs.training.task import (
    DivergenceError,
    Evaluated,
    Folds,
    Refit,
    Task,
    Trial,
    read_split,
    trial_name,
)
from ray_jobs.training.workers import ALONE, Worker, run_group, this_worker

if TYPE_CHECKING:
    from ray_jobs.training.checkpoint import Saver
    from ray_jobs.training.log import LogWriter

DIVERGED = sys.float_info.max  # the loss of a trial that diverged; JSON has no infinity
_START_SECONDS = 30 * 86400.0  # as long as other stages hold the resources, as a trial of one worker waits
_LOOK_SECONDS = 0.2  # between looks whether the workers have ended


def trial(
    context: Context[Finetune],
    task: Task,
    pool: Images,
    folds: Folds,
    fold: int,
    after: int = 0,
    tell: Callable[..., None] = lambda *_: None,
    worker: Worker = ALONE,
) -> Trial | None:
    """Fit on the first part of a fold, score on the second; write the result to the ledger and return it.

    Workers other than the first return None. `tell` is told of each evaluation of a trial of ASHA, which is over when
    it raises SystemExit, then in all workers.
    """
    from ray_jobs.evaluation.calibration import fit_temperature
    from ray_jobs.training.fit import Stopping, fit, predict, score
    from ray_jobs.training.log import Evaluation

    config, search = task.config, context.config.search
    train, validation = folds[fold]
    name, began = fit_name(context, task, fold, folds), time.monotonic()
    data, held_out, noun = pool.take(train), pool.take(validation), f"{name}, step"
    place = task.place(fold)
    saver = make_saver(context, trial_name(place), worker)
    log = None if worker.rank else make_log(context, trial_name(place))
    stopping = None
    if isinstance(search, ASHA):
        stopping = Stopping(config.steps, search.evaluations, tell=tell)
    elif (early := config.early_stopping) is not None:
        stopping = Stopping(config.steps, early.evaluations, early.patience)
    settings: Any = (config.seed, noun, after, saver, log, held_out, stopping, worker)
    try:
        with log or nullcontext():
            model, *_ = fit(fetched(context, task), data, task.learning_rate, *settings)
            if log is None:
                return None
            if config.early_stopping is None:
                logits = predict(model, task.contract, held_out)
                accuracy, loss, *_ = score(logits, held_out.labels)
                if stopping is None:
                    log.add_evaluation(Evaluation(loss, accuracy))
                temperature = fit_temperature(logits.numpy(), held_out.labels)
                result = Trial(accuracy, loss, config.steps, temperature=temperature)
            else:
                assert stopping is not None
                result = stopping.best
        outcome = outcome_of(result)
        if config.early_stopping is not None and stopping is not None:
            outcome += f", best at step {result.step} of {stopping.evaluations[-1][0]}"
    except DivergenceError as error:  # a sweep may include rates that are too high
        result, outcome = Trial(0.0, DIVERGED, config.steps), str(error)
    except SystemExit:
        assert stopping is not None
        if log is None:
            saver.wait()
            raise
        add_trial(context, place, pruned(stopping.evaluations, time.monotonic() - began))
        saver.remove()
        print(f"{name}: {outcome_of(pruned(stopping.evaluations, 0.0))}", flush=True)
        raise
    if log is None:
        saver.wait()
        return None
    evaluations = _finite(stopping.evaluations) if isinstance(search, ASHA) and stopping is not None else ()
    result = result._replace(evaluations=evaluations, seconds=time.monotonic() - began)
    add_trial(context, place, result)
    saver.remove()
    print(f"{name}: {outcome}", flush=True)
    return result


def refit(
    context: Context[Finetune], task: Task, pool: Images, draw: int, after: int = 0, worker: Worker = ALONE
) -> Refit | None:
    """Fit on all of a draw's labels, score on test, and record it in the ledger.

    Draw 0's model becomes the artifact's. Workers other than the first return None.
    """
    from ray_jobs.evaluation.average_precision import multi_label
    from ray_jobs.training.fit import fit, predict, score
    from vit_model.weights import save_model

    # Ray runs a finished task again if the node that holds its result is lost.
    last = task.last_step or task.config.steps
    finished = (
        None if worker.world > 1 else Ledger(context, []).refit(draw, task.point, last, task.temperature)
    )
    if finished is not None:
        return finished
    seed, noun = task.config.seed + draw, f"draw {draw}, step"
    name = f"{refits_prefix(task)}{draw}"
    saver = make_saver(context, name, worker)
    with nullcontext() if worker.rank else make_log(context, name) as log:
        settings: Any = (seed, noun, after, saver, log, None, None, worker)
        model, curve, substitutes = fit(fetched(context, task), pool, task.learning_rate, *settings)
    if worker.rank:
        return None
    test = read_split(context.dataset(context.config.cache_gib), "test")
    logits = predict(model, task.contract, test)
    # a class's probability ranks the images; its logarithm has fewer ties
    mean_ap = multi_label(logits.log_softmax(dim=1).numpy(), test.rows["labels"].combine_chunks())
    result = score(logits, test.labels, task.temperature)._replace(mean_ap=mean_ap)
    files: tuple[FileEntry, ...] = ()
    if draw == 0:
        with context.staging() as staging:
            save_model(staging.path, model, task.contract)
        files = staging.files
    finished = Refit(result, curve, substitutes, files)
    add_refit(context, draw, task.point, last, finished, task.temperature)
    saver.remove()
    print(f"draw {draw}: test accuracy {result.accuracy:.3f}", flush=True)
    return finished


def run_trial(
    context: Context[Finetune],
    task: Task,
    pool: Images,
    folds: Folds,
    fold: int,
    after: int,
    tell: Callable[..., None] | None = None,
) -> Trial:
    """Do `trial` in this process, or by as many workers as are configured. `tell` is given for a trial of ASHA."""
    given = (context, task, pool, folds, fold, after)
    if task.config.workers > 1:
        result = _by_workers(trial, given, tell)
    else:
        result = trial(*given) if tell is None else trial(*given, tell)
    assert isinstance(result, Trial)
    return result


def run_refit(context: Context[Finetune], task: Task, pool: Images, draw: int, after: int) -> Refit:
    """Do `refit` in this process, or by as many workers as are configured."""
    given = (context, task, pool, draw, after)
    result = refit(*given) if task.config.workers == 1 else _by_workers(refit, given)
    assert isinstance(result, Refit)
    return result


def _by_workers(
    function: Callable[..., Any], arguments: tuple[Any, ...], tell: Callable[..., None] | None = None
) -> Any:
    """Call `trial` or `refit` in each worker of a group, and return what the first one returns.

    `tell` is called in this process. If it raises SystemExit, that is raised again when the workers have ended, so that
    their resources are free.
    """
    import ray

    context = arguments[0]
    config, group = context.config, secrets.randbits(32)
    settings = {"function": function, "arguments": arguments, "group": group, "verdicts": None}
    names = (config.workers, config.threads, f"{context.attempt.submission_id}-{group}", _START_SECONDS)
    if tell is None:
        return run_group(_worker, settings, *names)
    verdicts = settings["verdicts"] = ray.remote(num_cpus=0)(Verdicts).remote()
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(run_group, _worker, settings, *names)
        while True:
            told = verdicts.next.remote()
            while not ray.wait([told], timeout=_LOOK_SECONDS)[0]:
                if training.done():
                    return training.result()
            try:
                tell(*ray.get(told))
            except BaseException:
                verdicts.give.remote(False)
                training.result()
                raise
            verdicts.give.remote(True)


class Verdicts:
    """An actor between the first worker of a trial and the trial's own process, which tells Ray Tune."""

    def __init__(self) -> None:
        self._evaluations: asyncio.Queue[Evaluated] = asyncio.Queue()
        self._verdicts: asyncio.Queue[bool] = asyncio.Queue()

    async def goes_on(self, evaluation: Evaluated) -> bool:
        """Hand an evaluation over, and return whether the trial goes on."""
        await self._evaluations.put(evaluation)
        return await self._verdicts.get()

    async def next(self) -> Evaluated:
        """Wait for the next evaluation."""
        return await self._evaluations.get()

    async def give(self, goes_on: bool) -> None:
        """Answer the evaluation before."""
        await self._verdicts.put(goes_on)


def _worker(settings: dict[str, Any]) -> Any:
    """Do a worker's part in a fit; None if the trial was told to end."""
    import ray
    import torch
    import torch.distributed as dist

    from ray_jobs.process import devices

    worker, verdicts = this_worker(settings["group"]), settings["verdicts"]
    if verdicts is None:
        return settings["function"](*settings["arguments"], worker=worker)
    device = devices.device(worker.local_rank)

    def tell(*evaluation: Any) -> None:
        goes_on = torch.ones(1, device=device)
        if worker.rank == 0:
            goes_on.fill_(ray.get(verdicts.goes_on.remote(evaluation)))
        dist.broadcast(goes_on, 0)
        if not goes_on:
            raise SystemExit

    try:
        return settings["function"](*settings["arguments"], tell, worker)
    except SystemExit:
        return None


def refits_prefix(task: Task) -> str:
    """Return what the names of the refits begin with.

    On GPUs, results vary a little, and the trials of another attempt may have chosen another point or last step.
    """
    parts = [*task.key] if task.last_step is None else [*task.key, task.last_step]
    return "-".join(("refit", *map(str, parts), ""))


def fetched(context: Context[Finetune], task: Task) -> Task:
    """Return the task with the backbone's folder on this machine, which may differ from the sender's."""
    return task if task.backbone is None else task._replace(backbone=context.input("backbone"))


def make_saver(context: Context[Finetune], fit: str, worker: Worker) -> Saver:
    """Return a worker's saver of a fit with this name."""
    from ray_jobs.training.checkpoint import Saver

    # Ray may run a task twice at once, if it has lost sight of a node.
    group = worker.group if worker.world > 1 else secrets.randbits(32)
    place: Any = {"rank": worker.rank, "world": worker.world, "group": group}
    return Saver(context.open_store(), context.attempt, context.config, **place, fit=fit)


def make_log(context: Context[Finetune], fit: str) -> LogWriter:
    """Return the writer of the log of a fit with this name."""
    from ray_jobs.training.gauges import Gauges
    from ray_jobs.training.log import LogWriter

    return LogWriter(context.open_store(), context.attempt, fit, Gauges(context.attempt, fit).show)


def pruned(evaluations: Sequence[Evaluated], seconds: float) -> Trial:
    """Return a trial that ASHA has ended after its last evaluation."""
    finite = _finite(evaluations)
    step, accuracy, loss = finite[-1]
    return Trial(accuracy, loss, step, finite, True, seconds)


def _finite(evaluations: Sequence[Evaluated]) -> tuple[Evaluated, ...]:
    """Return evaluations as JSON can have them."""
    return tuple((step, accuracy, min(loss, DIVERGED)) for step, accuracy, loss in evaluations)


def fit_name(context: Context[Finetune], task: Task, fold: int, folds: Folds) -> str:
    number = "" if context.config.search is None else f"trial {task.number}: "
    return number + describe(task.point) + (f", fold {fold}" if len(folds) > 1 else "")


def outcome_of(trial: Trial) -> str:
    if trial.loss == DIVERGED:
        return "diverged"
    pruned = f", ended by ASHA at step {trial.step}" if trial.is_pruned else ""
    return f"accuracy {trial.accuracy:.3f}, loss {trial.loss:.3f}{pruned}"
