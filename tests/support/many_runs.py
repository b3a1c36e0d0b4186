"""A store with a past: runs of three recipes, with results, an alias that was moved, and a schedule with its ticks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from pipelines.engine.history import end_run
from pipelines.engine.plan import plan_pipeline
from pipelines.engine.runs import start_run
from pipelines.environment import using
from pipelines.recipe.load import parse_pipeline
from pipelines.schedules.schedule import Schedule, add_schedule
from pipelines.schedules.ticks import End, Position, decide, record_end, refresh
from pipelines.store import Layout, Store, add_event, input_ref, move_alias, now
from ray_jobs.evaluation.rows import Truth
from tests.support.records import commit_planned
from tests.support.schedules import Clock
from tests.support.scores import Scores, put_scores

HOSTILE = '</script><img src=x onerror="document.title=1">'
RECIPES = ("nightly", "sweep", "ablation")
METHODS = ("ViT, pretrained", "ViT, untrained", "pixels")
IMAGES, DRAWS, SHOTS = 400, 3, (1, 5)


def put_many_runs(store: Store, numbers: range) -> None:
    """Write runs with these numbers, one an hour until now; each tenth fails."""
    clock, position = Clock(), Position()
    truth = Truth("digits", [f"{n}" for n in range(IMAGES)], np.random.default_rng(0).integers(0, 10, IMAGES))
    with using(clock):
        clock.moment = datetime.now(UTC) - timedelta(hours=len(numbers) + 1)
        add_schedule(store, Schedule(name="nightly", pipeline=_recipe("nightly", 0), recipe="n.yaml", cron="0 * * * *"))
        for number in numbers:
            clock.moment += timedelta(hours=1)
            rng = np.random.default_rng(number)
            recipe = RECIPES[0 if number % 2 else 1 + number % 4 // 2]
            status = "FAILED" if number % 10 == 9 else "SUCCEEDED"
            run = _put_run(store, recipe, number, truth, rng, status)
            if recipe == "nightly":
                refresh(store, recipe, position)
                decided = decide(store, recipe, position, clock.moment, "run", run, "")
                assert decided is not None
                end = End(status=status, stage="fewshot" if status == "FAILED" else None, time=now(), who="somebody")
                record_end(store, recipe, decided.number, end)


def _recipe(name: str, number: int) -> Any:
    train = {"job": "pretrain", "data": "images", "model": "Ti/16", "resolution": 224, "batch_size": 12}
    train |= {"steps": 20 + number, "learning_rate": [1e-3, 3e-3][number % 3 == 0]}
    stages = {
        "images": {"job": "ingest", "source": {"kind": "digits"}},
        "train": train,
        "fewshot": {"job": "evaluate", "data": "images", "backbone": "train", "shots": SHOTS, "draws": DRAWS},
    }
    described = HOSTILE if number == 7 else ""
    return parse_pipeline({"name": name, "description": described, "stages": stages}, "test")


def _put_run(store: Store, recipe: str, number: int, truth: Truth, rng: np.random.Generator, status: str) -> str:
    pipeline = _recipe(recipe, number)
    run = start_run(store, pipeline, tuple(pipeline.stages)).id
    for _ in pipeline.stages:
        for planned in plan_pipeline(store, pipeline, pipeline.order()):
            if planned.state != "run":
                continue
            if planned.name == "fewshot" and status == "FAILED":
                add_event(store, run, "stage", stage="fewshot", status="FAILED", detail=HOSTILE)
                continue
            files: tuple[Any, ...] = ()
            if planned.name == "fewshot":
                assert planned.key is not None
                with store.staging(Layout.files("evaluate", planned.key, 1)) as staging:
                    put_scores(staging.path, _scores(number, truth, rng))
                files = staging.files
            made = commit_planned(store, planned, run, files=files)
            if planned.name == "train" and number % 50 == 1:
                move_alias(store, "production", input_ref(store, made), number // 50, "person")
    end_run(store, run, status)
    return run


def _scores(number: int, truth: Truth, rng: np.random.Generator) -> list[Any]:
    found = []
    for place, method in enumerate(METHODS):
        for shots in SHOTS:
            share = min(0.95, 0.5 + 0.04 * shots - 0.1 * place + (number / 4000 if place == 0 else 0))
            right = rng.random((DRAWS, IMAGES)) < share
            answers = np.where(right, truth.labels, (truth.labels + 1) % 10)
            found += Scores(method, "few-shot linear", shots, answers, truth).scored()
    return found
