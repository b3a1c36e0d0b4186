"""A simulated Ray cluster: episodes of hours in milliseconds, the same for the same seed.

Jobs are processes that run the project's own code: a stage's heartbeat and commit (`ray_jobs.process`), a run's driver.
What Ray does, measured on Ray 2.60 and pinned by tests/pipelines/cluster/test_jobs_client.py, and what follows here:

- A submission id is taken once: the same id again gets no second job, whoever submits it, and that is no error.
- A job is PENDING for 1.1 to 2.1 s, then RUNNING; without entrypoint resources it may stay PENDING for ever.
- A stage commits, then its process still closes Ray down: the end of the job is seen 0.1 to 4 s after the manifest.
- exit code 0 is SUCCEEDED, any other FAILED, both with `driver_exit_code`; 0 may be called FAILED, too (ray#65608).
- FAILED without an exit code: Ray has lost the job's supervisor, while the stage's process may live on (ray#65025).
- RUNNING may stay after the supervisor has died with the process (ray#65037); `stop` then does nothing.
- `stop` returns at once; SIGTERM, and SIGKILL 3 s later; then STOPPED, without an exit code. Other jobs are left alone.
- Suspended, a process does nothing, and cannot be stopped, until it goes on as if nothing had happened.
- Jobs, their processes and their logs die with their cluster. The next one has another session name, and knows nobody.
- While a head is down nothing answers. A request can get lost, or its answer, after it was done.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from pipelines.cluster.jobs_client import ClusterUnreachable, JobState
from pipelines.spec import STAGE_TYPES, AnyStage
from pipelines.store import (
    Attempt,
    Layout,
    Store,
    StoreError,
    Superseded,
    commit,
    now,
    read_attempt,
    read_manifest,
    wait_for_store,
    warn,
)
from ray_jobs.process import stage
from ray_jobs.process.context import Context, Result
from ray_jobs.process.heartbeat import earlier_seconds, show_heartbeat
from tests.simulation.loop import Loop, Process
from tests.support.memory_store import MemoryStore
from tests.support.network import Network
from tests.support.records import make_manifest

LOOK_SECONDS = 1.0  # between a process's look for a later attempt and what it writes then, over a slow network
STOP_SECONDS = 1.0  # between SIGTERM and STOPPED
WAITS = "Job has not started yet. It may be waiting for resources."  # what Ray says of a PENDING job


@dataclass(frozen=True)
class Script:
    """What becomes of a job, if nobody stops it and its cluster lives. Seconds."""

    pending: float = 1.5
    running: float = 3.0  # until the stage has its result, or dies
    closing: float = 0.5  # from then until Ray sees the end
    status: str = "SUCCEEDED"  # what Ray says then; RUNNING: it does not notice the end
    exit_code: int | None = 0
    commits: bool = True
    commit_late: float = 0.0  # the manifest shows this much after the stage has written it
    lives_on: float = 0.0  # so much later than Ray says, the process ends; it commits just before
    suspended: float = 0.0  # when half done, its process and its supervisor stand still for so long
    message: str = ""
    log: str = "fine\n"
    metrics: dict[str, str] = field(default_factory=dict)  # of the stage's result

    @classmethod
    def failed(cls, exit_code: int | None = 1, log: str = "error: no luck\n", **more: Any) -> Script:
        return cls(status="FAILED", exit_code=exit_code, commits=False, log=log, **more)


@dataclass
class Job:
    """A job of one session of the cluster, as Ray sees it. `attempt`: of a stage."""

    submission_id: str
    process: Process
    session: str
    script: Script
    attempt: Attempt | None = None
    since: float = 0.0  # seconds of its session, when it was submitted
    status: str = "PENDING"
    exit_code: int | None = None
    is_supervised: bool = True  # Ray sees its end, and can stop it
    is_late: bool = False  # its attempt had a successor when it was submitted, which its process will see

    @property
    def ended(self) -> bool:
        return self.state.ended

    @property
    def state(self) -> JobState:
        over = self.status in {"SUCCEEDED", "FAILED"}
        message = self.script.message if over else WAITS if self.status == "PENDING" else ""
        return JobState(self.submission_id, self.status, message, self.exit_code if over else None)


@dataclass(frozen=True)
class SimulatedContext(Context[AnyStage]):
    """A stage's context whose store is the process's."""

    store: Store | None = None

    def open_store(self) -> Store:
        assert self.store is not None
        return self.store


class JobStore(MemoryStore):
    """The store as a job sees it; notes whose commit is the first, and shows it late if the script says so."""

    def __init__(self, cluster: SimulatedCluster, job: Job) -> None:
        super().__init__(cluster.store.objects, cluster.network(job.process))
        self.cluster, self.job = cluster, job
        self.late: list[str] = []

    def _names(self, folder: str, prefix: str, after: str) -> list[str]:
        """The job itself sees its manifest at once."""
        of_folder = [name for name in self.late if name.startswith(f"{folder}/") and not prefix and not after]
        own = [name.removeprefix(f"{folder}/") for name in of_folder]
        return sorted({*super()._names(folder, prefix, after), *own})

    def _must(self, condition: bool, otherwise: str) -> None:
        """Fail in the hub: an error in this process may be lost, if it is killed while it ends."""

        def fail() -> None:
            raise AssertionError(otherwise)

        if not condition:
            self.cluster.loop.after(0.0, fail)

    def _superseded_at(self) -> float:
        """When the next attempt was written; now if it is not."""
        attempt = self.job.attempt
        assert attempt is not None
        following = f"{Layout.attempt(attempt.job, attempt.key, attempt.number + 1)}/attempt.json"
        return float(getattr(self.objects, "since", {}).get(following, self.cluster.loop.now))

    def replace(self, name: str, data: bytes) -> None:
        looks = max(self._superseded_at(), self.job.process.asleep_until)  # suspended after its look, it sees it later
        self._must(self.cluster.loop.now - looks < LOOK_SECONDS, "a superseded process lives on")
        super().replace(name, data)

    def create(self, name: str, data: bytes) -> bool:
        if not name.endswith("manifest.json"):
            return super().create(name, data)
        self._must(self.cluster.loop.now - self._superseded_at() < LOOK_SECONDS, "a superseded process commits")

        def commit() -> None:
            if name not in self.objects:
                self.cluster.commits.append(self.job.submission_id)
            self.objects.setdefault(name, data)

        if self.job.script.commit_late:
            self.late.append(name)
            self.cluster.loop.after(self.job.script.commit_late, commit)
            return True
        return bool(self._ask("create", name, lambda: (commit(), self.objects[name] == data)[1]))


def loses_nothing(process: Process) -> Network:
    return Network()


@dataclass
class SimulatedCluster:
    """The cluster itself; drivers reach it through a `Client`.

    `script` says what becomes of each attempt's job, `network` what stands between a job and the store, and `drive` is
    the command of a submitted driver.
    """

    loop: Loop
    store: MemoryStore
    script: Callable[[Attempt], Script] = lambda attempt: Script()
    network: Callable[[Process], Network] = loses_nothing
    drive: Callable[[str], None] | None = None
    session: int = 1
    session_since: float = 0.0
    is_down: bool = False
    jobs: dict[str, Job] = field(default_factory=dict)  # of this session
    started: list[Job] = field(default_factory=list)  # in all sessions
    arrived: list[tuple[str, str]] = field(default_factory=list)  # (session, submission id) of each submission
    commits: list[str] = field(default_factory=list)  # submission ids of the jobs whose commit was the first
    superseded: list[str] = field(default_factory=list)  # those whose process saw a later attempt, and ended
    stopped: set[str] = field(default_factory=set)  # those that were to be stopped
    given_up: set[str] = field(default_factory=set)  # the same, if the request was lost
    numbers: count[int] = field(default_factory=count)

    @property
    def session_name(self) -> str:
        return f"session-{self.session}"

    # what befalls a cluster

    def go_down(self, seconds: float) -> None:
        """Give no answer for so long; its jobs go on."""
        self.is_down = True
        self.loop.after(seconds, self._come_back)

    def restart(self, seconds: float = 0.0) -> None:
        """The head dies with its jobs; another one is there so much later."""
        for job in self.jobs.values():
            job.process.kill()
        self.jobs.clear()
        self.session, self.session_since = self.session + 1, self.loop.now
        self.go_down(seconds)

    def _come_back(self) -> None:
        self.is_down = False

    # what clients ask

    def submit(self, submission_id: str, entrypoint: str) -> None:
        self.arrived.append((self.session_name, submission_id))
        if submission_id in self.jobs:
            return
        words = shlex.split(entrypoint)
        process = Process(self.loop, f"j{next(self.numbers)}")
        job = Job(submission_id, process, self.session_name, Script(), since=self.loop.now - self.session_since)
        if "drive" in words:
            run = words[words.index("drive") + 1]
            self._launch(job, lambda: self._drive(job, run))
            return
        job.attempt = self._attempt(job, words[-1])
        job.script = self.script(job.attempt)
        self.started.append(job)
        self._launch(job, lambda: self._run_stage(job))

    def _attempt(self, job: Job, spec: str) -> Attempt:
        attempt = read_attempt(self.store, spec.removeprefix(f"{self.store.uri}/").removesuffix("/attempt.json"))
        assert attempt is not None, "a job was submitted before its attempt was written"
        assert attempt.submission_id == job.submission_id, "submitted under an id that is not its attempt's"
        following = f"{Layout.attempt(attempt.job, attempt.key, attempt.number + 1)}/attempt.json"
        if attempt.cluster_session != self.session_name or self.store.read(following) is not None:
            job.is_late = True  # the submission was under way for long: to other drivers, its cluster is gone
            return attempt
        alive = [other for other in self.jobs.values() if not (other.ended or other.is_late)]
        others = {each.submission_id for each in alive if each.attempt and each.attempt.key == attempt.key}
        assert others <= self.stopped | self.given_up, "two jobs of one artifact at once"
        return attempt

    def stop(self, submission_id: str) -> None:
        job = self.jobs.get(submission_id)
        self.stopped.add(submission_id)
        if job is not None and not job.ended and job.is_supervised:
            job.process.kill()
            self.loop.after(STOP_SECONDS, lambda: self._set(job, "STOPPED"))

    # what jobs do

    def _launch(self, job: Job, main: Callable[[], None]) -> None:
        self.jobs[job.submission_id] = job

        def begin() -> None:
            if not job.process.is_dead:
                self._set(job, "RUNNING")
                job.process.start(main, "main")

        self.loop.after(job.script.pending, begin)

    def _drive(self, job: Job, run: str) -> None:
        assert self.drive is not None
        job.process.at_exit = lambda: self._end(job, 1)
        try:
            self.drive(run)
            self._end(job, 0)
        except StoreError:
            self._end(job, 1)

    def kill(self, job: Job) -> None:
        """Kill a job's process, which Ray sees."""
        self._end(job, -9)

    def _run_stage(self, job: Job) -> None:
        """Do what `ray_jobs.process.stage.run_stage` does around a `main` that computes nothing."""
        attempt, script, process = job.attempt, job.script, job.process
        assert attempt is not None
        store: Any = JobStore(self, job) if isinstance(self.store, MemoryStore) else self.store
        config: Any = STAGE_TYPES[attempt.job].model_validate(attempt.config)
        context = SimulatedContext(attempt, config, {}, store)
        process.at_exit = lambda: self._is_superseded(job)
        if script.lives_on:
            self.loop.after(script.running + script.closing, lambda: self._lose(job))
        try:
            if wait_for_store(lambda: stage.is_done(context), warn):
                self._end(job, 0)
                return
            started, earlier = now(), wait_for_store(lambda: earlier_seconds(context), warn)
            with show_heartbeat(context, earlier):
                process.sleep(script.running / 2)
                if script.suspended:
                    self._suspend(job)
                process.sleep(script.running / 2 + script.lives_on)
                if script.commits:
                    inputs = [each for references in attempt.inputs.values() for each in references]
                    made = [read_manifest(self.store, each.job, each.key) for each in inputs]
                    assert None not in made, "an input vanished under a stage"
                    result = Result(f"content of {attempt.key}", (), {**script.metrics})
                    stage.commit_result(context, result, started, earlier, {})
                process.sleep(script.closing)
            self._end(job, 0)
        except Superseded:
            self._is_superseded(job)
        except StoreError:
            self._end(job, 1)

    def _is_superseded(self, job: Job) -> None:
        self.superseded.append(job.submission_id)
        self._end(job, 1)

    def _suspend(self, job: Job) -> None:
        """The process and its supervisor stand still."""

        def resume() -> None:
            job.is_supervised = job.submission_id not in self.stopped

        job.is_supervised = False
        job.process.suspend(job.script.suspended)
        self.loop.after(job.script.suspended, resume)
        job.process.check()

    def _lose(self, job: Job) -> None:
        """Ray loses the job's supervisor, while the process lives on."""
        self._set(job, "FAILED")
        job.is_supervised = False

    def _end(self, job: Job, code: int) -> None:
        """The process ends; Ray says so, unless the script has it otherwise."""
        job.process.kill()
        if job.is_supervised and job.script.status != "RUNNING":
            job.exit_code = code or job.script.exit_code
            self._set(job, "FAILED" if code else job.script.status)
        job.is_supervised = False

    def commit(self, job: Job) -> None:
        """Commit at once, in the job's name."""
        assert job.attempt is not None
        made = {name: getattr(job.attempt, name) for name in ("job", "key", "stage", "run", "nonce")}
        ours = make_manifest(**made, attempt=job.attempt.number, content_digest=f"content of {made['key']}")
        commit(self.store, ours)

    def _set(self, job: Job, status: str) -> None:
        if not job.ended and self.jobs.get(job.submission_id) is job:
            job.status = status


