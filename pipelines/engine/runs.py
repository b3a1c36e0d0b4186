"""Runs as the store has them: begun, continued, listed, shown, stopped. A run is its plan and what happened to it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipelines import identity
from pipelines.cluster.jobs_client import LOOPBACK, ClusterUnreachable, wait_for_end
from pipelines.engine.status import Status
from pipelines.recipe.load import parse_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.spec import RecipeError
from pipelines.store import (
    Store,
    StoreDamaged,
    create_run,
    last_attempt,
    now,
    read_events,
    read_plan,
    stop_wished,
    warn,
    wish_stop,
)

if TYPE_CHECKING:
    from pipelines.cluster.jobs_client import Cluster

Clusters = Callable[[str], "Cluster"]  # a client of the cluster that a record names by its address

UNDER_WAY = {Status.PENDING, Status.RUNNING}
STOP_SECONDS = 8.0  # a job that was told to stop is killed after three
CLOCK_STEP_SECONDS = 2.0  # what a process's time of creation may move by when the clock is set


@dataclass(frozen=True)
class Run:
    """A plan under way: the same object whether it is new or continued."""

    id: str
    pipeline: Pipeline
    targets: tuple[str, ...]
    force: dict[str, str]  # stage -> nonce
    continued: bool
    strict_code: bool = False  # the digest of a stage's code is in its key


def start_run(
    store: Store,
    pipeline: Pipeline,
    targets: tuple[str, ...],
    force: tuple[str, ...] = (),
    run_id: str | None = None,
    strict_code: bool = False,
) -> Run:
    """The unfinished run of this very plan, or a new one; with `run_id` the run of that id, begun where it is not."""
    wanted = {
        "pipeline": pipeline.model_dump(mode="json"),
        "targets": list(targets),
        "stages": list(pipeline.needed_for(targets)),
        **({"strict_code": True} if strict_code else {}),
    }
    digest = identity.sha256(identity.canonical_json(wanted | {"force": sorted(force)}))
    nonces = {stage: secrets.token_hex(16) for stage in force}
    record = wanted | {"digest": digest, "force": nonces}
    if run_id is not None:
        create_run(store, run_id, record | {"run": run_id, "created": now(), "nonce": secrets.token_hex(8)})
        return load_run(store, run_id)
    for run in reversed(runs(store, pipeline.name)):
        before = read_plan(store, run)
        if before is not None and before["digest"] == digest and not is_over(store, run):
            return load_run(store, run)
    while True:
        run = f"{pipeline.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        if create_run(store, run, record | {"run": run, "created": now()}):
            return Run(run, pipeline, targets, nonces, continued=False, strict_code=strict_code)


def load_run(store: Store, run: str) -> Run:
    """A run as it was begun.

    Raises:
        RecipeError: there is none of that id, or this vitflow can't read its plan.
    """
    record = read_plan(store, run)
    if record is None:
        raise RecipeError(f"{store.uri} has no run {run}")
    pipeline = parse_pipeline(record["pipeline"], f"the plan of {run}")
    strict_code = record.get("strict_code", False)
    return Run(run, pipeline, tuple(record["targets"]), record["force"], True, strict_code)


def runs(store: Store, pipeline: str | None = None) -> list[str]:
    """Run ids, oldest first (of one pipeline, or all)."""
    found = [
        name
        for name in store.names("runs")
        if pipeline in {None, name.rsplit("-", 3)[0]} and _has_plan(store, name)
    ]
    return sorted(found, key=lambda run: run.rsplit("-", 3)[1:])


def _has_plan(store: Store, run: str) -> bool:
    """Whether a run has begun: a driver killed earlier leaves a folder without a plan."""
    try:
        return read_plan(store, run) is not None
    except StoreDamaged as error:
        warn(f"{error}; its run is left out")
        return False


def is_over(store: Store, run: str) -> bool:
    """Whether a run has ended or was told to."""
    return stop_wished(store, run) or any(event["event"] == "finished" for event in read_events(store, run))


def driver_process() -> dict[str, Any]:
    """What tells whether this driver still lives: on the same host its process, elsewhere the Ray job that it is."""
    import psutil

    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_created": psutil.Process().create_time(),
    }


def driver_alive(events: list[dict[str, Any]], clusters: Clusters) -> bool | None:
    """Whether a driver of a run lives; None where that can't be found out from here."""
    answers = [
        _job_alive(event, clusters) if event["event"] == "driver submitted" else _process_alive(event)
        for event in events
        if event["event"] in {"driver", "driver submitted"}
    ]
    return True if True in answers else None if None in answers else False


