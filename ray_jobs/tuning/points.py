"""The points that a fine-tuning's search tries: listed before it starts, or proposed by Optuna while it runs.

In: the configuration, and the points that were tried before. Out: points, {field: value}.
`ray_jobs.tuning.runner` runs their trials.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipelines.spec import Finetune
from pipelines.spec.search import Choices, Grid, Optuna, Point, Range
from ray_jobs.randomness import Purpose
from vit_model.errors import UserError

_DIGITS = 4  # significant digits of a drawn number, so that a person can copy it into a recipe
_TRIES = 100  # to get a point that was not drawn or proposed before


def points(config: Finetune) -> list[Point]:
    """Return the points to try, in order: without a search, one per learning rate; with Optuna, none.

    A random point is a pure function of the seed and its number, so raising `trials` keeps the earlier points. Points
    do not repeat: if the space has fewer than `trials`, all of them are returned.
    """
    space, search = config.space, config.search
    if search is None or isinstance(search, Grid):
        values = [choices for choices in space.values() if not isinstance(choices, Range)]
        return [dict(zip(space, point, strict=True)) for point in itertools.product(*values)]
    if isinstance(search, Optuna):
        return []
    drawn: list[Point] = []
    for number in range(search.trials):
        for attempt in range(_TRIES):
            raw = np.random.SeedSequence((search.seed, Purpose.DRAW_POINTS, number, attempt))
            uniform = np.random.Philox(raw).random_raw(len(space)) / 2.0**64
            point = {path: _value(values, float(u)) for (path, values), u in zip(space.items(), uniform, strict=True)}
            if point not in drawn:
                drawn.append(point)
                break
    return drawn


def _value(values: Range | Choices, uniform: float) -> Any:
    """Map a number in [0, 1) to a value that a field may have."""
    if not isinstance(values, Range):
        return values[int(uniform * len(values))]
    low, high = float(values.low), float(values.high)
    if values.is_whole:  # each whole number has the interval around it
        low, high = low - 0.5, high + 0.5
    if values.scale == "log":
        value = math.exp(math.log(low) + uniform * (math.log(high) - math.log(low)))
    else:
        value = low + uniform * (high - low)
    if values.is_whole:
        return min(max(round(value), int(values.low)), int(values.high))
    return min(max(float(f"{value:.{_DIGITS}g}"), values.low), values.high)


def size(config: Finetune) -> float:
    """Return how many points the space has; infinity if it has a range of real numbers."""
    return math.prod(
        len(values)
        if not isinstance(values, Range)
        else int(values.high) - int(values.low) + 1
        if values.is_whole
        else math.inf
        for values in config.space.values()
    )


def propose(config: Finetune, tried: Sequence[tuple[Point, float | None]]) -> Point | None:
    """Return the point that Optuna's TPE proposes next; None if it only repeats points that were tried.

    This is a pure function of the search's seed and the arguments, so an interrupted search resumes as if it had not
    been. A trial has the same result each time, so a point that was tried is not proposed again.

    Args:
        tried: the points so far, in order, each with its trials' mean of the `select_by` metric; None: still running.

    Raises:
        UserError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise UserError("search.kind optuna needs Optuna on the cluster: pip install 'vitflow[optuna]'") from None

    assert isinstance(config.search, Optuna)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = optuna.distributions
    space: dict[str, Any] = {}  # a list is represented by its indices
    for path, values in config.space.items():
        if not isinstance(values, Range):
            space[path] = distributions.CategoricalDistribution(range(len(values)))
        else:
            kind = distributions.IntDistribution if values.is_whole else distributions.FloatDistribution
            space[path] = kind(values.low, values.high, log=values.scale == "log")
    raw = np.random.SeedSequence((config.search.seed, Purpose.PROPOSE_POINT, len(tried)))
    # with a constant liar, TPE avoids the points of running trials and those that it has just repeated
    sampler = optuna.samplers.TPESampler(seed=int(raw.generate_state(1)[0]), constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    states, known = optuna.trial.TrialState, []
    for point, result in tried:
        known.append(
            {
                path: point[path] if isinstance(values, Range) else values.index(point[path])
                for path, values in config.space.items()
            }
        )
        state = states.RUNNING if result is None else states.COMPLETE
        study.add_trial(optuna.trial.create_trial(state=state, value=result, params=known[-1], distributions=space))
    for _ in range(_TRIES):
        asked = study.ask(space).params
        if asked not in known:
            return {
                path: asked[path] if isinstance(values, Range) else values[asked[path]]
                for path, values in config.space.items()
            }
    return None
