"""Schedules in the store: a pipeline, when to run it, and where.

A change is a new record schedules/<name>/<n>.json; the highest number is current.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from pipelines.cluster.jobs_client import Cluster, connect
from pipelines.cluster.local import connect_running
from pipelines.engine import submission
from pipelines.engine.runs import Clusters
from pipelines.environment import environment
from pipelines.recipe.pipeline import Pipeline
from pipelines.schedules.cron import check_cron, check_timezone, last_tick, ticks
from pipelines.schedules.notices import Send
from pipelines.spec import RecipeError, check_given_name, nearest
from pipelines.store import (
    Layout,
    Store,
    StoreDamaged,
    StoreError,
    encode,
    now,
    numbers,
    read_record,
    warn,
    who,
)
from vit_model.fields import Frozen

CLOCK_STEP = timedelta(seconds=60)  # the clocks of two machines differ by less, unless one was set


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
    overlap: Literal["skip", "queue"] = "skip"
    """What becomes of a tick while the previous run is under way: no run, or one when that run is over."""
    catch_up: Literal["none", "latest"] = "none"
    """What a server does about ticks that were due while nothing served the schedule: no run, or one for the latest."""
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


@dataclass(frozen=True)
class Reach:
    """How to reach the clusters of schedules, and the people who want notices.

    `token_file` contains the token of the clusters at a schedule's address; without `send` there are no notices.
    """

    token_file: Path | None
    send: Send | None = None

    def target(self, schedule: Schedule) -> AbstractContextManager[tuple[Cluster, Path | None]]:
        """Yield the cluster that the schedule's runs go to; see `submission.target`."""
        return submission.target(schedule.address, self.token_file)

    def clusters(self, schedule: Schedule) -> Clusters:
        """Return a client of the cluster at an address in a record of the schedule's runs."""

        def cluster(address: str) -> Cluster:
            at_schedule = schedule.address is not None and address == schedule.address.rstrip("/")
            return connect(address, self.token_file) if at_schedule else connect_running(address)

        return cluster


def check_name(name: str) -> str:
    """Return a schedule's name if it is valid. Raises RecipeError."""
    return check_given_name(name, "schedule name")


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
