"""Starting the runs of a schedule when they are due.

All state is in the store's create-only objects. So the process that serves a schedule (`schedule serve`, a timer, or
two of them by mistake) may be killed at any moment: a tick is decided once (`pipelines.schedules.ticks`); its run has
the tick in its id and starts once; Ray accepts the submission id of the run's driver once. A tick gets a run only after
the end of the run before was recorded.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile

from pipelines.cluster.jobs_client import ClusterUnreachable
from pipelines.engine import plan, submission
from pipelines.engine.history import end_run
from pipelines.engine.latest import named_models
from pipelines.engine.promotion import is_unsettled
from pipelines.engine.runs import Run, run_status, start_run, stop_run
from pipelines.engine.status import Status
from pipelines.schedules.notices import SKIPS, Event, announce, send_announced
from pipelines.schedules.schedule import Reach, Schedule, tick_run
from pipelines.schedules.ticks import (
    Decision,
    End,
    Position,
    Promotion,
    Tick,
    decide,
    is_decided,
    read_end,
    record_end,
    refresh,
)
from pipelines.spec import RecipeError
from pipelines.store import (
    PROMOTED,
    Over,
    Store,
    alias_history,
    now,
    read_events,
    read_manifest,
    read_over,
    read_plan,
    stop_reason,
    who,
)

DRIVERS = 3  # drivers of one run that may die on the same cluster before the run is given up
STARTING = timedelta(minutes=5)  # that another process may need to start a cluster and submit a run's first driver
COUNTED = 1_000  # ticks that were not served; more are not counted


def attend(
    store: Store,
    schedule: Schedule,
    moment: datetime,
    reach: Reach,
    grace: timedelta | None,
    position: Position | None = None,
) -> Iterator[str]:
    """Start the runs and drivers that a schedule needs at this moment; yield a line for each action.

    If the last tick that is due has no decision, decide: a run, none because every result exists, or none because the
    previous run has not ended. If no tick is due and the driver of the last run is gone, submit another. Record the end
    of the last run. Do nothing for a paused schedule.

    Args:
        moment: now, UTC.
        reach: how to reach the schedule's cluster.
        grace: older ticks are missed, unless the schedule catches up; None: the last tick is due however old it is.
        position: what an earlier call found, for fewer requests.

    Raises:
        StoreError, ClusterUnreachable, LocalRayError: the next call continues.
        ValueError: the schedule's cluster cannot be used.
    """
    if schedule.state == "active":
        grace = grace if schedule.catch_up == "none" else None
        yield from _Look(store, schedule, moment, reach, grace, position or Position()).attend()


def last_outcome(store: Store, schedule: Schedule, reach: Reach, position: Position) -> tuple[str | None, str] | None:
    """Return the last run of a schedule and its status, NOTHING_NEW if the last tick found all results; None if none.

    Args:
        position: brought up to date.
    """
    last = position.last
    if last is None:
        return None
    if last.decision == "nothing_new":
        return last.run, "NOTHING_NEW"
    assert last.run is not None
    return last.run, _status(store, schedule, last.run, reach)


@dataclass
class _Look:
    """One look at one schedule."""

    store: Store
    schedule: Schedule
    moment: datetime
    reach: Reach
    grace: timedelta | None
    position: Position

    def attend(self) -> Iterator[str]:
        refresh(self.store, self.schedule.name, self.position)
        status = yield from self.follow()
        yield from self.notify()  # at once, because the cluster may not answer
        tick = self.schedule.last_tick(self.moment)
        if tick is not None and not is_decided(self.store, self.schedule.name, self.position, tick):
            yield from self.decide(tick, status)
        elif status == Status.UNFINISHED:
            yield from self.submit()
        yield from self.notify()

    def follow(self) -> Generator[str, None, str | None]:
        """Record the end of the last run if it is over; return its status if it is not."""
        last, name = self.position.last, self.schedule.name
        if last is None or last.decision == "nothing_new" or self.position.end is not None:
            return None
        assert last.run is not None
        self.position.end = read_end(self.store, name, last.number)
        if self.position.end is not None:
            self.position.look_at = 0.0  # another server wrote it, and may have died before it sent a notice
            return None
        status = _status(self.store, self.schedule, last.run, self.reach)
        if status in {Status.UNFINISHED, Status.RUNNING}:
            return status
        if status == Status.STOPPED and read_over(self.store, last.run) is None:
            yield from self.stop(last.run)  # whoever stopped it may have been killed since
        yield from self.end(last.run)
        return None

    def decide(self, tick: datetime, status: str | None) -> Iterator[str]:
        """Decide on a tick that is due. `status`: of the last run, None if it is over."""
        run = self.position.last_run
        is_alive = status == Status.RUNNING or (
            status == Status.UNFINISHED and (self.is_starting() or self.is_driven())
        )
        is_late = self.is_late(tick)
        if status == Status.UNFINISHED and (is_alive or is_late):
            yield from self.submit()
        if is_alive and self.schedule.overlap == "queue":
            return
        if is_late:
            passed, following = self.passed(tick), next(self.schedule.next_ticks(self.moment))
            why = "nothing served the schedule then"
            if self.record(tick, "missed", run, f"{why}; {passed} ticks" if passed > 1 else why):
                yield f"missed {_shown(tick)}, because {why}; next {_shown(following)}"
        elif is_alive:
            if self.position.skips + 1 == SKIPS:
                self.announce(self.position.number + 1, "skipped")
            if self.record(tick, "skip", run, f"{run} has not ended"):
                yield f"skipped {_shown(tick)}: {run} has not ended (`vitflow stop {run}` ends it)"
        else:
            yield from self.begin(tick, status)

    def begin(self, tick: datetime, status: str | None) -> Iterator[str]:
        """Start the run of a tick, unless every result exists.

        Args:
            status: None if the last run is over; otherwise its driver is gone.
        """
        is_cached, run = self.is_cached(), tick_run(self.store, self.schedule, tick)
        if status is not None:
            assert self.position.last_run is not None
            # what it has committed, the new run finds by its key
            yield from self.stop(self.position.last_run, "" if is_cached else f"its driver died; continued by {run}")
            yield from self.end(self.position.last_run)
        passed = self.passed(tick)
        why = f"{passed - 1} earlier ticks were not served" if passed > 1 else ""
        if is_cached:
            why = "; ".join(filter(None, ["every result exists", why]))
            if self.position.failures:
                self.announce(self.position.number + 1, "recovered")
            if self.record(tick, "nothing_new", self.position.last_run, why):
                yield f"nothing new for {_shown(tick)}: every result exists"
        elif self.record(tick, "run", run, why):
            yield from self.submit()

    def record(self, tick: datetime, decision: Decision, run: str | None, why: str) -> Tick | None:
        """Record a decision; None if another process has just decided, and acts; if it dies, the next look does."""
        return decide(self.store, self.schedule.name, self.position, tick, decision, run, why)

    def is_late(self, tick: datetime) -> bool:
        """Whether a tick was due so long ago that it is missed. In a queue, it is due until the last run is over."""
        end = self.position.end if self.schedule.overlap == "queue" else None
        since = tick if end is None else max(tick, datetime.fromisoformat(end.time))
        return self.grace is not None and self.moment - since > self.grace

    def passed(self, tick: datetime) -> int:
        """Return the number of ticks from the last decision to `tick`, including it; at most COUNTED."""
        since = datetime.fromisoformat(self.schedule.time)
        if self.position.newest is not None:
            since = max(since, self.position.newest.until)
        following = islice(self.schedule.next_ticks(since), COUNTED)
        return max(1, sum(1 for _ in takewhile(lambda each: each <= tick, following)))

    def is_starting(self) -> bool:
        """Whether the last run, which has no driver, may be about to get its first one from another process."""
        last = self.position.last
        assert last is not None and last.run is not None
        has_driver = any(event["event"].startswith("driver") for event in read_events(self.store, last.run))
        return not has_driver and self.moment - datetime.fromisoformat(last.time) < STARTING

    def is_driven(self) -> bool:
        """Whether the last run has a driver that its events do not name, because whoever submitted it was killed."""
        run = self.position.last_run
        assert run is not None
        for event in reversed(read_events(self.store, run)):
            if event["event"] == "driver submitted":
                cluster = self.reach.clusters(self.schedule)(event["cluster_address"])
                with suppress(ClusterUnreachable, ValueError):  # then it is as dead as the recorded ones
                    return submission.last_driver(self.store, run, cluster)[1]
                break
        return False

    def is_cached(self) -> bool:
        """Whether every result of the pipeline exists.

        Only a cluster on this machine has the same files. For any other, the driver plans.
        """
        if self.schedule.address is not None and not submission.is_loopback(self.schedule.address):
            return False
        pipeline = self.schedule.pipeline
        names = pipeline.order()
        try:
            latest = named_models(self.store, pipeline, names).models
            planned = plan.plan_pipeline(self.store, pipeline, names, latest=latest)
        except RecipeError:  # a source cannot be read: the driver reports that in the run
            return False
        return all(stage.manifest is not None and not is_unsettled(self.store, stage) for stage in planned)

    def submit(self) -> Iterator[str]:
        """Start the last run unless it has started, and submit its driver unless one is running."""
        run_id = self.position.last_run
        assert run_id is not None
        run = self.start(run_id)
        with self.reach.target(self.schedule) as (cluster, ray_folder):
            session = cluster.session_name
            # drivers of other sessions do not count: they ended because their cluster did
            submitted = [event for event in read_events(self.store, run_id) if event["event"] == "driver submitted"]
            drivers = [event["submission_id"] for event in submitted if event["cluster_session"] == session]
            # two servers may each record the same driver; the other one, by its own clock, may just have started one
            if len({*drivers}) < DRIVERS or submission.last_driver(self.store, run_id, cluster)[1]:
                driver = submission.submit_driver(self.store, run, cluster, self.schedule.parallel, ray_folder)
                yield f"{run_id}: {driver} is running on {cluster.address}"
                return
        last = drivers[-1]
        end_run(self.store, run_id, Status.FAILED, f"{DRIVERS} drivers died; see the log of Ray's job {last}")
        yield from self.end(run_id)

    def start(self, run: str) -> Run:
        """Write the plan of a tick's run, or read the one that it has."""
        return start_run(self.store, self.schedule.pipeline, tuple(self.schedule.pipeline.stages), run_id=run)

    def stop(self, run: str, why: str = "") -> Iterator[str]:
        """Stop a run's jobs and record that it was stopped, with the reason of the first request to stop it."""
        if read_plan(self.store, run) is None:
            self.start(run)
        for line in stop_run(self.store, run, self.reach.clusters(self.schedule), why):
            yield f"{run}: {line}"
        end_run(self.store, run, Status.STOPPED, stop_reason(self.store, run))

    def end(self, run: str) -> Iterator[str]:
        """Record how the last run ended."""
        last = self.position.last
        assert last is not None
        status, over = run_status(self.store, run), read_over(self.store, run)
        failed = next((stage for stage in status["stages"] if stage["status"] == Status.FAILED), dict[str, str]())
        detail = "" if over is None else over.detail
        end = End(
            status=status["status"],
            stage=failed.get("stage"),
            error=failed.get("detail") or detail,
            alias=promotion(self.store, run, over),
            time=now(),
            who=who(),
        )
        if end.failed or (end.status == Status.SUCCEEDED and last.failures):
            self.announce(last.number, "failed" if end.failed else "recovered")
        if end.alias is not None:
            self.announce(last.number, end.alias.outcome)
        record_end(self.store, self.schedule.name, last.number, end)
        self.position.end = end
        yield ", ".join(filter(None, [f"{run}: {end.status}", end.why]))

    def announce(self, number: int, event: Event) -> None:
        """Write down a notice about a tick, if this process sends any, before the record that it is about."""
        if self.reach.send is not None:
            announce(self.store, self.schedule.name, self.position, number, event)

    def notify(self) -> Iterator[str]:
        """Send the notices that are due."""
        if self.reach.send is not None:
            yield from send_announced(self.store, self.schedule.name, self.position, self.moment, self.reach.send)


