"""The records of a run: its plan, its events, the request to stop it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.environment import environment
from pipelines.errors import StoreDamaged
from pipelines.store.objects import Record, check_name, parse_record, read_record, warn
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
    found = filter(None, _read_or_warn(store, names, Event))
    events = [event.model_dump(exclude_unset=True) for event in found]
    return sorted(events, key=lambda event: event["time"])  # ULIDs within a millisecond are not ordered


def create_over(store: Store, run: str, over: Over) -> None:
    """Write the end of a run, unless it has one."""
    store.create(f"{Layout.run(run)}/over.json", encode(over))


def read_over(store: Store, run: str) -> Over | None:
    """Return the end of a run; None if it is not over, or the record is damaged, which a warning says."""
    return read_overs(store, [run])[0]


def read_overs(store: Store, runs: Sequence[str]) -> list[Over | None]:
    """Do the same for several runs, with concurrent requests."""
    return _read_or_warn(store, [f"{Layout.run(run)}/over.json" for run in runs], Over)


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
    (request,) = _read_or_warn(store, [f"{Layout.run(run)}/stop.json"], StopRequest)
    return "" if request is None else request.why


def _read_or_warn(store: Store, names: Sequence[str], model: type[Record]) -> list[Record | None]:
    """Read records with concurrent requests; None for each that is missing, or damaged, which a warning says."""
    records: list[Record | None] = []
    for name, data in zip(names, store.read_all(names, LARGEST_RECORD), strict=True):
        try:
            records.append(None if data is None else parse_record(store, name, data, model))
        except StoreDamaged as error:
            warn(f"{error}; ignoring it. Run `vitflow verify`")
            records.append(None)
    return records
