"""Episodes of drivers: commands over one store and one cluster, and everything that may go wrong with them.

An episode is its seed. What must hold is asserted by the cluster when a job is submitted, and here at the end, after
the storm is over and the same command was given once more.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from typing import Any
from unittest.mock import patch

from pipelines import identity
from pipelines.cluster.jobs_client import ClusterUnreachable
from pipelines.engine import decisions, driver
from pipelines.engine.decisions import USER_MISTAKE
from pipelines.engine.driver import LOG_SECONDS, Driver
from pipelines.engine.history import is_over
from pipelines.engine.runs import start_run
from pipelines.engine.status import Status
from pipelines.environment import environment
from pipelines.files import s3_client
from pipelines.store import (
    Attempt,
    Layout,
    Manifest,
    Store,
    StoreError,
    StoreUnreachable,
    encode,
    request_stop,
    s3,
)
from pipelines.store.records import LAYOUT_VERSION
from pipelines.store.s3 import S3Store
from ray_jobs.process.heartbeat import HEARTBEAT_SECONDS
from tests.simulation.bucket import BucketClient
from tests.simulation.cluster import Client, Script, SimulatedCluster, random_script
from tests.simulation.faults import Faults, FaultyNetwork, Weather
from tests.simulation.knowing import DriversNetwork
from tests.simulation.loop import Loop, Process
from tests.support.memory_store import MemoryStore, Objects
from tests.support.world import Told, manifests_of, pipeline

Transitions = Counter[tuple[str, str, str]]
"""(phase, what was observed, actions) -> how often."""
STORM_SECONDS = 120.0
OLD = 0.1  # the share of drivers that are of the release before
ON_S3 = 0.2  # the share of episodes whose drivers use the real S3Store
CALM = 0.25  # the share of episodes in which only the order of requests is random
STOP_SECONDS = 60.0  # within which a run ends after the request to stop, over a network that loses a tenth
FINISH_SECONDS = 5000.0  # within which the last command ends; the longest wait is for a job that does not start
SUBMIT_SECONDS = 3.0  # between a look for the cluster's session and the arrival of a submission
# Between a look for a record and the write that depends on it; the log of a lost job is waited for in between.
RACE_SECONDS = LOG_SECONDS + 3.0
PIPELINES = (
    ("images",),
    ("images", "pixels"),
    ("images", "other", "pixels", "report"),
    ("images", "other", "pixels", "more", "both"),
)


class TimedObjects(Objects):
    """A store's objects, and when each was first written."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop, self.since = loop, dict[str, float]()

    def setdefault(self, name: str, data: bytes = b"") -> bytes:  # type: ignore[override]
        self.since.setdefault(name, self.loop.now)
        return super().setdefault(name, data)


@dataclass
class Command:
    """A command, in a process of its own."""

    process: Process
    network: DriversNetwork
    walk: Driver | None = None
    is_over: bool = False


