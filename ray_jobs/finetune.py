"""The finetune stage: sweep over learning rates or a search, refit with the best, score on test once (paper, table 4).

In: a dataset and a backbone, or a model size to train from scratch. Out: model.safetensors and config.json (of draw 0's
refit), rows.parquet and predictions.parquet (`ray_jobs.evaluation.rows`), sweep.json {trials, chosen, selected_on}, and
with a search {kind, chosen_trial, chosen_point}; curves.json, log.jsonl (`pipelines.store.training_log`).

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

import itertools
import json
import logging
import math
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Finetune, check_optimizer, nearest
from pipelines.spec.search import ASHA, Optuna, Point
from pipelines.spec.vtab import augmentation
from pipelines.store import FileEntry, write_log
from ray_jobs.data.shards import Dataset, Images
from ray_jobs.evaluation import rows
from ray_jobs.evaluation.leakage import PRETRAINED, SEEN, Overlap, check_leakage
from ray_jobs.evaluation.supports import Supports
from ray_jobs.process import devices
from ray_jobs.process.stage import Context, Result, model_digest, run_stage
from ray_jobs.training.contract import continued_contract, model_contract
from ray_jobs.training.ledger import Ledger, add_point, add_refit, add_trial, open_ledger
from ray_jobs.training.search import Tried, decoded, describe, last_evaluation, points, proposer, scheduler
from ray_jobs.training.task import DivergenceError, Evaluated, Folds, Refit, Task, Trial, read_split
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


def choose(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the trial with the highest mean validation accuracy; the lowest mean loss breaks ties.

    A point that diverged in some folds ranks below every point that diverged in fewer; one that ASHA ended early is not
    chosen. Raises DivergenceError if every point diverged in every fold.
    """

    def rank(trial: dict[str, Any]) -> tuple[float, float, float]:
        losses = [loss for loss in trial["losses"] if loss != DIVERGED]
        # Points that are compared by loss have the same number of losses, so sums rank as means do.
        return -len(losses), -float(np.mean(trial["accuracies"])), sum(losses)

    best = min((trial for trial in trials if "pruned_at" not in trial), key=rank)
    if set(best["losses"]) == {DIVERGED}:
        raise DivergenceError(
            "learning_rates: training diverged with every rate of the sweep; give lower ones"
        )
    return best


def sweep(
    context: Context[Finetune], task: Task, pools: list[Images], folds: Folds, ledger: Ledger
) -> list[dict[str, Any]]:
    """Try points x folds on draw 0: [{learning_rate, accuracies, losses}] in the order of their numbers.

    With early stopping also [{steps}], where these are the folds' best. With a search also [{number, point}], and
    {pruned_at} if ASHA ended it there. Trials in the ledger are not run again.

    Raises:
        UserError: a point does not fit the data or the backbone; or no trial has ended within the search's minutes.
    """
    config = task.config
    if isinstance(config.search, Optuna):
        run_proposed(context, task, pools, folds, ledger)
        known = ledger.points()
    else:
        known = dict(enumerate(points(config)))
        tasks = [at_point(task, number, point, pools[0].dataset) for number, point in known.items()]
        missing, finished = [], []
        for each, fold in [(each, fold) for fold in range(len(folds)) for each in tasks]:
            if (trial := said(context, each, fold, folds, ledger)) is None:
                missing.append((each, fold))
            else:
                finished.append((each, fold, trial))
        if missing:
            run_trials(context, pools, folds, missing, finished)
    trials = []
    for number, point in known.items():
        own = [found[1] for fold in range(len(folds)) if (found := ledger.trial((number, fold))) is not None]
        if len(own) == len(folds):  # otherwise the search's minutes were over
            trials.append(_entry(config, number, point, own))
    if not any("pruned_at" not in trial for trial in trials):
        raise UserError("search.minutes: no trial has ended in this time; give more")
    if config.search is not None:
        print(f"the trials by accuracy on what they held out:\n{_table(trials)}", flush=True)
    return trials


