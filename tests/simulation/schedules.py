"""Episodes of schedules, aliases and gc: servers over one store and one cluster, and people who act meanwhile.

An episode is its seed. It begins with a store whose runs are a month old, goes through a storm, and ends with one calm
server, a gc of what is left, and one more run. `tests.simulation.watched` checks each write; the end is checked here.

A grace period of a day is six minutes here, and what is scaled with it keeps its order: a driver looks for a new record
of a gc more often, and no job lives longer.
"""

from __future__ import annotations

import io
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from pydantic import BaseModel

from pipelines import identity
from pipelines.cluster.jobs_client import ClusterUnreachable
from pipelines.commands import aliases
from pipelines.engine import driver, gc
from pipelines.engine.driver import Driver
from pipelines.engine.history import is_over
from pipelines.engine.runs import load_run, start_run, stop_run
from pipelines.engine.submission import ClusterConnection, submit_driver
from pipelines.environment import environment, using
from pipelines.recipe.load import parse_pipeline
from pipelines.recipe.pipeline import Pipeline
from pipelines.schedules import schedule, serve
from pipelines.schedules.cron import last_tick, ticks
from pipelines.schedules.notices import NotSent
from pipelines.schedules.schedule import Reach, Schedule, add_schedule, set_state
from pipelines.spec import AnyStage
from pipelines.store import Attempt, Store, StoreError, artifacts, keeping, wait_for_store
from tests.simulation.cluster import Client, Script, SimulatedCluster
from tests.simulation.faults import FaultyNetwork, Weather
from tests.simulation.loop import Loop, Process
from tests.simulation.watched import POLICY, Watched
from tests.support.memory_store import MemoryStore
from tests.support.world import DIGITS, Told
from vit_model.errors import UserError
from vit_model.fields import Frozen

STORM_SECONDS = 900.0
MONTH = 40 * 86_400.0
GRACE_HOURS = 0.1
GC_LOOK_SECONDS = 100.0  # between a driver's looks for a record of a gc
SETTLE_SECONDS = 8000.0  # within which a calm server finishes: a notice of a server an hour ahead waits for an hour
CALM = 0.2  # the share of episodes in which only the order of requests, and what people do, is random
SOURCES = range(7)  # states of the folder that is ingested; the past has seen the first ones
EXPECTED = (StoreError, ClusterUnreachable, UserError)
NAME, ALIAS = "often", "production"

TRAIN = {"job": "pretrain", "data": "images", "model": "Ti/16", "resolution": 224, "init_from": f"@{ALIAS}"}
TRAIN |= {"steps": 20, "batch_size": 12, "learning_rate": 1e-3}
FROZEN = DIGITS | {"max_bad_fraction": 0.5}
PROMOTE = {"job": "promote", "data": "frozen", "candidate": "train", "against": f"@{ALIAS}", "floor": 0.5}
STAGES = {
    "pixels": {"images": DIGITS, "pixels": {"job": "baselines", "data": "images"}},
    "promote": {"images": DIGITS, "frozen": FROZEN, "train": TRAIN, "promote": PROMOTE},
}


@cache
def recipe(kind: str, name: str = "some", steps: int = 20) -> Pipeline:
    """A recipe of one of the kinds in STAGES."""
    stages = {each: fields | ({"steps": steps} if each == "train" else {}) for each, fields in STAGES[kind].items()}
    return parse_pipeline({"name": name, "stages": stages}, "test")


def verdict(attempt: Attempt) -> dict[str, str]:
    """What a comparison says: the same whenever it is made."""
    chosen = ("promoted", "promoted", "worse", "not shown")[int(identity.sha256(attempt.key)[:2], 16) % 4]
    return {"verdict": chosen, "reason": "so it is"} if attempt.job == "promote" else {}


class Source:
    """The state of the folder that `images` ingests; `frozen` never changes."""

    number = 0

    def of(self, config: AnyStage, *_: object) -> tuple[str | None, tuple[str, ...]]:
        """What `identity.listed_source` returns."""
        if config.job != "ingest":
            return None, ()
        return "frozen" if config.max_bad_fraction == FROZEN["max_bad_fraction"] else f"state {self.number}", ()


