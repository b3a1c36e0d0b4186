"""Recurring runs: schedules as the store has them, and what is done when one is due.

Nothing but the store's create-only objects is remembered, so that whoever attends to a schedule (`schedule serve`, a
timer, two of them by mistake) may be killed at any moment: a tick is decided once, in schedules/<name>/ticks; its run
has the tick in its id and is begun once; the run's driver has a submission id that Ray takes once.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from pipelines.cluster.jobs_client import Cluster, connect
from pipelines.cluster.local import connect_running
from pipelines.engine import plan, submission
from pipelines.engine.runs import Run, is_over, run_status, start_run
from pipelines.engine.status import Status
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
from vit_model.config import Frozen

DRIVERS = 3  # so many drivers of one run may die on one and the same cluster before it is given up
CLOCK_STEP = timedelta(seconds=60)  # clocks of two machines differ by less unless one was set
_OVER: set[tuple[str, str]] = set()  # (store, run): what is over stays so and is asked for every few seconds
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")


class Schedule(Frozen):
    """What runs when, where. `recipe` and `changes` tell people where the pipeline came from."""

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
        """All but who wrote it and when."""
        return self.model_dump(exclude={"nonce", "who", "time"})

    def next_ticks(self, after: datetime) -> Iterator[datetime]:
        """The instants at which it is due, in UTC, later than `after`."""
        return ticks(self.cron, self.timezone, after)

    def last_tick(self, until: datetime) -> datetime | None:
        """The last instant at which it was due, since it was written as it is."""
        written = datetime.fromisoformat(self.time)
        if written - until > CLOCK_STEP:  # the clock was set back since, and it is not known when
            written = until - CLOCK_STEP
        return last_tick(self.cron, self.timezone, written, until)


class Decision(Frozen):
    """What becomes of a tick: a run, or nothing because `run`, the one before, is not over."""

    tick: str
    decision: Literal["run", "skip"]
    run: str
    nonce: str
    who: str
    time: str


# ------------------------------------------------------------------------------------------------- in the store


def check_name(name: str) -> str:
    """A schedule's name. Raises RecipeError."""
    if not _NAME.fullmatch(name):
        raise RecipeError(
            f"{name!r} is no schedule's name: a small letter, then at most 40 small letters, digits, '-' or '_'"
        )
    return name


def read_schedule(store: Store, name: str) -> Schedule | None:
    """A schedule as it is now; None where there is none of that name, or it was removed."""
    found = _present(store, name)[1]
    return None if found is None or found.state == "removed" else found


def find_schedule(store: Store, name: str) -> Schedule:
    """The schedule of that name. Raises RecipeError where there is none."""
    found = read_schedule(store, check_name(name))
    if found is None:
        known = [schedule.name for schedule in all_schedules(store)]
        raise RecipeError(
            f"no schedule is called {name!r}{nearest(name, known) if known else ', there are none'}"
        )
    return found


def all_schedules(store: Store) -> list[Schedule]:
    """Every schedule that is not removed, by name; one that is damaged is left out with a warning."""
    found = []
    for name in store.names("schedules"):
        try:
            found.append(read_schedule(store, name))
        except StoreDamaged as error:
            warn(f"{error}; it is left out")
    return [schedule for schedule in found if schedule is not None]


def add_schedule(store: Store, wanted: Schedule) -> Literal["added", "replaced", "unchanged"]:
    """Write a schedule; one of its name is replaced where it is another.

    Raises:
        StoreError: somebody wrote it at the same moment.
    """
    number, before = _present(store, wanted.name)
    if before is not None and before.content() == wanted.content():
        return "unchanged"
    _write(store, number + 1, wanted)
    return "added" if before is None or before.state == "removed" else "replaced"


def set_state(store: Store, name: str, state: Literal["active", "paused", "removed"]) -> bool:
    """Pause, resume or remove a schedule; False where it is so already.

    Raises:
        RecipeError: there is none of that name; StoreError: somebody wrote it at the same moment.
    """
    find_schedule(store, name)
    number, before = _present(store, name)
    assert before is not None
    if before.state == state:
        return False
    _write(store, number + 1, before.model_copy(update={"state": state}))
    return True


def _present(store: Store, name: str) -> tuple[int, Schedule | None]:
    """The highest number of a schedule, 0 where there is none, and what stands there."""
    folder = Layout.schedule(name)
    number = max(numbers(store, folder), default=0)
    return number, read_record(store, f"{folder}/{number}.json", Schedule) if number else None


def _write(store: Store, number: int, schedule: Schedule) -> None:
    signed = schedule.model_copy(update={"nonce": secrets.token_hex(8), "who": who(), "time": now()})
    if not store.create(f"{Layout.schedule(schedule.name)}/{number}.json", encode(signed)):
        raise StoreError(f"somebody else has just changed the schedule {schedule.name}: look at it again")


def tick_run(store: Store, name: str, tick: datetime) -> str:
    """The id of a tick's run; it has the store in it, since a cluster may serve several with schedules of one name."""
    return f"{name}-{tick:%Y%m%d-%H%M%S}-tick{store.id[:8]}"


def last_decision(store: Store, name: str) -> Decision | None:
    """What was decided of the last tick that anybody has decided on."""
    folder = f"{Layout.schedule(name)}/ticks"
    names = store.names(folder)
    return read_record(store, f"{folder}/{names[-1]}", Decision) if names else None


