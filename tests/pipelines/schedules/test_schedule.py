"""A tick is decided once and becomes one run, whoever attends to it, and wherever he is killed."""

import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipelines.engine import history, plan, runs
from pipelines.engine.history import end_run
from pipelines.environment import Environment, using
from pipelines.recipe.load import load_pipeline, parse_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.schedules import serve
from pipelines.schedules.schedule import (
    Reach,
    Schedule,
    add_schedule,
    all_schedules,
    attend,
    decide,
    find_schedule,
    last_decision,
    read_schedule,
    set_state,
    tick_run,
)
from pipelines.spec import RecipeError
from pipelines.store import (
    Store,
    StoreError,
    add_event,
    commit,
    create_run,
    encode,
    now,
    open_store,
    read_events,
    read_plan,
)
from pipelines.store.folder import FolderStore
from tests.support.paths import TINY
from tests.support.records import make_manifest, make_plan
from tests.support.requests import counted

MINUTE = timedelta(minutes=1)
GRACE = timedelta(seconds=60)


def digits() -> Pipeline:
    stages = {"digits": {"job": "ingest", "source": {"kind": "digits"}}}
    return parse_pipeline({"name": "one", "stages": stages}, "test")


def make_schedule(**fields: Any) -> Schedule:
    defaults: dict[str, Any] = {"name": "often", "pipeline": digits(), "recipe": "one.yaml"}
    return Schedule(**defaults | {"cron": "* * * * *"} | fields)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """A store with a schedule for every minute, of a pipeline of which everything is made."""
    opened = open_store(str(tmp_path / "s"))
    assert isinstance(opened, FolderStore)
    (planned,) = plan.plan_pipeline(opened, digits(), ("digits",))
    commit(opened, make_manifest("ingest", key=planned.key))
    add_schedule(opened, make_schedule())
    return opened


def first_tick(store: FolderStore) -> datetime:
    """The first instant at which the schedule is due."""
    return next(find_schedule(store, "often").next_ticks(datetime.now(UTC)))


def decisions(store: FolderStore) -> dict[str, str]:
    folder = store.root / "schedules" / "often" / "ticks"
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {record["tick"]: record["decision"] for record in found}


REACH = Reach(None)


def begin(store: FolderStore, run: str) -> None:
    """A run that is under way: this process drives it."""
    runs.start_run(store, digits(), ("digits",), run_id=run)
    add_event(store, run, "driver", **runs.driver_process())


def run_of(store: Store, tick: datetime) -> str:
    return tick_run(store, make_schedule(), tick)


def say(store: FolderStore, moment: datetime, grace: timedelta | None = GRACE) -> list[str]:
    return list(attend(store, find_schedule(store, "often"), moment, REACH, grace))


# ------------------------------------------------------------------------------------------------- in the store


def test_a_schedule_is_added_replaced_paused_resumed_and_removed_and_nothing_is_overwritten(
    tmp_path: Path,
) -> None:
    store = open_store(str(tmp_path / "s"))
    folder = tmp_path / "s" / "schedules" / "often"
    assert add_schedule(store, make_schedule()) == "added"
    assert add_schedule(store, make_schedule()) == "unchanged"
    before = (folder / "1.json").read_bytes()
    assert add_schedule(store, make_schedule(cron="0 3 * * *")) == "replaced"
    assert set_state(store, "often", "paused")
    assert not set_state(store, "often", "paused")
    assert find_schedule(store, "often").state == "paused"
    assert set_state(store, "often", "active")
    assert find_schedule(store, "often").cron == "0 3 * * *"
    assert set_state(store, "often", "removed")
    assert all_schedules(store) == []
    with pytest.raises(RecipeError, match="there are: none"):
        find_schedule(store, "often")
    assert add_schedule(store, make_schedule()) == "added"
    assert sorted(path.name for path in folder.glob("*.json")) == [f"{n}.json" for n in range(1, 7)]
    assert (folder / "1.json").read_bytes() == before


