"""Episodes of schedules, aliases and gc: servers over one store and one cluster, and people who act meanwhile.

An episode is its seed. It begins with a store whose runs are a month old, goes through a storm, and ends with one calm
server, a gc of what is left, and one more run. `tests.simulation.watched` checks each write, and all records
at the end.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from pipelines.cluster.jobs_client import ClusterUnreachable
from pipelines.commands import aliases
from pipelines.engine import gc
from pipelines.engine.driver import Driver
from pipelines.engine.history import is_over
from pipelines.engine.runs import load_run, start_run, stop_run
from pipelines.engine.submission import ClusterConnection, submit_driver
from pipelines.environment import environment, using
from pipelines.schedules import serve
from pipelines.schedules.notices import NotSent
from pipelines.schedules.schedule import Schedule, add_schedule, set_state
from pipelines.store import Attempt, StoreError, wait_for_store
from tests.simulation.cluster import Client, Script, SimulatedCluster
from tests.simulation.faults import FaultyNetwork, Weather
from tests.simulation.loop import Loop, Process
from tests.simulation.schedule_world import ALIAS, CRONS, NAME, SOURCES, Reached, Source, past, recipe, verdict, world
from tests.simulation.watched import POLICY, Watched
from tests.support.memory_store import MemoryStore
from tests.support.world import Told
from vit_model.errors import UserError

STORM_SECONDS = 900.0
GRACE_HOURS = 0.1
SETTLE_SECONDS = 8000.0  # within which a calm server finishes: a notice of a server an hour ahead waits for an hour
CALM = 0.2  # the share of episodes in which only the order of requests, and what people do, is random
EXPECTED = (StoreError, ClusterUnreachable, UserError)


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
        is_storm = self.loop.now < self.weather.until
        if is_storm and attempt.job == "promote" and self.random.random() < 0.2:  # a person moves it
            self.loop.after(self.random.choice([0.1, 3.0, 20.0]), self._set_alias)
        pending, closing = self.random.choice([1.1, 2.1]), self.random.choice([0.1, 1.0, 4.0])
        timing = {"pending": pending, "closing": closing, "running": self.random.choice([0.1, 3.0, 20.0, 60.0])}
        if self.is_calm or not is_storm or self.random.random() < 0.8:
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
        if not self.is_calm and self.random.random() < 0.3:
            self.loop.after(self.random.uniform(0, 2), partial(process.suspend, 20.0))

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
        sometimes(3, self._set_alias, self._roll_back, partial(self._at_once, self._set_alias))
        sometimes(2, self._stop, self._change_schedule, self._submit, partial(self._at_once, self._change_schedule))
        for _ in range(random.choice([0, 1, 2, 2])):
            when = random.uniform(1, last)
            for _ in range(random.choice([1, 2])):
                self.loop.after(when + random.choice([0.0, 0.0, 1.0]), self._gc)
            for what in (self._set_alias, self._roll_back, self._submit, self._fill):  # just before it deletes
                self.loop.after(when + GRACE_HOURS * 3600 + random.uniform(-5, 3), what)
        if not self.is_calm:
            sometimes(4, self._kill_server, self._suspend_server, self._kill_driver, self._suspend_driver)
            for _ in range(random.randrange(3)):
                befall = random.choice([self.cluster.restart, self.cluster.go_down])
                self.loop.after(random.uniform(1, last), partial(befall, random.choice([0.0, 3.0, 30.0, 150.0])))

    def _at_once(self, do: Callable[[], object]) -> None:
        """Two people do it at once."""
        do()
        self.loop.after(self.random.choice([0.0, 0.01, 0.3]), do)

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
            self.loop.run(self.loop.now + 1.0)  # a run's id is the time
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
