"""Runs as the store has them: begun, continued, listed, shown, stopped. A run is its plan and what happened to it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pipelines import identity
from pipelines.spec import Pipeline
from pipelines.store import (
    Store,
    create_run,
    last_attempt,
    now,
    read_events,
    read_plan,
    stop_wished,
    wish_stop,
)

if TYPE_CHECKING:
    from pipelines.cluster import Cluster

CLOCK_STEP_SECONDS = 2.0  # what a process's time of creation may move by when the clock is set


@dataclass(frozen=True)
class Run:
    """A plan under way: the same object whether it is new or continued."""

    id: str
    pipeline: Pipeline
    targets: tuple[str, ...]
    force: dict[str, str]  # stage -> nonce
    continued: bool


def start_run(store: Store, pipeline: Pipeline, targets: tuple[str, ...], force: tuple[str, ...]) -> Run:
    """The unfinished run of this very plan, or a new one."""
    wanted = {
        "pipeline": pipeline.model_dump(mode="json"),
        "targets": list(targets),
        "stages": list(pipeline.needed_for(targets)),
    }
    digest = identity.sha256(identity.canonical_json(wanted | {"force": sorted(force)}))
    for run in reversed(runs(store, pipeline.name)):
        record = read_plan(store, run)
        if record is not None and record["digest"] == digest and not is_over(store, run):
            return Run(run, pipeline, targets, record["force"], continued=True)
    while True:
        run = f"{pipeline.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        nonces = {stage: secrets.token_hex(16) for stage in force}
        if create_run(store, run, wanted | {"digest": digest, "force": nonces, "run": run, "created": now()}):
            return Run(run, pipeline, targets, nonces, continued=False)


def runs(store: Store, pipeline: str | None = None) -> list[str]:
    """Run ids, oldest first (of one pipeline, or all)."""
    # a run begins with its plan: a folder without one is what a killed driver left
    found = [
        name
        for name in store.names("runs")
        if pipeline in {None, name.rsplit("-", 3)[0]} and read_plan(store, name) is not None
    ]
    return sorted(found, key=lambda run: run.rsplit("-", 3)[1:])


def is_over(store: Store, run: str) -> bool:
    """Whether a run has ended or was told to."""
    return stop_wished(store, run) or any(event["event"] == "finished" for event in read_events(store, run))


def this_process() -> dict[str, Any]:
    """What tells, on the same host, whether a driver still lives."""
    import psutil

    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_created": psutil.Process().create_time(),
    }


def driver_alive(events: list[dict[str, Any]]) -> bool | None:
    """Whether a driver of a run lives: None where it ran on another host."""
    import psutil

    answers: list[bool | None] = []
    for event in (event for event in events if event["event"] == "driver"):
        if event["host"] != socket.gethostname():
            answers.append(None)
            continue
        try:
            answers.append(
                abs(psutil.Process(event["pid"]).create_time() - event["process_created"])
                < CLOCK_STEP_SECONDS
            )
        except psutil.NoSuchProcess:
            answers.append(False)
    return True if True in answers else None if None in answers else False


def run_status(store: Store, run: str) -> dict[str, Any]:
    """A run for people: its status, its stages in running order with theirs, how long each took.

    A run's status is one of Ray's five, or UNFINISHED: its driver is gone and the same command continues it.
    """
    record, events = read_plan(store, run), read_events(store, run)
    assert record is not None
    stages: dict[str, dict[str, Any]] = {
        name: {"stage": name, "status": "PENDING"} for name in record["stages"]
    }
    for event in events:
        if event["event"] in {"stage", "attempt ended"} and event["stage"] in stages:
            stage = stages[event["stage"]]
            stage.update({name: value for name, value in event.items() if name not in {"event", "time"}})
            if event["status"] == "RUNNING":
                stage.setdefault("started", event["time"])
            stage["changed"] = event["time"]
    finished = [event for event in events if event["event"] == "finished"]
    if finished:
        status = finished[-1]["status"]
    elif stop_wished(store, run):
        status = "STOPPED"
    else:
        status = "UNFINISHED" if driver_alive(events) is False else "RUNNING"
    return {
        "run": run,
        "pipeline": record["pipeline"]["name"],
        "status": status,
        "created": record["created"],
        "stages": list(stages.values()),
    }


def stop_run(store: Store, run: str, clusters: Callable[[str], Cluster]) -> Iterator[str]:
    """Wish a run to stop, then stop the jobs that it submitted; says what became of each."""
    from pipelines.cluster import ClusterUnreachable

    wish_stop(store, run)
    for stage in run_status(store, run)["stages"]:
        if stage["status"] in {"PENDING", "RUNNING"} and "submission_id" in stage:
            attempt = last_attempt(store, stage["submission_id"].split("-")[0], stage["key"])
            if attempt is None or attempt.run != run:
                continue
            try:
                clusters(attempt.cluster_address).stop(attempt.submission_id)
                yield f"stopped {attempt.submission_id}"
            except (ClusterUnreachable, ValueError) as error:
                yield f"{attempt.submission_id}: its cluster does not answer ({error})"
