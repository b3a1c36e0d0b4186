"""A run whose trainings are under way, as drivers and workers leave it in a store; no Ray."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from pipelines.engine import runs
from pipelines.recipe.load import parse_pipeline
from pipelines.store import LogLine, Store, add_event, create_attempt, encode_lines, segment_name
from tests.support.records import make_attempt

RUN = "one-20260101-000000-aaaa"
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
STAGES: dict[str, Any] = {
    "digits": {"job": "ingest", "source": {"kind": "digits"}},
    "pretrain": {"job": "pretrain", "data": "digits", "model": "Ti/16", "resolution": 16, "steps": 40}
    | {"batch_size": 8, "learning_rate": 0.01},
    "finetune": {"job": "finetune", "data": "digits", "backbone": "pretrain", "learning_rates": [0.01, 0.001]}
    | {"steps": 20, "batch_size": 8},
}


def put_run(store: Store, **status: str) -> None:
    """Write a run whose stages have these statuses; a training's key is its name."""
    pipeline = parse_pipeline({"name": "one", "stages": STAGES}, "test")
    runs.start_run(store, pipeline, tuple(STAGES), run_id=RUN)
    for stage, state in status.items():
        job = STAGES[stage]["job"]
        add_event(store, RUN, "stage", stage=stage, status=state, key=stage, submission_id=f"{job}-{stage}-1")
        create_attempt(store, make_attempt(job, key=stage, run=RUN))


def line(step: int, fit: str | None = None, **fields: Any) -> LogLine:
    """A line with a value of its own in each field but `dev_*`; the loss is 1 / step."""
    known: dict[str, Any] = {
        "time": (BEGAN + timedelta(seconds=step)).isoformat(),
        "fit": fit,
        "step": step,
        "epoch": step / 16,
        "loss": 1 / step,
        "learning_rate": 0.01 * step,
        "gradient_norm": 2.0 + step,
        "images_per_second": 1000.0 + step,
        "data_wait": step / 100,
        "mfu": step / 200,
        "seconds_left": 60.0,
    }
    return LogLine(**known | fields)


def put_lines(store: Store, stage: str, *lines: LogLine, attempt: int = 1, start: int = 0, number: int = 1) -> None:
    """Write a segment of a stage's log, by the only writer of its fit in an attempt."""
    writer = {None: "A", "trial-0-0": "B", "trial-1-0": "C", "refit-1-0": "D"}[lines[0].fit]
    name = segment_name(STAGES[stage]["job"], stage, attempt, start, writer * 26, number)
    create_attempt(store, make_attempt(STAGES[stage]["job"], key=stage, run=RUN, number=attempt))
    assert store.create(name, encode_lines(lines))
