"""Checkpoints of a training: each worker's part of the state in one safetensors file, committed together.

A file has the worker's `StateShard`s, named kind/parameter@start, and in its header the worker's other state as JSON.
So a checkpoint can be read by any number of workers, by any engine, and without pickle. Writing happens in a thread,
from a copy. The worker of rank 0 commits when all files are there, and removes checkpoints that are no longer needed.

A pretraining has one series of checkpoints, a fine-tuning one for each running fit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pipelines.spec import Finetune, Pretrain
from pipelines.store import (
    Attempt,
    Checkpoint,
    Store,
    StoreAbsent,
    StoreDamaged,
    StoreError,
    StoreUnreachable,
    checkpoint_requested,
    checkpoints,
    commit_checkpoint,
    encode,
    intact,
    now,
    read_record,
    remove_checkpoints,
    wait_for_store,
    warn,
)
from ray_jobs.process.heartbeat import Steps
from ray_jobs.training.engine import StateShard
from ray_jobs.training.state import STATE, TrainState, WorkerState
from ray_jobs.training.workers import ALONE, Worker

_LOOK_SECONDS = 0.2  # between checks for the other workers' files
_AWAIT_SECONDS = 5.0  # how long a worker waits for its writer before it asks the others again
_LISTEN_SECONDS = 2.0  # between checks for requests


class _Writing(NamedTuple):
    """A checkpoint that is being written: this worker's part, and on rank 0 the commit that follows."""

    checkpoint: Checkpoint
    is_best: bool
    part: Future[Checkpoint]
    commit: Future[None]
    is_given_up: threading.Event
    """set if some worker could not write its part"""


def _store_error(future: Future[Any]) -> StoreError | None:
    """Return the StoreError that a future ended with, or None; raise any other error, and StoreAbsent."""
    error = future.exception()
    if error is not None and (isinstance(error, StoreAbsent) or not isinstance(error, StoreError)):
        raise error
    return error


