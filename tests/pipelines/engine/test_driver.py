"""The driver on simulated clusters and stores: what is lost, damaged, killed, stopped and answered oddly.

Time is the clock's of `tests.simulation.loop`: an hour of waiting takes a millisecond.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
import yaml

import pipelines.store.protocol
from pipelines.cluster.local import LocalConnection
from pipelines.commands import running
from pipelines.engine import decisions, driver, history, runs
from pipelines.engine.driver import STOP_SECONDS, Driver
from pipelines.engine.logs import show_logs
from pipelines.engine.plan import PlannedStage
from pipelines.recipe.load import parse_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.store import Attempt, Layout, Store, StoreUnreachable, all_manifests, commit, request_stop
from pipelines.store.folder import FolderStore
from tests.conftest import Vitflow
from tests.simulation.cluster import Client, Script
from tests.simulation.loop import Killed, Loop
from tests.support.in_process import Jobs
from tests.support.memory_store import MemoryStore
from tests.support.network import DiesAfter, Loses, Network
from tests.support.records import make_manifest
from tests.support.world import World, first_key

KEY = first_key()[:12]
ID = f"ingest-{KEY}"  # how the submission ids of the stage `images` begin


def job_id(number: int) -> str:
    """The submission id of this attempt, if the first driver has written it and those before it."""
    return f"{ID}-1-{number - 1}-{number}"


def scripts(*in_order: Script) -> Callable[[Attempt], Script]:
    """The first job is to do this, the next that; the last is repeated."""
    return lambda attempt: in_order[min(attempt.number, len(in_order)) - 1]


def walk(world: World, network: Network | None = None) -> dict[str, str]:
    return {name: status.value for name, status in world.driver(network).walk()[0].items()}


# ------------------------------------------------------------------------------------------- the usual way


def test_stages_are_driven_one_after_the_other_and_all_is_told() -> None:
    world = World("images", "pixels")
    status, made = world.driver().walk()
    assert status == {"images": "SUCCEEDED", "pixels": "SUCCEEDED"}
    assert [(stage.name, stage.state) for stage in made] == [("images", "cached"), ("pixels", "cached")]
    assert world.events() == [
        *(f"stage images {status}" for status in ("PENDING", "RUNNING", "SUCCEEDED")),
        *(f"stage pixels {status}" for status in ("PENDING", "RUNNING", "SUCCEEDED")),
        "finished SUCCEEDED",
    ]
    assert world.told.of("images") == ["RUNNING", f"SUCCEEDED {KEY}"]
    (attempt,) = world.attempts()
    assert attempt.submission_id == job_id(1)
    assert (attempt.nonce, attempt.cluster_session) == ("1-0", "session-1")
    assert world.log(attempt) == "fine\n"
    assert walk(world) == {"images": "CACHED", "pixels": "CACHED"}
    assert len(world.cluster.arrived) == 2


def test_what_a_process_left_behind_that_died_after_its_commit_is_removed() -> None:
    """Whether this driver sees the commit, or the next one, because this one died, too."""

    def leave_checkpoint(attempt: Attempt) -> Script:
        if attempt.job == "pretrain":
            folder = Layout.checkpoint(attempt.job, attempt.key, attempt.number, 10)
            world.store.objects[f"{folder}/rank-0.safetensors"] = b"state"
        return Script()

    def left() -> list[str]:
        return [name for name in world.store.objects if "/checkpoints/" in name]

    world = World("images", "model", script=leave_checkpoint)
    assert walk(world)["model"] == "SUCCEEDED" and not left()
    leave_checkpoint(*world.attempts("pretrain"))
    assert left()
    assert walk(world)["model"] == "CACHED" and not left()


def test_a_copy_of_a_store_leaves_the_jobs_of_the_first_alone() -> None:
    """Both have one id and the same records, and use the same Ray."""
    world = World("images", script=lambda attempt: Script(running=1e5))
    first = world.driver()
    while not world.cluster.started:
        first.step()
        world.clock.sleep(1.0)
    copy = world.driver()
    copy.store.uri = "copy"
    copy._begin("images")
    assert (observed := copy._observe("images")).attempt == world.attempts()[0]
    assert observed.job is None
    assert observed.lost == "its store is memory"
    assert decisions.decide(decisions.InFlight(), observed, 0.0)[1][-1] is decisions.Do.WRITE
    copy.stop()
    assert not world.cluster.stopped
    first.stop()
    assert world.cluster.stopped == {job_id(1)}


def test_independent_stages_run_at_once_and_no_more_than_allowed() -> None:
    for parallel, seconds in ((2, 6.0), (1, 12.0)):
        world = World("images", "other")
        driver = world.driver()
        driver.parallel = parallel
        driver.walk()
        assert seconds - 3 < world.clock.now < seconds


class Meter(Network):
    """Counts the requests to the store from the second minute to the third."""

    def __init__(self, clock: Loop) -> None:
        super().__init__()
        self.clock, self.requests = clock, 0

    def after(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        self.requests += what in {"read", "list", "create"} and 120 <= self.clock.now < 180


@pytest.mark.parametrize("stages", [("images",), ("images", "other")])
def test_a_running_stage_takes_twelve_requests_a_minute(stages: tuple[str, ...]) -> None:
    """So ten take 150, with the look for a request to stop every two seconds."""
    world = World(*stages, script=lambda attempt: Script(running=300.0))
    meter = Meter(world.clock)
    walk(world, meter)
    assert meter.requests == pytest.approx(30 + 12 * len(stages), abs=3)


def test_the_stage_with_the_longest_path_behind_it_begins_first() -> None:
    world = World("other", "images", "pixels")
    driver = world.driver()
    driver.parallel = 1
    driver.walk()
    begun = [event.split()[1] for event in world.events() if event.endswith("PENDING")]
    assert begun == ["images", "other", "pixels"]


def test_what_fails_skips_only_what_needs_it() -> None:
    ends = {"images": Script.failed(2), "other": Script()}
    world = World("images", "other", "pixels", script=lambda attempt: ends[attempt.stage])
    assert walk(world) == {"images": "FAILED", "other": "SUCCEEDED", "pixels": "SKIPPED"}
    assert world.told.of("pixels") == ["SKIPPED images was not made"]
    assert world.events()[-1] == "finished FAILED"


def test_the_end_of_a_job_is_awaited_after_its_commit_but_not_for_long() -> None:
    for closing, seconds in ((2.0, 7.0), (60.0, 15.5)):
        world = World(script=scripts(Script(closing=closing)))
        assert walk(world) == {"images": "SUCCEEDED"}
        assert world.clock.now == pytest.approx(seconds, abs=1.0)


# ------------------------------------------------------------------------------------------- clusters that go


def test_a_job_whose_cluster_is_gone_is_lost_and_followed_by_the_next_attempt() -> None:
    world = World()
    world.clock.after(3.0, partial(world.cluster.restart, 5.0))
    assert walk(world) == {"images": "SUCCEEDED"}
    assert world.cluster.arrived == [("session-1", job_id(1)), ("session-2", job_id(2))]
    assert [attempt.cluster_session for attempt in world.attempts()] == ["session-1", "session-2"]
    assert "attempt ended images LOST" in world.events()
    assert world.told.of("images") == [
        "RUNNING",
        "WAITING no answer: http://127.0.0.1:8265: connection refused",
        "LOST its cluster is gone; another attempt",
        "RUNNING attempt 2",
        f"SUCCEEDED {KEY}",
    ]


def test_a_cluster_that_does_not_answer_for_a_while_loses_nothing() -> None:
    """It is told once each time; the job goes on meanwhile, and may even commit."""
    world = World(script=scripts(Script(running=20.0)))
    for begins in (4.0, 10.0, 20.0):
        world.clock.after(begins, partial(world.cluster.go_down, 5.0))
    assert walk(world) == {"images": "SUCCEEDED"}
    assert world.cluster.arrived == [("session-1", job_id(1))]
    assert len(world.attempts()) == 1
    assert sum(line.startswith("WAITING") for line in world.told.of("images")) == 3
    assert world.clock.now < 23, "it was committed while its cluster was down"
    logs: list[str] = []
    world.cluster.is_down = False
    client: Any = Client(world.cluster)
    show_logs(MemoryStore(world.store.objects), world.driver().run.id, None, False, lambda _: client, logs.append)
    assert logs == ["--- images (attempt 1, SUCCEEDED)", "fine"], "not copied, but the cluster has it"


def test_a_job_that_its_own_cluster_does_not_know_is_submitted_under_the_same_id() -> None:
    """The driver died between writing the attempt and submitting its job."""
    world = World()
    with pytest.raises(Killed):
        walk(world, DiesAfter(2))  # the listing of the source, the attempt
    assert (len(world.attempts()), world.cluster.arrived) == (1, [])
    assert walk(world) == {"images": "SUCCEEDED"}
    assert world.cluster.arrived == [("session-1", job_id(1))]


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("what", ["read", "list", "create", "job", "logs", "session", "submit"])
def test_an_outage_of_the_store_or_the_cluster_changes_nothing_but_the_time(what: str, answers: bool) -> None:
    world = World("images", "pixels")
    assert set(walk(world, Loses(what, times=7, answers=answers)).values()) == {"SUCCEEDED"}
    assert [job.attempt.stage for job in world.cluster.started] == ["images", "pixels"], "no second job"
    assert {attempt.number for job in ("ingest", "baselines") for attempt in world.attempts(job)} == {1}
    assert set(world.events()) >= {f"stage images {status}" for status in ("PENDING", "RUNNING", "SUCCEEDED")}
    assert world.events()[-1] == "finished SUCCEEDED"


def test_a_stage_whose_records_do_not_answer_waits_alone() -> None:
    world = World("images", "other")
    assert walk(world, Loses(f"list artifacts/ingest/{KEY}", times=20))["images"] == "SUCCEEDED"
    ends = {name: when for when, name, status, _ in world.told.stages if status == "SUCCEEDED"}
    assert ends["other"] < 6 < 20 < ends["images"]
    assert world.told.of("images")[0].startswith(f"WAITING no answer: list artifacts/ingest/{KEY}")
    assert world.told.of("images")[1] == "RUNNING"
    assert world.told.lines == []


# ------------------------------------------------------------------------------------------- odd answers


def test_a_job_that_succeeds_without_a_manifest_has_a_minute_to_show_it() -> None:
    world = World(script=scripts(Script(commits=False), Script(commit_late=50.0)))
    assert walk(world) == {"images": "SUCCEEDED"}
    assert len(world.attempts()) == 2
    assert "attempt ended images FAILED" in world.events()
    assert 60 + 50 < world.clock.now < 130
    assert world.told.of("images")[1] == "FAILED its job succeeded without a manifest; another attempt"


@pytest.mark.parametrize("late", [2.0, 60.0])
def test_a_process_that_ray_has_lost_sees_its_successor_and_commits_nothing(late: float) -> None:
    lives_on = Script(status="FAILED", exit_code=None, closing=0.1, lives_on=late)
    world = World(script=scripts(lives_on, Script(running=90.0)))
    assert walk(world) == {"images": "SUCCEEDED"}
    assert world.cluster.superseded == [job_id(1)]
    assert world.cluster.commits == [job_id(2)]
    assert world.manifests()["images"].attempt == 2


# ------------------------------------------------------------------------------------------- signs of life


def test_a_job_that_ray_calls_running_after_its_process_died_is_lost() -> None:
    world = World(script=scripts(Script(status="RUNNING", running=100.0, commits=False), Script()))
    assert walk(world) == {"images": "SUCCEEDED"}
    lost = next(when for when, _, status, _ in world.told.stages if status == "LOST")
    assert 60 - 5 < lost - (1.5 + 100.0) < 75, "its last sign of life was at most 5 s before"
    assert world.told.of("images") == [
        "RUNNING",
        "LOST no sign of life for 60 s; another attempt",
        "RUNNING attempt 2",
        f"SUCCEEDED {KEY}",
    ]
    assert "attempt ended images LOST" in world.events()
    assert world.cluster.stopped == {job_id(1)}
    assert world.log(world.attempts()[0]) == "fine\n"


@pytest.mark.parametrize("suspended", [50.0, 120.0])
def test_a_suspended_process_is_lost_after_a_minute_and_ends_when_it_goes_on(suspended: float) -> None:
    world = World(script=scripts(Script(running=20.0, suspended=suspended), Script(running=100.0)))
    assert walk(world) == {"images": "SUCCEEDED"}
    is_lost = suspended > 60
    assert world.cluster.superseded == [job_id(1)] * is_lost
    assert world.cluster.commits == [job_id(2) if is_lost else job_id(1)]
    assert len(world.attempts()) == 1 + is_lost


class EndsBetween(Network):
    """The job commits, and then dies, between the question for its manifest and the one for the job."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def before(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        job = self.world.cluster.jobs.get(name)
        if what == "job" and job is not None and job.status == "RUNNING":
            self.world.cluster.commit(job)
            job.status = "FAILED"


