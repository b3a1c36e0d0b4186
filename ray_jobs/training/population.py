"""Population-based training (Jaderberg et al. 2017): trainings that take over from each other and change their values.

In: a task, the labelled images, dev as the one fold, the ledger. Out: what sweep.json says of each member.

All members train to a round's end, are scored on dev, and then the worst continue from the best. Ray Tune's PBT is not
used. It ranks members at different times and draws from Python's global random numbers, so its result depends on
timing, and what it needs to go on after an interruption is in files that must be unpickled. Here a round's schedules
are a pure function of the results in the ledger (`exploit_and_explore`), so there is no state of the population to
lose, and the result is the same after any interruption and with any number of members at a time. Ray runs a round's
fits as tasks, like refits.

A round is a fit with the schedule of values since step 0 (`Task.schedule`), whose first steps are those of the member
that it continues from. So it may start from that member's checkpoint, or from an earlier one, or from the beginning:
the result is the same. The refit repeats the chosen member's schedule, on train and dev.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np

from pipelines.spec import Finetune
from pipelines.spec.search import PBT
from pipelines.store import remove_checkpoints
from ray_jobs.data.shards import Images
from ray_jobs.process import devices
from ray_jobs.process.context import Context
from ray_jobs.training.ledger import Ledger
from ray_jobs.training.search import describe, exploit_and_explore, points
from ray_jobs.training.standing import ROWS, entry, table, time_left
from ray_jobs.training.task import Folds, Phase, Schedule, Task, Trial, at_point, place_of, trial_name
from ray_jobs.training.trials import DIVERGED, fit_name, outcome_of, run_trial
from vit_model.errors import UserError


class Round(NamedTuple):
    """A finished round: its last step, and each member's schedule up to there and result."""

    end: int
    schedules: list[Schedule]
    results: list[Trial]


def run_population(
    context: Context[Finetune], task: Task, pools: list[Images], folds: Folds, ledger: Ledger
) -> list[dict[str, Any]]:
    """Train the population; return [{learning_rate, accuracies, losses, number, point, schedule, rounds}] by member.

    `schedule` has the phases of a member's training, [{step, member, point}], and `rounds` what it did in each round:
    [{step, accuracy, loss, point}], with {copied} if it continued from this member. Rounds in the ledger are not run
    again.

    Raises:
        UserError: a point does not fit the data or the backbone; or no round has ended within the search's minutes.
    """
    config, search = task.config, task.config.search
    assert isinstance(search, PBT)
    _, concurrent = devices.fit_resources(config.threads, config.workers)
    began, earlier = time.time(), 0.0  # seconds that the rounds of earlier attempts took
    ends = [math.ceil(config.steps * part / search.rounds) for part in range(1, search.rounds + 1)]
    schedules: list[Schedule] = [(Phase(0, member, point),) for member, point in enumerate(points(config))]
    history: list[Round] = []
    for number, end in enumerate(ends):
        tasks = [_round_task(task, schedule, end, pools[0]) for schedule in schedules]
        found = [_from_ledger(context, each, folds, ledger) for each in tasks]
        earlier += sum(result.seconds for result in found if result is not None)
        minutes = math.inf if search.minutes is None else search.minutes
        deadline = began + 60 * minutes - earlier / concurrent
        missing = [each for each, result in zip(tasks, found, strict=True) if result is None]
        if missing and time.time() >= deadline:
            break
        waves = math.ceil(len(tasks) / concurrent)
        later = waves * (config.steps - end) + math.ceil(len(pools) / concurrent) * config.steps
        new = iter(run_round(context, pools[0], folds, missing, later, concurrent))
        results = [next(new) if result is None else result for result in found]
        if history:  # nothing continues from them any more
            _remove_checkpoints(context, history[-1].schedules)
        history.append(Round(end, schedules, results))
        print(_standing(config, history, len(ends), concurrent, deadline), flush=True)
        scores = [None if each.loss == DIVERGED else (each.accuracy, each.loss) for each in results]
        if end == config.steps or not any(scores):
            break
        current = [schedule[-1].point for schedule in schedules]
        following = exploit_and_explore(config, number, current, scores)
        for member, (parent, point) in enumerate(following):
            if parent != member:
                print(f"trial {member} continues from trial {parent} with {describe(point)}", flush=True)
        schedules = [
            (*schedules[parent], Phase(end, member, point))
            for member, (parent, point) in enumerate(following)
        ]
    if not history:
        raise UserError("search.minutes: no round has ended in this time; give more")
    return _entries(config, history)


