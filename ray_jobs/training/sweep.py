"""The sweep of a fine-tuning: the points that it tries with Ray Tune, and which of them it chooses.

In: a task, the labelled images of draw 0, its folds, the ledger. Out: what sweep.json says of each point, of which
`choose` takes one.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from pipelines.scratch import scratch_folder
from pipelines.spec import Finetune
from pipelines.spec.search import ASHA, Optuna, Point
from ray_jobs.data.shards import Images
from ray_jobs.process import cluster
from ray_jobs.process.context import Context
from ray_jobs.training.ledger import Ledger, add_point, add_trial
from ray_jobs.training.search import last_evaluation, points, propose, scheduler, size
from ray_jobs.training.standing import ended, entry, standing, table
from ray_jobs.training.task import DivergenceError, Evaluated, Folds, Place, Task, Trial, at_point
from ray_jobs.training.trials import DIVERGED, fit_name, outcome_of, pruned, run_trial
from vit_model.errors import UserError

_END_SECONDS = 60.0  # for the workers of a trial that ASHA has ended, which takes them about two


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
        known = run_proposed(context, task, pools, folds, ledger)
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
    # of the others, the search's minutes were over
    done = ended(config, ledger, known, len(folds))
    trials = [entry(config, number, known[number], own) for number, own in done.items()]
    if not any("pruned_at" not in trial for trial in trials):
        raise UserError("search.minutes: no trial has ended in this time; give more")
    if config.search is not None:
        print(f"the trials by accuracy on what they held out:\n{table(trials)}", flush=True)
    return trials


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


def last_step(trial: dict[str, Any]) -> int:
    """Return the step at which a point was best: the median over folds, the lower of two."""
    pairs = zip(trial["steps"], trial["losses"], strict=True)
    return statistics.median_low([step for step, loss in pairs if loss != DIVERGED])


def held_out_temperature(ledger: Ledger, places: Iterable[Place]) -> float | None:
    """Return the geometric mean of the temperatures of a point's trials; None if they have none.

    They were fitted on fewer labels than a refit, which has no images left to be calibrated on.
    """
    trials = [found[1] for place in places if (found := ledger.trial(place)) is not None]
    temperatures = [trial.temperature for trial in trials if trial.temperature is not None]
    return statistics.geometric_mean(temperatures) if temperatures else None


def said(context: Context[Finetune], task: Task, fold: int, folds: Folds, ledger: Ledger) -> Trial | None:
    """Return a trial that is in the ledger, and say so; None if it is not."""
    if (found := ledger.trial(task.place(fold))) is None:
        return None
    attempt, trial = found
    print(f"{fit_name(context, task, fold, folds)}: {outcome_of(trial)} (from attempt {attempt})", flush=True)
    return trial


def run_trials(
    context: Context[Finetune],
    pools: list[Images],
    folds: Folds,
    missing: list[tuple[Task, int]],
    finished: list[tuple[Task, int, Trial]],
) -> None:
    """Run the missing trials with Ray Tune. ASHA is told of the finished ones again, because it compares with them."""
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # nothing reads its CSV and TensorBoard files
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the old output is silent at verbosity 0
    # Tune warns that the files switched off above are missing. It does not need them for a trial's last report.
    logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)
    os.environ["TUNE_WARN_INSUFFICIENT_RESOURCE_THRESHOLD_S"] = "900"  # another stage may hold the cores
    from ray import tune

    config = context.config
    trials: list[tuple[Task, int, Trial | None]] = [(*each, None) for each in missing]
    if isinstance(config.search, ASHA):
        trials = [*finished, *trials]
    resources, concurrent = cluster.fit_resources(config.threads, config.workers)
    # Tune's own records are not kept: the ledger has what a later attempt needs.
    with scratch_folder() as scratch:
        trainable = tune.with_parameters(
            _tune_trial,
            context=context,
            pool=pools[0],
            folds=folds,
            after=partial(steps_after, config.steps, concurrent, trials=len(trials), refits=len(pools)),
            concurrent=concurrent,
            deadline=_deadline(config, sum(trial.seconds for *_, trial in finished), concurrent),
            trials=trials,
        )
        is_reused = config.workers == 1
        tuner = tune.Tuner(
            tune.with_resources(trainable if is_reused else _ending_with_its_workers(trainable), resources),
            param_space={"number": tune.grid_search(list(range(len(trials))))},
            tune_config=tune.TuneConfig(
                reuse_actors=is_reused, max_concurrent_trials=concurrent, scheduler=scheduler(config)
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
        # ASHA's verdict may reach a process so late that it could not record it.
        if before is None and "evaluations" in result.metrics and not ledger.trial(task.place(fold)):
            add_trial(context, task.place(fold), pruned(result.metrics["evaluations"], 0.0))


def run_proposed(
    context: Context[Finetune], task: Task, pools: list[Images], folds: Folds, ledger: Ledger
) -> dict[int, Point]:
    """Run the trials of the points that Optuna proposes, and return the points by number.

    Each point is a Ray task. First come those that an earlier attempt has begun and not ended. Ray Tune's Optuna is not
    used: it trains a point again each time it is proposed, and an interruption changes what it proposes.
    """
    import ray

    config, search = task.config, task.config.search
    assert isinstance(search, Optuna)
    known, accuracies, seconds = ledger.points(), dict[int, float](), 0.0
    for number, point in known.items():
        one = at_point(task, number, point, pools[0].dataset)
        own = [said(context, one, fold, folds, ledger) for fold in range(len(folds))]
        done = [trial for trial in own if trial is not None]
        seconds += sum(trial.seconds for trial in done)
        if len(done) == len(folds):
            accuracies[number] = _mean_accuracy(done)
    begun = [number for number in known if number not in accuracies]

    def following() -> int | None:
        """Return the number of the next point; None if there is none now."""
        if begun:
            return begun.pop(0)
        tried = [(known[number], accuracies.get(number)) for number in sorted(known)]
        if len(known) >= total or (point := propose(config, tried)) is None:
            return None
        number = next(
            each for each in itertools.count() if each not in known and add_point(context, each, point)
        )
        known[number] = point
        return number

    total = int(min(search.trials, size(config)))
    count = (total - len(accuracies)) * len(folds)
    resources, concurrent = cluster.fit_resources(config.threads, config.workers)
    deadline = _deadline(config, seconds, concurrent)
    remote = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(run_point)
    running: dict[Any, int] = {}
    places = itertools.count()
    while True:
        while len(running) < concurrent and time.time() < deadline and (begins := following()) is not None:
            after = [
                steps_after(config.steps, concurrent, next(places), trials=count, refits=len(pools))
                for _ in folds
            ]
            one = at_point(task, begins, known[begins], pools[0].dataset)
            running[remote.remote(context, one, pools[0], folds, after, deadline)] = begins
        if not running:
            break
        (result,), _ = ray.wait([*running])
        number = running.pop(result)
        if (accuracy := ray.get(result)) is not None:
            accuracies[number] = accuracy
            print(standing(config, ledger, len(folds), concurrent, deadline), flush=True)
    if len(known) < total and time.time() < deadline:
        print(
            f"the search ends after {len(known)} of {total} points: Optuna proposes only points that were tried",
            flush=True,
        )
    elif total < search.trials:
        print(f"search.trials is {search.trials}, but the space has only {total} points", flush=True)
    return dict(sorted(known.items()))


def run_point(
    context: Context[Finetune], task: Task, pool: Images, folds: Folds, after: list[int], deadline: float
) -> float | None:
    """Run the trials of a point, fold by fold, and return their mean accuracy; None if they begin after the deadline.

    Args:
        after: how many steps the stage still does after each fold's trial.
    """
    if time.time() >= deadline:
        return None
    ledger, trials = Ledger(context, task.attempts), []
    for fold in range(len(folds)):
        found = ledger.trial(task.place(fold))
        trials.append(run_trial(context, task, pool, folds, fold, after[fold]) if found is None else found[1])
    return _mean_accuracy(trials)


def _mean_accuracy(trials: list[Trial]) -> float:
    return float(np.mean([trial.accuracy for trial in trials]))


def _deadline(config: Finetune, seconds: float, concurrent: int) -> float:
    """Return the time after which no trial begins; trials of earlier attempts have taken `seconds` of it."""
    minutes = None if config.search is None else config.search.minutes
    return math.inf if minutes is None else time.time() + 60 * minutes - seconds / concurrent


def _ending_with_its_workers(run: Callable[[dict[str, Any]], None]) -> type[Any]:
    """Return Tune's trainable of a function whose process ends after the workers that the function has started.

    Tune asks a trial that it stops to end and ends its process right away, which would kill Ray Train's controller and
    leave the workers' placement group behind until somebody finds out (ray#54305).
    """
    from ray.train._internal.session import get_session
    from ray.tune.trainable import wrap_function

    class Waiting(wrap_function(run)):  # type: ignore[misc]
        def cleanup(self) -> None:
            get_session().finish(timeout=_END_SECONDS)
            super().cleanup()

    return Waiting


def _tune_trial(
    parameters: dict[str, int],
    context: Context[Finetune],
    pool: Images,
    folds: Folds,
    after: Callable[[int], int],
    concurrent: int,
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
        is_told = isinstance(context.config.search, ASHA)
        try:
            done = run_trial(context, task, pool, folds, fold, after(number), tell if is_told else None)
        except SystemExit:  # ASHA has ended it
            _say_standing(context, task, folds, concurrent, deadline)
            raise
        if context.config.search is not None:
            _say_standing(context, task, folds, concurrent, deadline)
    tune.report(
        {"accuracy": 0.0 if done is None else done.accuracy, "evaluation": last_evaluation(context.config)}
    )


def _say_standing(
    context: Context[Finetune], task: Task, folds: Folds, concurrent: int, deadline: float
) -> None:
    ledger = Ledger(context, task.attempts)
    print(standing(context.config, ledger, len(folds), concurrent, deadline), flush=True)


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