def test_the_tenth_change_comes_after_the_ninth(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    for minute in range(12):
        add_schedule(store, make_schedule(cron=f"{minute} * * * *"))
    assert find_schedule(store, "often").cron == "11 * * * *"


def test_of_two_who_change_a_schedule_at_once_one_is_told(tmp_path: Path) -> None:
    class Late(FolderStore):
        """One whose writes always come second."""

        def create(self, name: str, data: bytes) -> bool:
            if name.startswith("schedules/"):
                FolderStore.create(self, name, encode(make_schedule(cron="1 1 1 1 *", time=now())))
            return super().create(name, data)

    store = Late(tmp_path / "s")
    with pytest.raises(StoreError, match="another process has just changed the schedule often"):
        add_schedule(store, make_schedule())
    assert find_schedule(store, "often").cron == "1 1 1 1 *"


@pytest.mark.parametrize("name", ["", "Often", "../x", "a/b", "1a", "a" * 42, "a\n"])
def test_what_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="is not a valid schedule name"):
        find_schedule(open_store(str(tmp_path / "s")), name)


def test_a_damaged_schedule_is_told_by_name(store: FolderStore) -> None:
    store.create("schedules/often/2.json", b'{"name": "often", "cron": "99 * * * *"}')
    with pytest.raises(StoreError, match=r"schedules/often/2\.json is damaged"):
        read_schedule(store, "often")


# ------------------------------------------------------------------------------------------------- being due