class CheckpointManager:
    """One worker's part in writing the checkpoints of a training. All workers call its methods together.

    Args:
        worker: its group is in the names of the files, because a group that died may have left some behind.
        start: the checkpoint that the attempt started from, which is kept.
        steps: counts how many steps are done.
        fit: with a Finetune, the name of the fit, whose newest checkpoint is kept.
    """

    def __init__(
        self,
        store: Store,
        attempt: Attempt,
        config: Pretrain | Finetune,
        worker: Worker = ALONE,
        start: Checkpoint | None = None,
        steps: Steps | None = None,
        fit: str | None = None,
    ) -> None:
        self._store, self._attempt, self._fit = store, attempt, fit
        self._worker, self._rank, self._world, self._start = worker, worker.rank, worker.world, start
        self._every, self._steps = config.checkpoint_every, steps or Steps()
        self._kept_latest, self._kept_steps, self._end = 1, tuple[int, ...](), config.steps
        self._agreement = dist.new_group(backend="gloo") if worker.world > 1 else None
        self._request: tuple[Tensor, dist.Work] | None = None  # rank 0's answer, being sent
        self._thread = ThreadPoolExecutor(1)
        self._writing: _Writing | None = None
        self._last = time.monotonic()
        self._requests = self._answered = 0  # requests for a checkpoint, which only a pretraining gets
        self._has_checkpoints = False  # whether a fit has or had checkpoints
        self.newest = None if start is None else start.step
        """the step of the last checkpoint that is written; None if there is none"""
        if isinstance(config, Pretrain):
            self._kept_latest, self._kept_steps = config.keep_checkpoints, config.keep_steps
            self._requests = self._answered = checkpoint_requested(store, attempt)
            if self._rank == 0:
                threading.Thread(target=self._listen, name="requests for a checkpoint", daemon=True).start()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint after this step is configured or was requested. Called after every step."""
        self._steps.done = step
        every = self._every
        is_wanted = self._is_requested()
        return is_wanted or step in self._kept_steps or (every.steps is not None and step % every.steps == 0)

    def _is_requested(self) -> bool:
        """Return whether the clock or a request demands a checkpoint; with several workers, as of the previous call.

        So no step waits for rank 0's answer, which is sent to the others during the next step.
        """
        minutes, is_wanted = self._every.minutes, False
        if self._rank == 0:  # its clock decides
            clock, requests = time.monotonic(), self._requests
            is_wanted = requests > self._answered or (minutes is not None and clock - self._last >= 60 * minutes)
            self._answered, self._last = requests, clock if is_wanted else self._last
        if self._agreement is None:
            return is_wanted
        flag = torch.tensor([is_wanted])
        before, self._request = self._request, (flag, dist.broadcast(flag, 0, self._agreement, async_op=True))
        if before is None:
            return False
        flag, work = before
        work.wait()
        return bool(flag)

    def _listen(self) -> None:
        while True:
            time.sleep(_LISTEN_SECONDS)
            try:
                self._requests = checkpoint_requested(self._store, self._attempt)
            except StoreError as error:
                warn(f"cannot check for requests for a checkpoint: {error}")

    def save(self, step: int, best: int | None, shards: Iterable[StateShard], state: WorkerState) -> None:
        """Copy the state after `step` steps, and write it in a thread. First `wait` for the previous checkpoint.

        `best` is the step with the highest dev accuracy so far; its checkpoint is kept.

        Raises:
            StoreError: as `wait`.
            Superseded: there was a newer attempt when the previous checkpoint was committed.
        """
        self.wait()
        self._has_checkpoints, self._last = True, time.monotonic()
        copies = {f"{shard.kind}/{shard.name}@{shard.start}": shard.values.to("cpu", copy=True) for shard in shards}
        checkpoint = Checkpoint(
            job=self._attempt.job,
            key=self._attempt.key,
            attempt=self._attempt.number,
            step=step,
            files=(),
            created=now(),
            fit=self._fit,
            best=best,
        )
        # An outage does not end a training.
        part = self._thread.submit(wait_for_store, partial(self._write_part, checkpoint, copies, state), warn)
        is_given_up = threading.Event()
        commit = partial(self._commit, checkpoint, best, part, is_given_up)
        committing = self._thread.submit(wait_for_store, commit, warn)
        self._writing = _Writing(checkpoint, step == best, part, committing, is_given_up)

    def wait(self) -> None:
        """Return when the last checkpoint is written; on rank 0, when it is committed.

        If it cannot be written, because the disk is full or the store refuses it, it is skipped with a line in the
        log: training continues, the previous checkpoint remains, and the next one is written as usual.

        Raises:
            StoreError: it cannot be written, but the result needs it, because consumers can name it.
            StoreAbsent: the store was deleted.
            Superseded: there is a newer attempt.
        """
        if (writing := self._writing) is None:
            return
        self._writing, step = None, writing.checkpoint.step
        self._await(writing.part)
        error = _store_error(writing.part)
        if self._is_true_of_any(error is not None):
            writing.is_given_up.set()
            if self._rank == 0:  # not with the next checkpoint, which may need the space
                self._thread.submit(self._discard, writing.checkpoint)
            error = error or StoreError("another worker could not write its part, see the log")
        else:
            self._await(writing.commit)
            error = _store_error(writing.commit)
            if error is not None:
                self._thread.submit(self._discard, writing.checkpoint)
        if error is None:
            self.newest = step
        elif writing.is_best or step in self._kept_steps:
            raise error
        else:
            last = "there is no earlier one" if self.newest is None else f"the last checkpoint is of step {self.newest}"
            warn(f"cannot write the checkpoint of step {step}: {error}; {last}, and training continues")

    def _await(self, future: Future[Any]) -> None:
        """Wait for all workers' futures, in short collective operations, because a store may be away for long."""
        while self._is_true_of_any(not future.done()):
            futures.wait([future], timeout=_AWAIT_SECONDS)

    def _is_true_of_any(self, flag: bool) -> bool:
        """Return whether the flag of any worker is true."""
        if self._agreement is None:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, self._agreement)
        return bool(flags)

    def opened_start(self) -> TrainState | None:
        """Open the checkpoint that the attempt started from; None if it started without one."""
        return None if self._start is None else TrainState(self._store, self._start)

    def resume(
        self, attempts: Iterable[int], module: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> TrainState | None:
        """Open the fit's latest checkpoint by this attempt or one of `attempts`; None if there is none.

        A checkpoint that is damaged or belongs to another model or optimizer is skipped with a line in the log: this
        costs a part of one fit, while an error would block the key until somebody removes the checkpoint.
        """
        attempt, usable = self._attempt, {self._attempt.number, *attempts}
        existing = checkpoints(self._store, attempt.job, attempt.key, self._fit, usable)
        self._has_checkpoints = bool(existing)
        if self._agreement is not None:
            return self._resume_together(existing, module, optimizer)
        return self._furthest(existing, module, optimizer)

    def _resume_together(
        self, existing: list[Checkpoint], module: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> TrainState | None:
        """Open the checkpoint that rank 0 chooses: an attempt that is still running may add others meanwhile."""
        saved = self._furthest(existing, module, optimizer) if self._rank == 0 else None
        chosen = [None if saved is None else (saved.attempt, saved.step)]
        dist.broadcast_object_list(chosen, 0, self._agreement)
        if self._rank == 0 or chosen[0] is None:
            return saved
        number, step = chosen[0]
        job, key = self._attempt.job, self._attempt.key
        for checkpoint in checkpoints(self._store, job, key, self._fit, {number}):
            if checkpoint.step == step:
                return TrainState(self._store, checkpoint)
        raise StoreError(
            f"{self._store.uri}: the checkpoint of step {step} of attempt {number} was removed meanwhile; rerun"
        )

    def _furthest(
        self, existing: list[Checkpoint], module: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> TrainState | None:
        for checkpoint in existing:
            try:
                saved = TrainState(self._store, checkpoint)
                saved.require(module, optimizer)
            except StoreDamaged as error:
                print(f"{error.problem}; it is not used", flush=True)
                continue
            self.newest = saved.step
            return saved
        return None

    def remove(self) -> None:
        """Remove the checkpoints of a fit that has ended, if there are any.

        Raises:
            Superseded: there is a newer attempt.
        """
        self.wait()
        if self._has_checkpoints and self._rank == 0:
            remove_checkpoints(self._store, self._attempt, fit=self._fit)

    def named(self, best: int | None) -> list[TrainState]:
        """Open the checkpoints before the last step that consumers can name: the best, and the configured steps.

        Raises:
            StoreDamaged: a checkpoint is missing or damaged. The next attempt continues from an earlier one.
        """
        existing = checkpoints(self._store, self._attempt.job, self._attempt.key, self._fit)
        states, needed = [], {*self._kept_steps, *([] if best is None else [best])} - {self._end}
        for step in sorted(needed):
            checkpoint = intact(self._store, [entry for entry in existing if entry.step == step])
            if checkpoint is None:
                raise StoreDamaged(
                    f"{self._store.uri}: the checkpoint of step {step}, which the result needs, is missing or damaged",
                    "run the pipeline again to continue from an earlier checkpoint",
                )
            states.append(TrainState(self._store, checkpoint))
        return states

    def _write_part(self, checkpoint: Checkpoint, copies: dict[str, Tensor], state: WorkerState) -> Checkpoint:
        """Write this worker's file and return the checkpoint with this file only.

        Raises:
            StoreError: it cannot be written.
        """
        try:
            with self._store.staging(checkpoint.folder) as staging:
                save_file(
                    copies,
                    staging.path / f"{self._name(self._rank)}.safetensors",
                    {STATE: state.model_dump_json()},
                )
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{self._store.uri}: cannot write {checkpoint.folder}: {error}") from None
        part = checkpoint.model_copy(update={"files": staging.files})
        if self._rank:
            self._store.create(f"{checkpoint.folder}/{self._name(self._rank)}.json", encode(part))
        return part

    def _commit(
        self, checkpoint: Checkpoint, best: int | None, part: Future[Checkpoint], is_given_up: threading.Event
    ) -> None:
        """On rank 0, commit a checkpoint when all its parts are written, unless it is given up."""
        if self._rank:
            return
        others = []
        for rank in range(1, self._world):
            name = f"{checkpoint.folder}/{self._name(rank)}.json"
            while (record := read_record(self._store, name, Checkpoint)) is None:
                if is_given_up.wait(_LOOK_SECONDS):
                    return
            others.append(record.files[0])
        if part.exception() is not None:
            return
        files = (*part.result().files, *others)
        commit_checkpoint(self._store, self._attempt, checkpoint.model_copy(update={"files": files}))
        try:
            self._remove_old(checkpoint.step, best)
        except StoreUnreachable:
            raise  # to try again
        except StoreError as error:
            warn(f"cannot remove older checkpoints: {error}")

    def _discard(self, checkpoint: Checkpoint) -> None:
        """Remove the parts of a checkpoint that not all workers could write, or that could not be committed."""
        with suppress(StoreError):
            names = self._store.names(checkpoint.folder)
            # otherwise it is committed, and the removal of older ones failed
            if "manifest.json" not in names:
                self._store.remove([f"{checkpoint.folder}/{name}" for name in names])

    def _name(self, rank: int) -> str:
        return f"group-{self._worker.group}-rank-{rank:05d}"

    def _remove_old(self, step: int, best: int | None) -> None:
        """Keep the latest, the best, those that consumers can name, and the attempt's start; remove all others.

        What was the best when one of the latest was written also stays: the next attempt may continue from that one.
        """
        attempt = self._attempt
        existing = checkpoints(self._store, attempt.job, attempt.key, self._fit)
        earlier = [entry for entry in existing if entry.step <= step and entry.attempt <= attempt.number]
        newest = {entry.step: entry for entry in reversed(earlier)}  # per step, the newest attempt's
        latest = sorted(newest)[-self._kept_latest :]
        steps = {*latest, best, *self._kept_steps, *(newest[step].best for step in latest)}
        kept = [newest[step] for step in newest if step in steps]
        kept += [] if self._start is None else [self._start]
        remove_checkpoints(self._store, attempt, kept, step, self._fit)
