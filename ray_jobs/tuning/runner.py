"""The sweep of a fine-tuning: try its points with Ray Tune or in Ray tasks, and choose one.

In: a task, the labelled images of draw 0, its folds, the ledger. Out: each point with its trials, of which `choose`
takes one. This module is free of torch, like the entry process; what it runs in other processes is in `fits`.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pipelines.scratch import scratch_folder
from pipelines.spec import Finetune
from pipelines.spec.search import ASHA, Optuna, Point
from ray_jobs.data.shards import Images
from ray_jobs.process import cluster
from ray_jobs.process.context import Context
from ray_jobs.training.task import (
    DIVERGED,
    DivergenceError,
    Evaluation,
    Folds,
    Task,
    at_point,
    mean,
    selecting,
)
from ray_jobs.tuning.ledger import Ledger, add_point, add_trial
from ray_jobs.tuning.points import points, propose, size
from ray_jobs.tuning.progress import ended, progress, table
from ray_jobs.tuning.trial import Refitted, Trial, TriedPoint, fit_title, pruned
from vit_model.errors import UserError


def sweep(
    context: Context[Finetune], task: Task, pools: list[Images], folds: Folds, ledger: Ledger
) -> list[TriedPoint]:
    """Try points x folds on draw 0; return the points that have ended, by number. Trials in the ledger are reused.

    Raises:
        UserError: a point does not fit the data or the backbone; or no trial has ended within the search's minutes.
    """
    config = task.config
    if isinstance(config.search, Optuna):
        known = run_proposed(context, task, pools, folds, ledger)
    else:
        known = dict(enumerate(points(config)))
        tasks = [at_point(task, number, point, pools[0].dataset) for number, point in known.items()]
        missing, finished = [], []
        for fold, point_task in itertools.product(range(len(folds)), tasks):
            if (trial := reuse_trial(context, point_task, fold, folds, ledger)) is None:
                missing.append((point_task, fold))
            else:
                finished.append((point_task, fold, trial))
        if missing:
            run_trials(context, pools, folds, missing, finished)
    tried = ended(config, ledger, known, len(folds))  # the others were cut off by search.minutes
    if all(point.is_pruned for point in tried):
        raise UserError("search.minutes: no trial has ended in this time; use more minutes")
    if config.search is not None:
        print(f"the trials by {task.metric} on their held-out images:\n{table(tried)}", flush=True)
    return tried


def choose(tried: Sequence[TriedPoint]) -> TriedPoint:
    """Return the point with the highest rank, but not one that ASHA ended early.

    Raises DivergenceError if every point diverged in every fold.
    """
    best = max((point for point in tried if not point.is_pruned), key=lambda point: point.rank)
    if all(trial.loss == DIVERGED for trial in best.folds):
        raise DivergenceError("learning_rates: training diverged with every rate of the sweep; use lower rates")
    return best


def last_step(trials: Sequence[Trial]) -> int:
    """Return the step at which a point was best: the median over folds, the lower of two."""
    return statistics.median_low([trial.step for trial in trials if trial.loss != DIVERGED])


def held_out_temperature(trials: Sequence[Trial]) -> float | None:
    """Return the geometric mean of the temperatures of a point's trials; None if they have none.

    Those models were fitted on fewer labels than a refit, but a refit has no images left to calibrate on.
    """
    temperatures = [trial.temperature for trial in trials if trial.temperature is not None]
    return statistics.geometric_mean(temperatures) if temperatures else None


def reuse_trial(context: Context[Finetune], task: Task, fold: int, folds: Folds, ledger: Ledger) -> Trial | None:
    """Return a trial that is in the ledger, with a line in the log; None if it is not."""
    if (entry := ledger.trial(task.trial(fold))) is None:
        return None
    attempt, trial = entry
    title = fit_title(context.config, task, fold, len(folds))
    print(f"{title}: {trial.outcome} (from attempt {attempt})", flush=True)
    return trial


def run_trial(
    context: Context[Finetune],
    task: Task,
    pool: Images,
    folds: Folds,
    fold: int,
    report: Callable[[Evaluation], None] | None = None,
) -> Trial:
    """Run a trial in this process or in the configured number of workers. Only trials of ASHA have `report`."""
    from ray_jobs.tuning import fits

    callback = () if report is None else (report,)
    result = fits.run(fits.trial, context, task, pool, folds, fold, *callback)
    assert isinstance(result, Trial)
    return result


def run_refit(context: Context[Finetune], task: Task, pool: Images, draw: int) -> Refitted:
    """Run a refit in this process or in the configured number of workers."""
    from ray_jobs.tuning import fits

    result = fits.run(fits.refit, context, task, pool, draw)
    assert isinstance(result, Refitted)
    return result


def run_trials(
    context: Context[Finetune],
    pools: list[Images],
    folds: Folds,
    missing: list[tuple[Task, int]],
    finished: list[tuple[Task, int, Trial]],
) -> None:
    """Run the missing trials with Ray Tune. ASHA gets the finished trials again, because it compares with them."""
    _silence_tune()
    from ray import tune

    config, search = context.config, context.config.search
    trials: list[tuple[Task, int, Trial | None]] = [(*trial, None) for trial in missing]
    scheduler = None
    if isinstance(search, ASHA):
        trials = [*finished, *trials]
        scheduler = tune.schedulers.AsyncHyperBandScheduler(
            time_attr="evaluation",
            metric="selecting",
            mode="max",
            max_t=search.evaluations,
            grace_period=search.grace,
            reduction_factor=search.reduction_factor,
        )
    resources, concurrent = cluster.fit_resources(config.threads or 1, config.workers)
    # Tune's own records are not kept: the ledger has what a later attempt needs.
    with scratch_folder() as scratch:
        trainable = tune.with_parameters(
            _tune_trial,
            context=context,
            pool=pools[0],
            folds=folds,
            concurrent=concurrent,
            deadline=_deadline(config, sum(trial.seconds for *_, trial in finished), concurrent),
            trials=trials,
        )
        tuner = tune.Tuner(
            tune.with_resources(trainable, resources),
            param_space={"number": tune.grid_search(list(range(len(trials))))},
            tune_config=tune.TuneConfig(
                reuse_actors=config.workers == 1, max_concurrent_trials=concurrent, scheduler=scheduler
            ),
            run_config=tune.RunConfig(name="sweep", storage_path=str(scratch), verbose=0),
        )
        results = list(tuner.fit())
    for result in results:
        if result.error is not None:
            raise result.error
    ledger = Ledger(context, [])
    for result in results:
        task, fold, before = trials[result.config["number"]]
        # ASHA's decision may reach a process so late that it cannot record the trial.
        if before is None and "evaluations" in result.metrics and not ledger.trial(task.trial(fold)):
            evaluations = [Evaluation(*values) for values in result.metrics["evaluations"]]
            add_trial(context, task.trial(fold), pruned(evaluations))


def _silence_tune() -> None:
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # nothing reads its CSV and TensorBoard files
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the old output is silent at verbosity 0
    # Tune warns that the files switched off above are missing. It does not need them for a trial's last report.
    logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)
    os.environ["TUNE_WARN_INSUFFICIENT_RESOURCE_THRESHOLD_S"] = "900"  # another stage may hold the cores


def _tune_trial(
    parameters: dict[str, int],
    context: Context[Finetune],
    pool: Images,
    folds: Folds,
    concurrent: int,
    deadline: float,
    trials: list[tuple[Task, int, Trial | None]],
) -> None:
    """Run one of `trials`; one that finished in an earlier attempt only reports its evaluations to ASHA again."""
    from ray import tune

    sys.unraisablehook = _show_unraisable
    search, number = context.config.search, parameters["number"]
    task, fold, done = trials[number]
    evaluations: list[Evaluation] = []

    def report(evaluation: Evaluation) -> None:
        evaluations.append(evaluation)
        # the last one is reported when the result is in the ledger, because ASHA then ends the trial
        if evaluation.step < task.config.steps or done is not None:
            results = {"selecting": selecting(evaluation), "evaluations": evaluations}
            tune.report(results | {"evaluation": len(evaluations)})

    def print_progress() -> None:
        ledger = Ledger(context, task.attempts)
        print(progress(context.config, ledger, len(folds), concurrent, deadline), flush=True)

    if done is not None:
        for evaluation in done.evaluations:
            report(evaluation)
    elif time.time() < deadline:
        callback = report if isinstance(search, ASHA) else None
        try:
            done = run_trial(context, task, pool, folds, fold, callback)
        except SystemExit:  # ASHA has ended it
            print_progress()
            raise
        print_progress()
    last = search.evaluations if isinstance(search, ASHA) else 1
    tune.report({"selecting": 0.0 if done is None else selecting(done), "evaluation": last})


def run_proposed(
    context: Context[Finetune], task: Task, pools: list[Images], folds: Folds, ledger: Ledger
) -> dict[int, Point]:
    """Run the trials of the points that Optuna proposes, and return the points by number.

    Each point is a Ray task. Points that an earlier attempt began and did not end come first. Ray Tune's Optuna is not
    used: it trains a point each time it is proposed, and an interruption changes what it proposes.
    """
    import ray

    config, dataset = task.config, pools[0].dataset
    proposals = Proposals(context, ledger.points())
    seconds = 0.0
    for number, point in proposals.points.items():
        point_task = at_point(task, number, point, dataset)
        trials = [reuse_trial(context, point_task, fold, folds, ledger) for fold in range(len(folds))]
        done = [trial for trial in trials if trial is not None]
        seconds += sum(trial.seconds for trial in done)
        if len(done) == len(folds):
            proposals.results[number] = mean(done)
    proposals.begun = [number for number in proposals.points if number not in proposals.results]
    _, concurrent = cluster.fit_resources(config.threads or 1, config.workers)
    deadline = _deadline(config, seconds, concurrent)
    run, running = cluster.remote(run_point, config.threads or 1, config.workers), dict[Any, int]()
    while True:
        while len(running) < concurrent and time.time() < deadline:
            if (following := proposals.next()) is None:
                break
            point_task = at_point(task, following, proposals.points[following], dataset)
            running[run(context, point_task, pools[0], folds, deadline)] = following
        if not running:
            break
        (result,), _ = ray.wait([*running])
        number = running.pop(result)
        if (mean_result := ray.get(result)) is not None:
            proposals.results[number] = mean_result
            print(progress(config, ledger, len(folds), concurrent, deadline), flush=True)
    proposals.print_end(time.time() >= deadline)
    return dict(sorted(proposals.points.items()))


class Proposals:
    """The points that Optuna has proposed in a search, by number, and the results of the points that have ended."""

    def __init__(self, context: Context[Finetune], known: dict[int, Point]) -> None:
        self._context, self._search = context, context.config.search
        assert isinstance(self._search, Optuna)
        self._trials = self._search.trials
        self.total = int(min(self._trials, size(context.config)))
        self.points, self.results = known, dict[int, float]()
        self.begun: list[int] = []
        """the points that an earlier attempt began and did not end"""

    def next(self) -> int | None:
        """Return the number of the point to try next; None if there is none now."""
        if self.begun:
            return self.begun.pop(0)
        if len(self.points) >= self.total:
            return None
        tried = [(self.points[number], self.results.get(number)) for number in sorted(self.points)]
        if (point := propose(self._context.config, tried)) is None:
            return None
        free = (number for number in itertools.count() if number not in self.points)
        number = next(number for number in free if add_point(self._context, number, point))
        self.points[number] = point
        return number

    def print_end(self, is_over_time: bool) -> None:
        """Print why the search has ended, if there were fewer trials than configured."""
        if len(self.points) < self.total and not is_over_time:
            print(
                f"the search ends after {len(self.points)} of {self.total} points: Optuna proposes only points that it"
                " has tried",
                flush=True,
            )
        elif self.total < self._trials:
            print(f"search.trials is {self._trials}, but the space has only {self.total} points", flush=True)


def run_point(context: Context[Finetune], task: Task, pool: Images, folds: Folds, deadline: float) -> float | None:
    """Run a point's trials, fold by fold, and return their mean of the `select_by` metric; None after the deadline."""
    if time.time() >= deadline:
        return None
    ledger, trials = Ledger(context, task.attempts), []
    for fold in range(len(folds)):
        entry = ledger.trial(task.trial(fold))
        trials.append(run_trial(context, task, pool, folds, fold) if entry is None else entry[1])
    return mean(trials)


def _deadline(config: Finetune, seconds: float, concurrent: int) -> float:
    """Return the time after which no trial begins; trials of earlier attempts have used `seconds` of it."""
    minutes = None if config.search is None else config.search.minutes
    return math.inf if minutes is None else time.time() + 60 * minutes - seconds / concurrent


def _show_unraisable(error: sys.UnraisableHookArgs) -> None:
    """Show an exception that cannot be caught, unless it only ends the process.

    Ray's SIGTERM handler raises SystemExit wherever the process of a finished trial is, even in a destructor.
    """
    if not isinstance(error.exc_value, SystemExit):
        sys.__unraisablehook__(error)