def test_a_commit_that_comes_between_two_questions_is_seen() -> None:
    world = World(script=scripts(Script(exit_code=1, running=100.0)))
    assert walk(world, EndsBetween(world)) == {"images": "SUCCEEDED"}
    assert len(world.attempts()) == 1


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        (Script.failed(1, "error: first\nerror: no luck\nTraceback\n"), "no luck"),
        (Script.failed(1, "one line\nthe last line\n\n"), "the last line"),
        (Script.failed(None, "", message="Job supervisor actor died"), "Job supervisor actor died"),
        (Script.failed(-9, ""), "exit code -9"),
        (Script.failed(None, ""), "exit code None"),
        (Script(status="STOPPED", commits=False), "stopped from outside"),
    ],
)
def test_the_reason_of_a_failure_is_the_best_that_is_known(script: Script, detail: str) -> None:
    world = World(script=scripts(script))
    assert walk(world) == {"images": "FAILED"}
    assert world.told.of("images")[-1] == f"FAILED {detail}"


# ------------------------------------------------------------------------------------------- attempts


def test_a_command_makes_three_attempts_with_growing_pauses() -> None:
    world = World(script=scripts(Script.failed(pending=1.0, running=1.0, closing=1.0)))
    assert walk(world) == {"images": "FAILED"}
    began = [when for when, _, status, _ in world.told.stages if status == "RUNNING"]
    ended = [when for when, _, status, detail in world.told.stages if status == "FAILED"]
    pauses = [later - earlier for later, earlier in zip(began[1:], ended, strict=False)]
    assert pauses == pytest.approx([1.0 + 1.0, 2.0 + 1.0], abs=0.7), "the pause, and being pending"
    assert [world.log(attempt) for attempt in world.attempts()] == ["error: no luck\n"] * 3
    assert world.events().count("attempt ended images FAILED") == 3
    assert walk(world) == {"images": "FAILED"}, "each command makes its own"
    assert [attempt.number for attempt in world.attempts()] == [1, 2, 3, 4, 5, 6]


