"""What a search of a fine-tuning says while it runs: its best trial so far, its trials, the time that is left.

In: the configuration, the ledger. Out: lines for the log; the entries of sweep.json.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np

from pipelines.spec import Finetune
from pipelines.spec.search import ASHA, Optuna, Point
from ray_jobs.training.task import Trial, describe, point_key
from ray_jobs.tuning.ledger import Ledger
from ray_jobs.tuning.points import points, size

_TABLES = 4  # of a search, the last one at its end
_FEW = 8  # trials, of which there is only the table at the end
ROWS = 10  # of a table before the end


def ended(config: Finetune, ledger: Ledger, known: Mapping[int, Point], folds: int) -> dict[int, list[Trial]]:
    """Return the trials of each point that has ended in all folds, by number."""
    done = {}
    for number, point in known.items():
        key = point_key(config.search, number, point)
        own = [found[1] for fold in range(folds) if (found := ledger.trial((*key, fold))) is not None]
        if len(own) == folds:
            done[number] = own
    return done


def entry(config: Finetune, number: int, point: Point, folds: list[Trial]) -> dict[str, Any]:
    """Return what sweep.json says of a point."""
    said: dict[str, Any] = {
        "learning_rate": point["learning_rate"],
        "accuracies": [each.accuracy for each in folds],
        "losses": [each.loss for each in folds],
    }
    if config.early_stopping is not None:
        said["steps"] = [each.step for each in folds]
    if config.search is not None:
        said |= {"number": number, "point": point}
        if folds[0].is_pruned:
            said["pruned_at"] = folds[0].step
    return said


def table(trials: list[dict[str, Any]], rows: int | None = None) -> str:
    """Return a line per trial, the best first; None for all of them."""
    ranked = sorted(trials, key=_rank)
    lines = [
        f"  {np.mean(trial['accuracies']):.3f}  trial {trial['number']}: {describe(trial['point'])}"
        + (f" (ended at step {trial['pruned_at']})" if "pruned_at" in trial else "")
        for trial in ranked[:rows]
    ]
    more = len(ranked) - len(lines)
    return "\n".join([*lines, f"  and {more} more"] if more else lines)


def standing(
    config: Finetune, ledger: Ledger, folds: int, concurrent: int = 1, deadline: float = math.inf
) -> str:
    """Return how many trials of a search have ended, the time left, and the best so far; after each quarter a table.

    Args:
        folds: how many trials each point has.
        concurrent: how many trials run at once.
        deadline: the time after which no trial begins.
    """
    search = config.search
    known = ledger.points() if isinstance(search, Optuna) else dict(enumerate(points(config)))
    total = int(min(search.trials, size(config))) if isinstance(search, Optuna) else len(known)
    trials = ended(config, ledger, known, folds)
    said = f"{len(trials)} of {total} trials have ended"
    if total > len(trials) and (seconds := _seconds(config, known, trials)) > 0:
        said += ", " + time_left(
            (total - len(trials)) * seconds / concurrent, deadline, isinstance(search, ASHA)
        )
    entries = [entry(config, number, known[number], own) for number, own in trials.items()]
    if whole := [each for each in entries if "pruned_at" not in each]:
        best = min(whole, key=_rank)
        accuracy = np.mean(best["accuracies"])
        said += f"; the best is trial {best['number']}, accuracy {accuracy:.3f}: {describe(best['point'])}"
    quarters = [_TABLES * count // total for count in (len(trials) - 1, len(trials))]
    if total >= _FEW and len(trials) < total and quarters[0] < quarters[1]:
        said += "\n" + table(entries, ROWS)
    return said


def time_left(seconds: float, deadline: float, is_limit: bool) -> str:
    """Say how long a search still takes, by the mean of what has ended; less if it may begin nothing after a deadline.

    Args:
        is_limit: whether it may take less.
    """
    until = max(0.0, deadline - time.time())
    left = f"{'at most ' * is_limit}{timedelta(seconds=round(min(seconds, until)))} left"
    return f"{left} {'of search.minutes' if until < seconds else 'for the search'}"


def _rank(trial: dict[str, Any]) -> tuple[float, float]:
    """Return what trials are sorted by: accuracy, then loss."""
    return -float(np.mean(trial["accuracies"])), sum(trial["losses"])


def _seconds(config: Finetune, known: Mapping[int, Point], trials: Mapping[int, list[Trial]]) -> float:
    """Return the mean seconds of a point's trials; of ASHA's, of those that it does not end."""
    taken = []
    for number, own in trials.items():
        steps = config.at(known[number]).steps
        taken.append(sum(each.seconds * (steps / each.step if each.is_pruned else 1) for each in own))
    return float(np.mean(taken)) if taken else 0.0
