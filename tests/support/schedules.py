"""A schedule in a store, its clock, and its cluster as far as it sees it: jobs that run until they are ended."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipelines.cluster.jobs_client import JobState
from pipelines.engine import plan
from pipelines.engine.history import end_run
from pipelines.environment import Environment, using
from pipelines.recipe.load import parse_pipeline
from pipelines.schedules.due import attend
from pipelines.schedules.notices import Send
from pipelines.schedules.schedule import Reach, Schedule, add_schedule, find_schedule, tick_run
from pipelines.schedules.ticks import Position
from pipelines.store import commit, open_store
from pipelines.store.folder import FolderStore
from tests.simulation.loop import Killed
from tests.support.records import make_manifest

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
GRACE = timedelta(seconds=60)
DIGITS = parse_pipeline({"name": "one", "stages": {"digits": {"job": "ingest", "source": {"kind": "digits"}}}}, "test")


@dataclass
class JobsOnly:
    """Each job is RUNNING from its submission on; `state` has them by submission id."""

    address: str = "http://127.0.0.1:8265"
    session_name: str = "session-1"
    state: dict[str, str] = field(default_factory=dict)

    def submit(self, submission_id: str, *_: object) -> None:
        self.state.setdefault(submission_id, "RUNNING")

    def job(self, submission_id: str) -> JobState | None:
        status = self.state.get(submission_id)
        return None if status is None else JobState(submission_id, status, "", None)

    def jobs(self) -> list[JobState]:
        return [JobState(name, status, "", None) for name, status in self.state.items()]

    def stop(self, submission_id: str) -> None:
        if self.state.get(submission_id) == "RUNNING":
            self.state[submission_id] = "STOPPED"

    def drivers(self, run: str) -> list[str]:
        """The states of a run's drivers, in order."""
        return [status for name, status in self.state.items() if name.startswith(f"driver-{run}-")]

    def drivers_die(self) -> None:
        for name in self.state:
            self.state[name] = "FAILED"


class Reached(Reach):
    """The way to such a cluster, whatever the schedule's address."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(None, **fields)
        object.__setattr__(self, "ray", JobsOnly())

    ray: JobsOnly

    @contextmanager
    def target(self, schedule: Schedule) -> Iterator[tuple[Any, Path | None]]:
        yield self.ray, None

    def clusters(self, schedule: Schedule) -> Callable[[str], Any]:
        return lambda _: self.ray


class Clock(Environment):
    """It stands still until it is set."""

    def __init__(self) -> None:
        self.moment = NOON - timedelta(seconds=30)

    def utc(self) -> datetime:
        return self.moment

    def sleep(self, seconds: float) -> None:
        self.moment += timedelta(seconds=seconds)


class Scheduled:
    """A schedule for every minute, written half a minute before noon; its store, its cluster and its clock."""

    def __init__(self, folder: Path, send: Send | None = None, **fields: Any) -> None:
        store = open_store(str(folder / "s"))
        assert isinstance(store, FolderStore)
        self.store, self.clock, self.reach = store, Clock(), Reached(send=send)
        self.ray = self.reach.ray
        self.write(**fields)

    def write(self, **fields: Any) -> None:
        """Add the schedule, or change it."""
        defaults: dict[str, Any] = {"name": "often", "pipeline": DIGITS, "recipe": "one.yaml", "cron": "* * * * *"}
        with using(self.clock):
            add_schedule(self.store, Schedule(**defaults | fields))

    def make_all(self) -> None:
        """Every result of the pipeline exists."""
        (planned,) = plan.plan_pipeline(self.store, DIGITS, ("digits",))
        commit(self.store, make_manifest("ingest", key=planned.key))

    def look(
        self,
        minute: float,
        grace: timedelta | None = GRACE,
        position: Position | None = None,
        store: FolderStore | None = None,
    ) -> list[str]:
        """Attend to the schedule so many minutes after noon."""
        self.clock.moment = NOON + minute * MINUTE
        schedule = find_schedule(self.store, "often")
        with using(self.clock):
            moment = self.clock.moment
            return list(attend(store or self.store, schedule, moment, self.reach, grace, position))

    def run(self, minute: float) -> str:
        return tick_run(self.store, find_schedule(self.store, "often"), NOON + minute * MINUTE)

    def end(self, minute: float, status: str, detail: str = "") -> None:
        """The driver of this tick's run ends it."""
        with using(self.clock):
            end_run(self.store, self.run(minute), status, detail)

    def decisions(self) -> list[tuple[float, str]]:
        """(minute, decision) of each, in the order of their numbers."""
        folder = self.store.root / "schedules" / "often" / "ticks"
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("0*.json"))]
        assert [record["previous"] for record in found] == [*range(len(found))]
        return [((datetime.fromisoformat(each["tick"]) - NOON) / MINUTE, each["decision"]) for each in found]

    def ends(self) -> list[str]:
        """What is recorded of the ends of the ticks' runs, by number."""
        folder = self.store.root / "schedules" / "often" / "ends"
        found = {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
        fields = ((number, end["status"], end["stage"], end["error"]) for number, end in found.items())
        return [" ".join(str(each) for each in of if each is not None and each != "") for of in fields]


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
