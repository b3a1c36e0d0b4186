"""A Ray cluster and its clock, simulated: episodes of hours in milliseconds, the same for the same seed.

What the real one does, measured on Ray 2.60 and pinned by tests/pipelines/cluster/test_jobs_client.py, and what follows
here:

- A submission id is taken once: the same id again gets no second job, whoever submits it, and that is no error.
- A job is PENDING for 1.1 to 2.1 s, then RUNNING; without entrypoint resources it may stay PENDING for ever.
- A stage commits, then its process still closes Ray down: the end of the job is seen 0.1 to 4 s after the manifest.
- exit code 0 is SUCCEEDED, any other FAILED, both with `driver_exit_code`; 0 may be called FAILED, too (ray#65608).
- FAILED without an exit code: Ray has lost the job's supervisor, while the stage's process may live on (ray#65025).
- RUNNING may stay after the supervisor has died with the process (ray#65037); `stop` then does nothing.
- `stop` returns at once; SIGTERM, and SIGKILL 3 s later; then STOPPED, without an exit code. Other jobs are left alone.
- The process of a stage shows a sign of life every 5 s. It ends when it sees a later attempt, and looks for one before
  it commits. Suspended, it does nothing, and cannot be stopped, until it goes on as if nothing had happened.
- Jobs, their processes and their logs die with their cluster. The next one has another session name, and knows nobody.
- While a head is down nothing answers. A request can get lost, or its answer, after it was done.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from random import Random
from typing import Any

from pipelines.cluster.jobs_client import ClusterUnreachable, JobState
from pipelines.environment import Environment
from pipelines.store import (
    Attempt,
    Layout,
    StoreUnreachable,
    Superseded,
    check_newest,
    commit,
    read_attempt,
    read_manifest,
)
from tests.support.memory_store import MemoryStore
from tests.support.network import Network
from tests.support.records import make_manifest

BEGAN = datetime(2026, 11, 22, 12, tzinfo=UTC)  # when the clock stands at 0
STOP_SECONDS = 1.0  # between SIGTERM and STOPPED
HEARTBEAT_SECONDS = 5.0  # between two signs of life
WAITS = "Job has not started yet. It may be waiting for resources."  # what Ray says of a PENDING job


class Clock(Environment):
    """Time that passes only while somebody sleeps; what is due then happens on the way."""

    def __init__(self, limit: float = 1e6) -> None:
        self.now, self.limit = 0.0, limit
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        assert until < self.limit, "the walk does not end"
        while self._due and self._due[0][0] <= until:
            due, _, do = heapq.heappop(self._due)
            self.now = max(self.now, due)  # what is done may sleep, too
            do()
        self.now = max(self.now, until)

    def utc(self) -> datetime:
        return BEGAN + timedelta(seconds=self.now)

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Have something done later: an outage, Ctrl-C, another driver's step."""
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), do))


@dataclass(frozen=True)
class Script:
    """What becomes of a job, if nobody stops it and its cluster lives. Seconds."""

    pending: float = 1.5
    running: float = 3.0  # until the stage has committed, or died
    closing: float = 0.5  # from then until Ray sees the end
    status: str = "SUCCEEDED"  # what Ray says then; RUNNING: it does not notice the end
    exit_code: int | None = 0
    commits: bool = True
    commit_late: float = 0.0  # the manifest shows this much after the stage had written it
    lives_on: float = 0.0  # so much later than Ray says, the process ends; it commits just before
    suspended: float = 0.0  # when half done, its process and its supervisor stand still for so long
    shows_life: bool = True
    message: str = ""
    log: str = "fine\n"
    metrics: dict[str, str] = field(default_factory=dict)  # of the stage's result

    @classmethod
    def failed(cls, exit_code: int | None = 1, log: str = "error: no luck\n", **more: Any) -> Script:
        return cls(status="FAILED", exit_code=exit_code, commits=False, log=log, **more)


@dataclass
class Job:
    """A job of one session of the cluster, as Ray sees it."""

    attempt: Attempt
    script: Script
    session: str
    status: str = "PENDING"
    process_lives: bool = True  # what the stage's process does is not always what Ray says
    is_suspended: bool = False
    is_supervised: bool = True  # Ray sees its end, and can stop it
    beats: int = 0

    @property
    def ended(self) -> bool:
        return self.state.ended

    @property
    def state(self) -> JobState:
        over = self.status in {"SUCCEEDED", "FAILED"}
        exit_code = self.script.exit_code if over else None
        message = self.script.message if over else WAITS if self.status == "PENDING" else ""
        return JobState(self.attempt.submission_id, self.status, message, exit_code)


