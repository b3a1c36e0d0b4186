"""`schedule serve`: attends to all schedules of a store, as long as it runs. Remembers nothing, listens on nothing."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from apscheduler.schedulers.blocking import BlockingScheduler
from apscheduler.triggers.base import BaseTrigger

from pipelines.cluster import ClusterUnreachable
from pipelines.local_ray import LocalRayError
from pipelines.schedule import Schedule, all_schedules, attend
from pipelines.store import Store, StoreError

LOOK_SECONDS = 10.0  # between two looks at the store: for schedules that others change, for drivers that died
GRACE = timedelta(seconds=60)  # a tick that is older was missed


class _Waking(BaseTrigger):
    """At every tick of a schedule, and every LOOK_SECONDS; first at once."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        if previous_fire_time is None:
            return now
        return min(next(self.schedule.next_ticks(now)), now.astimezone(UTC) + timedelta(seconds=LOOK_SECONDS))


class _Server:
    """The jobs of the scheduler, each in a thread, no schedule twice at once."""

    def __init__(self, store: Store, token_file: Path | None, say: Callable[[str], None]) -> None:
        self.store, self.token_file, self.say = store, token_file, say
        # a look that is late is taken once; that a schedule is still being attended to is no news
        logging.getLogger("apscheduler").setLevel(logging.ERROR)
        self.scheduler = BlockingScheduler(
            timezone=UTC, job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        )
        self.served: dict[str, Schedule] = {}
        self.said: dict[str, str] = {}

    def look(self) -> None:
        """Serve the schedules that are active now."""
        try:
            active = {found.name: found for found in all_schedules(self.store) if found.state == "active"}
        except StoreError as error:
            self._say_once("", f"no schedules can be read: {error}")
            return
        self.said.pop("", None)
        for name in self.served.keys() - active.keys():
            self.scheduler.remove_job(f"schedules/{name}")
            self.say(f"{name}: no longer served")
        for name, schedule in active.items():
            if self.served.get(name) != schedule:
                job = f"schedules/{name}"
                self.scheduler.add_job(self.wake, _Waking(schedule), [name], id=job, replace_existing=True)
                following = next(schedule.next_ticks(datetime.now(UTC)))
                self.say(
                    f"{name}: {schedule.cron} {schedule.timezone}, next {following:%Y-%m-%d %H:%M:%S} UTC"
                )
        self.served = active

    def wake(self, name: str) -> None:
        """Attend to one schedule; what goes wrong with it is said, and tried again at the next look."""
        try:
            for line in attend(self.store, name, datetime.now(UTC), self.token_file, GRACE):
                self._say_once(name, line)
        except (StoreError, ClusterUnreachable, LocalRayError, ValueError) as error:
            self._say_once(name, f"{error}; will be tried again")

    def _say_once(self, name: str, line: str) -> None:
        if self.said.get(name) != line:
            self.said[name] = line
            self.say(f"{name}: {line}" if name else line)


def serve(store: Store, token_file: Path | None, say: Callable[[str], None]) -> None:
    """Attend to the store's schedules until SIGTERM or SIGINT; the runs' drivers are jobs and go on.

    Args:
        token_file: with the token of the clusters at the schedules' addresses.
        say: told one line for each thing that happens.
    """
    server = _Server(store, token_file, say)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(f"serving {store.uri}")
    server.scheduler.add_job(
        server.look, "interval", seconds=LOOK_SECONDS, id="schedules", next_run_time=datetime.now(UTC)
    )
    try:
        server.scheduler.start()
    except KeyboardInterrupt:
        say("ending; runs go on")
        server.scheduler.shutdown()
