"""Which runs a store has, newest first, and what late events say about their stages."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipelines.engine.history import end_run, is_over, newest_results, runs, runs_of, stages_of
from pipelines.engine.runs import run_status
from pipelines.store import Layout, add_event, commit, create_run, open_store
from tests.support.records import make_manifest, make_plan

PLAN = make_plan("p-20260101-000000-0000", "a")


def event(status: str, attempt: int | None = None, is_end: bool = False, key: str = "k") -> dict[str, Any]:
    found = {"event": "attempt ended" if is_end else "stage", "time": "t", "stage": "a", "status": status}
    return found | ({} if attempt is None else {"attempt": attempt}) | ({} if is_end else {"key": key})


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], "PENDING"),
        ([event("RUNNING", 1), event("LOST", 1, True)], "LOST"),
        ([event("RUNNING", 1), event("LOST", None, True)], "LOST"),  # of a store from before they had numbers
        ([event("RUNNING", 2), event("LOST", 1, True)], "RUNNING"),
        ([event("SUCCEEDED"), event("LOST", 1, True)], "SUCCEEDED"),
        ([event("SUCCEEDED"), event("RUNNING", 1)], "SUCCEEDED"),  # another driver, which is late
        ([event("CACHED"), event("RUNNING", 1, key="of a changed source")], "RUNNING"),
    ],
)
def test_what_a_late_driver_says_hides_nothing(events: list[dict[str, Any]], status: str) -> None:
    assert [(stage["job"], stage["status"]) for stage in stages_of(PLAN, events)] == [("ingest", status)]


def test_a_recipes_runs_are_its_own_newest_first_however_old(tmp_path: Path) -> None:
    store, today = open_store(str(tmp_path / "s")), datetime.now(UTC)
    wanted = [f"mine-{today - timedelta(days):%Y%m%d}-000000-0000" for days in (0, 1, 30, 59, 61, 400)]
    others = [f"{name}-{today:%Y%m%d}-000000-0000" for name in ("mine-2", "mine-big", "min", "mine2")]
    for run in (*wanted, *others):
        create_run(store, run, make_plan(run))
    assert list(runs_of(store, "mine")) == wanted
    assert next(runs_of(store, "mine-2")) == others[0]
    assert sorted(runs(store)) == sorted((*wanted, *others))


def test_the_end_of_a_run_is_recorded_once_with_its_stages(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    create_run(store, run := PLAN["run"], PLAN)
    add_event(store, run, "stage", stage="a", status="SUCCEEDED", key="k")
    assert not is_over(store, run)
    end_run(store, run, "SUCCEEDED")
    end_run(store, run, "FAILED")
    add_event(store, run, "attempt ended", stage="a", status="LOST")
    status = run_status(store, run)
    assert (is_over(store, run), status["status"]) == (True, "SUCCEEDED")
    assert [(stage["stage"], stage["status"], stage["key"]) for stage in status["stages"]] == [("a", "SUCCEEDED", "k")]


def test_two_stages_may_have_one_result_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    for day, key in ((1, "good"), (2, "bad")):
        create_run(store, run := f"p-2026010{day}-000000-0000", make_plan(run, "a", "b"))
        for stage in ("a", "b"):
            add_event(store, run, "stage", stage=stage, status="SUCCEEDED", key=key)
        commit(store, make_manifest("ingest", key=key))
    (tmp_path / "s" / Layout.manifest("ingest", "bad")).write_bytes(b"{")
    found = newest_results(store, runs_of(store, "p"), {"a": "ingest", "b": "ingest", "c": "ingest"})
    assert {stage: manifest.key for stage, (manifest, _) in found.items()} == {"a": "good", "b": "good"}