@dataclass
class FakeCluster:
    """The cluster itself; drivers reach it through a `Client`. `script` says what becomes of each attempt's job."""

    clock: Clock
    store: MemoryStore
    script: Callable[[Attempt], Script] = lambda attempt: Script()
    session: int = 1
    is_down: bool = False
    jobs: dict[str, Job] = field(default_factory=dict)  # of this session
    started: list[Job] = field(default_factory=list)  # in all sessions
    # (session, submission id) of each submission
    arrived: list[tuple[str, str]] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)  # submission ids of the jobs whose commit was the first
    superseded: list[str] = field(default_factory=list)  # those whose process saw a later attempt, and ended
    stopped: set[str] = field(default_factory=set)  # those that were to be stopped

    @property
    def session_name(self) -> str:
        return f"session-{self.session}"

    # what befalls a cluster

    def go_down(self, seconds: float) -> None:
        """Give no answer for so long; its jobs go on."""
        self.is_down = True
        self.clock.after(seconds, self._come_back)

    def restart(self, seconds: float = 0.0) -> None:
        """The head dies with its jobs; another one is there so much later."""
        for job in self.jobs.values():
            job.process_lives = False
        self.jobs.clear()
        self.session += 1
        self.go_down(seconds)

    def _come_back(self) -> None:
        self.is_down = False

    # what clients ask

    def submit(self, submission_id: str, entrypoint: str) -> None:
        self.arrived.append((self.session_name, submission_id))
        if submission_id in self.jobs:
            return
        record = entrypoint.rpartition(" ")[2].removeprefix(f"{self.store.uri}/").removesuffix("/attempt.json")
        attempt = read_attempt(self.store, record)
        assert attempt is not None, "a job was submitted before its attempt was written"
        assert attempt.submission_id == submission_id
        others = [job for job in self.jobs.values() if job.attempt.key == attempt.key and not job.ended]
        assert {job.attempt.submission_id for job in others} <= self.stopped, "two jobs of one artifact at once"
        assert read_manifest(self.store, attempt.job, attempt.key) is None, "a job for what is committed"
        job = self.jobs[submission_id] = Job(attempt, self.script(attempt), self.session_name)
        self.started.append(job)
        self.clock.after(job.script.pending, lambda: self._begin(job))

    def stop(self, submission_id: str) -> None:
        job = self.jobs.get(submission_id)
        self.stopped.add(submission_id)
        if job is not None and not job.ended and job.is_supervised:
            job.process_lives = False
            self.clock.after(STOP_SECONDS, lambda: self._set(job, "STOPPED"))

    # what jobs do

    def _begin(self, job: Job) -> None:
        if not job.process_lives:
            return
        self._set(job, "RUNNING")
        self._beat(job)
        script = job.script
        if script.suspended:
            self.clock.after(script.running / 2, lambda: self._suspend(job))
        self.clock.after(script.running + script.lives_on, lambda: self._write(job))
        self.clock.after(script.running + script.closing, lambda: self._end(job))

    def _suspend(self, job: Job) -> None:
        def resume() -> None:
            job.is_suspended = False
            job.is_supervised = job.attempt.submission_id not in self.stopped

        job.is_suspended, job.is_supervised = True, False
        self.clock.after(job.script.suspended, resume)

    def _beat(self, job: Job) -> None:
        """Show a sign of life, and look for a later attempt."""
        if not job.process_lives:
            return
        with suppress(StoreUnreachable):
            if not job.is_suspended and not self._is_superseded(job) and job.script.shows_life:
                job.beats += 1
                name = Layout.heartbeat(job.attempt.job, job.attempt.key, job.attempt.number)
                self.store.replace(name, str(job.beats).encode())
        self.clock.after(HEARTBEAT_SECONDS, lambda: self._beat(job))

    def _is_superseded(self, job: Job) -> bool:
        try:
            check_newest(self.store, job.attempt)
        except Superseded:
            job.process_lives = False
            self.superseded.append(job.attempt.submission_id)
        return not job.process_lives

    def _write(self, job: Job) -> None:
        """The stage's process is done: it commits, if it lives and may."""
        if job.is_suspended:
            self.clock.after(1.0, lambda: self._write(job))
        elif job.process_lives and job.script.commits and not self._is_superseded(job):
            self.clock.after(job.script.commit_late, lambda: self.commit(job))

    def commit(self, job: Job) -> None:
        """The manifest shows."""
        made = {
            name: getattr(job.attempt, name) for name in ("job", "key", "stage", "run", "nonce", "inputs", "config")
        }
        ours = make_manifest(
            **made, metrics=job.script.metrics, attempt=job.attempt.number, content_digest=f"content of {made['key']}"
        )
        before = read_manifest(self.store, ours.job, ours.key) is not None
        if commit(self.store, ours).nonce == ours.nonce and not before:
            self.commits.append(job.attempt.submission_id)

    def _end(self, job: Job) -> None:
        """The process ends, and Ray says so, unless the script has it otherwise."""
        if job.is_suspended:
            self.clock.after(1.0, lambda: self._end(job))
        elif job.process_lives:
            if job.is_supervised:
                self._set(job, job.script.status)
            job.is_supervised = job.script.status != "RUNNING"
            self.clock.after(job.script.lives_on, lambda: self._die(job))

    def _die(self, job: Job) -> None:
        job.process_lives = False

    def _set(self, job: Job, status: str) -> None:
        if not job.ended and self.jobs.get(job.attempt.submission_id) is job:
            job.status = status