@dataclass
class Episode:
    """A world in which commands come and go. `kept`: the only faults that happen, if it is not None."""

    seed: int
    transitions: Transitions = field(default_factory=Counter)
    kept: frozenset[str] | None = None

    def __post_init__(self) -> None:
        random = self.random = Random(self.seed)
        self.faults = Faults(self.seed, self.kept)
        self.loop = Loop(limit=2e5)
        self.objects = TimedObjects(self.loop)
        self.is_calm = random.random() < CALM
        self.poll_seconds = random.choice([0.5, 2.0, 5.0])
        self.pipeline = pipeline(*random.choice(PIPELINES))
        self.is_on_s3 = random.random() < ON_S3
        self.weather = Weather(until=0.0 if self.is_calm else STORM_SECONDS)
        self.unusual, self.kinds = 0.0, random.sample(range(12), random.choice([2, 12]))
        if not self.is_calm:
            self.weather.losses = random.choice([0.0, 0.01, 0.1])
            self.weather.late = random.choice([0.0, 0.02])
            self.weather.deaths = random.choice([0.0, 0.002, 0.01])
            self.unusual = random.choice([0.0, 0.4, 0.9])
            if random.random() < 0.1:
                self.weather.full_from = random.uniform(0, 20)
                self.weather.full_until = self.weather.full_from + random.choice([2.0, 40.0])
        store = MemoryStore(self.objects)
        self.cluster = SimulatedCluster(self.loop, store, script=self._script, network=self._jobs_network)
        if self.is_on_s3:
            store.uri = "s3://memory"
            self.objects["store.json"] = encode({"id": store.id, "layout": LAYOUT_VERSION})
        self.told = Told(self.loop)
        self.commands: list[Command] = []
        self.old = set[str]()  # processes of the release before
        self.is_suspended = False  # a driver was
        self.stopped: dict[str, float] = {}  # run -> when it was requested to stop
        self.scripts: dict[str, Script] = {}  # nonce of an attempt -> what becomes of it

    def _script(self, attempt: Attempt) -> Script:
        script = self.scripts[attempt.nonce] = self._random_script(attempt)
        return script

    def _random_script(self, attempt: Attempt) -> Script:
        random = self.faults.random(f"job {attempt.nonce}")
        usual = Script(
            pending=random.choice([1.1, 2.1]), running=random.choice([0.1, 0.1, 3.0, 3.0, 20.0, 90.0, 400.0])
        )
        if self.is_calm or self.loop.now > STORM_SECONDS:
            return usual
        script = random_script(random, self.unusual, self.kinds)
        if script == usual or not self.unusual:
            return script
        said = ", ".join(f"{name} {value}" for name, value in vars(script).items() if value != getattr(usual, name))
        happens = self.faults.happens(f"job {attempt.nonce}", f"attempt {attempt.number} of {attempt.stage}: {said}")
        return script if happens else usual

    def _drivers_network(self, process: Process) -> DriversNetwork:
        return DriversNetwork(process, self.faults.random(process.name), self.weather, self.faults)

    def _jobs_network(self, process: Process) -> FaultyNetwork:
        return FaultyNetwork(process, self.faults.random(process.name), self.weather, self.faults)

    def _new_command(self) -> Command:
        """Return a new process, and its way to the store and the cluster."""
        name = str(len(self.commands) + 1)
        random = self.faults.random(f"{name} clock")
        wrong_by = 0.0 if self.is_calm else random.choice([0.0, 0.0, 3600.0, -3600.0])
        if wrong_by and not self.faults.happens(f"{name} clock", f"process {name}: its clock is wrong by {wrong_by} s"):
            wrong_by = 0.0
        process = Process(self.loop, name, wrong_by)
        is_old = not self.is_calm and self.loop.now < STORM_SECONDS and random.random() < OLD
        if is_old and self.faults.happens(f"{name} release", f"process {name} is of the release before"):
            self.old.add(name)
        network = self._drivers_network(process)
        process.s3 = BucketClient(self.objects, network)
        self.commands.append(Command(process, network))
        return self.commands[-1]

    def _store(self, network: DriversNetwork) -> Store:
        store: Any = MemoryStore(self.objects, network)
        return S3Store("s3://memory") if self.is_on_s3 else store

    def command(self, done: Callable[[str, dict[str, str]], None]) -> Process:
        """Give the command `vitflow run`, in a process of its own; `done` gets the run and its stages' statuses."""
        command = self._new_command()

        def run() -> None:
            try:
                status = self._drive(command)
                done(command.network.run, {name: each.value for name, each in status.items()})
            except KeyboardInterrupt:
                walk = command.walk
                is_stopped = walk is not None and Status.STOPPED in walk.status.values()
                assert not is_stopped or f"{Layout.run(walk.run.id)}/stop.json" in self.objects, "stopped in secret"
                command.process.kill()
            except (StoreUnreachable, ClusterUnreachable):
                assert command.walk is None, "a driver ended because something did not answer"
            except StoreError:
                assert self.weather.full_until < inf, "a driver ended because of the store"
            finally:
                command.is_over = True

        command.process.start(run, "main")
        return command.process

    def _drive(self, command: Command) -> dict[str, Status]:
        store, client = self._store(command.network), Client(self.cluster, command.network)
        begun = start_run(store, self.pipeline, tuple(self.pipeline.stages))
        command.network.run = begun.id
        command.walk = Driver(store, begun, client, self.told, parallel=4)  # type: ignore[arg-type]
        return command.walk.walk()[0]

    # ------------------------------------------------------------------------------------------- an episode

    def run(self) -> None:
        """Let it happen, then check the end."""
        polls = patch.object(driver, "POLL_SECONDS", self.poll_seconds)
        client = patch.object(s3_client, "client", lambda: environment().s3)  # type: ignore[attr-defined]
        jitter = patch.object(s3, "random", self.random)
        quiet = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
        with quiet[0], quiet[1], counted(self.transitions), releases(self.old), polls, client, jitter:
            self._happen()

    def _happen(self) -> None:
        self._befall()
        for _ in range(1 if self.is_calm else self.random.choice([1, 2])):
            self.loop.after(self.random.uniform(0, 5), self._keep_commanding)
        self.loop.run(STORM_SECONDS)
        self._check_stopped()
        self._finish()
        self._check_end()

    def _befall(self) -> None:
        if self.is_calm:
            return
        for number in range(self.random.randrange(4)):
            name = self.random.choice(["restart", "go_down"])
            when, seconds = self.random.uniform(0, 40), self.random.choice([0.0, 3.0, 30.0])
            if self.faults.happens(f"cluster {number}", f"{when:.1f} s, the cluster: {name} for {seconds} s"):
                self.loop.after(when, partial(getattr(self.cluster, name), seconds))
        if self.random.random() < 0.15:
            when = self.random.uniform(1, 40)
            if self.faults.happens("stop", f"{when:.1f} s, every run is requested to stop"):
                self.loop.after(when, self._stop)

    def _keep_commanding(self) -> None:
        """Give the command, and give it again when its process has died, until the storm is over."""
        process = self.command(lambda run, status: None)
        random = self.faults.random(f"{process.name} from outside")
        when, kind = random.uniform(1, 30), random.random()
        happens = partial(self.faults.happens, f"{process.name} from outside")
        if not self.is_calm and kind < 0.2:
            seconds = random.choice([10.0, 100.0])
            if happens(f"process {process.name} is suspended after {when:.1f} s for {seconds} s"):
                self.is_suspended = True
                self.loop.after(when, lambda: process.suspend(seconds))
        is_early = self.loop.now + when < STORM_SECONDS - 30
        if not self.is_calm and 0.2 < kind < 0.3 and is_early and happens(f"Ctrl-C in process {process.name}"):
            self.loop.after(when, process.interrupt)

        def look() -> None:
            if process.is_dead and self.loop.now < STORM_SECONDS - 20:
                self._keep_commanding()
            elif not process.is_dead:
                self.loop.after(5.0, look)

        self.loop.after(5.0, look)

    def _stop(self) -> None:
        """Somebody requests every run to stop."""
        runs = {name.split("/")[1] for name in self.objects if name.startswith("runs/")}
        self.stopped = dict.fromkeys(runs, self.loop.now)
        for run in runs:
            request_stop(MemoryStore(self.objects), run)  # type: ignore[arg-type]

    def _finish(self) -> None:
        """Give the command until it ends by itself, with nothing in its way."""
        self.cluster.is_down = False
        self.loop.limit = self.loop.now + FINISH_SECONDS
        ended: list[tuple[str, dict[str, str]]] = []
        while not ended:
            process = self.command(lambda run, status: ended.append((run, status)))
            self.loop.run_while(lambda process=process: not (ended or process.is_dead))
            assert ended or process.is_dead, "nothing is due, and the command has not ended"
        self.run_id, self.status = ended[-1]

    # ------------------------------------------------------------------------------------------- what must hold

    def attempts(self) -> list[Attempt]:
        return [
            Attempt.model_validate_json(data) for name, data in self.objects.items() if name.endswith("attempt.json")
        ]

    def _check_stopped(self) -> None:
        """A driver ends soon after the request to stop, unless it was suspended."""
        if self.is_suspended or self.is_on_s3:
            return
        for command in self.commands:
            when = inf if command.walk is None else self.stopped.get(command.walk.run.id, inf)
            goes_on = not (command.is_over or command.process.is_dead)
            assert not (goes_on and when + STOP_SECONDS < self.loop.now), "it goes on after the request to stop"

    def _check_end(self) -> None:
        made = manifests_of(self.objects)
        assert set(self.status.values()) <= {"CACHED", "SUCCEEDED", "FAILED", "SKIPPED"}
        whole = {name for name, status in self.status.items() if status in {"CACHED", "SUCCEEDED"}}
        mistakes = any(script.exit_code == USER_MISTAKE for script in self.scripts.values())
        # after a mistake, another driver, which comes to the stage later, tries it again, and those that were skipped
        assert whole <= made.keys() if mistakes else whole == made.keys(), "a status and the store differ"
        if not mistakes:
            assert whole == {*self.pipeline.stages}, "a stage failed although nothing goes wrong any more"
        if self.is_calm:
            assert len(self.attempts()) == len(whole), "an attempt was lost although nothing went wrong"
        store: Any = MemoryStore(self.objects)
        assert is_over(store, self.run_id), "the run has not ended"
        for manifest in made.values():
            assert manifest.content_digest == f"content of {manifest.key}"
            folder = f"artifacts/{manifest.job}/{manifest.key}/attempts/{manifest.attempt}"
            attempt = Attempt.model_validate_json(self.objects[f"{folder}/attempt.json"])
            assert attempt.nonce == manifest.nonce, "committed by nobody's attempt"
        self._check_sessions()
        self._check_order(made)
        per_command = Counter((attempt.nonce.split("-")[0], attempt.key) for attempt in self.attempts())
        # one more, if the answer to the first got lost: then it is found, like one of another command
        assert all(number <= decisions.ATTEMPTS + 1 for number in per_command.values()), "too many attempts"
        self._check_processes()

    def _check_sessions(self) -> None:
        """A job runs in its attempt's session, unless that ended while its submission was under way."""
        if self.is_suspended or self.weather.late or self.is_on_s3:
            return
        for job in self.cluster.started:
            assert job.attempt is not None
            is_own = job.attempt.cluster_session == job.session
            assert is_own or job.since < SUBMIT_SECONDS, "an attempt of another session was submitted"

    def _check_order(self, made: dict[str, Manifest]) -> None:
        """Nothing was begun after it was committed, and no attempt committed after the next had been written."""
        if self.weather.late or self.is_on_s3:  # whose client tries a request again for as long as a race takes
            return
        since = self.objects.since
        committed = {manifest.key: manifest for manifest in made.values()}
        for attempt in self.attempts():
            manifest, folder = committed.get(attempt.key), f"artifacts/{attempt.job}/{attempt.key}"
            if manifest is None or self.scripts.get(manifest.nonce, Script()).commit_late:
                continue
            written, done = since[f"{folder}/attempts/{attempt.number}/attempt.json"], since[f"{folder}/manifest.json"]
            if not self.is_suspended:
                assert written < done + RACE_SECONDS + self.poll_seconds, "an attempt at what was committed"
            if attempt.number == manifest.attempt + 1:
                assert done < written + RACE_SECONDS + self.poll_seconds, "committed by an attempt that had a successor"

    def _check_processes(self) -> None:
        """After a minute more, nothing runs that has a successor."""
        self.loop.run(self.loop.now + 60.0)
        newest: Counter[str] = Counter()
        for attempt in self.attempts():
            newest[attempt.key] = max(newest[attempt.key], attempt.number)
        for job in self.cluster.started:
            assert job.attempt is not None
            is_awake = job.process.asleep_until + 2 * HEARTBEAT_SECONDS <= self.loop.now  # and has looked
            lives = not job.process.is_dead and job.status != "PENDING" and is_awake
            assert not (lives and job.attempt.number < newest[job.attempt.key]), "superseded, and it lives on"