def test_the_log_of_an_attempt_is_saved_before_the_next_is_written() -> None:
    world = World(script=scripts(Script.failed(), Script()))
    walk(world)
    written = [name for name in world.store.objects if "/attempts/" in name and "alive" not in name]
    names = [name.rsplit("/", 3)[1:] for name in written]
    assert [[*name[-2:]] for name in names] == [
        ["1", "attempt.json"],
        ["1", "log.txt"],
        ["2", "attempt.json"],
        ["2", "log.txt"],
    ]


def test_a_stage_whose_source_changed_is_planned_anew_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Script.failed(3, "error: the source changed\n")
    by_source = {"source 0": changed, "source 1": changed, "source 2": Script()}
    world = World(script=lambda attempt: by_source[str(attempt.source)])
    with monkeypatch.context() as patched:
        sources = (f"source {number}" for number in count())
        patched.setattr("pipelines.identity.listed_source", lambda _: (next(sources), ("1.png",)))
        assert walk(world) == {"images": "SUCCEEDED"}
    assert len({attempt.key for attempt in world.attempts()}) == 3
    assert world.told.of("images").count("FAILED the source changed; planned anew") == 2


@pytest.mark.parametrize("lost", [{"answers": False}, {"answers": True}])
def test_a_mistake_is_an_answer_to_whoever_submitted_it_even_if_that_answer_got_lost(
    lost: dict[str, bool],
) -> None:
    world = World(script=scripts(Script.failed(2, pending=0.1, running=0.1, closing=0.1)))
    with pytest.raises(Killed):
        walk(world, DiesAfter(1))
    assert walk(world, Loses("submit", **lost)) == {"images": "FAILED"}
    assert len(world.attempts()) == 1


