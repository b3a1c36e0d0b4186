"""Recurring runs: schedules in the store, and starting a run when one is due.

All state is in the store's create-only objects. So the process that serves a schedule (`schedule serve`, a timer, or
two of them by mistake) may be killed at any moment: a tick is decided once, in schedules/<name>/ticks; its run has the
tick in its id and starts once; Ray accepts the submission id of the run's driver once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from pipelines.cluster.jobs_client import Cluster, connect
from pipelines.cluster.local import connect_running
from pipelines.engine import plan, submission
from pipelines.engine.history import days_back, end_run, is_over
from pipelines.engine.promotion import is_unsettled
from pipelines.engine.runs import Clusters, Run, run_status, start_run
from pipelines.engine.status import Status
from pipelines.environment import environment
from pipelines.recipe.pipeline import Pipeline
from pipelines.schedules.cron import check_cron, check_timezone, last_tick, ticks
from pipelines.spec import RecipeError, nearest
from pipelines.store import (
    Layout,
    Store,
    StoreDamaged,
    StoreError,
    add_event,
    encode,
    now,
    numbers,
    read_events,
    read_plan,
    read_record,
    warn,
    who,
)
from vit_model.fields import Frozen

DRIVERS = 3  # drivers of one run that may die on the same cluster before the run is given up
CLOCK_STEP = timedelta(seconds=60)  # the clocks of two machines differ by less, unless one was set
_OVER: set[tuple[str, str]] = set()  # (store, run), cached because it is needed every few seconds
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")


class Schedule(Frozen):
    """A pipeline, when to run it, and where. `recipe` and `changes` record where the pipeline came from."""

    name: str
    state: Literal["active", "paused", "removed"] = "active"
    pipeline: Pipeline
    recipe: str
    changes: tuple[str, ...] = ()
    cron: Annotated[str, AfterValidator(check_cron)]
    timezone: Annotated[str, AfterValidator(check_timezone)] = "UTC"
    address: str | None = None
    parallel: int | None = None
    nonce: str = ""
    who: str = ""
    time: str = ""

    def content(self) -> dict[str, Any]:
        """Return all fields except who wrote the schedule and when."""
        return self.model_dump(exclude={"nonce", "who", "time"})

    def next_ticks(self, after: datetime) -> Iterator[datetime]:
        """Yield the times after `after` at which it is due, in UTC."""
        return ticks(self.cron, self.timezone, after)

    def last_tick(self, until: datetime) -> datetime | None:
        """Return the last time until `until` at which it was due, after this version of it was written."""
        written = datetime.fromisoformat(self.time)
        if written - until > CLOCK_STEP:  # the clock was set back, at an unknown time
            written = until - CLOCK_STEP
        return last_tick(self.cron, self.timezone, written, until)


class Decision(Frozen):
    """The decision on a tick: a run, or skipped because the previous run, `run`, has not ended."""

    tick: str
    decision: Literal["run", "skip"]
    run: str
    nonce: str
    who: str
    time: str


@dataclass(frozen=True)
class Reach:
    """How to reach the clusters of schedules; `token_file` contains the token of those at a schedule's address."""

    token_file: Path | None

    def target(self, schedule: Schedule) -> AbstractContextManager[tuple[Cluster, Path | None]]:
        """Yield the cluster that the schedule's runs go to; see `submission.target`."""
        return submission.target(schedule.address, self.token_file)

    def clusters(self, schedule: Schedule) -> Clusters:
        """Return a client of the cluster at an address in a record of the schedule's runs."""

        def cluster(address: str) -> Cluster:
            at_schedule = schedule.address is not None and address == schedule.address.rstrip("/")
            return connect(address, self.token_file) if at_schedule else connect_running(address)

        return cluster


# ------------------------------------------------------------------------------------------------- in the store


def check_name(name: str) -> str:
    """Return a schedule's name if it is valid. Raises RecipeError."""
    if not _NAME.fullmatch(name):
        raise RecipeError(
            f"{name!r} is not a valid schedule name; expected a lowercase letter, then at most 40 lowercase letters, "
            "digits, '-' or '_'"
        )
    return name


def read_schedule(store: Store, name: str) -> Schedule | None:
    """Return the current version of a schedule; None if it does not exist or was removed."""
    schedule = _current(store, name)[1]
    return None if schedule is None or schedule.state == "removed" else schedule


