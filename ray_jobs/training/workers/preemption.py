"""Preemption notices: SIGTERM to the stage's process, or a machine of the cluster that is draining.

Runs in the stage's process. After either notice the workers save a checkpoint, which is requested through the store.
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
    """During the block, request a checkpoint on SIGTERM and when a machine of the cluster is draining.

    After SIGTERM the process ends when the checkpoint is committed, or after `GRACE_SECONDS`. When Ray stops a job, it
    sends SIGKILL 3 s after SIGTERM, or after RAY_JOB_STOP_WAIT_TIME_S of the head's environment.
    """
    over = threading.Event()
    threading.Thread(target=_watch_machines, args=(context, over), name="draining machines", daemon=True).start()
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
    """Request a checkpoint, and wait until it is committed."""
    store, attempt = context.open_store(), context.attempt
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        existing = checkpoints(store, attempt.job, attempt.key)[:1]
        request_checkpoint(store, attempt)
        print(f"{why}: saving a checkpoint", flush=True)
        while checkpoints(store, attempt.job, attempt.key)[:1] == existing:
            if time.monotonic() > deadline:
                print(f"{why}: no checkpoint was saved within {GRACE_SECONDS:.0f} s", flush=True)
                return
            time.sleep(0.2)
    except StoreError as error:
        warn(f"{why}: cannot save a checkpoint: {error}")