class Client:
    """A driver's way to the cluster: its `JobServer`, and its connection, with a network of its own between."""

    address = "http://127.0.0.1:8265"

    def __init__(self, server: FakeCluster, network: Network | None = None) -> None:
        self.server, self.network = server, network or Network()

    def cluster(self) -> Client:
        return self

    def keep(self) -> None:
        """Nothing."""

    def _ask(self, what: str, name: str, answer: Callable[[], Any]) -> Any:
        if self.server.is_down:
            raise ClusterUnreachable(f"{self.address}: connection refused")
        return self.network.ask(what, name, answer, ClusterUnreachable)

    @property
    def session_name(self) -> str:
        return self._ask("session", "", lambda: self.server.session_name)

    def submit(self, submission_id: str, entrypoint: str, *_: object) -> None:
        self._ask("submit", submission_id, lambda: self.server.submit(submission_id, entrypoint))

    def job(self, submission_id: str) -> JobState | None:
        job = self._ask("job", submission_id, lambda: self.server.jobs.get(submission_id))
        return None if job is None else job.state

    def stop(self, submission_id: str) -> None:
        self._ask("stop", submission_id, lambda: self.server.stop(submission_id))

    def logs(self, submission_id: str) -> str:
        job = self._ask("logs", submission_id, lambda: self.server.jobs.get(submission_id))
        return "" if job is None or job.status == "PENDING" else job.script.log

    def follow_logs(self, *_: object) -> None:
        """Nothing: lines are read in a thread of their own, which decides nothing."""


def random_script(random: Random) -> Script:
    """What may become of a job, the usual most often."""
    usual = Script(
        pending=random.choice([1.1, 1.5, 2.1, 30.0]),
        running=random.choice([0.1, 3.0, 20.0]),
        closing=random.choice([0.1, 1.0, 4.0, 8.0]),
    )
    timing = {name: getattr(usual, name) for name in ("pending", "running", "closing")}
    unusual = [
        Script.failed(1, **timing),
        Script.failed(2, **timing),
        Script.failed(-9, log="", message="killed", **timing),
        Script.failed(None, log="", message="Job supervisor actor died", **timing),
        Script(**timing, status="FAILED", exit_code=None, lives_on=random.choice([0.0, 2.0, 9.0])),
        Script(**timing, status="FAILED", exit_code=0),
        Script(**timing, status="RUNNING", commits=random.random() < 0.5),
        Script(**timing, suspended=random.choice([20.0, 70.0, 200.0])),
        Script(**timing, shows_life=False, suspended=1e3),
        Script(pending=random.choice([800.0, 1e5])),
        Script(**timing, commit_late=random.choice([0.2, 5.0, 50.0, 70.0])),
        Script(**timing, commits=False),
        Script(**timing, status="STOPPED", commits=False),
    ]
    return usual if random.random() < 0.6 else random.choice(unusual)