def said(context: Context[Finetune], task: Task, fold: int, folds: Folds, ledger: Ledger) -> Trial | None:
    """Return a trial that is in the ledger, and say so; None if it is not."""
    if (found := ledger.trial((task.number, fold))) is None:
        return None
    attempt, trial = found
    print(f"{_name(context, task, fold, folds)}: {_outcome(trial)} (from attempt {attempt})", flush=True)
    return trial


def _entry(config: Finetune, number: int, point: Point, folds: list[Trial]) -> dict[str, Any]:
    """Return what sweep.json says of a point."""
    entry: dict[str, Any] = {
        "learning_rate": point["learning_rate"],
        "accuracies": [each.accuracy for each in folds],
        "losses": [each.loss for each in folds],
    }
    if config.early_stopping is not None:
        entry["steps"] = [each.step for each in folds]
    if config.search is not None:
        entry |= {"number": number, "point": point}
        if folds[0].is_pruned:
            entry["pruned_at"] = folds[0].step
    return entry


def _table(trials: list[dict[str, Any]]) -> str:
    """Return a line per point, the best first."""
    ranked = sorted(
        ((float(np.mean(trial["accuracies"])), trial) for trial in trials), key=lambda each: -each[0]
    )
    return "\n".join(
        f"  {accuracy:.3f}  trial {trial['number']}: {describe(trial['point'])}"
        + (f" (ended at step {trial['pruned_at']})" if "pruned_at" in trial else "")
        for accuracy, trial in ranked
    )


def last_step(trial: dict[str, Any]) -> int:
    """Return the step at which a point was best: the median over folds, the lower of two."""
    pairs = zip(trial["steps"], trial["losses"], strict=True)
    return statistics.median_low([step for step, loss in pairs if loss != DIVERGED])


def held_out_temperature(ledger: Ledger, number: int, folds: int) -> float | None:
    """Return the geometric mean over folds of a point's temperatures; None if it has none.

    Its trials were fitted on fewer labels than a refit, which has no images left to be calibrated on.
    """
    trials = [found[1] for fold in range(folds) if (found := ledger.trial((number, fold))) is not None]
    temperatures = [trial.temperature for trial in trials if trial.temperature is not None]
    return statistics.geometric_mean(temperatures) if temperatures else None


def run_trials(
    context: Context[Finetune],
    pools: list[Images],
    folds: Folds,
    missing: list[tuple[Task, int]],
    finished: list[tuple[Task, int, Trial]],
) -> None:
    """Run the missing trials. ASHA is told of the finished ones again, because it compares with them."""
    from ray import tune

    trials: list[tuple[Task, int, Trial | None]] = [(*each, None) for each in missing]
    if isinstance(context.config.search, ASHA):
        trials = [*finished, *trials]
    results = _tune(
        context,
        pools,
        folds,
        _tune_trial,
        {"number": tune.grid_search(list(range(len(trials))))},
        {"scheduler": scheduler(context.config)},
        len(trials),
        sum(trial.seconds for *_, trial in finished),
        trials=trials,
    )
    ledger = Ledger(context, [])
    for result in results:
        task, fold, before = trials[result.config["number"]]
        # ASHA's verdict may reach a process so late that it could not record it.
        if before is None and "evaluations" in result.metrics and not ledger.trial((task.number, fold)):
            add_trial(context, (task.number, fold), _pruned(result.metrics["evaluations"], 0.0))


