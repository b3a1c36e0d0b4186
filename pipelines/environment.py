"""What a process takes from the machine besides its files: the time, random ids, threads, and its own end.

The engine, the schedules, the store's records and a stage's heartbeat ask `environment()`, so that the simulator in
tests/simulation runs this code in a world whose time passes, and whose processes die, as it decides. As with the
contexts of the module `decimal`, the environment belongs to the thread, and it is the machine's unless a block uses
another.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime


class Environment:
    """The machine's. The simulator overrides every method."""

    def utc(self) -> datetime:
        """Return the wall clock's time, UTC; it may be wrong and may be set."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return the seconds since a moment in the past."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def token_hex(self, size: int) -> str:
        """Return `size` random bytes in hexadecimal."""
        return secrets.token_hex(size)

    def ulid(self) -> str:
        """Return an id that is sorted by the wall clock's milliseconds and unique."""
        from ulid import ULID  # commands that write no event do without it

        return str(ULID())

    def flag(self) -> threading.Event:
        return threading.Event()

    def start(self, function: Callable[[], None], name: str) -> threading.Thread:
        """Start a thread that does not keep the process alive."""
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        return thread

    def pool(self, threads: int) -> AbstractContextManager[Executor]:
        return ThreadPoolExecutor(threads)

    def exit(self, code: int) -> None:
        """End the process at once, whatever its other threads do or wait for."""
        os._exit(code)


_current: ContextVar[Environment] = ContextVar("environment", default=Environment())  # noqa: B039 (it has no state)


def environment() -> Environment:
    """Return the environment of this thread."""
    return _current.get()


@contextmanager
def using(other: Environment) -> Iterator[None]:
    """Use another environment in this thread during the block."""
    token = _current.set(other)
    try:
        yield
    finally:
        _current.reset(token)