def test_where_nothing_is_new_the_run_is_over_at_once_and_ray_is_not_started(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITFLOW_RAY_DIR", str(tmp_path / "ray"))
    tick = first_tick(store)
    run = run_of(store, tick)
    assert say(store, tick - timedelta(milliseconds=1)) == []
    assert say(store, tick) == [f"{run}: nothing to do"]
    assert say(store, tick + timedelta(seconds=30)) == [], "once"
    status = runs.run_status(store, run)
    assert status["status"] == "SUCCEEDED"
    assert [stage["status"] for stage in status["stages"]] == ["CACHED"]
    assert not (tmp_path / "ray").exists()
    assert list(history.runs_of(store, "one")) == [run], "it is a run of the recipe, as any other"


def test_an_idle_tick_makes_the_same_requests_after_many_ticks(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def idle_requests() -> int:
        requests.clear()
        for each in all_schedules(store):
            assert list(attend(store, each, tick + timedelta(seconds=20), REACH, GRACE)) == []
        return requests.total()

    tick = first_tick(store)
    say(store, tick)
    requests = counted(monkeypatch)
    assert idle_requests() == 5, "a new server also looks whether the last run is over"
    assert idle_requests() == 4
    for number in range(200):
        decide(store, make_schedule(), tick - (number + 1) * MINUTE, "earlier")
    assert idle_requests() == 4


def test_many_servers_at_once_decide_each_tick_once(store: FolderStore) -> None:
    """Six of them, each with a clock of its own that stumbles forward over twelve ticks."""
    tick = first_tick(store)
    last = tick + 11 * MINUTE
    said: list[str] = []
    failed: list[BaseException] = []

    def serve(seed: int) -> None:
        chance = random.Random(seed)
        opened = open_store(store.uri)
        moment = tick
        try:
            while moment <= last + timedelta(seconds=59):
                said.extend(attend(opened, find_schedule(opened, "often"), moment, REACH, GRACE))
                moment += timedelta(seconds=chance.uniform(5, 45))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    expected = [(tick + number * MINUTE).isoformat() for number in range(12)]
    found = decisions(store)
    assert set(found) <= set(expected)
    assert expected[0] in found, "the first of all is not late for anybody"
    ran = [datetime.fromisoformat(text) for text, decision in found.items() if decision == "run"]
    assert history.runs(store) == [run_of(store, moment) for moment in ran]
    assert all(history.is_over(store, run) for run in history.runs(store))


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class DyingStore(FolderStore):
    """A store whose user is killed at the n-th write, before or after it."""

    writes_left, after = 0, False

    def create(self, name: str, data: bytes) -> bool:
        self.writes_left -= 1
        if self.writes_left == 0 and not self.after:
            raise Killed
        done = super().create(name, data)
        if self.writes_left == 0:
            raise Killed
        return done


def die(store: FolderStore, tick: datetime, write: int, after: bool) -> None:
    """Attend to a tick and be killed at this write."""
    dying = DyingStore(store.root)
    dying.writes_left, dying.after = write, after
    with pytest.raises(Killed):
        list(attend(dying, find_schedule(store, "often"), tick, REACH, GRACE))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", [1, 2, 3, 4])
def test_whoever_is_killed_at_any_write_is_followed_by_one_who_finishes(
    store: FolderStore, write: int, after: bool
) -> None:
    tick = first_tick(store)
    die(store, tick, write, after)  # the decision, the plan, a stage's event, the end
    for seconds in (7, 90):  # the second: long after the grace
        list(
            attend(
                store,
                find_schedule(store, "often"),
                tick + timedelta(seconds=seconds),
                REACH,
                timedelta(seconds=10),
            )
        )
    run = run_of(store, tick)
    assert decisions(store).get(tick.isoformat()) == "run"
    assert history.runs(store) == [run]
    assert runs.run_status(store, run)["status"] == "SUCCEEDED"


def test_a_tick_is_skipped_once_and_for_all_while_the_run_before_is_under_way(store: FolderStore) -> None:
    tick = first_tick(store)
    assert say(store, tick) != []
    run = run_of(store, tick + MINUTE)
    begin(store, run)
    assert decide(store, make_schedule(), tick + MINUTE, None)
    assert say(store, tick + 2 * MINUTE)[0].endswith(f": {run} has not ended (`vitflow stop {run}` ends it)")
    assert say(store, tick + 3 * MINUTE) != [], "so is the next, for the same run"
    end_run(store, run, "FAILED")
    assert say(store, tick + 3 * MINUTE + timedelta(seconds=20)) == [], "what was skipped stays skipped"
    assert say(store, tick + 4 * MINUTE) == [f"{run_of(store, tick + 4 * MINUTE)}: nothing to do"]
    assert list(decisions(store).values()) == ["run", "run", "skip", "skip", "run"]


def test_a_missed_tick_is_told_and_not_made_up_for_by_a_server_but_by_a_timer(store: FolderStore) -> None:
    add_schedule(store, make_schedule(cron="0 * * * *"))
    hour = first_tick(store)
    late = hour + timedelta(minutes=25)
    (line,) = say(store, late)
    assert line.startswith("missed ")
    assert f"next {hour + timedelta(hours=1):%Y-%m-%d %H:%M}" in line
    assert decisions(store) == {}
    assert say(store, late, grace=None) == [f"{run_of(store, hour)}: nothing to do"]
    assert say(store, late, grace=None) == []


def test_what_was_due_before_it_was_added_or_while_it_rested_is_not_due(store: FolderStore) -> None:
    assert say(store, datetime.now(UTC), grace=None) == []
    set_state(store, "often", "paused")
    assert say(store, datetime.now(UTC) + 5 * MINUTE, grace=None) == []
    set_state(store, "often", "active")
    assert say(store, datetime.now(UTC), grace=None) == []
    removed = find_schedule(store, "often").model_copy(update={"state": "removed"})
    assert list(attend(store, removed, datetime.now(UTC) + 5 * MINUTE, REACH, None)) == []
    assert last_decision(store, "often") is None


def test_a_driver_that_another_machine_submitted_to_itself_is_not_taken_for_dead(store: FolderStore) -> None:
    tick = first_tick(store)
    run = run_of(store, tick)
    die(store, tick, write=2, after=True)
    fields = {"submission_id": f"driver-{run}-1", "cluster_address": "http://127.0.0.1:1"}
    add_event(store, run, "driver submitted", host="elsewhere", cluster_session="s", **fields)
    (line,) = say(store, tick + MINUTE)
    assert line.startswith("skipped ")
    assert read_plan(store, run_of(store, tick + MINUTE)) is None


def test_two_stores_with_schedules_of_one_name_share_no_run_id(store: FolderStore, tmp_path: Path) -> None:
    """The driver's submission id is made of it, and one cluster may serve both."""
    tick = first_tick(store)
    assert run_of(store, tick) != tick_run(open_store(str(tmp_path / "other")), make_schedule(), tick)


def test_a_run_keeps_the_pipeline_it_was_begun_with(store: FolderStore) -> None:
    """The schedule was replaced after the run had been begun."""
    tick = first_tick(store)
    die(store, tick, write=2, after=True)
    add_schedule(store, make_schedule(pipeline=load_pipeline(str(TINY)), cron="0 0 1 1 *"))
    run = run_of(store, tick)
    assert say(store, tick + timedelta(seconds=20)) == [f"{run}: nothing to do"]
    assert [stage["stage"] for stage in runs.run_status(store, run)["stages"]] == ["digits"]


def test_a_store_that_fails_is_said_and_begun_work_goes_on_later(store: FolderStore) -> None:
    tick = first_tick(store)
    unrelated = "unrelated-20260101-000000-abcd"
    create_run(store, unrelated, make_plan(unrelated))

    class Failing(FolderStore):
        def create(self, name: str, data: bytes) -> bool:
            if name.endswith("plan.json"):
                raise StoreError("no space left")
            return super().create(name, data)

    with pytest.raises(StoreError, match="no space left"):
        list(attend(Failing(store.root), find_schedule(store, "often"), tick, REACH, GRACE))
    assert say(store, tick + timedelta(seconds=5)) == [f"{run_of(store, tick)}: nothing to do"]
    assert [event["event"] for event in read_events(store, run_of(store, tick))] == ["stage"]
    assert history.is_over(store, run_of(store, tick))


def test_wrong_requests_from_the_command_line_write_nothing(vitflow_here, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    add = ("schedule", "add", "weekly", TINY, "--store", tmp_path / "s", "--cron")
    done = vitflow_here(*add, "0 3 * * MOM", "--timezone", "Europe/Berlin", check=2)
    assert "'0 3 * * MOM': Bad day-of-week; expected" in done.stderr
    done = vitflow_here(*add, "0 3 * * 1", "--timezone", "Europe/Berln", check=2)
    assert "'Europe/Berln': no such time zone" in done.stderr
    done = vitflow_here(*add, "0 3 * * 1", "--address", "http://head:8265", check=2)
    assert "which only this machine sees" in done.stderr
    assert not (tmp_path / "s").exists()


def test_list_says_when_a_schedule_is_due_and_what_became_of_it(vitflow_here, store: FolderStore) -> None:  # type: ignore[no-untyped-def]
    tick = first_tick(store)
    say(store, tick)
    (row,) = json.loads(vitflow_here("schedule", "list", "--store", store.root, "--json").stdout)
    assert (row["name"], row["state"], row["status"]) == ("often", "active", "SUCCEEDED")
    assert row["last run"] == run_of(store, tick)
    assert datetime.fromisoformat(row["next"]) - tick <= 2 * MINUTE


def test_a_clock_that_is_set_back_stops_no_schedule_and_repeats_no_tick(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock goes an hour back in the middle: every minute that it shows is decided, each once."""
    monkeypatch.setattr(serve, "LOOK_SECONDS", 0.01)
    late = first_tick(store) + timedelta(hours=2)
    early = late - timedelta(hours=1)
    shown = [late, late + MINUTE, *(early + number * MINUTE for number in range(3)), late, late + 2 * MINUTE]

    def clock() -> Iterator[datetime]:
        for moment in shown:
            yield moment
            deadline = time.monotonic() + 20
            while moment.isoformat() not in decisions(store) and time.monotonic() < deadline:
                yield moment  # a tick's thread may be at work on the one before
        raise KeyboardInterrupt

    said: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    stumbling = Environment()
    stumbling.utc = partial(next, clock())  # type: ignore[method-assign]
    with using(stumbling):
        serve.serve(store, REACH, said.append)
    signal.signal(signal.SIGTERM, before)
    assert decisions(store) == {moment.isoformat(): "run" for moment in shown}
    assert len(history.runs(store)) == len(set(shown))
    assert "ending; started runs continue" in said


def test_a_schedule_written_before_the_clock_was_set_back_is_not_waited_for(store: FolderStore) -> None:
    """It was written in what is now the future; what was due longer ago than a minute is not made up for."""
    schedule = find_schedule(store, "often")
    written = datetime.fromisoformat(schedule.time)
    for moment in (written - timedelta(hours=1), written - timedelta(minutes=59)):
        tick = moment.replace(second=0, microsecond=0)
        assert schedule.last_tick(moment) == tick
        say(store, moment)
        assert decisions(store)[tick.isoformat()] == "run"
    assert len(decisions(store)) == 2
    assert schedule.last_tick(written - timedelta(seconds=30)) is None, "two machines' clocks may differ so much"
