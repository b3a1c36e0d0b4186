"""The records of a run: its plan, its events, the request to stop it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.environment import environment
from pipelines.errors import StoreDamaged
from pipelines.store.objects import check_name, parse_record, read_record, warn
from pipelines.store.protocol import LARGEST_RECORD, Store, encode
from pipelines.store.records import Event, Layout, Over, RunPlan, StopRequest, now, who


def create_run(store: Store, run: str, plan: Mapping[str, Any]) -> bool:
    """Write a run's plan; return False if a run with this id exists."""
    return store.create(f"{Layout.run(run)}/plan.json", encode(plan))


def read_plan(store: Store, run: str) -> dict[str, Any] | None:
    """Read a run's plan; None if there is none. Raises StoreDamaged."""
    name = f"{Layout.run(run)}/plan.json"
    plan = read_record(store, name, RunPlan)
    if plan is None:
        return None
    check_name(store, name, f"{Layout.run(plan.run)}/plan.json")
    return plan.model_dump()


def add_event(store: Store, run: str, event: str, **fields: Any) -> None:
    """Append to a run's history, which has one small object per event."""
    record = {"event": event, "time": now(), **fields}
    store.create(f"{Layout.run(run)}/events/{environment().ulid()}.json", encode(record))


def read_events(store: Store, run: str, newest: int | None = None) -> list[dict[str, Any]]:
    """Read a run's history, oldest first, or only the newest events; skip damaged events with a warning."""
    folder = f"{Layout.run(run)}/events"
    names = [f"{folder}/{name}" for name in store.names(folder)[-(newest or 0) :]]
    events = []
    for name, data in zip(names, store.read_all(names, LARGEST_RECORD), strict=True):
        if data is None:
            continue
        try:
            events.append(parse_record(store, name, data, Event).model_dump(exclude_unset=True))
        except StoreDamaged as error:
            warn(f"{error}; ignoring it. Run `vitflow verify`")
    return sorted(events, key=lambda event: event["time"])  # ULIDs within a millisecond are not ordered


def create_over(store: Store, run: str, over: Over) -> None:
    """Write the end of a run, unless it has one."""
    store.create(f"{Layout.run(run)}/over.json", encode(over))


def read_over(store: Store, run: str) -> Over | None:
    """Return the end of a run; None if it is not over, or the record is damaged, which a warning says."""
    return read_overs(store, [run])[0]


def read_overs(store: Store, runs: Sequence[str]) -> list[Over | None]:
    """Do the same for several runs, with concurrent requests."""
    names = [f"{Layout.run(run)}/over.json" for run in runs]
    return [
        _parse_over(store, name, data) for name, data in zip(names, store.read_all(names, LARGEST_RECORD), strict=True)
    ]


def _parse_over(store: Store, name: str, data: bytes | StoreDamaged | None) -> Over | None:
    try:
        return None if data is None else parse_record(store, name, data, Over)
    except StoreDamaged as error:
        warn(f"{error}; ignoring it. Run `vitflow verify`")
        return None


def request_stop(store: Store, run: str, why: str = "") -> None:
    """Request a run to stop; its drivers see the request and submit no more jobs. The first request counts.

    Args:
        why: empty, if a person stops it.
    """
    store.create(f"{Layout.run(run)}/stop.json", encode(StopRequest(who=who(), time=now(), why=why)))


def stop_requested(store: Store, run: str) -> bool:
    """Whether the run was requested to stop."""
    return store.read(f"{Layout.run(run)}/stop.json") is not None


def stop_reason(store: Store, run: str) -> str:
    """Return why the run was requested to stop; empty, if a person did that, or the record is damaged."""
    try:
        request = read_record(store, f"{Layout.run(run)}/stop.json", StopRequest)
    except StoreDamaged as error:
        warn(f"{error}; ignoring it. Run `vitflow verify`")
        return ""
    return "" if request is None else request.why