def driver_log(store: Store, run: str, clusters: Clusters) -> str:
    """What the last driver that was submitted for a run said; empty where there is none, or it can't be asked."""
    submitted = [event for event in read_events(store, run) if event["event"] == "driver submitted"]
    if not submitted:
        return ""
    try:
        return clusters(submitted[-1]["cluster_address"]).logs(submitted[-1]["submission_id"])
    except (ClusterUnreachable, ValueError):
        return ""


def _process_alive(event: dict[str, Any]) -> bool | None:
    import psutil

    if event["host"] != socket.gethostname():
        return None
    try:
        created = psutil.Process(event["pid"]).create_time()
    except psutil.NoSuchProcess:
        return False
    return bool(abs(created - event["process_created"]) < CLOCK_STEP_SECONDS)


def _job_alive(event: dict[str, Any], clusters: Clusters) -> bool | None:

    if urlsplit(event["cluster_address"]).hostname in LOOPBACK and event.get("host") != socket.gethostname():
        return None  # the same address is another cluster here
    try:
        job = clusters(event["cluster_address"]).job(event["submission_id"])
    except ClusterUnreachable as error:
        return False if error.refused_on_loopback else None
    except ValueError:
        return None  # another cluster's token
    return job is not None and not job.ended


def run_status(store: Store, run: str, clusters: Clusters | None = None) -> dict[str, Any]:
    """A run for people: its status, its stages in running order with theirs, how long each took.

    A run's status is one of Ray's five, or UNFINISHED: its driver is gone and the same command continues it. Without
    `clusters` nothing is asked, and a run that has not ended is RUNNING.
    """
    record, events = read_plan(store, run), read_events(store, run)
    assert record is not None
    stages = _stages(record["stages"], events)
    finished = [event for event in events if event["event"] == "finished"]
    if finished:
        status = finished[-1]["status"]
    elif stop_wished(store, run):
        status = Status.STOPPED
    else:
        gone = clusters is not None and driver_alive(events, clusters) is False
        status = Status.UNFINISHED if gone else Status.RUNNING
    if status == Status.STOPPED:  # by somebody who stopped the driver too, so that it could not say so
        for stage in stages.values():
            if stage["status"] in UNDER_WAY:
                stage["status"] = Status.STOPPED
    return {
        "run": run,
        "pipeline": record["pipeline"]["name"],
        "status": status,
        "created": record["created"],
        "stages": list(stages.values()),
    }


def _stages(names: list[str], events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the drivers wrote of each stage, the last word last."""
    stages: dict[str, dict[str, Any]] = {name: {"stage": name, "status": Status.PENDING} for name in names}
    for event in events:
        if event["event"] in {"stage", "attempt ended"} and event["stage"] in stages:
            stage = stages[event["stage"]]
            stage.update({name: value for name, value in event.items() if name not in {"event", "time"}})
            if event["status"] == Status.RUNNING:
                stage.setdefault("started", event["time"])
            stage["changed"] = event["time"]
    return stages


def stop_run(store: Store, run: str, clusters: Clusters) -> Iterator[str]:
    """Wish a run to stop, then stop the jobs that it submitted, the driver's first; says what became of each."""
    wish_stop(store, run)
    record, events = read_plan(store, run), read_events(store, run)
    assert record is not None

    def stop(address: str, submission_id: str) -> str:
        try:
            cluster = clusters(address)
            cluster.stop(submission_id)
            wait_for_end(cluster, {submission_id}, STOP_SECONDS)
        except (ClusterUnreachable, ValueError) as error:
            return f"{submission_id}: its cluster does not answer ({error})"
        return f"stopped {submission_id}"

    # first the driver, so that it begins no stage that is not seen here
    for event in [event for event in events if event["event"] == "driver submitted"][-1:]:
        yield stop(event["cluster_address"], event["submission_id"])
    for stage in _stages(record["stages"], read_events(store, run)).values():
        if stage["status"] in UNDER_WAY and "submission_id" in stage:
            attempt = last_attempt(store, stage["submission_id"].split("-")[0], stage["key"])
            if attempt is not None and attempt.run == run:
                yield stop(attempt.cluster_address, attempt.submission_id)