def run_proposed(
    context: Context[Finetune], task: Task, pools: list[Images], folds: Folds, ledger: Ledger
) -> None:
    """Run what Optuna proposes; first the points that an earlier attempt has begun and not ended."""
    search, tried, seconds = context.config.search, [], 0.0
    assert isinstance(search, Optuna)
    for number, point in ledger.points().items():
        own = [
            said(context, at_point(task, number, point, pools[0].dataset), fold, folds, ledger)
            for fold in range(len(folds))
        ]
        done = [trial for trial in own if trial is not None]
        seconds += sum(trial.seconds for trial in done)
        accuracy = float(np.mean([trial.accuracy for trial in done])) if len(done) == len(folds) else None
        tried.append(Tried(number, point, accuracy))
    left = search.trials - sum(each.accuracy is not None for each in tried)
    if left > 0:
        settings = {"search_alg": proposer(context.config, tried), "num_samples": left}
        _tune(context, pools, folds, _tune_proposed, None, settings, left, seconds, task=task, tried=tried)


def _tune(
    context: Context[Finetune],
    pools: list[Images],
    folds: Folds,
    run: Callable[..., None],
    space: dict[str, Any] | None,
    settings: dict[str, Any],
    count: int,
    seconds: float,
    **parameters: Any,
) -> list[Any]:
    """Run `count` trials with Ray Tune and return its results.

    Args:
        seconds: that the trials of earlier attempts took, which counts for the search's minutes.
    """
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # nothing reads its CSV and TensorBoard files
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the old output is silent at verbosity 0
    # Tune warns that the files switched off above are missing. It does not need them for a trial's last report.
    logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)
    os.environ["TUNE_WARN_INSUFFICIENT_RESOURCE_THRESHOLD_S"] = "900"  # another stage may hold the cores
    from ray import tune

    config = context.config
    resources, concurrent = devices.fit_resources(config.threads)
    minutes = None if config.search is None else config.search.minutes
    deadline = math.inf if minutes is None else time.time() + 60 * minutes - seconds / concurrent
    # Tune's own records are not kept: the ledger has what a later attempt needs.
    with tempfile.TemporaryDirectory(prefix="vitflow-", ignore_cleanup_errors=True) as scratch:
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(
                    run,
                    context=context,
                    pool=pools[0],
                    folds=folds,
                    after=partial(
                        steps_after, config.steps, concurrent, trials=count * len(folds), refits=len(pools)
                    ),
                    deadline=deadline,
                    **parameters,
                ),
                resources,
            ),
            param_space=space,
            tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=concurrent, **settings),
            run_config=tune.RunConfig(name="sweep", storage_path=scratch, verbose=0),
        )
        results = list(tuner.fit())
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def _tune_trial(
    parameters: dict[str, int],
    context: Context[Finetune],
    pool: Images,
    folds: Folds,
    after: Callable[[int], int],
    deadline: float,
    trials: list[tuple[Task, int, Trial | None]],
) -> None:
    """Run one of the given trials; one that has finished before only reports its evaluations to ASHA again."""
    from ray import tune

    sys.unraisablehook = _show_unraisable
    number = parameters["number"]
    task, fold, done = trials[number]
    evaluations: list[Evaluated] = []

    def tell(*evaluation: Any) -> None:
        evaluations.append(evaluation)
        # the last one follows when the result is in the ledger, because ASHA then ends the trial
        if evaluation[0] < task.config.steps or done is not None:
            tune.report(
                {"accuracy": evaluation[1], "evaluation": len(evaluations), "evaluations": evaluations}
            )

    if done is not None:
        for evaluation in done.evaluations:
            tell(*evaluation)
    elif time.time() < deadline:
        done = trial(context, task, pool, folds, fold, after(number), tell)
    tune.report(
        {"accuracy": 0.0 if done is None else done.accuracy, "evaluation": last_evaluation(context.config)}
    )