def decide(store: Store, name: str, tick: datetime, in_the_way: str | None) -> Decision | None:
    """Decide on a tick, where nobody has: run it, or skip it for the run in the way."""
    decision = Decision(
        tick=tick.isoformat(),
        decision="run" if in_the_way is None else "skip",
        run=in_the_way or tick_run(store, name, tick),
        nonce=secrets.token_hex(8),
        who=who(),
        time=now(),
    )
    return decision if store.create(_decision_name(name, tick), encode(decision)) else None


def _decision_name(name: str, tick: datetime) -> str:
    return f"{Layout.schedule(name)}/ticks/{tick:%Y%m%dT%H%M%SZ}.json"


# ------------------------------------------------------------------------------------------------- being due


def attend(
    store: Store, name: str, moment: datetime, token_file: Path | None, grace: timedelta | None
) -> Iterator[str]:
    """Do what a schedule asks for at this moment; says what was done.

    First the run of the last tick, if its driver is gone, gets another; then the last tick that is due, if nobody has
    decided on it, becomes a run, or is skipped while the run before is not over. A schedule that is paused rests.

    Args:
        moment: now, UTC.
        token_file: with the token of the cluster at the schedule's address.
        grace: a tick that is older is missed; None takes the last one however old it is.

    Raises:
        StoreError, ClusterUnreachable, LocalRayError: what is begun is gone on with at the next call.
        ValueError: the schedule's cluster can't be used.
    """
    schedule = read_schedule(store, name)
    if schedule is None or schedule.state != "active":
        return
    before = last_decision(store, name)
    in_the_way = None
    if before is not None and not _over(store, before.run):
        if _status(store, before.run, schedule, token_file) == Status.UNFINISHED:
            yield from _submit(store, schedule, before.run, token_file)
        if not _over(store, before.run):
            in_the_way = before.run
    tick = schedule.last_tick(moment)
    if tick is None or store.read(_decision_name(name, tick)) is not None:
        return
    if grace is not None and moment - tick > grace:
        following = next(schedule.next_ticks(moment))
        yield f"{_shown(tick)} was missed, nothing served then; next {_shown(following)}"
        return
    decision = decide(store, name, tick, in_the_way)
    if decision is None:
        return  # somebody else has just decided, and submits; if not, that is seen next time
    if decision.decision == "skip":
        yield f"{_shown(tick)} is skipped: {decision.run} is not over (`vitflow stop {decision.run}` ends it)"
    else:
        yield from _submit(store, schedule, decision.run, token_file)


def last_run(store: Store, schedule: Schedule, token_file: Path | None) -> tuple[str, str] | None:
    """(id, status) of the run of the last tick that became one."""
    decision = last_decision(store, schedule.name)
    if decision is None:
        return None
    return decision.run, _status(store, decision.run, schedule, token_file)


def _status(store: Store, run: str, schedule: Schedule, token_file: Path | None) -> str:
    """A run's status; UNFINISHED also where it was decided on and not yet begun."""

    def clusters(address: str) -> Cluster:
        at_schedule = schedule.address is not None and address == schedule.address.rstrip("/")
        return connect(address, token_file) if at_schedule else connect_running(address)

    if read_plan(store, run) is None:
        return Status.UNFINISHED
    return str(run_status(store, run, clusters)["status"])


def _over(store: Store, run: str) -> bool:
    if (store.id, run) not in _OVER and read_plan(store, run) is not None and is_over(store, run):
        _OVER.add((store.id, run))
    return (store.id, run) in _OVER


def _submit(store: Store, schedule: Schedule, run_id: str, token_file: Path | None) -> Iterator[str]:
    """Begin a tick's run where it is not begun, and see to it that a driver is at work, unless nothing is to do."""
    run = start_run(store, schedule.pipeline, tuple(schedule.pipeline.stages), run_id=run_id)
    if _nothing_to_do(store, schedule, run):
        yield f"{run_id}: nothing to do"
        return
    with submission.target(schedule.address, token_file) as (cluster, ray_folder):
        session = cluster.session_name
        before = [
            event for event in read_events(store, run_id) if event["event"] == "driver submitted"
        ]  # one whose cluster died with it is not to blame
        if sum(event["cluster_session"] == session for event in before) >= DRIVERS:
            last = before[-1]["submission_id"]
            add_event(store, run_id, "finished", status=Status.FAILED, detail=f"{DRIVERS} drivers died")
            yield f"{run_id}: given up, {DRIVERS} drivers died of it; see the log of Ray's job {last}"
            return
        driver = submission.submit_driver(store, run, cluster, schedule.parallel, ray_folder)
    yield f"{run_id}: {driver} is at work on {cluster.address}"


def _nothing_to_do(store: Store, schedule: Schedule, run: Run) -> bool:
    """Whether everything is made; then the run is over.

    Only a cluster on this machine has the files that are seen here: elsewhere the driver finds out.
    """
    if schedule.address is not None and not submission.is_loopback(schedule.address):
        return False
    try:
        planned = plan.plan_pipeline(store, run.pipeline, run.pipeline.needed_for(run.targets))
    except (
        RecipeError
    ):  # a source that can't be read: the driver says so where a run's failures are looked for
        return False
    if any(stage.manifest is None for stage in planned):
        return False
    for stage in planned:
        add_event(store, run.id, "stage", stage=stage.name, status=Status.CACHED, key=stage.key)
    add_event(store, run.id, "finished", status=Status.SUCCEEDED)
    return True


def _shown(tick: datetime) -> str:
    return f"{tick.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