def _round_task(task: Task, schedule: Schedule, end: int, pool: Images) -> Task:
    """Return the task of the last round of a schedule."""
    phase = schedule[-1]
    before = [schedule[:count] for count in range(len(schedule) - 1, 0, -1)]
    return at_point(task, phase.member, phase.point, pool.dataset)._replace(
        schedule=schedule, last_step=end, ancestors=tuple(trial_name(place_of(each)) for each in before)
    )


def _from_ledger(context: Context[Finetune], task: Task, folds: Folds, ledger: Ledger) -> Trial | None:
    """Return a finished round, and say so; None if it is not finished."""
    if (found := ledger.trial(task.place(0))) is None:
        return None
    attempt, result = found
    print(f"{fit_name(context, task, 0, folds)}: {outcome_of(result)} (from attempt {attempt})", flush=True)
    return result


def run_round(
    context: Context[Finetune], pool: Images, folds: Folds, tasks: list[Task], later: int, concurrent: int
) -> list[Trial]:
    """Run these members' round, each in a Ray task.

    Args:
        later: steps that the stage still does after this round, with `concurrent` fits in parallel.
    """
    import ray

    resources, _ = devices.fit_resources(context.config.threads, context.config.workers)
    remote = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(run_member)
    last = (len(tasks) - 1) // concurrent
    running = []
    for number, task in enumerate(tasks):
        assert task.last_step is not None
        steps = task.last_step - task.schedule[-1].step
        after = later + (last - number // concurrent) * steps
        running.append(remote.remote(context, task, pool, folds, after))
    results: list[Trial] = ray.get(running)
    return results


def run_member(context: Context[Finetune], task: Task, pool: Images, folds: Folds, after: int) -> Trial:
    """Run a member's round, if it is not in the ledger."""
    # Ray runs a finished task again if the node that holds its result is lost.
    if (found := Ledger(context, []).trial(task.place(0))) is not None:
        return found[1]
    return run_trial(context, task, pool, folds, 0, after)


def _remove_checkpoints(context: Context[Finetune], schedules: list[Schedule]) -> None:
    """Remove the checkpoints of the last rounds of these schedules."""
    for schedule in schedules:
        remove_checkpoints(context.open_store(), context.attempt, fit=trial_name(place_of(schedule)))


def _standing(config: Finetune, history: list[Round], rounds: int, concurrent: int, deadline: float) -> str:
    """Say which round has ended, the time left, and where each member stands."""
    said = f"round {len(history)} of {rounds} has ended"
    fits = [result.seconds for each in history for result in each.results]
    if len(history) < rounds:
        left = (rounds - len(history)) * len(history[0].results) * float(np.mean(fits)) / concurrent
        said += f", {time_left(left, deadline, is_limit=False)}"
    return f"{said}; the trials by accuracy on dev:\n{table(_entries(config, history), ROWS)}"


def _entries(config: Finetune, history: list[Round]) -> list[dict[str, Any]]:
    """Return what sweep.json says of each member."""
    *_, last = history
    found = []
    for member, (schedule, result) in enumerate(zip(last.schedules, last.results, strict=True)):
        rounds = []
        for each in history:
            own = each.schedules[member]
            before = own[-2].member if len(own) > 1 else member
            rounds.append(
                {
                    "step": each.end,
                    "accuracy": each.results[member].accuracy,
                    "loss": each.results[member].loss,
                    "point": own[-1].point,
                }
                | ({} if before == member else {"copied": before})
            )
        phases = {"schedule": [phase._asdict() for phase in schedule], "rounds": rounds}
        found.append(entry(config, member, schedule[-1].point, [result]) | phases)
    return found