def promotion(store: Store, run: str, over: Over | None) -> Promotion | None:
    """Return what a run did to an alias; None if it compared nothing, found another run's comparison, or died before.

    A move is read from the alias, not from the run's end: the driver may have died after it.
    """
    plan = read_plan(store, run)
    assert plan is not None
    promotes = [stage for stage in plan["pipeline"]["stages"].values() if stage["job"] == "promote"]
    for alias in dict.fromkeys(stage["against"] for stage in promotes):
        for move in alias_history(store, alias[1:], since=plan["aliases"].get(alias, 0)):
            if move.run == run and move.report is not None:
                compared = read_manifest(store, "promote", move.report)
                why = "" if compared is None else str(compared.metrics["reason"])
                return Promotion(alias=alias[1:], outcome="promoted", why=why)
    for stage in () if over is None else over.stages:
        decided = (stage.model_extra or {}).get("promotion")
        # its own comparison may be CACHED: the driver that made it was killed, and the next one found it
        if decided is not None and decided.get("by") == run and decided["verdict"] not in (PROMOTED, "same"):
            return Promotion(alias=decided["alias"], outcome="refused", why=decided["reason"])
    return None


def _status(store: Store, schedule: Schedule, run: str, reach: Reach) -> str:
    """Return a run's status; UNFINISHED also if it was decided on but has not started."""
    if read_plan(store, run) is None:
        return Status.UNFINISHED
    return str(run_status(store, run, reach.clusters(schedule))["status"])


def _shown(tick: datetime) -> str:
    return f"{tick.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