def _tune_proposed(
    parameters: dict[str, Any],
    context: Context[Finetune],
    pool: Images,
    folds: Folds,
    after: Callable[[int], int],
    deadline: float,
    task: Task,
    tried: list[Tried],
) -> None:
    """Run the trials of a point that Optuna proposes, fold by fold."""
    from ray import tune

    sys.unraisablehook = _show_unraisable
    point = decoded(context.config, parameters)
    ledger = Ledger(context, task.attempts)
    accuracies = []
    if time.time() < deadline:
        number = next((each.number for each in tried if each.point == point), None)
        if number is None:
            free = itertools.count(max((each.number + 1 for each in tried), default=0))
            number = next(number for number in free if add_point(context, number, point))
        own = at_point(task, number, point, pool.dataset)
        for fold in range(len(folds)):
            done = ledger.trial((number, fold))
            first = (number - len(tried)) * len(folds) + fold
            result = trial(context, own, pool, folds, fold, after(max(0, first))) if done is None else done[1]
            accuracies.append(result.accuracy)
    tune.report({"accuracy": float(np.mean(accuracies)) if accuracies else 0.0})


def trial(
    context: Context[Finetune],
    task: Task,
    pool: Images,
    folds: Folds,
    fold: int,
    after: int = 0,
    tell: Callable[..., None] = lambda *_: None,
) -> Trial:
    """Fit on the first part of a fold, score on the second; write the result to the ledger and return it.

    `tell` is told of each evaluation of a trial of ASHA, which is over when it raises SystemExit.
    """
    from ray_jobs.evaluation.calibration import fit_temperature
    from ray_jobs.training.fit import Stopping, fit, predict, score
    from ray_jobs.training.log import Evaluation

    config, search = task.config, context.config.search
    train, validation = folds[fold]
    name, began = _name(context, task, fold, folds), time.monotonic()
    data, held_out, noun = pool.take(train), pool.take(validation), f"{name}, step"
    saver = make_saver(context, f"trial-{task.number}-{fold}")
    log = make_log(context, f"trial-{task.number}-{fold}")
    stopping = None
    if isinstance(search, ASHA):
        stopping = Stopping(config.steps, search.evaluations, tell=tell)
    elif (early := config.early_stopping) is not None:
        stopping = Stopping(config.steps, early.evaluations, early.patience)
    settings: Any = (config.seed, noun, after, saver, log, held_out, stopping)
    try:
        with log:
            model, *_ = fit(fetched(context, task), data, task.learning_rate, *settings)
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
        outcome = _outcome(result)
        if config.early_stopping is not None and stopping is not None:
            outcome += f", best at step {result.step} of {stopping.evaluations[-1][0]}"
    except DivergenceError as error:  # a sweep may include rates that are too high
        result, outcome = Trial(0.0, DIVERGED, config.steps), str(error)
    except SystemExit:
        assert stopping is not None
        add_trial(context, (task.number, fold), _pruned(stopping.evaluations, time.monotonic() - began))
        saver.remove()
        print(f"{name}: {_outcome(_pruned(stopping.evaluations, 0.0))}", flush=True)
        raise
    evaluations = _finite(stopping.evaluations) if isinstance(search, ASHA) and stopping is not None else ()
    result = result._replace(evaluations=evaluations, seconds=time.monotonic() - began)
    add_trial(context, (task.number, fold), result)
    saver.remove()
    print(f"{name}: {outcome}", flush=True)
    if search is not None:
        print(standing(context.config, Ledger(context, task.attempts), len(folds)), flush=True)
    return result


def standing(config: Finetune, ledger: Ledger, folds: int) -> str:
    """Return how many trials of a search have ended, and which is the best so far."""
    search = config.search
    known = ledger.points() if isinstance(search, Optuna) else dict(enumerate(points(config)))
    ended, best = 0, (-1.0, "")
    for number, point in known.items():
        own = [found[1] for fold in range(folds) if (found := ledger.trial((number, fold))) is not None]
        ended += len(own) == folds
        if len(own) == folds and not own[0].is_pruned:
            accuracy = float(np.mean([each.accuracy for each in own]))
            best = max(best, (accuracy, f"trial {number}, accuracy {accuracy:.3f}: {describe(point)}"))
    total = search.trials if isinstance(search, Optuna) else len(known)
    return f"{ended} of {total} trials have ended" + (f"; the best is {best[1]}" if best[1] else "")