def find_schedule(store: Store, name: str) -> Schedule:
    """Return the schedule with this name. Raises RecipeError if there is none."""
    schedule = read_schedule(store, check_name(name))
    if schedule is None:
        names = [schedule.name for schedule in all_schedules(store)]
        raise RecipeError(f"no schedule is called {name!r}{nearest(name, names)}")
    return schedule


def all_schedules(store: Store) -> list[Schedule]:
    """Return every schedule that is not removed, by name; skip damaged ones with a warning."""
    schedules = []
    for name in store.names("schedules"):
        try:
            schedules.append(read_schedule(store, name))
        except StoreDamaged as error:
            warn(f"{error}; ignoring it")
    return [schedule for schedule in schedules if schedule is not None]


def add_schedule(store: Store, wanted: Schedule) -> Literal["added", "replaced", "unchanged"]:
    """Write a schedule; a different one with the same name is replaced.

    Raises:
        StoreError: another process wrote it at the same time.
    """
    number, existing = _current(store, wanted.name)
    if existing is not None and existing.content() == wanted.content():
        return "unchanged"
    _write(store, number + 1, wanted)
    return "added" if existing is None or existing.state == "removed" else "replaced"


def set_state(store: Store, name: str, state: Literal["active", "paused", "removed"]) -> bool:
    """Pause, resume or remove a schedule; return False if it already has this state.

    Raises:
        RecipeError: there is no such schedule. StoreError: another process wrote it at the same time.
    """
    find_schedule(store, name)
    number, schedule = _current(store, name)
    assert schedule is not None
    if schedule.state == state:
        return False
    _write(store, number + 1, schedule.model_copy(update={"state": state}))
    return True


def _current(store: Store, name: str) -> tuple[int, Schedule | None]:
    """Return the highest number of a schedule, 0 if there is none, and the schedule with that number."""
    folder = Layout.schedule(name)
    number = max(numbers(store, folder), default=0)
    return number, read_record(store, f"{folder}/{number}.json", Schedule) if number else None


def _write(store: Store, number: int, schedule: Schedule) -> None:
    signed = schedule.model_copy(update={"nonce": environment().token_hex(8), "who": who(), "time": now()})
    if not store.create(f"{Layout.schedule(schedule.name)}/{number}.json", encode(signed)):
        raise StoreError(f"another process has just changed the schedule {schedule.name}; check it and retry")


def tick_run(store: Store, schedule: Schedule, tick: datetime) -> str:
    """Return the id of a tick's run, which is a run of the schedule's recipe, whatever the schedule is called.

    It includes the store, because a cluster may run several stores' schedules.
    """
    by = hashlib.sha256(f"{store.id}/{schedule.name}".encode()).hexdigest()[:8]
    return f"{schedule.pipeline.name}-{tick:%Y%m%d-%H%M%S}-tick{by}"


def last_decision(store: Store, name: str) -> Decision | None:
    """Return the decision on the latest tick that has one; list the older ones only if there is no recent one."""
    folder = f"{Layout.schedule(name)}/ticks"
    for day in days_back():
        if names := store.names(folder, after=day):
            return read_record(store, f"{folder}/{names[-1]}", Decision)
    return None


def decide(store: Store, schedule: Schedule, tick: datetime, blocking_run: str | None) -> Decision | None:
    """Decide to run a tick, or to skip it because of an earlier run; None if there is a decision already."""
    decision = Decision(
        tick=tick.isoformat(),
        decision="run" if blocking_run is None else "skip",
        run=blocking_run or tick_run(store, schedule, tick),
        nonce=environment().token_hex(8),
        who=who(),
        time=now(),
    )
    return decision if store.create(_decision_name(schedule.name, tick), encode(decision)) else None


def _decision_name(name: str, tick: datetime) -> str:
    return f"{Layout.schedule(name)}/ticks/{tick:%Y%m%dT%H%M%SZ}.json"


# ------------------------------------------------------------------------------------------------- being due