class Client:
    """A process's way to the cluster: a `Cluster`, and a driver's `Connection`, with a network of its own between."""

    address = "http://127.0.0.1:8265"

    def __init__(self, server: SimulatedCluster, network: Network | None = None) -> None:
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

    def jobs(self) -> list[JobState]:
        return [job.state for job in self._ask("jobs", "", lambda: [*self.server.jobs.values()])]

    def stop(self, submission_id: str) -> None:
        self.server.given_up.add(submission_id)
        self._ask("stop", submission_id, lambda: self.server.stop(submission_id))

    def logs(self, submission_id: str) -> str:
        job = self._ask("logs", submission_id, lambda: self.server.jobs.get(submission_id))
        return "" if job is None or job.status == "PENDING" else job.script.log

    def follow_logs(self, *_: object) -> None:
        """Nothing: lines are read in a thread of their own, which decides nothing."""


def random_script(random: Random, share: float = 0.4, kinds: Sequence[int] = range(12)) -> Script:
    """What may become of a job: a share of them is unusual, each of one of these kinds."""
    usual = Script(
        pending=random.choice([1.1, 1.5, 2.1, 30.0]),
        running=random.choice([0.1, 3.0, 20.0, 20.0, 400.0]),
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
        Script(**timing, suspended=random.choice([20.0, 70.0, 200.0, 1e3])),
        Script(pending=random.choice([800.0, 1e5])),
        Script(**timing, commit_late=random.choice([0.2, 5.0, 50.0, 70.0])),
        Script(**timing, commits=False),
        Script(**timing, status="STOPPED", commits=False),
    ]
    return unusual[random.choice(kinds)] if random.random() < share else usual
