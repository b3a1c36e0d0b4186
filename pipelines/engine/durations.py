"""How long stages took, from the times in the manifests of finished results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from pipelines.engine.plan import PlannedStage
from pipelines.recipe.pipeline import base
from pipelines.store import Manifest

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


def last_seconds(previous: Mapping[str, Manifest], stages: Iterable[PlannedStage]) -> dict[str, float]:
    """Return how long the last similar result of each stage took; stages without one are left out.

    Similar are results of a stage of this name, or for trainings of any stage; trainings must agree in the fields that
    decide on the time.

    Args:
        previous: stage -> its last result.
    """
    trainings: dict[Work, Manifest] = {}
    of_stage: dict[tuple[str, Work], Manifest] = {}
    for name, manifest in previous.items():
        work = _work(manifest.job, manifest.config)
        of_stage[base(name), work] = manifest
        if "steps" in manifest.config:
            trainings[work] = manifest
    found = {}
    for stage in stages:
        work = _work(stage.config.job, stage.config.model_dump(mode="json", include={*_OF_TRAININGS}))
        if (last := of_stage.get((base(stage.name), work), trainings.get(work))) is not None:
            found[stage.name] = last.seconds
    return found


def _work(job: str, config: Mapping[str, Any]) -> Work:
    """Return what decides on the time of a stage, as far as its fields do."""
    return job, *(str(config.get(name)) for name in _OF_TRAININGS if "steps" in config)