class Reached(Reach):
    """A server's way to the cluster, and to the people who want notices."""

    def __init__(self, client: Client, send: Callable[[Any], None]) -> None:
        super().__init__(None, send)
        object.__setattr__(self, "client", client)

    client: Client

    @contextmanager
    def target(self, _: Schedule) -> Iterator[tuple[Any, Path | None]]:
        self.client.session_name  # noqa: B018 (sends a request)
        yield self.client, None

    def clusters(self, _: Schedule) -> Callable[[str], Any]:
        return lambda _: self.client


@cache
def past(kind: str) -> tuple[dict[str, bytes], float]:
    """A store's objects after five calm runs, and the time a month later."""
    source, loop = Source(), Loop(1e9)
    store: Any = MemoryStore()
    cluster = SimulatedCluster(loop, store, lambda attempt: Script(metrics=verdict(attempt)))
    with world(source):
        for number in range(5):
            source.number = number
            with using(Process(loop, f"p{number}")):
                begun = start_run(store, recipe(kind), tuple(STAGES[kind]))
                Driver(store, begun, Client(cluster), Told(loop), parallel=4).walk()
            loop.sleep(86_400.0)
    loop.sleep(MONTH)
    return store.objects, loop.now


CRONS = {"* * * * *": 60, "*/2 * * * *": 120, "*/5 * * * *": 300}  # lines, and their seconds