def _pruned(evaluations: Sequence[Evaluated], seconds: float) -> Trial:
    """Return a trial that ASHA has ended after its last evaluation."""
    finite = _finite(evaluations)
    step, accuracy, loss = finite[-1]
    return Trial(accuracy, loss, step, finite, True, seconds)


def _finite(evaluations: Sequence[Evaluated]) -> tuple[Evaluated, ...]:
    """Return evaluations as JSON can have them."""
    return tuple((step, accuracy, min(loss, DIVERGED)) for step, accuracy, loss in evaluations)


def _name(context: Context[Finetune], task: Task, fold: int, folds: Folds) -> str:
    number = "" if context.config.search is None else f"trial {task.number}: "
    return number + describe(task.point) + (f", fold {fold}" if len(folds) > 1 else "")


def _outcome(trial: Trial) -> str:
    if trial.loss == DIVERGED:
        return "diverged"
    pruned = f", ended by ASHA at step {trial.step}" if trial.is_pruned else ""
    return f"accuracy {trial.accuracy:.3f}, loss {trial.loss:.3f}{pruned}"


def _show_unraisable(error: sys.UnraisableHookArgs) -> None:
    """Show an exception that cannot be caught, unless it only ends the process.

    Ray's SIGTERM handler raises SystemExit wherever a finished trial's process happens to be, even in a destructor.
    """
    if not isinstance(error.exc_value, SystemExit):
        sys.__unraisablehook__(error)


