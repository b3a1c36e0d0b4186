"""The records of a run: its plan, its events, the wish that it stops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.errors import StoreDamaged
from pipelines.store.objects import check_name, parse_record, read_record, warn
from pipelines.store.protocol import LARGEST_RECORD, Store, encode
from pipelines.store.records import Event, Layout, RunPlan, now, who


def create_run(store: Store, run: str, plan: Mapping[str, Any]) -> bool:
    """Write a run's plan; False where a run of that id exists."""
    return store.create(f"{Layout.run(run)}/plan.json", encode(plan))


def read_plan(store: Store, run: str) -> dict[str, Any] | None:
    """A run's plan. Raises StoreDamaged."""
    name = f"{Layout.run(run)}/plan.json"
    plan = read_record(store, name, RunPlan)
    if plan is None:
        return None
    check_name(store, name, f"{Layout.run(plan.run)}/plan.json")
    return plan.model_dump()


def add_event(store: Store, run: str, event: str, **fields: Any) -> None:
    """Append to a run's history: one small object an event."""
    from ulid import ULID

    record = {"event": event, "time": now(), **fields}
    store.create(f"{Layout.run(run)}/events/{ULID()}.json", encode(record))


def read_events(store: Store, run: str) -> list[dict[str, Any]]:
    """A run's history, oldest first; an event that is damaged is left out with a warning."""
    folder = f"{Layout.run(run)}/events"
    names = [f"{folder}/{name}" for name in store.names(folder)]
    found = []
    for name, data in zip(names, store.read_all(names, LARGEST_RECORD), strict=True):
        if data is None:
            continue
        try:
            found.append(parse_record(store, name, data, Event).model_dump(exclude_unset=True))
        except StoreDamaged as error:
            warn(f"{error}; it is left out, `vitflow verify` says what to do")
    return sorted(found, key=lambda record: record["time"])  # ulids of one millisecond are in no order


def wish_stop(store: Store, run: str) -> None:
    """Write the wish that a run stops; whoever drives it, or finds a job of it dead, obeys."""
    store.create(f"{Layout.run(run)}/stop.json", encode({"who": who(), "time": now()}))


def stop_wished(store: Store, run: str) -> bool:
    """Whether somebody wishes the run to stop."""
    return store.read(f"{Layout.run(run)}/stop.json") is not None
