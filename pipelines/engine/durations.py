"""How long stages took, from the times in the manifests of finished results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

from pipelines.engine.latest import recipe_of
from pipelines.engine.plan import PlannedStage
from pipelines.recipe.pipeline import base
from pipelines.store import Manifest, Store

# the fields that decide on the time
_OF_TRAININGS = ("steps", "batch_size", "resolution", "model", "labels", "refits")
LONGEST = 3  # stages that are named
Work = tuple[str, ...]


def in_hours(seconds: float) -> str:
    """Return seconds as 0:01:30."""
    return str(timedelta(seconds=round(seconds)))


def longest(seconds: Mapping[str, float]) -> str:
    """Name the stages with the most seconds."""
    slowest = sorted(seconds, key=lambda stage: -seconds[stage])[:LONGEST]
    return ", ".join(f"{stage} {in_hours(seconds[stage])}" for stage in slowest)


def last_seconds(
    store: Store, manifests: Sequence[Manifest], pipeline: str, stages: Iterable[PlannedStage]
) -> dict[str, float]:
    """Return how long the newest similar result of each stage took; stages without one are left out.

    Similar are results of a stage of this name in recipes of this name, or for trainings of any stage; trainings must
    agree in the fields that decide on the time.

    Args:
        manifests: all of the store, the oldest first.
        pipeline: the name of the recipe.
    """
    recipe = cache(partial(recipe_of, store))
    trainings: dict[Work, Manifest] = {}
    of_stage: dict[tuple[str, Work], list[Manifest]] = {}
    for manifest in manifests:
        work = _work(manifest.job, manifest.config)
        of_stage.setdefault((base(manifest.stage), work), []).append(manifest)
        if "steps" in manifest.config:
            trainings[work] = manifest
    found = {}
    for stage in stages:
        work = _work(stage.config.job, stage.config.model_dump(mode="json", include={*_OF_TRAININGS}))
        own = (
            each
            for each in reversed(of_stage.get((base(stage.name), work), []))
            if recipe(each.run) == pipeline
        )
        if (newest := next(own, trainings.get(work))) is not None:
            found[stage.name] = newest.seconds
    return found


def _work(job: str, config: Mapping[str, Any]) -> Work:
    """Return what decides on the time of a stage, as far as its fields do."""
    return job, *(str(config.get(name)) for name in _OF_TRAININGS if "steps" in config)