# ------------------------------------------------------------------------------------------- stopping

WHEN = {"pending": 0.5, "running": 3.0, "between two attempts": 6.5, "in its last words": 8.0}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def to_be_stopped(when: str) -> World:
    first = Script(closing=20.0) if when == "in its last words" else Script.failed(running=4.5)
    return World("images", "pixels", script=scripts(first, Script()))


@pytest.mark.parametrize("when", WHEN)
def test_a_wish_to_stop_ends_the_run_and_its_jobs(when: str) -> None:
    world = to_be_stopped(when)
    driver = world.driver()
    world.clock.after(WHEN[when], partial(request_stop, world.store, driver.run.id))
    status, made = driver.walk()
    if when == "in its last words":
        assert (status, len(made)) == ({"images": "SUCCEEDED", "pixels": "STOPPED"}, 1)
    else:
        assert (status, made) == ({"images": "STOPPED", "pixels": "STOPPED"}, [])
        assert world.clock.now < WHEN[when] + STOP_SECONDS + 1
    world.clock.sleep(100)
    assert all(job.ended for job in world.cluster.started)
    assert len(world.cluster.started) == 1
    assert world.events()[-1] == "finished STOPPED"


@pytest.mark.parametrize("when", ["pending", "running", "between two attempts"])
def test_ctrl_c_writes_the_wish_first_then_stops_the_jobs(when: str) -> None:
    world = to_be_stopped(when)
    world.clock.after(WHEN[when], interrupt)
    network = Recorder()
    with pytest.raises(KeyboardInterrupt):
        walk(world, network)
    assert world.stop_wish() is not None
    stops = [request for request in network.requests if "stop" in request]
    assert stops[-2].startswith("create runs/")
    assert stops[-1].startswith(f"stop {ID}")
    assert "stage images STOPPED" in world.events()
    assert "finished STOPPED" not in world.events()
    world.clock.sleep(100)
    assert "images" not in world.manifests()