@contextmanager
def releases(old: set[str]) -> Iterator[None]:
    """Let some processes be of an earlier release: other code of the stages."""
    code_digest = identity.code_digest

    def digest(job: str) -> str:
        return "0" * 64 if getattr(environment(), "name", "") in old else code_digest(job)

    with patch.object(identity, "code_digest", digest):
        yield


@contextmanager
def counted(transitions: Transitions) -> Iterator[None]:
    """Count the driver's decisions by their kinds."""
    decide = decisions.decide

    def counting(flight: decisions.InFlight, observed: decisions.Observation, now: float) -> decisions.Decision:
        decided = decide(flight, observed, now)
        job = "" if observed.job is None else f" {observed.job.status} {observed.job.driver_exit_code}"
        seen = f"{'manifest' if observed.manifest else 'attempt' if observed.attempt else 'nothing'}{job}"
        done = " ".join(each.name if isinstance(each, decisions.Do) else type(each).__name__ for each in decided[1])
        transitions[flight.phase.name, seen, done] += 1
        return decided

    no_git = patch.object(identity, "git_state", dict)  # each commit would start git
    with patch.object(driver, "decide", counting), no_git:
        yield


def episode(seed: int, transitions: Transitions | None = None, kept: frozenset[str] | None = None) -> Episode:
    """Run one; an AssertionError or another exception of it is a finding."""
    world = Episode(seed, Counter() if transitions is None else transitions, kept)
    try:
        world.run()
    except BaseException as error:
        error.add_note(f"drivers.episode({seed})")
        raise
    return world
