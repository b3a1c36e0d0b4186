"""Notices that a training will be interrupted: its process is told to end, or one of its machines is going away.

In the stage's process. Both make the workers save a checkpoint, which they are asked for through the store.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray

from pipelines.spec import Pretrain
from pipelines.store import StoreError, checkpoints, request_checkpoint, warn
from ray_jobs.process.context import Context

GRACE_SECONDS = 25.0  # for the checkpoint after SIGTERM; machines get 30 s or more
_LOOK_SECONDS = 3.0


@contextmanager
def save_on_notice(context: Context[Pretrain]) -> Iterator[None]:
    """Ask for a checkpoint during the block on SIGTERM, and when a machine of the cluster is draining.

    After SIGTERM the process ends when the checkpoint is there, or after `GRACE_SECONDS`. Ray sends SIGKILL to a job
    that it stops 3 s after SIGTERM, or after RAY_JOB_STOP_WAIT_TIME_S of the head's environment.
    """
    over = threading.Event()
    threading.Thread(
        target=_watch_machines, args=(context, over), name="draining machines", daemon=True
    ).start()
    before = signal.getsignal(signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)
        _save(context, "told to end (SIGTERM)")
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        over.set()


def _watch_machines(context: Context[Pretrain], over: threading.Event) -> None:
    known: set[str] = set()
    while not over.wait(_LOOK_SECONDS):
        draining = set(ray._private.state.state.get_draining_nodes())  # as Ray Train's own watcher asks
        if draining - known:
            _save(context, "a machine of the cluster is draining")
        known |= draining


def _save(context: Context[Pretrain], why: str) -> None:
    """Ask for a checkpoint, and wait until there is one."""
    store, attempt = context.open_store(), context.attempt
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        there = checkpoints(store, attempt.job, attempt.key)[:1]
        request_checkpoint(store, attempt)
        print(f"{why}: saving a checkpoint", flush=True)
        while checkpoints(store, attempt.job, attempt.key)[:1] == there:
            if time.monotonic() > deadline:
                print(f"{why}: there was no checkpoint within {GRACE_SECONDS:.0f} s", flush=True)
                return
            time.sleep(0.2)
    except StoreError as error:
        warn(f"{why}: no checkpoint, because {error}")
