"""A tick is decided once and becomes one run, whoever attends to it, and wherever he is killed."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.engine import history
from pipelines.engine.history import end_run
from pipelines.engine.runs import run_status
from pipelines.environment import Environment, using
from pipelines.recipe.load import load_pipeline
from pipelines.schedules import due, serve
from pipelines.schedules.due import attend
from pipelines.schedules.schedule import (
    Schedule,
    all_schedules,
    find_schedule,
    set_state,
    tick_run,
)
from pipelines.schedules.ticks import Position, decide, read_end, refresh
from pipelines.store import StoreError, add_event, open_store, read_events, read_over, read_plan, request_stop
from pipelines.store.folder import FolderStore
from tests.conftest import Vitflow
from tests.simulation.loop import Killed
from tests.support.paths import TINY
from tests.support.requests import counted
from tests.support.schedules import GRACE, MINUTE, NOON, Clock, DyingStore, Scheduled


@pytest.fixture
def often(tmp_path: Path) -> Scheduled:
    """Nothing is made yet."""
    return Scheduled(tmp_path)


@pytest.fixture
def made(tmp_path: Path) -> Scheduled:
    """Every result exists."""
    scheduled = Scheduled(tmp_path)
    scheduled.make_all()
    return scheduled


# ------------------------------------------------------------------------------------------------- decisions


def test_a_tick_becomes_a_run_whose_end_is_recorded_once(often: Scheduled) -> None:
    assert often.look(-0.01) == []
    run = often.run(0)
    (line,) = often.look(0)
    assert line.startswith(f"{run}: driver-{run}-") and "is running" in line
    assert often.look(0.5) == [], "once"
    assert list(history.runs_of(often.store, "one")) == [run], "it is a run of the recipe, as any other"
    often.end(0, "SUCCEEDED")
    assert often.look(0.6) == [f"{run}: SUCCEEDED"]
    assert often.look(0.7) == []
    assert often.decisions() == [(0, "run")]
    assert often.ends() == ["1 SUCCEEDED"]


def test_what_failed_is_in_the_end(often: Scheduled) -> None:
    often.look(0)
    failed = {"stage": "digits", "status": "FAILED", "detail": "images/b does not exist"}
    with using(often.clock):
        add_event(often.store, often.run(0), "stage", **failed)
    often.end(0, "FAILED")
    assert often.look(0.5) == [f"{often.run(0)}: FAILED, stage digits, images/b does not exist"]
    assert often.ends() == ["1 FAILED digits images/b does not exist"]


def test_where_every_result_exists_no_run_is_written_and_the_cluster_is_not_asked(made: Scheduled) -> None:
    assert made.look(0) == ["nothing new for 2026-11-22 12:00 UTC: every result exists"]
    assert made.look(0.5) == [], "once"
    assert made.decisions() == [(0, "nothing_new")]
    assert history.runs(made.store) == [] and not made.ray.state
    assert made.look(1) != []


def test_a_cluster_elsewhere_plans_by_itself(made: Scheduled) -> None:
    """It may have other files."""
    made.write(address="http://head:8265")
    made.look(0)
    assert made.decisions() == [(0, "run")]


def test_a_decision_on_a_stale_read_is_refused(often: Scheduled) -> None:
    """Two servers decide two neighbouring ticks on what they read before either: one run, not two."""
    stale, other = Position(), Position()
    with using(often.clock):
        for position in (stale, other):
            refresh(often.store, "often", position)
        assert decide(often.store, "often", other, NOON, "run", often.run(0), "")
        assert decide(often.store, "often", stale, NOON + MINUTE, "run", often.run(1), "") is None
    assert often.look(1, position=stale)[-1].startswith("skipped ")
    assert often.decisions() == [(0, "run"), (1, "skip")]


def test_an_idle_look_takes_four_requests_whatever_its_age(often: Scheduled, monkeypatch: pytest.MonkeyPatch) -> None:
    def requests_of_a_look(position: Position) -> int:
        requests.clear()
        (schedule,) = all_schedules(often.store)
        with using(often.clock):
            assert list(attend(often.store, schedule, often.clock.moment, often.reach, GRACE, position)) == []
        return requests.total()

    position = Position()
    often.look(-0.1, position=position)
    requests = counted(monkeypatch)
    assert requests_of_a_look(position) == 4, "before the first tick"
    often.look(0, position=position)
    often.end(0, "SUCCEEDED")
    often.look(0.1, position=position)
    assert requests_of_a_look(position) == 4
    assert requests_of_a_look(Position()) == 7, "a new process also finds the newest decision, and the end of its run"
    with using(often.clock):
        for minute in range(2_000):
            decide(often.store, "often", position, NOON + minute * MINUTE, "missed", None, "")
    often.clock.moment = NOON + 1_999.2 * MINUTE
    assert requests_of_a_look(position) == 4
    assert requests_of_a_look(Position()) == 12, "of which 5 grow with the logarithm"


@pytest.mark.parametrize("number", [0, 1, 511, 512, 513, 1_535, 1_536, 5_000])
def test_the_newest_decision_is_found(number: int, often: Scheduled) -> None:
    folder = often.store.root / "schedules" / "often" / "ticks"
    folder.mkdir()
    record = {
        "tick": NOON.isoformat(),
        "decision": "skip",
        "run": None,
        "nonce": "",
        "who": "",
        "time": NOON.isoformat(),
    }
    for each in range(1, number + 1):
        (folder / f"{each:08d}.json").write_text(json.dumps(record | {"previous": each - 1}))
    position = Position()
    refresh(often.store, "often", position)
    assert position.number == number


# ------------------------------------------------------------------------------------------------- killed


def die(scheduled: Scheduled, minute: float, write: int, after: bool) -> None:
    """Attend to a tick under a timer and be killed at this write."""
    dying = DyingStore(scheduled.store.root)
    dying.writes_left, dying.after = write, after
    with pytest.raises(Killed):
        scheduled.look(minute, None, store=dying)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", [1, 2, 3])
def test_whoever_is_killed_at_any_write_is_followed_by_one_who_finishes(
    often: Scheduled, write: int, after: bool
) -> None:
    die(often, 0, write, after)  # the decision, the plan, the driver's submission
    often.look(0.1)
    often.look(0.9)
    assert often.decisions() == [(0, "run")]
    assert history.runs(often.store) == [often.run(0)]
    assert often.ray.drivers(often.run(0)) == ["RUNNING"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", range(1, 7))
def test_whoever_is_killed_while_he_continues_a_dead_run_is_followed_by_one_who_finishes(
    often: Scheduled, write: int, after: bool
) -> None:
    often.look(0)
    often.ray.drivers_die()
    die(often, 1, write, after)  # the stop, the end of the run, that of the tick, the decision, the plan, the driver
    often.look(1.1, None)
    often.look(1.2, None)
    assert often.decisions() == [(0, "run"), (1, "run")], "no tick is lost"
    assert read_over(often.store, often.run(0)).status == "STOPPED"  # type: ignore[union-attr]
    assert [end.split()[:2] for end in often.ends()] == [["1", "STOPPED"]]
    assert often.ray.drivers(often.run(0)) == ["FAILED"]
    assert often.ray.drivers(often.run(1)) == ["RUNNING"]


def test_a_store_that_fails_is_said_and_begun_work_goes_on_later(often: Scheduled) -> None:
    class Failing(FolderStore):
        def create(self, name: str, data: bytes) -> bool:
            if name.endswith("plan.json"):
                raise StoreError("no space left")
            return super().create(name, data)

    with pytest.raises(StoreError, match="no space left"):
        often.look(0, store=Failing(often.store.root))
    assert "is running" in often.look(0.1)[0]
    assert [event["event"] for event in read_events(often.store, often.run(0))] == ["driver submitted"]


def test_a_run_keeps_the_pipeline_it_was_begun_with(often: Scheduled) -> None:
    """The schedule was replaced after the run had been begun."""
    often.look(0)
    often.ray.drivers_die()
    run = often.run(0)
    often.write(pipeline=load_pipeline(str(TINY)), cron="0 0 1 1 *")
    assert "is running" in often.look(0.2)[0]
    assert [stage["stage"] for stage in run_status(often.store, run)["stages"]] == ["digits"]


# ------------------------------------------------------------------------------------------------- the run before


def test_a_tick_is_skipped_once_and_for_all_while_the_run_before_is_under_way(often: Scheduled) -> None:
    often.look(0)
    (line,) = often.look(1)
    assert line == f"skipped 2026-11-22 12:01 UTC: {often.run(0)} has not ended (`vitflow stop {often.run(0)}` ends it)"
    assert often.look(2) != [], "so is the next, for the same run"
    often.end(0, "FAILED")
    assert often.look(2.2) == [f"{often.run(0)}: FAILED"], "what was skipped stays skipped"
    often.look(3)
    assert often.decisions() == [(0, "run"), (1, "skip"), (2, "skip"), (3, "run")]


def test_in_a_queue_the_latest_tick_waits_for_the_run_before(often: Scheduled) -> None:
    often.write(overlap="queue")
    for minute in range(6):
        often.look(minute)
    assert often.decisions() == [(0, "run")]
    often.clock.moment += MINUTE / 3
    often.end(0, "SUCCEEDED")
    often.look(6.9)
    assert often.decisions() == [(0, "run"), (6, "run")]
    refresh(often.store, "often", position := Position())
    assert position.newest is not None and position.newest.why == "5 earlier ticks were not served"


def test_a_queued_tick_is_not_missed_however_long_it_waited(often: Scheduled) -> None:
    often.write(overlap="queue", cron="0 * * * *")
    for minute in (0, 60, 110):
        often.look(minute)
    often.end(0, "SUCCEEDED")
    often.look(110.5)
    assert often.decisions() == [(0, "run"), (60, "run")]


def test_a_dead_driver_is_followed_by_another_until_the_run_is_given_up(often: Scheduled) -> None:
    for second in range(3):
        assert "is running" in often.look(second / 60)[0]
        assert often.look(second / 60) == [], "it lives"
        often.ray.drivers_die()
    (line,) = often.look(0.5)
    assert line.startswith(f"{often.run(0)}: FAILED, 3 drivers died; see the log of Ray's job driver-")
    assert often.ray.drivers(often.run(0)) == 3 * ["FAILED"]
    assert often.ends()[0].startswith("1 FAILED 3 drivers died")


def test_a_driver_that_two_servers_record_counts_once(often: Scheduled) -> None:
    run = often.run(0)
    often.look(0)
    (event,) = read_events(often.store, run)
    with using(often.clock):
        add_event(often.store, run, **{name: value for name, value in event.items() if name != "time"})
    often.ray.drivers_die()
    often.look(0.1)
    often.ray.drivers_die()
    assert "is running" in often.look(0.2)[0]


@pytest.mark.parametrize("behind", [timedelta(0), timedelta(hours=1)])
def test_a_driver_that_another_server_has_just_submitted_is_not_given_up(
    often: Scheduled, monkeypatch: pytest.MonkeyPatch, behind: timedelta
) -> None:
    """Also if its clock is behind, so that its event is not the last."""
    for second in range(2):
        often.look(second / 60)
        often.ray.drivers_die()
    target = often.reach.target

    def after_the_other(schedule: Schedule) -> AbstractContextManager[Any]:
        monkeypatch.undo()
        other = Clock()
        other.moment = NOON - behind
        with using(other):
            assert len(list(attend(often.store, schedule, NOON, often.reach, GRACE))) == 1
        return target(schedule)

    monkeypatch.setattr(type(often.reach), "target", lambda _, schedule: after_the_other(schedule))
    assert "is running" in often.look(2 / 60)[0]
    assert often.ray.drivers(often.run(0)) == ["FAILED", "FAILED", "RUNNING"]
    assert often.ends() == []


def test_a_dead_driver_does_not_cost_the_next_tick(often: Scheduled) -> None:
    """Under a timer that calls at the ticks only, its run is stopped, with its jobs, and the tick's run continues."""
    often.look(0, None)
    often.ray.drivers_die()
    lines = often.look(1, None)
    assert f"{often.run(0)}: STOPPED, its driver died; continued by {often.run(1)}" in lines
    assert "is running" in lines[-1]
    assert often.decisions() == [(0, "run"), (1, "run")]
    assert often.ends() == [f"1 STOPPED its driver died; continued by {often.run(1)}"]
    assert often.ray.drivers(often.run(1)) == ["RUNNING"]


