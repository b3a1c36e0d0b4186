"""Runs in the store: starting, continuing, showing and stopping them. A run is a plan and its events."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipelines import identity
from pipelines.cluster.jobs_client import LOOPBACK, ClusterUnreachable, wait_for_end
from pipelines.engine.history import READERS, RECENT, is_over, is_run, plan_of, position_of, runs_of, stages_of
from pipelines.engine.latest import Named, Newest, named_models
from pipelines.engine.status import COMMITTED, Status
from pipelines.environment import environment
from pipelines.recipe.load import parse_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.spec import RecipeError
from pipelines.store import (
    Found,
    InputRef,
    Over,
    Store,
    create_run,
    is_at,
    last_attempt,
    listed,
    now,
    read_events,
    read_over,
    read_overs,
    read_plan,
    request_stop,
    stop_requested,
)
from vit_model.fields import Frozen

if TYPE_CHECKING:
    from pipelines.cluster.jobs_client import Cluster

Clusters = Callable[[str], "Cluster"]  # returns a client of the cluster at an address in a record

UNDER_WAY = {Status.PENDING, Status.RUNNING}
STOP_SECONDS = 8.0  # Ray kills a job three seconds after the request to stop it
CLOCK_STEP_SECONDS = 2.0  # the largest change of a process's creation time when the clock is set


@dataclass(frozen=True)
class Run:
    """A run to drive, new or continued."""

    id: str
    pipeline: Pipeline
    targets: tuple[str, ...]
    force: dict[str, str]  # stage -> nonce
    continued: bool
    strict_code: bool = False  # the digest of a stage's code is in its key
    latest: Newest = field(default_factory=dict)  # when it was planned
    moves: Mapping[str, int] = field(default_factory=dict)  # @alias -> the number of its last move at that time


class ListedRun(Frozen):
    """A run in lists: its recipe's name, its status, when it was created, and its stages, all and committed ones."""

    run: str
    pipeline: str
    status: str
    created: str
    stages: int
    done: int


def start_run(
    store: Store,
    pipeline: Pipeline,
    targets: tuple[str, ...],
    force: tuple[str, ...] = (),
    run_id: str | None = None,
    strict_code: bool = False,
) -> Run:
    """Continue the unfinished run of the same plan, or start a new one; with `run_id`, the run with that id."""
    plan, digest = _plan(pipeline, targets, force, strict_code)
    if run_id is None and (unfinished := _unfinished_run(store, pipeline.name, digest)) is not None:
        return unfinished
    named = named_models(store, pipeline, plan["stages"])
    nonces = {stage: environment().token_hex(16) for stage in force}
    record = plan | {"digest": digest, "force": nonces} | _record(named)
    if run_id is not None:
        create_run(store, run_id, record | {"run": run_id, "created": now(), "nonce": environment().token_hex(8)})
        return load_run(store, run_id)
    while True:
        moment = environment().utc()  # ids are sorted by time: the last part is a fraction of the second
        run = f"{pipeline.name}-{moment:%Y%m%d-%H%M%S}-{moment.microsecond * 2**16 // 10**6:04x}"
        if create_run(store, run, record | {"run": run, "created": now()}):
            return Run(run, pipeline, targets, nonces, False, strict_code, named.models, named.moves)


def latest_models(
    store: Store,
    pipeline: Pipeline,
    targets: tuple[str, ...],
    force: tuple[str, ...] = (),
    strict_code: bool = False,
) -> Newest:
    """Return the models of `latest` and aliases that `start_run` would find in the run that it continues, or record."""
    plan, digest = _plan(pipeline, targets, force, strict_code)
    if not any(pipeline.stages[name].from_store() for name in plan["stages"]):
        return {}  # most runs: do not look for an unfinished one
    run = _unfinished_run(store, pipeline.name, digest)
    return named_models(store, pipeline, plan["stages"]).models if run is None else run.latest


def _plan(
    pipeline: Pipeline, targets: tuple[str, ...], force: tuple[str, ...], strict_code: bool
) -> tuple[dict[str, Any], str]:
    """Return the user's request for a run, and the digest by which its unfinished run is found.

    Results of planning, such as the newest models, are not part of the request.
    """
    plan = {
        "pipeline": pipeline.model_dump(mode="json"),
        "targets": list(targets),
        "stages": list(pipeline.needed_for(targets)),
        **({"strict_code": True} if strict_code else {}),
    }
    return plan, identity.sha256(identity.canonical_json(plan | {"force": sorted(force)}))


def _unfinished_run(store: Store, pipeline: str, digest: str) -> Run | None:
    """Return the newest run of a plan, among the recipe's RECENT runs, that is not over.

    Work is found by its key whatever the run: a run that is not continued is only another one over the same results.
    """
    for run in islice(runs_of(store, pipeline), RECENT):
        if is_over(store, run):
            continue
        existing = plan_of(store, run)
        if existing is not None and existing["digest"] == digest:
            return load_run(store, run)
    return None


def _record(named: Named) -> dict[str, Any]:
    """Return the fields of a plan with the models that its names meant; none if it has no such names."""
    models = {name: reference and reference.model_dump() for name, reference in named.models.items()}
    return ({"latest": models} if models else {}) | ({"aliases": named.moves} if named.moves else {})


def load_run(store: Store, run: str) -> Run:
    """Load a run from its plan.

    Raises:
        RecipeError: there is no such run, or this version of vitflow cannot read its plan.
    """
    record = read_plan(store, run)
    if record is None:
        raise RecipeError(f"{store.uri} has no run {run}")
    pipeline = parse_pipeline(record["pipeline"], f"the plan of {run}")
    strict_code = record.get("strict_code", False)
    latest = {name: found and InputRef.model_validate(found) for name, found in record["latest"].items()}
    targets = tuple(record["targets"])
    return Run(run, pipeline, targets, record["force"], True, strict_code, latest, record["aliases"])


