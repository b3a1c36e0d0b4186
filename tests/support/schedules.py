"""A schedule's cluster, as far as a schedule sees it: jobs that run until somebody says otherwise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.cluster.jobs_client import JobState
from pipelines.schedules.schedule import Reach, Schedule


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
