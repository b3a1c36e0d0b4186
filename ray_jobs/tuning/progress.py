"""Progress of a fine-tuning's sweep: its best trial so far, its trials, the time left.

In: the configuration, the ledger. Out: lines for the log.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np

from pipelines.spec import Detect, Finetune
from pipelines.spec.search import ASHA, Optuna, Point
from pipelines.store import FitName
from ray_jobs.evaluation.rows import AP, MEAN_IOU
from ray_jobs.training.task import describe, point_digest
from ray_jobs.tuning.ledger import Ledger
from ray_jobs.tuning.points import points, size
from ray_jobs.tuning.trial import TriedPoint

_TABLES = 4  # tables per search, the last one at its end
_FEW = 8  # a search of fewer points has only the table at the end
_ROWS = 10  # rows of a table before the end


def ended(config: Finetune, ledger: Ledger, known: Mapping[int, Point], folds: int) -> list[TriedPoint]:
    """Return the points whose trials have ended in all folds."""
    begun = _begun(config, ledger, known, folds)
    return [point for point in begun if len(point.folds) == folds]


def _begun(config: Finetune, ledger: Ledger, known: Mapping[int, Point], folds: int) -> list[TriedPoint]:
    """Return the points of which at least one trial has ended, with those trials."""
    begun = []
    for number, point in known.items():
        digest = point_digest(config.search, point)
        names = [FitName("trial", number, fold, digest) for fold in range(folds)]
        trials = [entry[1] for name in names if (entry := ledger.trial(name)) is not None]
        if trials:
            begun.append(TriedPoint(number, point, trials))
    return begun


def table(tried: Sequence[TriedPoint], rows: int | None = None) -> str:
    """Return a line per point, the best first; at most `rows` lines, None for all."""
    ranked = sorted(tried, key=lambda point: point.rank, reverse=True)
    lines = [
        f"  {point.selecting:.3f}  {point.title}"
        + (f" (ended at step {point.folds[0].step})" if point.is_pruned else "")
        for point in ranked[:rows]
    ]
    more = len(ranked) - len(lines)
    return "\n".join([*lines, f"  and {more} more"] if more else lines)


def progress(config: Finetune, ledger: Ledger, folds: int, concurrent: int = 1, deadline: float = math.inf) -> str:
    """Return how many trials of a sweep have ended, the time left, and the best point so far.

    If there are at least 8 points, a table follows after each quarter of them.

    Args:
        folds: how many trials each point has.
        concurrent: how many trials run at once.
        deadline: the time after which no trial begins.
    """
    search = config.search
    known = ledger.points() if isinstance(search, Optuna) else dict(enumerate(points(config)))
    count = int(min(search.trials, size(config))) if isinstance(search, Optuna) else len(known)
    begun = _begun(config, ledger, known, folds)
    done, total = sum(len(point.folds) for point in begun), count * folds
    message = f"{done} of {total} trials have ended"
    if total > done and (seconds := _seconds(config, begun)) > 0:
        left = (total - done) * seconds / concurrent
        message += ", " + time_left(left, deadline, isinstance(search, ASHA))
    tried = [point for point in begun if len(point.folds) == folds]
    if whole := [point for point in tried if not point.is_pruned]:
        best = max(whole, key=lambda point: point.rank)
        metric = MEAN_IOU if config.masks else AP if isinstance(config, Detect) else config.select_by
        message += f"; the best is trial {best.number}, {metric} {best.selecting:.3f}: {describe(best.point)}"
    quarters = [_TABLES * number // count for number in (len(tried) - 1, len(tried))]
    if count >= _FEW and len(tried) < count and quarters[0] < quarters[1]:
        message += "\n" + table(tried, _ROWS)
    return message


def time_left(seconds: float, deadline: float, is_limit: bool) -> str:
    """Return in words how long a sweep still takes, given the estimated seconds; at most until the deadline.

    Args:
        is_limit: whether the sweep may take less.
    """
    until = max(0.0, deadline - time.time())
    left = f"{'at most ' * is_limit}{timedelta(seconds=round(min(seconds, until)))} left"
    return left + " of search.minutes" * (until < seconds)


def _seconds(config: Finetune, begun: Sequence[TriedPoint]) -> float:
    """Return the mean seconds of the trials that have ended; extrapolated to all steps if ASHA has ended them."""
    taken = [
        trial.seconds * (config.at(point.point).steps / trial.step if trial.is_pruned else 1)
        for point in begun
        for trial in point.folds
    ]
    return float(np.mean(taken)) if taken else 0.0