def test_ctrl_c_while_the_store_does_not_answer_waits_for_it() -> None:
    world = to_be_stopped("running")
    world.clock.after(3.0, interrupt)
    with pytest.raises(KeyboardInterrupt):
        walk(world, Loses("create", "stop.json"))
    assert world.told.lines == [
        "stopping images",
        "waiting for the store: create runs/some-20261122-120000-0000/stop.json got lost",
    ]
    assert world.stop_wish() is not None
    assert [job.status for job in world.cluster.started] == ["STOPPED"]


class Recorder(Network):
    """Keeps what changes something."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []

    def after(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        if what in {"create", "submit", "stop"}:
            self.requests.append(f"{what} {name}")


def test_a_stopped_job_of_a_run_that_is_to_stop_is_not_tried_again() -> None:
    """`vitflow stop` writes the wish and stops the job; the driver may see the job first."""
    world = World()
    driver = world.driver()

    def stop() -> None:
        driver.look_for_stop_at = 1e9
        request_stop(world.store, driver.run.id)
        world.cluster.stop(job_id(1))

    world.clock.after(3.0, stop)
    assert driver.walk()[0] == {"images": "STOPPED"}
    assert len(world.attempts()) == 1


def test_nothing_is_begun_after_the_wish() -> None:
    world = World("images", "other")
    driver = world.driver()
    request_stop(world.store, driver.run.id)
    driver.look_for_stop_at = 1e9  # the wish comes right after it was looked for
    assert driver.walk()[0] == {"images": "STOPPED", "other": "STOPPED"}
    assert (world.attempts(), world.cluster.arrived) == ([], [])


def test_a_job_of_another_run_is_never_stopped() -> None:
    """Two runs need one artifact: the second follows the job of the first, and is stopped."""
    world = World()
    other = world.new_run()
    with pytest.raises(Killed):
        walk(world, DiesAfter(3))
    driver = world.driver(run=other)
    world.clock.after(3.0, partial(request_stop, world.store, other))
    network = driver.connection.network = Recorder()  # type: ignore[attr-defined]
    assert driver.walk()[0] == {"images": "STOPPED"}
    assert not [request for request in network.requests if request.startswith("stop ")]
    world.clock.sleep(60)
    assert walk(world) == {"images": "CACHED"}


def test_the_job_of_an_attempt_that_another_run_wrote_a_moment_before_is_not_stopped() -> None:
    writers = set()
    for number in range(1, 15):
        world = World()
        other = world.driver(run=world.new_run())
        driver = world.driver(network := Interleaved(number, other))
        world.clock.after(3.0, partial(request_stop, world.store, driver.run.id))
        assert driver.walk()[0] == {"images": "STOPPED"}
        (attempt,) = world.attempts()
        assert ("stop" in network.asked) == (attempt.run == driver.run.id)
        writers.add(attempt.run == driver.run.id)
    assert writers == {True, False}, "now the one was first, now the other"


def test_a_slot_that_a_stopped_stage_leaves_is_given_to_nobody() -> None:
    world = World("images", "other")
    driver = world.driver()
    driver.parallel = 1
    world.clock.after(3.0, partial(request_stop, world.store, driver.run.id))
    assert driver.walk()[0] == {"images": "STOPPED", "other": "STOPPED"}
    assert sum(event.endswith("PENDING") for event in world.events()) == 1


def test_a_cluster_that_is_gone_does_not_keep_a_run_from_stopping() -> None:
    world = World()
    driver = world.driver()
    world.clock.after(3.0, partial(world.cluster.go_down, 1e5))
    world.clock.after(3.0, partial(request_stop, world.store, driver.run.id))
    assert driver.walk()[0] == {"images": "STOPPED"}
    assert "could not stop" in world.told.lines[0]
    assert world.clock.now < 10


# ------------------------------------------------------------------------------------------- several drivers


def failing_once() -> World:
    return World("images", "pixels", script=scripts(Script.failed(), Script()))


@pytest.mark.parametrize("number", range(1, 27))
def test_a_driver_that_dies_after_any_of_its_actions_is_followed_by_one_that_goes_on(number: int) -> None:
    world = failing_once()
    with pytest.raises(Killed):
        walk(world, DiesAfter(number))
    world.clock.sleep(Random(number).choice([0.0, 3.0, 60.0]))
    assert set(walk(world).values()) <= {"CACHED", "SUCCEEDED"}
    assert len(world.cluster.commits) == 2
    assert len(set(world.cluster.arrived)) == len(world.cluster.arrived) == 4, "no job twice"
    assert [attempt.number for attempt in world.attempts("baselines")] == [1, 2]
    assert all(world.log(attempt) for job in ("ingest", "baselines") for attempt in world.attempts(job)[:-1])


def test_that_was_after_every_action() -> None:
    network = Network()
    walk(failing_once(), network)
    assert network.writes == 26


class Interleaved(Network):
    """Before its n-th request, another driver takes a step."""

    def __init__(self, number: int, other: Driver) -> None:
        super().__init__()
        self.number, self.other = number, other
        self.asked: set[str] = set()

    def before(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        self.asked.add(what)
        self.number -= 1
        if self.number == 0:
            self.other.step()


@pytest.mark.parametrize("number", range(1, 60))
def test_two_drivers_on_one_store_make_one_job(number: int) -> None:
    """The second takes a step between any two questions of the first, then each of its steps between two of these."""
    world = failing_once()
    second = world.driver()

    def step() -> None:
        if second.step():
            world.clock.after(driver.POLL_SECONDS, step)

    world.clock.after(0.05, step)
    assert set(walk(world, Interleaved(number, second)).values()) == {"SUCCEEDED"}
    world.clock.sleep(10)
    assert set(second.status.values()) == {"SUCCEEDED"}
    assert len(world.cluster.started) == 4
    assert len(world.cluster.commits) == 2
    assert [attempt.number for attempt in world.attempts("ingest")] == [1, 2]


# ------------------------------------------------------------------------------------------- with a real store


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (decisions, "UNREACHABLE_SECONDS"),
        (decisions, "ASK_SECONDS"),
        (driver, "POLL_SECONDS"),
        (pipelines.store.protocol, "UNREACHABLE_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 0.001)


REPORT = {
    "title": "Some",
    "question": "Which?",
    "headline": "This one.",
    "note": "",
    "accuracies": [],
    "verdicts": [],
}


def pipeline(images: Path) -> Pipeline:
    """One image to ingest, and a report on it."""
    (images / "train" / "a").mkdir(parents=True)
    (images / "train" / "a" / "1.png").write_bytes(b"as good as an image here")
    ingest = {"job": "ingest", "source": {"kind": "folder", "root": str(images)}}
    report = {"job": "report", "title": "Some", "of": ["images"]}
    return parse_pipeline({"name": "two", "stages": {"images": ingest, "report": report}}, "test")


class Forgetful(FolderStore):
    """Of each thing that it is asked for, the first answer is lost: what was to be written is there all the same."""

    def __init__(self, root: Path) -> None:
        self.asked: set[tuple[str, str]] = set()
        super().__init__(root)

    def _answer(self, what: str, name: str, answer: Any) -> Any:
        if name != Layout.STORE and (what, name) not in self.asked:
            self.asked.add((what, name))
            raise StoreUnreachable(f"can't {what} {name}")
        return answer

    def read(self, name: str, limit: int | None = None) -> Any:
        return self._answer("read", name, super().read(name, limit))

    def create(self, name: str, data: bytes) -> Any:
        # an event has a new name at each try: these are told apart by their stage and status
        name_, what = name, json.loads(data) if "/events/" in name else {}
        if what:
            name_ = f"{what['event']} {what.get('stage')} {what.get('status')}"
        return self._answer("create", name_, super().create(name, data))

    def names(self, folder: str) -> Any:
        return self._answer("list", folder, super().names(folder))

    def local(self, folder: str, files: Any) -> Any:
        return self._answer("fetch", folder, super().local(folder, files))


class Committing(Jobs):
    """A cluster, and the connection to it, whose jobs have committed, or ended with this exit code, when they are
    submitted. `source` is removed by the first job; the manifest of the stage `damaged` is, before anybody reads it."""

    def __init__(self, store: Store, code: int = 0, source: Path | None = None, damaged: str = "") -> None:
        super().__init__()
        self.store, self.code, self.source, self.damaged = store, code, source, damaged

    def cluster(self) -> Any:
        return self

    def keep(self) -> None:
        """Nothing."""

    def submit(self, submission_id: str, command: str, settings: object, metadata: dict[str, str]) -> None:
        assert submission_id not in self.states
        self.ended(submission_id, self.code, "error: said so\n" if self.code else "fine\n")
        if self.source is not None and self.source.exists():
            shutil.rmtree(self.source)
        if self.code:
            return
        job, key = Path(command.rpartition(" ")[2]).parts[-5:-3]
        with self.store.staging(Layout.files(job, key, 1)) as staging:
            if job == "report":
                (staging.path / "report.json").write_text(json.dumps(REPORT))
        commit(self.store, make_manifest(job, key=key, stage=job, files=staging.files))
        if metadata["stage"] == self.damaged:
            Path(self.store.uri, Layout.manifest(job, key)).write_text("{")


@pytest.fixture
def store(hurried: None, tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "s")


@pytest.fixture
def run(store: FolderStore, tmp_path: Path) -> runs.Run:
    return runs.start_run(store, pipeline(tmp_path / "images"), ("images", "report"))


def drive(store: Store, run: runs.Run, connection: Committing) -> list[PlannedStage]:
    return running._drive(store, run, nullcontext(connection), 2, "vitflow run two")


def test_a_store_that_loses_every_answer_once_changes_nothing_about_a_run(
    store: FolderStore, run: runs.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that a driver asks of the store is asked again: also what it reads when the run is over."""
    connection = Committing(store)
    made = drive(Forgetful(store.root), run, connection)
    assert [stage.state for stage in made] == ["cached", "cached"]
    assert {manifest.job for manifest in all_manifests(store)} == {"ingest", "report"}
    assert len(connection.states) == 2
    assert runs.run_status(store, run.id)["status"] == "SUCCEEDED"
    said = capsys.readouterr().out
    assert said.count("Which? This one.") == 1, "the report is shown, once"
    assert "waiting for the store: can't fetch" in said, "it was asked for after the walk"


