"""`schedule serve`: attends to all schedules of a store while it runs. It listens on no port.

What it keeps, the positions of the schedules' ticks, only saves requests.

It waits for at most LOOK_SECONDS by the monotonic clock, then decides from the store and the current wall clock, so
setting the clock forward or back does not matter.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from datetime import datetime, timedelta

from pipelines.cluster.jobs_client import ClusterUnreachable
from pipelines.cluster.local import LocalRayError
from pipelines.environment import environment
from pipelines.schedules.due import attend
from pipelines.schedules.heartbeat import METRICS_FILE, notify_watchdog, write_metrics
from pipelines.schedules.schedule import Reach, Schedule, all_schedules
from pipelines.schedules.ticks import Position
from pipelines.store import Store, StoreError
from vit_model.errors import UserError

LOOK_SECONDS = 10.0  # between two checks of the store for changed schedules and dead drivers
GRACE = timedelta(seconds=60)  # older ticks were missed
THREADS = 32  # schedules attended to at once, because a cluster that does not answer takes ten seconds


class _Server:
    """A server that attends to each schedule in a thread, and never twice at once to the same schedule."""

    def __init__(self, store: Store, reach: Reach, say: Callable[[str], None]) -> None:
        self.store, self.reach, self.say = store, reach, say
        self.served: dict[str, Schedule] = {}
        self.attending: dict[str, Future[None]] = {}
        self.printed: dict[str, str] = {}
        self.positions: dict[str, Position] = {}

    def look(self, now: datetime, threads: Executor) -> float:
        """Attend to the active schedules; return the seconds until the next look."""
        try:
            active = {schedule.name: schedule for schedule in all_schedules(self.store) if schedule.state == "active"}
        except StoreError as error:
            self._say_once("", f"cannot read the schedules: {error}")
            return LOOK_SECONDS
        self.printed.pop("", None)
        ticks = {name: next(schedule.next_ticks(now)) for name, schedule in active.items()}
        for name in self.served.keys() - active.keys():
            self.say(f"{name}: no longer served")
        for name, schedule in active.items():
            if self.served.get(name) != schedule:
                line = f"{schedule.cron} {schedule.timezone}, next {ticks[name]:%Y-%m-%d %H:%M:%S} UTC"
                self.say(f"{name}: {line}")
            if name not in self.attending or self.attending[name].done():
                position = self.positions.setdefault(name, Position())
                self.attending[name] = threads.submit(self._attend, schedule, now, position)
        self.served = active
        try:
            write_metrics({name: self.positions[name] for name in active})
            self.printed.pop("metrics", None)
        except OSError as error:
            self._say_once("metrics", f"cannot write {METRICS_FILE}: {error}")
        return min([LOOK_SECONDS, *((tick - now).total_seconds() for tick in ticks.values())])

    def _attend(self, schedule: Schedule, now: datetime, position: Position) -> None:
        """Attend to one schedule; print errors, and retry at the next look."""
        try:
            for line in attend(self.store, schedule, now, self.reach, GRACE, position):
                self._say_once(schedule.name, line)
        except (StoreError, ClusterUnreachable, LocalRayError, UserError) as error:
            self._say_once(schedule.name, f"{error}; retrying")
        except Exception:  # a bug must not end the other schedules, nor go unnoticed
            traceback.print_exc()

    def _say_once(self, name: str, line: str) -> None:
        if self.printed.get(name) != line:
            self.printed[name] = line
            self.say(f"{name}: {line}" if name else line)


def serve(store: Store, reach: Reach, say: Callable[[str], None]) -> None:
    """Attend to the store's schedules until SIGTERM or SIGINT; the runs' drivers are jobs and continue.

    Args:
        reach: how to reach the schedules' clusters.
        say: prints a line.
    """
    server = _Server(store, reach, say)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(f"serving {store.uri}")
    with environment().pool(THREADS) as threads:
        try:
            while True:
                seconds = server.look(environment().utc(), threads)
                notify_watchdog()
                environment().sleep(seconds)  # by the monotonic clock
        except KeyboardInterrupt:
            say("ending; started runs continue")
            threads.shutdown(cancel_futures=True)
    signal.signal(signal.SIGTERM, before)
