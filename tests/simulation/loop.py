"""Virtual time, and processes whose threads are greenlets: a second takes microseconds, in the same order every time.

A greenlet runs until it sleeps; every request to a store or a cluster sleeps on its way there and back, so there the
others have their turn. The greenlet that makes the loop, a test's own, may sleep, too: the loop then runs until it is
time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from math import inf
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from pipelines.environment import Environment, using

BEGAN = datetime(2026, 11, 22, 12, tzinfo=UTC)  # when the loop stands at 0


class Killed(BaseException):
    """SIGKILL: nothing that follows in this process happens."""


class Loop:
    """The time of a world, in seconds, and what is due."""

    def __init__(self, limit: float = 1e6) -> None:
        self.now, self.limit = 0.0, limit
        self.hub = getcurrent()
        self._until = 0.0  # the hub does what is due until then
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        """Have something done later: an outage, Ctrl-C, another process's step."""
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), do))

    def sleep(self, seconds: float) -> None:
        sleeper, until, due = getcurrent(), self.now + seconds, self._due
        if sleeper is self.hub:
            self.run(until)
        elif until <= self._until and until < self.limit and (not due or until < due[0][0]):
            self.now = until  # nobody else has a turn before; to switch to the hub and back takes longer
        else:
            heapq.heappush(due, (until, next(self._numbers), sleeper.switch))
            self.hub.switch()

    def run(self, until: float) -> None:
        """Do what is due until then."""
        assert until < self.limit, "it does not end"
        self._do_while(lambda: True, until)
        self.now = max(self.now, until)

    def run_while(self, condition: Callable[[], bool]) -> None:
        """Do what is due as long as the condition holds."""
        self._do_while(condition, inf)

    def _do_while(self, condition: Callable[[], bool], until: float) -> None:
        outer, self._until = self._until, until  # what is done in the hub may sleep, too
        while self._due and self._due[0][0] <= until and condition():
            due, _, do = heapq.heappop(self._due)
            assert due < self.limit, "it does not end"
            self.now = max(self.now, due)
            do()
        self._until = outer

    def wait(self, seconds: float, wakers: list[Callable[[], None]], is_over: Callable[[], bool]) -> None:
        """Sleep until one of `wakers` is called, which this call adds to, or for so long."""
        waiting, until = getcurrent(), self.now + seconds
        if waiting is self.hub:
            while not is_over() and self._due and self._due[0][0] <= until:
                self.run(self._due[0][0])
            self.run(self.now if is_over() else until)
            return
        asleep = True

        def wake() -> None:
            nonlocal asleep
            if asleep:
                asleep = False
                waiting.switch()

        self.after(seconds, wake)
        wakers.append(wake)
        self.hub.switch()


class SimulatedFlag:
    """A `threading.Event`."""

    def __init__(self, process: Process) -> None:
        self._process, self._is_set = process, False
        self._wakers: list[Callable[[], None]] = []

    def set(self) -> None:
        self._is_set = True
        for wake in self._wakers:
            self._process.loop.after(0.0, wake)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            seconds = 1e9 if timeout is None else timeout
            self._process.pause(self._process.loop.wait, seconds, self._wakers, self.is_set)
        return self._is_set


class SimulatedThread:
    """A greenlet of a process."""

    def __init__(self, process: Process, function: Callable[[], None]) -> None:
        self._over = SimulatedFlag(process)

        def run() -> None:
            with using(process):
                try:
                    process.check()
                    function()
                except Killed:
                    pass
                finally:
                    self._over.set()

        process.loop.after(0.0, greenlet(run, process.loop.hub).switch)

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)


class SimulatedPool(Executor):
    """`map` works in the calling thread, `submit` in another."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def map(self, function: Callable[..., Any], *of: Any, **_: Any) -> Iterator[Any]:
        return iter([function(*each) for each in zip(*of, strict=False)])

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*arguments, **named))
            except Exception as error:
                future.set_exception(error)

        self._process.start(run, "pool")
        return future


class Process(Environment):
    """A process of a world: its clock may be wrong, it can be killed, and suspended."""

    def __init__(self, loop: Loop, name: str = "1", wrong_by: float = 0.0) -> None:
        self.loop, self.name, self.wrong_by = loop, name, wrong_by
        self.is_dead, self.asleep_until = False, 0.0
        self.at_exit: Callable[[], object] = lambda: None
        self._tokens, self._events = count(), count()

    def check(self) -> None:
        """Stand still while the process is suspended; raise Killed if it is dead."""
        while self.asleep_until > self.loop.now and not self.is_dead:
            self.loop.sleep(self.asleep_until - self.loop.now)
        if self.is_dead:
            raise Killed

    def kill(self) -> None:
        self.is_dead = True

    def suspend(self, seconds: float) -> None:
        self.asleep_until = self.loop.now + seconds

    def utc(self) -> datetime:
        return BEGAN + timedelta(seconds=self.loop.now + self.wrong_by)

    def monotonic(self) -> float:
        return self.loop.now

    def sleep(self, seconds: float) -> None:
        self.pause(self.loop.sleep, seconds)

    def pause(self, wait: Callable[..., None], *arguments: Any) -> None:
        """Let the others have their turn."""
        if self.is_dead:
            raise Killed
        try:
            wait(*arguments)
        except GreenletExit:  # the loop is over, and nobody wakes this greenlet
            self.kill()
        if self.is_dead or self.asleep_until > self.loop.now:
            self.check()

    def token_hex(self, size: int) -> str:
        return f"{self.name}-{next(self._tokens)}"

    def ulid(self) -> str:
        return f"{self.utc():%Y%m%d%H%M%S%f}-{self.name}-{next(self._events):06d}"

    def flag(self) -> SimulatedFlag:
        return SimulatedFlag(self)

    def start(self, function: Callable[[], None], name: str) -> SimulatedThread:
        return SimulatedThread(self, function)

    @contextmanager
    def pool(self, threads: int) -> Iterator[Executor]:
        yield SimulatedPool(self)

    def exit(self, code: int) -> None:
        self.at_exit()
        self.kill()
        raise Killed