def test_a_source_that_goes_during_a_run_does_not_undo_what_was_made_of_it(
    store: FolderStore, run: runs.Run, tmp_path: Path
) -> None:
    made = drive(store, run, Committing(store, source=tmp_path / "images"))
    assert not (tmp_path / "images").exists()
    assert [stage.manifest and stage.manifest.job for stage in made] == ["ingest", "report"]


def test_a_stage_that_ends_with_2_fails_its_run_with_1(
    store: FolderStore, run: runs.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    connection = Committing(store, code=2)
    with pytest.raises(typer.Exit) as ended:
        drive(store, run, connection)
    assert ended.value.exit_code == 1
    assert len(connection.states) == 1, "a mistake of the user's is not tried again"
    assert "said so" in capsys.readouterr().out


def test_a_manifest_that_is_damaged_while_its_stage_is_followed_fails_that_stage_alone(
    store: FolderStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = pipeline(tmp_path / "images").model_dump(mode="json")["stages"]
    both = {"name": "both", "stages": {"small": stages["images"] | {"short_side": 32}, **stages}}
    run = runs.start_run(store, parse_pipeline(both, "test"), ("small", "images", "report"))
    with pytest.raises(typer.Exit) as ended:
        drive(store, run, Committing(store, damaged="small"))
    assert ended.value.exit_code == 1
    statuses = {stage["stage"]: stage["status"] for stage in runs.run_status(store, run.id)["stages"]}
    assert statuses == {"small": "FAILED", "images": "SUCCEEDED", "report": "SUCCEEDED"}
    assert "manifest.json is damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    "numbers", [{signal.SIGINT}, {signal.SIGHUP}, {signal.SIGTERM}, {signal.SIGHUP, signal.SIGINT}]
)
def test_ctrl_c_kill_and_closing_the_terminal_stop_a_run_and_say_how_to_continue_it(
    store: FolderStore,
    tmp_path: Path,
    vitflow_here: Vitflow,
    monkeypatch: pytest.MonkeyPatch,
    numbers: set[signal.Signals],
) -> None:
    recipe = pipeline(tmp_path / "images").model_dump(mode="json", exclude_defaults=True)
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(recipe))
    connection = Committing(store)

    def submit(*_: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number in numbers:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # they arrive together

    monkeypatch.setattr(connection, "submit", submit)
    monkeypatch.setattr(LocalConnection, "cluster", lambda _: connection)
    done = vitflow_here("run", tmp_path / "two.yaml", "--store", store.uri, check=130)
    assert "stopping images" in done.stdout and "To continue: vitflow run" in done.stdout
    (run,) = history.runs(store)
    assert runs.run_status(store, run)["status"] == "STOPPED"
    assert signal.getsignal(signal.SIGHUP) is signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
