"""Which points a fine-tuning's search tries: those known before it starts, and those of Optuna or PBT meanwhile.

In: the configuration, and what was tried before. Out: points, {field: value}.
`ray_jobs.training.sweep` runs their trials.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipelines.spec import Finetune
from pipelines.spec.search import ASHA, PBT, Choices, Grid, Optuna, Point, Range
from vit_model.errors import UserError

if TYPE_CHECKING:
    from ray.tune.schedulers import AsyncHyperBandScheduler
    from ray.tune.search.optuna import OptunaSearch

_DRAW_POINTS, _EXPLORE = 1, 2  # purposes, so that one seed has different random numbers elsewhere
_DIGITS = 4  # significant ones of a drawn number, so that a person can copy it into a recipe
_TRIES = 100  # for a point that was not drawn before


def points(config: Finetune) -> list[Point]:
    """Return the points to try, in order; without a search one per learning rate, and with Optuna none.

    A random point is a pure function of the seed and its number, so raising `trials` keeps those before. Points do not
    repeat: if the space has fewer than `trials`, all of them are returned.
    """
    space, search = config.space, config.search
    if search is None or isinstance(search, Grid):
        values = [choices for choices in space.values() if not isinstance(choices, Range)]
        return [dict(zip(space, point, strict=True)) for point in itertools.product(*values)]
    if isinstance(search, Optuna):
        return []
    found: list[Point] = []
    for number in range(search.members if isinstance(search, PBT) else search.trials):
        for attempt in range(_TRIES):
            raw = np.random.SeedSequence((search.seed, _DRAW_POINTS, number, attempt))
            uniform = np.random.Philox(raw).random_raw(len(space)) / 2.0**64
            point = {
                path: _value(values, float(u))
                for (path, values), u in zip(space.items(), uniform, strict=True)
            }
            if point not in found:
                found.append(point)
                break
    return found


def _value(values: Range | Choices, uniform: float) -> Any:
    """Return the value at a place in [0, 1) of what a field may be."""
    if not isinstance(values, Range):
        return values[int(uniform * len(values))]
    low, high = float(values.low), float(values.high)
    if values.is_whole:  # each whole number has the interval around it
        low, high = low - 0.5, high + 0.5
    if values.scale == "log":
        value = math.exp(math.log(low) + uniform * (math.log(high) - math.log(low)))
    else:
        value = low + uniform * (high - low)
    return _inside(values, value)


def _inside(values: Range, value: float) -> int | float:
    """Return the nearest value of a range, whole or with few digits."""
    if values.is_whole:
        return min(max(round(value), int(values.low)), int(values.high))
    return min(max(float(f"{value:.{_DIGITS}g}"), values.low), values.high)


def exploit_and_explore(
    config: Finetune,
    round_number: int,
    current: Sequence[Point],
    scores: Sequence[tuple[float, float] | None],
) -> list[tuple[int, Point]]:
    """Return (the member to continue from, its point) of each member of PBT after a round, from 0.

    The members of the lowest quantile, and those that diverged, each continue from a random one of the highest, with
    perturbed values; the others as they are. A pure function of the search's seed, the round and the scores (Jaderberg
    et al. 2017, section 4.1: truncation selection, perturb or resample).

    Args:
        current: the members' points.
        scores: their accuracy and loss on dev; None: it diverged. Ties are broken by the lower loss, then the number.
    """
    search, space = config.search, config.space
    assert isinstance(search, PBT)
    alive = [(-score[0], score[1], member) for member, score in enumerate(scores) if score is not None]
    ranked = [member for *_, member in sorted(alive)]
    part = max(1, int(search.quantile * len(current)))
    best, worst = ranked[:part], set(ranked[len(current) - part :])
    following = []
    for member, point in enumerate(current):
        if scores[member] is not None and member not in worst:
            following.append((member, point))
            continue
        raw = np.random.SeedSequence((search.seed, _EXPLORE, round_number, member))
        uniform = np.random.Philox(raw).random_raw(1 + 3 * len(space)) / 2.0**64
        parent = best[int(uniform[0] * len(best))]
        draws = uniform[1:].reshape(-1, 3)
        perturbed = {
            path: _explored(search, values, current[parent][path], *draw)
            for (path, values), draw in zip(space.items(), draws.tolist(), strict=True)
        }
        following.append((parent, perturbed))
    return following


def _explored(
    search: PBT, values: Range | Choices, value: Any, anew: float, place: float, direction: float
) -> Any:
    """Return the value that follows another one, from three numbers in [0, 1)."""
    if anew < search.resample:
        return _value(values, place)
    if not isinstance(values, Range):  # a neighbour
        there = values.index(value) + (1 if direction >= 0.5 else -1)
        return values[min(max(there, 0), len(values) - 1)]
    changed = value * search.factors[direction >= 0.5]
    if values.is_whole:  # by 1 at least
        changed = max(changed, value + 1) if direction >= 0.5 else min(changed, value - 1)
    return _inside(values, changed)


def describe(point: Point) -> str:
    """Say a point: `learning rate 0.01, optimizer.weight decay 0.1`."""
    return ", ".join(
        f"{path.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}"
        for path, value in point.items()
    )


def scheduler(config: Finetune) -> AsyncHyperBandScheduler | None:
    """Return Ray Tune's ASHA, if that is the search."""
    search = config.search
    if not isinstance(search, ASHA):
        return None
    from ray.tune.schedulers import AsyncHyperBandScheduler

    return AsyncHyperBandScheduler(
        time_attr="evaluation",
        metric="accuracy",
        mode="max",
        max_t=search.evaluations,
        grace_period=search.grace,
        reduction_factor=search.reduction_factor,
    )