def test_a_driver_whose_submitter_was_killed_before_it_wrote_that_down_keeps_its_run(often: Scheduled) -> None:
    often.look(0)
    often.ray.drivers_die()
    die(often, 0.5, 2, after=False)  # the second driver runs, and the store knows the first one only
    found, skipped = often.look(1)
    assert "is running" in found and skipped.startswith("skipped ")
    assert often.ray.drivers(often.run(0)) == ["FAILED", "RUNNING"] and often.ends() == []


def test_a_run_that_a_person_stops_at_that_moment_is_not_called_dead(
    often: Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    often.look(0, None)
    often.ray.drivers_die()

    def stopped_meanwhile(_: object) -> bool:
        with using(often.clock):
            request_stop(often.store, often.run(0))
        return False

    monkeypatch.setattr(due._Look, "is_cached", stopped_meanwhile)
    often.look(1, None)
    assert often.ends() == ["1 STOPPED"]


def test_a_run_that_another_process_is_about_to_start_is_not_taken_for_dead(often: Scheduled) -> None:
    """Starting a cluster takes it a minute; but if it was killed, a week later the next tick is not lost, either."""
    die(often, 0, 2, after=True)
    often.look(1, None)
    assert often.decisions() == [(0, "run"), (1, "skip")]
    assert often.ray.drivers(often.run(0)) == ["RUNNING"], "it helps"
    often.end(0, "SUCCEEDED")
    often.look(2.5, None)
    often.end(2, "SUCCEEDED")
    die(often, 3, 3, after=True)  # the end, the decision, the plan
    often.look(10_000, None)
    assert often.decisions()[-2:] == [(3, "run"), (10_000, "run")]
    assert often.ends()[-1].startswith("4 STOPPED")


def test_a_driver_that_another_machine_submitted_to_itself_is_not_taken_for_dead(often: Scheduled) -> None:
    die(often, 0, 2, after=True)
    fields = {"submission_id": f"driver-{often.run(0)}-1", "cluster_address": "http://127.0.0.1:1"}
    with using(often.clock):
        fields |= {"host": "elsewhere", "cluster_session": "s", "store_uri": often.store.uri}
        add_event(often.store, often.run(0), "driver submitted", **fields)
    (line,) = often.look(1)
    assert line.startswith("skipped ")
    assert read_plan(often.store, often.run(1)) is None


def test_a_run_that_a_person_stopped_is_over_and_its_jobs_are_stopped(often: Scheduled) -> None:
    often.look(0)
    request_stop(often.store, often.run(0))  # by a command that was killed then
    often.look(0.5)
    assert often.ray.drivers(often.run(0)) == ["STOPPED"]
    assert often.ends() == ["1 STOPPED"]
    often.look(1)
    assert often.decisions() == [(0, "run"), (1, "run")]


# ------------------------------------------------------------------------------------------------- missed


def test_missed_ticks_are_told_and_made_up_for_by_a_timer_or_if_the_schedule_says_so(often: Scheduled) -> None:
    often.write(cron="0 * * * *")
    (line,) = often.look(25)
    assert line.startswith("missed ") and "next 2026-11-22 13:00" in line
    assert often.look(26) == []
    assert often.look(27, None) == [], "decided is decided"
    assert "is running" in often.look(85, None)[0]
    often.end(60, "SUCCEEDED")
    often.look(86)
    often.look(310)
    refresh(often.store, "often", position := Position())
    assert position.newest is not None and position.newest.why == "nothing served the schedule then; 4 ticks"
    often.write(cron="0 * * * *", catch_up="latest")
    assert "is running" in often.look(385)[0]
    assert often.decisions() == [(0, "missed"), (60, "run"), (300, "missed"), (360, "run")]


def test_what_was_due_before_it_was_added_or_while_it_rested_is_not_due(often: Scheduled) -> None:
    assert often.look(-0.2, None) == []
    with using(often.clock):
        set_state(often.store, "often", "paused")
    assert often.look(5, None) == []
    with using(often.clock):
        set_state(often.store, "often", "active")
    assert often.look(5.5, None) == []
    removed = find_schedule(often.store, "often").model_copy(update={"state": "removed"})
    assert list(attend(often.store, removed, NOON + 9 * MINUTE, often.reach, None)) == []
    assert often.decisions() == []


# ------------------------------------------------------------------------------------------------- in a row


def test_failures_and_skips_in_a_row_are_counted(often: Scheduled) -> None:
    def counts() -> tuple[int, int]:
        position = Position()
        refresh(often.store, "often", position)
        if position.last is not None:
            position.end = read_end(often.store, "often", position.last.number)
        return position.failures, position.skips

    assert counts() == (0, 0)
    for minute, (status, expected) in enumerate(
        [("FAILED", 1), ("FAILED", 2), ("STOPPED", 2), ("SUCCEEDED", 0), ("FAILED", 1)]
    ):
        often.look(3 * minute)
        often.look(3 * minute + 1)
        assert counts()[1] == 1
        often.end(3 * minute, status)
        often.look(3 * minute + 1.5)
        assert counts() == (expected, 1), status
    often.make_all()
    often.look(15)
    assert counts() == (0, 0), "nothing to do is a success"


# ------------------------------------------------------------------------------------------------- clocks


def test_a_clock_that_is_set_back_stops_no_schedule_and_repeats_no_tick(
    made: Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock goes an hour back in the middle: every minute that it shows is decided, each once."""
    monkeypatch.setattr(serve, "LOOK_SECONDS", 0.01)
    shown = [120, 121, 60, 61, 62, 120, 122]

    def clock() -> Iterator[datetime]:
        for minute in shown:
            yield NOON + minute * MINUTE
            deadline = time.monotonic() + 20
            while minute not in [each for each, _ in made.decisions()] and time.monotonic() < deadline:
                yield NOON + minute * MINUTE  # a tick's thread may be at work on the one before
        raise KeyboardInterrupt

    said: list[str] = []
    stumbling = Environment()
    stumbling.utc = partial(next, clock())  # type: ignore[method-assign]
    with using(stumbling):
        serve.serve(made.store, made.reach, said.append)
    assert made.decisions() == [(minute, "nothing_new") for minute in [120, 121, 60, 61, 62, 122]]
    assert "ending; started runs continue" in said


def test_of_two_servers_whose_clocks_differ_by_an_hour_each_tick_is_decided_once(often: Scheduled) -> None:
    for minute in range(100):
        often.look(minute)  # the one whose clock is right
        often.look(minute + 60.2)
        if minute % 7 == 0:
            for run in history.runs(often.store):
                end_run(often.store, run, "SUCCEEDED")
    decided = [minute for minute, _ in often.decisions()]
    assert sorted(decided) == [*range(160)]
    ran = [minute for minute, decision in often.decisions() if decision == "run"]
    assert sorted(history.runs(often.store)) == sorted(map(often.run, ran))


def test_a_schedule_written_before_the_clock_was_set_back_is_not_waited_for(made: Scheduled) -> None:
    """It was written in what is now the future; what was due longer ago than a minute is not made up for."""
    for minute in (-60, -59):
        made.look(minute + 0.5)
    assert made.decisions() == [(-60, "nothing_new"), (-59, "nothing_new")]
    assert find_schedule(made.store, "often").last_tick(NOON - timedelta(seconds=60)) is None, (
        "two machines' clocks may differ so much"
    )


# ------------------------------------------------------------------------------------------------- commands


def test_list_says_when_a_schedule_is_due_and_what_became_of_it(
    vitflow_here: Vitflow, often: Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    often.look(0)
    often.end(0, "SUCCEEDED")
    (row,) = json.loads(vitflow_here("schedule", "list", "--store", often.store.root, "--json").stdout)
    assert (row["name"], row["state"], row["status"]) == ("often", "active", "SUCCEEDED")
    assert row["last run"] == often.run(0)
    assert datetime.fromisoformat(row["next"]) - datetime.now(UTC) <= MINUTE


def test_show_says_what_became_of_the_last_ten_ticks(vitflow_here: Vitflow, often: Scheduled) -> None:
    often.look(0)
    often.end(0, "FAILED", "3 drivers died")
    for minute in range(1, 12):
        often.look(minute)
    shown = json.loads(vitflow_here("schedule", "show", "often", "--store", often.store.root, "--json").stdout)
    assert [tick["decision"] for tick in shown["ticks"]] == ["skip"] * 10
    assert (shown["failures_in_a_row"], shown["skips_in_a_row"]) == (1, 10)
    assert "no such file" in shown["recipe_file"]
    often.end(1, "STOPPED")
    often.look(11.5)
    often.make_all()
    for minute in (12, 30):
        often.look(minute)
    text = vitflow_here("schedule", "show", "often", "--store", often.store.root).stdout
    rows = [re.split("  +", line) for line in text.splitlines()[-10:]]
    assert [row[1] for row in rows] == ["nothing_new"] * 2 + ["skip"] * 8
    assert rows[0][-1] == "every result exists; 17 earlier ticks were not served"


def test_diff_shows_what_changed_in_the_recipe_since_it_was_pinned(vitflow_here: Vitflow, tmp_path: Path) -> None:
    recipe, store = tmp_path / "mine.yaml", ("--store", tmp_path / "s")
    recipe.write_text(TINY.read_text())
    vitflow_here("schedule", "add", "often", recipe, "--cron", "* * * * *", *store)
    assert "as often pinned it" in vitflow_here("schedule", "diff", "often", *store).stdout
    changed = yaml.safe_load(TINY.read_text())
    first, *_, last = changed["stages"]
    del changed["stages"][last]
    changed["stages"][first]["max_bad_fraction"] = 0.25
    recipe.write_text(yaml.safe_dump(changed))
    lines = vitflow_here("schedule", "diff", "often", *store).stdout.splitlines()
    assert lines[0] == f"stage {last}: only in what is pinned"
    assert lines[1].startswith(f"stages.{first}.max_bad_fraction ") and lines[1].endswith(" -> 0.25")
    assert len(lines) == 3
    assert "differs from the pinned one" in vitflow_here("schedule", "show", "often", *store).stdout


def test_two_stores_with_schedules_of_one_name_share_no_run_id(often: Scheduled, tmp_path: Path) -> None:
    """The driver's submission id is made of it, and one cluster may serve both."""
    other = open_store(str(tmp_path / "other"))
    assert often.run(0) != tick_run(other, find_schedule(often.store, "often"), NOON)