def attend(store: Store, schedule: Schedule, moment: datetime, reach: Reach, grace: timedelta | None) -> Iterator[str]:
    """Start the runs and drivers that a schedule needs at this moment; yield a line for each action.

    If the driver of the last tick's run is gone, submit another. Then, if there is no decision on the last tick that is
    due, start its run, or skip it if the previous run has not ended. Do nothing for a paused schedule.

    Args:
        moment: now, UTC.
        reach: how to reach the schedule's cluster.
        grace: older ticks are missed; None: the last tick is due however old it is.

    Raises:
        StoreError, ClusterUnreachable, LocalRayError: the next call continues.
        ValueError: the schedule's cluster cannot be used.
    """
    if schedule.state != "active":
        return
    tick = schedule.last_tick(moment)
    decided = tick and read_record(store, _decision_name(schedule.name, tick), Decision)
    previous = decided or last_decision(store, schedule.name)  # an idle call lists nothing
    blocking_run = None
    if previous is not None and not _is_over(store, previous.run):
        if _status(store, previous.run, reach.clusters(schedule)) == Status.UNFINISHED:
            yield from _submit(store, schedule, previous.run, reach)
        if not _is_over(store, previous.run):
            blocking_run = previous.run
    if tick is None or decided is not None:
        return
    if grace is not None and moment - tick > grace:
        following = next(schedule.next_ticks(moment))
        yield f"missed {_shown(tick)}, because nothing served the schedule then; next {_shown(following)}"
        return
    decision = decide(store, schedule, tick, blocking_run)
    if decision is None:
        return  # another process has just decided, and submits it; if it fails, the next call does
    if decision.decision == "skip":
        yield f"skipped {_shown(tick)}: {decision.run} has not ended (`vitflow stop {decision.run}` ends it)"
    else:
        yield from _submit(store, schedule, decision.run, reach)


def last_run(store: Store, schedule: Schedule, reach: Reach) -> tuple[str, str] | None:
    """Return (id, status) of the run in the last decision; None if there is none."""
    decision = last_decision(store, schedule.name)
    if decision is None:
        return None
    return decision.run, _status(store, decision.run, reach.clusters(schedule))


def _status(store: Store, run: str, clusters: Clusters) -> str:
    """Return a run's status; UNFINISHED also if it was decided on but has not started."""
    if read_plan(store, run) is None:
        return Status.UNFINISHED
    return str(run_status(store, run, clusters)["status"])


def _is_over(store: Store, run: str) -> bool:
    if (store.id, run) not in _OVER and is_over(store, run):
        _OVER.add((store.id, run))
    return (store.id, run) in _OVER


def _submit(store: Store, schedule: Schedule, run_id: str, reach: Reach) -> Iterator[str]:
    """Start a tick's run unless it has started, and submit its driver unless one is running or all is cached."""
    run = start_run(store, schedule.pipeline, tuple(schedule.pipeline.stages), run_id=run_id)
    if _finish_cached(store, schedule, run):
        yield f"{run_id}: nothing to do"
        return
    with reach.target(schedule) as (cluster, ray_folder):
        session = cluster.session_name
        # drivers of other sessions do not count: they ended because their cluster did
        submitted = [event for event in read_events(store, run_id) if event["event"] == "driver submitted"]
        if sum(event["cluster_session"] == session for event in submitted) >= DRIVERS:
            last = submitted[-1]["submission_id"]
            end_run(store, run_id, Status.FAILED, f"{DRIVERS} drivers died")
            yield f"{run_id}: given up after {DRIVERS} drivers died; see the log of Ray's job {last}"
            return
        driver = submission.submit_driver(store, run, cluster, schedule.parallel, ray_folder)
    yield f"{run_id}: {driver} is running on {cluster.address}"


def _finish_cached(store: Store, schedule: Schedule, run: Run) -> bool:
    """Record the run as finished if all its stages are cached; return whether they are.

    Only a cluster on this machine has the same files. For any other, the driver plans.
    """
    if schedule.address is not None and not submission.is_loopback(schedule.address):
        return False
    try:
        names = run.pipeline.needed_for(run.targets)
        planned = plan.plan_pipeline(store, run.pipeline, names, latest=run.latest)
    except RecipeError:  # a source cannot be read: the driver reports that in the run
        return False
    if any(stage.manifest is None or is_unsettled(store, stage) for stage in planned):
        return False
    for stage in planned:
        add_event(store, run.id, "stage", stage=stage.name, status=Status.CACHED, key=stage.key)
    end_run(store, run.id, Status.SUCCEEDED)
    return True


def _shown(tick: datetime) -> str:
    return f"{tick.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