def last_evaluation(config: Finetune) -> int:
    """Return how many evaluations a trial has that ASHA does not end."""
    return config.search.evaluations if isinstance(config.search, ASHA) else 1


class Tried(NamedTuple):
    """A point that Optuna proposed before, and the mean accuracy that it had; None if its trials have not ended."""

    number: int
    point: Point
    accuracy: float | None


def proposer(config: Finetune, tried: Sequence[Tried]) -> OptunaSearch:
    """Return Ray Tune's Optuna, which knows the points that were tried, and first proposes those that have not ended.

    It is built from the ledger and never unpickled. A field with choices is searched over their places (`decoded`).

    Raises:
        UserError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise UserError(
            "search.kind optuna needs Optuna on the cluster: pip install 'vitflow[optuna]'"
        ) from None
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch

    assert isinstance(config.search, Optuna)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, Any] = {}
    for path, values in config.space.items():
        if not isinstance(values, Range):
            space[path] = tune.choice(list(range(len(values))))
        elif values.is_whole:  # Tune's whole numbers end before the upper one
            whole = tune.lograndint if values.scale == "log" else tune.randint
            space[path] = whole(values.low, int(values.high) + 1)
        else:
            real = tune.loguniform if values.scale == "log" else tune.uniform
            space[path] = real(values.low, values.high)
    begun = [_encoded(config, each.point) for each in tried if each.accuracy is None]
    # another seed after an interruption, or its random points would be proposed again
    sampler = optuna.samplers.TPESampler(seed=(config.search.seed + len(tried)) % 2**32)
    search = OptunaSearch(
        space, metric="accuracy", mode="max", points_to_evaluate=begun or None, sampler=sampler
    )
    for each in tried:
        if each.accuracy is not None:
            search.add_evaluated_point(_encoded(config, each.point), each.accuracy)
    return search


def decoded(config: Finetune, proposed: dict[str, Any]) -> Point:
    """Return the point that the parameters of a trial of `proposer` stand for."""
    return {
        path: proposed[path] if isinstance(values, Range) else values[proposed[path]]
        for path, values in config.space.items()
    }


def _encoded(config: Finetune, point: Point) -> dict[str, Any]:
    return {
        path: point[path] if isinstance(values, Range) else values.index(point[path])
        for path, values in config.space.items()
    }