def driver_process() -> dict[str, Any]:
    """Return the fields of a `driver` event, from which another process on this host sees whether it is alive."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "process_created": _created(pid)}


def driver_alive(events: list[dict[str, Any]], clusters: Clusters) -> bool | None:
    """Whether a driver of a run is alive; None if that cannot be determined from here."""
    answers = [
        _job_alive(event, clusters) if event["event"] == "driver submitted" else _process_alive(event)
        for event in events
        if event["event"] in {"driver", "driver submitted"}
    ]
    return True if True in answers else None if None in answers else False


def driver_log(store: Store, run: str, clusters: Clusters) -> str:
    """Return the log of the last submitted driver of a run; empty if there is none or its cluster does not answer."""
    submitted = [event for event in read_events(store, run) if event["event"] == "driver submitted"]
    if not submitted:
        return ""
    try:
        return clusters(submitted[-1]["cluster_address"]).logs(submitted[-1]["submission_id"])
    except (ClusterUnreachable, ValueError):
        return ""


def _process_alive(event: dict[str, Any]) -> bool | None:
    if event["host"] != socket.gethostname():
        return None
    created = _created(event["pid"])
    return created is not None and abs(created - event["process_created"]) < CLOCK_STEP_SECONDS


def _created(pid: int) -> float | None:
    """Return when a process of this host was started, in seconds since 1970; None if there is none."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def _job_alive(event: dict[str, Any], clusters: Clusters) -> bool | None:
    if urlsplit(event["cluster_address"]).hostname in LOOPBACK and event.get("host") != socket.gethostname():
        return None  # on this host the same address is another cluster
    try:
        job = clusters(event["cluster_address"]).job(event["submission_id"])
    except ClusterUnreachable as error:
        return False if error.refused_on_loopback else None
    except ValueError:
        return None  # the cluster refuses our token
    return job is not None and not job.ended


def run_status(store: Store, run: str, clusters: Clusters | None = None) -> dict[str, Any]:
    """Return a run's status and its stages, in running order, with their statuses and times.

    A run's status is one of Ray's five, or UNFINISHED: its driver is gone and the same command continues it. Without
    `clusters`, no cluster is queried, and a run that has not ended is RUNNING.
    """
    record = read_plan(store, run)
    assert record is not None
    return status_of(store, record, read_over(store, run), clusters)


def all_runs(store: Store, clusters: Clusters | None = None) -> Iterator[ListedRun]:
    """Yield all runs, oldest first; see `run_status`. Runs that are over come from the catalog if it has them."""
    versions = store.versions("runs", ["plan.json", "over.json"], "events")

    def read(ids: Sequence[str]) -> Iterator[Found[ListedRun]]:
        with environment().pool(READERS) as threads:
            records = threads.map(partial(plan_of, store), ids)
        for run, record, over in zip(ids, records, read_overs(store, ids), strict=True):
            if record is not None:
                found = _listed(status_of(store, record, over, clusters))
                yield Found(position_of(run), run, found, is_final=over is not None)

    return listed(store, "runs", {run: versions[run] for run in versions if is_run(run)}, ListedRun, read)


def _listed(status: dict[str, Any]) -> ListedRun:
    done = sum(stage["status"] in COMMITTED for stage in status["stages"])
    return ListedRun.model_validate(status | {"done": done, "stages": len(status["stages"])})


def status_of(
    store: Store, record: dict[str, Any], over: Over | None, clusters: Clusters | None = None
) -> dict[str, Any]:
    """Return the same as `run_status` of a run whose plan and end have been read."""
    run = record["run"]
    if over is not None:
        status, stages = over.status, over.model_dump(exclude_unset=True)["stages"]
    else:
        events = read_events(store, run)
        status, stages = _status_so_far(store, run, events, clusters), stages_of(record, events)
    if status == Status.STOPPED:  # `stop` also stopped the driver, which could not record its stages' status
        for stage in stages:
            if stage["status"] in UNDER_WAY:
                stage["status"] = Status.STOPPED
    return {
        "run": run,
        "pipeline": record["pipeline"]["name"],
        "status": status,
        "created": record["created"],
        "stages": [*stages],
    }


def _status_so_far(store: Store, run: str, events: list[dict[str, Any]], clusters: Clusters | None) -> str:
    """Return the status of a run without a record of its end."""
    if stop_requested(store, run):
        return Status.STOPPED
    gone = clusters is not None and driver_alive(events, clusters) is False
    return Status.UNFINISHED if gone else Status.RUNNING


def stop_run(store: Store, run: str, clusters: Clusters, why: str = "") -> Iterator[str]:
    """Request a run to stop, then stop its jobs, the driver's first; yield a line about each job.

    Args:
        why: empty, if a person stops it.
    """
    request_stop(store, run, why)
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

    # the driver first, so that it does not begin another stage; but not a driver of the store that this one copies
    submitted = [event for event in events if event["event"] == "driver submitted"]
    for event in [event for event in submitted if is_at(store, event["store_uri"])][-1:]:
        yield stop(event["cluster_address"], event["submission_id"])
    for stage in stages_of(record, read_events(store, run)):
        if stage["status"] in UNDER_WAY and "submission_id" in stage:
            attempt = last_attempt(store, stage["job"], stage["key"])
            if attempt is not None and attempt.run == run and is_at(store, attempt.store_uri):
                yield stop(attempt.cluster_address, attempt.submission_id)