def at_point(task: Task, number: int, point: Point, dataset: Dataset) -> Task:
    """Return the task of one point of the search, with its own settings and perhaps its own resolution.

    Raises:
        UserError: the settings do not fit each other, the data or the backbone.
    """
    try:
        config = task.config.at(point)
    except ValueError as error:
        why = reasons(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(f"search: {describe(point)} do not go together: {why}") from error
    return make_task(config, dataset, task.backbone)._replace(
        attempts=task.attempts, number=number, point=point
    )


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


def refit(context: Context[Finetune], task: Task, pool: Images, draw: int, after: int = 0) -> Refit:
    """Fit on all of a draw's labels, score on test, and record it in the ledger.

    Draw 0's model becomes the artifact's.
    """
    from ray_jobs.evaluation.average_precision import multi_label
    from ray_jobs.training.fit import fit, predict, score
    from vit_model.weights import save_model

    # Ray runs a finished task again if the node that holds its result is lost.
    last = task.last_step or task.config.steps
    if (finished := Ledger(context, []).refit(draw, task.point, last, task.temperature)) is not None:
        return finished
    seed, noun = task.config.seed + draw, f"draw {draw}, step"
    name = f"{_refits(task)}{draw}"
    saver = make_saver(context, name)
    with make_log(context, name) as log:
        settings: Any = (seed, noun, after, saver, log)
        model, curve, substitutes = fit(fetched(context, task), pool, task.learning_rate, *settings)
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


def _refits(task: Task) -> str:
    """Return what the names of the refits begin with.

    On GPUs, results vary a little, and the trials of another attempt may have chosen another point or last step.
    """
    last = "" if task.last_step is None else f"{task.last_step}-"
    return f"refit-{task.number}-{last}"


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
    """Refit these draws, each in a Ray task."""
    import ray

    resources, concurrent = devices.fit_resources(task.config.threads)
    remote = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(refit)
    tasks = []
    for number, draw in enumerate(draws):
        after = steps_after(task.last_step or task.config.steps, concurrent, number, 0, len(draws))
        tasks.append(remote.remote(context, task, pools[draw], draw, after))
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
    known = [] if isinstance(config.search, Optuna) else points(config)
    if len(known) == 1 and config.early_stopping is None:  # nothing to select, so no image is held out
        trials, number, point, selected_on = [], 0, known[0], ONE_RATE
    else:
        if isinstance(config.search, ASHA) and len(supports.folds) > 1:
            raise UserError("search.kind asha needs dev, but the data set has none; use random or optuna")
        trials = sweep(context, task, pools, supports.folds, ledger)
        chosen = choose(trials)
        number = chosen.get("number", trials.index(chosen))
        point = chosen.get("point") or known[number]
    task = at_point(task, number, point, dataset)
    said = f"chosen on {selected_on}: {describe(point)}"
    if config.early_stopping is not None:
        task = task._replace(last_step=last_step(chosen))
        said += f", stopped at step {task.last_step} of {task.config.steps}"
    print(said, flush=True)
    task = task._replace(temperature=held_out_temperature(ledger, number, len(supports.folds)))
    refits = refit_draws(context, task, pools, ledger)

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
        curves = [{"draw": draw, "points": refit.curve} for draw, refit in enumerate(refits)]
        (staging.path / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
        # An earlier attempt may have chosen another rate.
        write_log(context.open_store(), context.attempt, staging.path, ("trial-", _refits(task)))
    files = (*refits[0].files, *staging.files)
    digest = {"model": model_digest(refits[0].files), "rows": rows.digest_rows(accuracy_rows, rows.ROWS)}
    digest["sweep"] = sha256(sweep_json)  # the report reads it, so it is part of the content
    metrics: dict[str, float | int | str] = {
        "learning_rate": task.learning_rate,
        **_test_accuracy(dataset, refits, overlap),
        "parameters": task.contract.architecture.num_parameters,
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


def _test_accuracy(dataset: Dataset, refits: list[Refit], overlap: Overlap) -> dict[str, float]:
    """Return the mean over refits on the test images that were not seen in training; empty if all were.

    Of several refits also the standard deviation (ddof 1).
    """
    unseen = ~overlap.seen
    if not unseen.any():
        return {}
    labels = dataset.labels("test")
    accuracies = [float(np.mean((refit.score.predictions == labels)[unseen])) for refit in refits]
    metrics = {"test_accuracy": float(np.mean(accuracies))}
    if len(accuracies) > 1:
        metrics["test_accuracy_std"] = float(np.std(accuracies, ddof=1))
    return metrics


def make_task(config: Finetune, dataset: Dataset, backbone: Path | None) -> Task:
    """Return the task with its model's contract: the backbone's with a new head and resolution, or a new model's.

    Raises:
        UserError: a setting does not fit the data, the model or the classes.
    """
    if config.augment == "vtab":
        try:
            config = config.model_copy(update={"augment": augmentation(dataset.info.name)})
        except ValueError as error:
            raise UserError(str(error)) from None
    if backbone is None:
        assert config.model is not None and config.resolution is not None
        contract = model_contract(config.model, config.resolution, dataset.info, config.eval_crop)
        check_settings(config, contract)
        return Task(config, contract, None, 0, {})
    from vit_model.weights import read_contract

    source = read_contract(backbone)
    resolution = config.resolution or source.preprocessing.resolution
    try:
        architecture = source.architecture.for_finetuning(resolution, len(dataset.info.class_names))
        contract = continued_contract(source, architecture, dataset.info, config.eval_crop)
    except ValidationError as error:
        raise UserError(f"fine-tuning {config.backbone}: {reasons(error)}") from error
    check_settings(config, contract)
    return Task(config, contract, backbone, 0, {})


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
    if checkpoint := config.checkpoints().get("backbone"):
        settings["checkpoint"] = checkpoint
    settings |= {path: value for path, value in task.point.items() if path not in settings}
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
        accuracy_rows += rows.mean_ap_of_real(common, truth, refit.score.mean_ap, selected_on, settings)
    return accuracy_rows, predictions


if __name__ == "__main__":
    run_stage("finetune")