def quick_ticks(cron: str, timezone: str, after: datetime) -> Iterator[datetime]:
    """What `cron.ticks` yields; reading a line takes longer than all else that a server does."""
    if cron not in CRONS:
        yield from ticks(cron, timezone, after)
    step = CRONS[cron]
    for number in count(int(after.timestamp()) // step + 1):
        yield datetime.fromtimestamp(number * step, UTC)


def quick_last_tick(cron: str, timezone: str, since: datetime, now: datetime) -> datetime | None:
    """What `cron.last_tick` returns."""
    if cron not in CRONS:
        return last_tick(cron, timezone, since, now)
    latest = datetime.fromtimestamp(int(now.timestamp()) // CRONS[cron] * CRONS[cron], UTC)
    return latest if latest > since else None


@lru_cache(10_000)
def parse(model: Any, data: bytes) -> Any:
    """Parse a record, once: records are immutable, and parsing them takes most of the time."""
    return BaseModel.model_validate_json.__func__(model, data)  # type: ignore[attr-defined]


@contextmanager
def world(source: Source) -> Iterator[None]:
    """Run the project's code in this world: its constants of time in proportion, its sources, and no machine."""

    def uncached(store: Any, folder: str, versions: Any, model: Any, read: Any) -> Iterator[Any]:
        yield from (found.record for found in sorted(read(sorted(versions)), key=lambda each: each.position))

    with ExitStack() as stack:
        for module, name, value in (
            (driver, "POLL_SECONDS", 1.0),
            (keeping, "LOOK_SECONDS", GC_LOOK_SECONDS),
            (identity, "listed_source", source.of),
            (identity, "source_fingerprint", lambda config: source.of(config)[0]),
            (identity, "git_state", dict),  # each commit would start git
            (artifacts, "listed", uncached),  # the catalog is a file of this machine, and has its own tests
            (aliases, "open_", lambda *_, **__: opened()),
            (signal, "signal", lambda *_: None),
            (schedule, "ticks", quick_ticks),
            (schedule, "last_tick", quick_last_tick),
            (Frozen, "model_validate_json", classmethod(parse)),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


def opened() -> Store:
    """The store of a person's process."""
    process: Any = environment()
    return process.store


@dataclass
class Episode:
    """A world in which servers and people come and go."""

    seed: int
    transitions: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        random = self.random = Random(self.seed)
        self.kind = random.choice(["pixels", "promote", "promote", "promote"])
        objects, begin = past(self.kind)
        self.loop = Loop(limit=begin + 1e6)
        self.loop.now, self.source = begin, Source()
        self.source.number = random.choice(SOURCES)
        self.objects = Watched(self.loop, objects)
        self.is_calm = random.random() < CALM
        self.weather = Weather(until=begin + STORM_SECONDS)
        if not self.is_calm:
            self.weather.losses = random.choice([0.0, 0.01, 0.1])
            self.weather.late = random.choice([0.0, 0.0, 0.02])
            self.weather.deaths = random.choice([0.0, 0.001, 0.003])
        self.are_clocks_wrong = not self.is_calm and random.random() < 0.3
        store: Any = MemoryStore(self.objects)
        self.cluster = SimulatedCluster(self.loop, store, self._script, self._network, self._drive)
        self.cluster.numbers = iter(range(1000, 10**6))
        self.objects.cluster = self.cluster
        self.told = Told(self.loop)
        self.servers: list[Process] = []
        self.processes = 0
        self.notices: set[str] = set()  # ids of those that were received
        self.bugs: list[BaseException] = []  # that a server printed

    # ------------------------------------------------------------------------------------------- processes

    def _network(self, process: Process) -> FaultyNetwork:
        return FaultyNetwork(process, self.random, self.weather)

    def _script(self, attempt: Attempt) -> Script:
        if attempt.source not in (None, "frozen", f"state {self.source.number}"):
            return Script.failed(3, log="error: source files have changed\n")
        pending, closing = self.random.choice([1.1, 2.1]), self.random.choice([0.1, 1.0, 4.0])
        timing = {"pending": pending, "closing": closing, "running": self.random.choice([0.1, 3.0, 20.0, 60.0])}
        if self.is_calm or self.loop.now > self.weather.until or self.random.random() < 0.8:
            return Script(**timing, metrics=verdict(attempt))  # type: ignore[arg-type]
        return self.random.choice(
            [
                Script.failed(1, **timing),
                Script.failed(2, **timing),
                Script.failed(None, log="", message="Job supervisor actor died", **timing),
                Script(**timing, status="RUNNING", metrics=verdict(attempt)),  # type: ignore[arg-type]
                Script(**timing, suspended=90.0, metrics=verdict(attempt)),  # type: ignore[arg-type]
                Script(**timing, commits=False),  # type: ignore[arg-type]
            ]
        )

    def process(self, name: str = "", wrong_by: float = 0.0) -> tuple[Process, Any, Client]:
        """Return a new process, and its ways to the store and the cluster."""
        self.processes += 1
        process: Any = Process(self.loop, f"{name}{self.processes}", wrong_by)
        network = self._network(process)
        process.store = MemoryStore(self.objects, network)
        return process, process.store, Client(self.cluster, network)

    def person(self, do: Callable[[Any, Client], object]) -> None:
        """Have somebody do something in a process of its own; errors are his."""
        process, store, client = self.process("a")

        def run() -> None:
            with suppress(*EXPECTED):
                do(store, client)

        process.start(run, "main")

    def _drive(self, run: str) -> None:
        """Do what the command `drive` does."""
        process: Any = environment()
        network = self._network(process)
        store: Any = MemoryStore(self.objects, network)
        begun = wait_for_store(lambda: load_run(store, run), self.told.say)
        if not wait_for_store(lambda: is_over(store, run), self.told.say):
            connection: Any = ClusterConnection(Client(self.cluster, network))  # type: ignore[arg-type]
            Driver(store, begun, connection, self.told, parallel=4).walk()

    def serve(self, wrong_by: float) -> Process:
        """Start a server."""
        process, store, client = self.process("s", wrong_by)
        process.start(lambda: serve.serve(store, Reached(client, self._send), self.told.say), "main")
        return process

    def _send(self, notice: Any) -> None:
        """People receive a notice, unless it gets lost, or the answer to it does."""
        losses = 0.3 if self.loop.now < self.weather.until and not self.is_calm else 0.0
        environment().sleep(0.1)
        if self.random.random() < losses:
            raise NotSent("no answer")
        self.notices.add(notice["id"])
        if self.random.random() < losses:
            raise NotSent("no answer")

    # ------------------------------------------------------------------------------------------- an episode

    def run(self) -> None:
        """Let it happen, then check the end."""
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), world(self.source), self._noticing():
            with using(Process(self.loop, "begin")):
                self.write_schedule(MemoryStore(self.objects))
            for _ in range(self.random.choice([1, 2, 2, 2, 3])):
                wrong_by = self.random.choice([0.0, 3600.0, -3600.0]) if self.are_clocks_wrong else 0.0
                self.loop.after(self.random.uniform(0, 20), partial(self._keep_serving, wrong_by))
            self._befall()
            self.loop.run(self.weather.until)
            self._settle()
            self._collect()
            self._run_once_more()
        self.objects.check_end(self.notices, self.is_calm)
        assert not self.bugs, self.bugs
        self.objects.count(self.transitions, self.notices)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Note the exceptions that a server prints, and survives."""
        import sys

        with patch.object(serve.traceback, "print_exc", lambda: self.bugs.append(sys.exc_info()[1])):
            yield

    def write_schedule(self, store: Any) -> None:
        """Add the schedule, or replace it."""
        random = self.random
        wanted = Schedule(
            name=NAME,
            pipeline=recipe(self.kind, random.choice(["some", "some", "other"]), random.choice([20, 20, 21])),
            recipe="some.yaml",
            cron=random.choice([*CRONS]),
            overlap=random.choice(["skip", "queue"]),
            catch_up=random.choice(["none", "latest"]),
        )
        add_schedule(store, wanted)

    def _keep_serving(self, wrong_by: float) -> None:
        """Start a server, and start it again some time after it has died, until the storm is over."""
        if self.loop.now >= self.weather.until:
            return
        process = self.serve(wrong_by)
        self.servers.append(process)

        def look() -> None:
            if process.is_dead:
                self.loop.after(self.random.choice([0.0, 5.0, 100.0]), partial(self._keep_serving, wrong_by))
            else:
                self.loop.after(5.0, look)

        self.loop.after(5.0, look)

    def _befall(self) -> None:
        """Decide what happens when."""
        random, last = self.random, STORM_SECONDS - 60

        def sometimes(most: int, *whats: Callable[[], object]) -> None:
            for _ in range(random.randint(0, most)):
                self.loop.after(random.uniform(1, last), random.choice(whats))

        sometimes(5, self._fill)
        sometimes(3, self._set_alias, self._roll_back)
        sometimes(2, self._stop, self._change_schedule, self._submit)
        for _ in range(random.choice([0, 1, 2, 2])):
            when = random.uniform(1, last)
            for _ in range(random.choice([1, 2])):
                self.loop.after(when + random.choice([0.0, 0.0, 1.0]), self._gc)
            for what in (self._set_alias, self._roll_back, self._submit, self._fill):  # just before it deletes
                self.loop.after(when + GRACE_HOURS * 3600 + random.uniform(-9, 3), what)
        if not self.is_calm:
            sometimes(4, self._kill_server, self._suspend_server, self._kill_driver, self._suspend_driver)
            for _ in range(random.randrange(3)):
                befall = random.choice([self.cluster.restart, self.cluster.go_down])
                self.loop.after(random.uniform(1, last), partial(befall, random.choice([0.0, 3.0, 30.0, 150.0])))

    def _fill(self) -> None:
        """Somebody changes the folder, perhaps back to what it was."""
        self.source.number = self.random.choice(SOURCES)

    def _set_alias(self) -> None:
        models = self.objects.models()
        if models:
            key = self.random.choice(models)
            self.person(lambda store, _: aliases.alias_set(ALIAS, key, store="memory"))

    def _roll_back(self) -> None:
        self.person(lambda store, _: aliases.alias_rollback(ALIAS, None, store="memory"))

    def _stop(self) -> None:
        under_way = self.objects.runs_under_way()
        if under_way:
            run = self.random.choice(under_way)
            self.objects.stopped.add(run)
            self.person(lambda store, client: list(stop_run(store, run, lambda _: client)))  # type: ignore[arg-type,return-value]

    def _change_schedule(self) -> None:
        state = self.random.choice(["removed", "paused", "active", None])
        if state is None:
            self.person(lambda store, _: self.write_schedule(store))
            return
        self.person(lambda store, _: set_state(store, NAME, state))
        if state != "active":
            self.loop.after(self.random.choice([1.0, 100.0]), lambda: self.person(self._bring_back))

    def _bring_back(self, store: Any, _: object) -> None:
        self.write_schedule(store)

    def _submit(self) -> None:
        """Somebody submits a run of a recipe by hand."""
        chosen = recipe(self.kind, self.random.choice(["some", "other"]))

        def submit(store: Any, client: Any) -> None:
            submit_driver(store, start_run(store, chosen, tuple(chosen.stages)), client, None, None)

        self.person(submit)

    def _gc(self) -> None:
        """Somebody lists what nothing needs, and deletes it after the grace period, unless somebody else does."""
        process, store, _ = self.process("g")

        def run() -> None:
            with suppress(*EXPECTED):
                gc.collect(store, POLICY, None)
                gc.collect(store, POLICY, GRACE_HOURS)
                process.sleep(GRACE_HOURS * 3600 + self.random.choice([1.0, 1.0, 30.0]))
                gc.collect(store, POLICY, GRACE_HOURS)

        process.start(run, "main")

    def _kill_server(self) -> None:
        self.random.choice(self.servers).kill() if self.servers else None

    def _suspend_server(self) -> None:
        if self.servers:
            self.random.choice(self.servers[-3:]).suspend(self.random.choice([20.0, 100.0, 200.0]))

    def _drivers(self) -> list[Any]:
        return [job for job in self.cluster.jobs.values() if job.attempt is None and job.status == "RUNNING"]

    def _kill_driver(self) -> None:
        if drivers := self._drivers():
            self.cluster.kill(self.random.choice(drivers))

    def _suspend_driver(self) -> None:
        if drivers := self._drivers():
            self.random.choice(drivers).process.suspend(self.random.choice([20.0, 100.0]))

    # ------------------------------------------------------------------------------------------- its end

    def _settle(self) -> None:
        """The storm is over, no tick is due any more: one server finishes what was begun."""
        self.cluster.is_down = False
        for process in self.servers:
            process.kill()
        wanted = Schedule(name=NAME, pipeline=recipe(self.kind), recipe="some.yaml", cron="0 0 1 1 *")
        with using(Process(self.loop, "settle")):
            store: Any = MemoryStore(self.objects)
            add_schedule(store, wanted)
        server, limit = self.serve(0.0), self.loop.now + SETTLE_SECONDS
        self.loop.run(self.loop.now + 100.0)  # what was under way has arrived
        while self.objects.is_pending():
            assert self.loop.now < limit, f"it does not end: {self.objects.is_pending()}"
            self.loop.run(self.loop.now + 30.0)
        server.kill()

    def _collect(self) -> None:
        """Long afterwards, a gc deletes what nothing needs."""
        self.loop.run(self.loop.now + 3 * 86_400)
        with using(Process(self.loop, "last")):
            for _ in range(2):
                gc.collect(MemoryStore(self.objects), POLICY, GRACE_HOURS)  # type: ignore[arg-type]
                self.loop.run(self.loop.now + GRACE_HOURS * 3600 + 1)
            found = gc.collect(MemoryStore(self.objects), POLICY)  # type: ignore[arg-type]
            assert not found.unneeded, "it was not deleted"

    def _run_once_more(self) -> None:
        """The same pipeline makes all it needs; and then there is nothing to do."""
        store: Any = MemoryStore(self.objects)
        chosen = recipe(self.kind)
        for name in ("once", "twice"):
            with using(Process(self.loop, name)):
                begun = start_run(store, chosen, tuple(chosen.stages))
                status, _ = Driver(store, begun, Client(self.cluster), self.told, parallel=4).walk()
                assert all(each.succeeded for each in status.values()), status


def episode(seed: int, transitions: Counter[tuple[str, str, str]] | None = None) -> Episode:
    """Run one; an AssertionError or another exception of it is a finding."""
    made = Episode(seed, Counter() if transitions is None else transitions)
    try:
        made.run()
    except BaseException as error:
        error.add_note(f"schedules.episode({seed})")
        raise
    return made
