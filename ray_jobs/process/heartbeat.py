"""The heartbeat of an attempt, which also ends the attempt's process when a later attempt has taken over.

While a stage's process runs, a thread in it replaces the attempt's alive.json every few seconds. The driver watches
that object: if it has not changed for a minute, the attempt is lost, and the driver starts the next one. The same
thread looks for that next attempt and ends the process if there is one, because a lost attempt may still run: its
machine was suspended, or its cluster lost contact with it. When the process ends, Ray ends its workers.

A stage's process may only wait for its workers, and would wait forever if they hang. So a worker that counts steps
writes its step to the same object (`count_steps`), and the stage's process ends if that step does not change for very
long. A stage without steps, such as the ingest of a large archive, only shows that its process runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pipelines.environment import environment
from pipelines.spec import AnyStage
from pipelines.store import (
    Attempt,
    Heartbeat,
    Layout,
    Store,
    StoreDamaged,
    StoreError,
    Superseded,
    check_newest,
    encode,
    read_attempt,
    read_record,
    warn,
)
from ray_jobs.process.context import Context

HEARTBEAT_SECONDS = 5.0  # a driver waits for twelve of them
# The longest time without a step: longer than an evaluation between two steps or a restart of the workers. This is the
# last resort: the process group's limit ends workers that wait for each other (`ray_jobs.training.workers.hangs`).
STEP_SECONDS = 7200.0


class Steps:
    """A counter that a training loop sets; `count_steps` writes it to the store."""

    done: int | None = None


def earlier_seconds(context: Context[AnyStage]) -> float:
    """Return how long earlier attempts by the same code ran whose ledgers or checkpoints this one can use."""
    attempt, store = context.attempt, context.open_store()
    for number in range(attempt.number - 1, 0, -1):
        place = attempt.job, attempt.key, number
        if not (store.names(Layout.ledger(*place)) or store.names(Layout.checkpoints(*place))):
            continue
        with suppress(StoreDamaged):
            earlier = read_attempt(store, Layout.attempt(*place))
            last = read_record(store, Layout.heartbeat(*place), Heartbeat)
            if earlier is not None and last is not None and earlier.code_digest == attempt.code_digest:
                return last.seconds  # with those that it continued
    return 0.0


@contextmanager
def show_heartbeat(context: Context[AnyStage], earlier: float = 0.0) -> Iterator[None]:
    """Show a heartbeat during the block, in the process of a stage; `earlier`: its `earlier_seconds`."""
    seen, unchanged, began = Heartbeat(nonce=context.attempt.nonce), 0, environment().monotonic()

    def show(store: Store) -> None:
        nonlocal seen, unchanged
        last, seen = seen, _write_heartbeat(store, context.attempt, seconds=earlier + environment().monotonic() - began)
        # count heartbeats, not seconds: the clock also runs while a process is suspended
        unchanged = unchanged + 1 if seen.step == last.step else 0
        if seen.step is not None and unchanged * HEARTBEAT_SECONDS > STEP_SECONDS:
            _exit(f"step {seen.step} has lasted for {STEP_SECONDS / 3600:.0f} hours; the workers hang")

    with _repeated(context, show):
        yield


@contextmanager
def count_steps(context: Context[AnyStage]) -> Iterator[Steps]:
    """Yield a step counter and write a heartbeat whenever it changes; for one worker of a stage."""
    steps, shown = Steps(), None

    def show(store: Store) -> None:
        nonlocal shown
        if steps.done != shown:
            shown = _write_heartbeat(store, context.attempt, steps.done).step

    with _repeated(context, show):
        yield steps


def _write_heartbeat(
    store: Store, attempt: Attempt, step: int | None = None, seconds: float | None = None
) -> Heartbeat:
    """Write the next heartbeat and return it; it repeats the previous heartbeat's value of what is None."""
    name = Layout.heartbeat(attempt.job, attempt.key, attempt.number)
    try:
        last = read_record(store, name, Heartbeat)
    except StoreDamaged:  # a power cut damaged it
        last = None
    last = last or Heartbeat(nonce=attempt.nonce)
    following = Heartbeat(
        nonce=attempt.nonce,
        beat=last.beat + 1,
        step=last.step if step is None else step,
        seconds=last.seconds if seconds is None else seconds,
    )
    store.replace(name, encode(following))
    return following


@contextmanager
def _repeated(context: Context[AnyStage], beat: Callable[[Store], None]) -> Iterator[None]:
    """Call `beat` now and every few seconds in a thread, until the block ends or the attempt is superseded."""
    over = environment().flag()

    def repeat() -> None:
        store = None
        while True:
            try:
                store = store or context.open_store()
                check_newest(store, context.attempt)
                beat(store)
            except Superseded as error:
                _exit(str(error))
            except StoreError as error:
                # it may answer again; if it does not, the driver does not see this process either
                warn(f"cannot write a heartbeat: {error}")
            if over.wait(HEARTBEAT_SECONDS):
                return

    thread = environment().start(repeat, "heartbeat")
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=1.0)  # no longer, because the store may not answer


def _exit(reason: str) -> None:
    """End the process at once, whatever its other threads do or wait for."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    environment().exit(1)
