"""The log of a training: progress lines on stdout, and `LogLine`s in the store.

In: each step, with its learning rate and gradient norm. Out: `LogLine`s, which `pipelines.store.read_log` reads: at the
points of the curve, at evaluations, and at least every `LINE_SECONDS`. A number is read from the device only for a
line, because reading waits for the device. `Gauges` also shows each line in Ray's metrics, which every node exports to
Prometheus.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from ray.util.metrics import Gauge
from ulid import ULID

from pipelines.spec import Finetune, Pretrain
from pipelines.store import (
    Attempt,
    LogLine,
    ProgressLine,
    Store,
    encode_lines,
    now,
    segment_name,
    wait_for_store,
    warn,
)
from ray_jobs.data.loader import Loader
from ray_jobs.process import devices, progress
from ray_jobs.training.optim import is_finite_norm
from ray_jobs.training.steps import Step
from ray_jobs.training.task import Evaluation
from ray_jobs.training.workers import ALONE, Worker

_GAUGES = {
    "step": "Steps done",
    "epoch": "Images seen, divided by the number of training images",
    "loss": "Mean training loss since the previous log line",
    "learning_rate": "Learning rate of the last step",
    "gradient_norm": "Norm of the last step's gradients before clipping",
    "images_per_second": "Training images per second of all workers",
    "data_wait": "Share of the time that the first worker waited for images",
    "mfu": "Model FLOPs utilisation, a share of the GPUs' peak",
    "seconds_left": "Estimated seconds until the last step",
    "dev_loss": "Last measured loss on dev",
    "dev_accuracy": "Last measured accuracy on dev",
}
"""A field of `LogLine` -> the description of its gauge, which Prometheus shows as ray_vitflow_<field>."""
LINE_SECONDS = 10.0  # at most between two lines
SEGMENT_SECONDS = 5.0  # between two segments
_JOINED = 32  # segments that are merged into one: a training of a month has about a hundred


class LogWriter:
    """Writes the lines of one training into the store, in a thread, so that a slow store does not delay a step.

        with LogWriter(store, attempt) as writer: ...

    After the block, all lines are in the store. If the block ended with an exception, the writer does not wait for a
    store that is away. It passes each line to `callback` at once.
    """

    def __init__(
        self,
        store: Store,
        attempt: Attempt,
        fit: str | None = None,
        callback: Callable[[LogLine], None] = lambda line: None,
    ) -> None:
        self.fit, self._callback = fit, callback
        self._store, self._attempt = store, attempt
        self._start, self._id, self._number = 0, str(ULID()), 0
        self._last: LogLine | None = None
        self._unsaved: list[LogLine] = []
        self._segments: list[tuple[int, str]] = []  # (how often it was merged, name), the oldest first
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="log", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=None if kind is None else 1.0)
        if not self._thread.is_alive():
            self._try_to_save(is_patient=kind is None)

    def continue_from(self, step: int, unsaved: Sequence[LogLine]) -> None:
        """Continue from a checkpoint after `step` steps, with the lines that were not in the store at that time."""
        self._start, self._unsaved = step, [*unsaved]
        self._last = unsaved[-1] if unsaved else None

    def add(self, line: LogLine) -> None:
        """Add a line; it replaces an earlier line of the same step."""
        with self._lock:
            self._last = line
            self._unsaved.append(line)
        self._callback(line)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add an evaluation after the last step to that step's line.

        If the fit resumed after its last step, that line may be in the store already, and does not change.
        """
        if self._last is None:
            return
        measured = {"dev_loss": finite(evaluation.loss), "dev_accuracy": evaluation.accuracy}
        self.add(self._last.model_copy(update={"time": now(), **measured}))

    def unsaved(self) -> tuple[LogLine, ...]:
        """Return the lines that may not be in the store; a checkpoint has to contain them, so that none gets lost."""
        with self._lock:
            return tuple(self._unsaved)

    def _repeat(self) -> None:
        while not self._over.wait(SEGMENT_SECONDS):
            self._try_to_save()

    def _try_to_save(self, is_patient: bool = False) -> None:
        try:
            if is_patient:
                wait_for_store(self._save, warn)
            else:
                self._save()
        except Exception as error:  # the log must not end a training
            warn(f"cannot write the log of the training: {error}")

    def _save(self) -> None:
        lines = self.unsaved()
        if not lines:
            return
        self._create(0, encode_lines(lines))
        with self._lock:
            del self._unsaved[: len(lines)]
        while len(alike := self._newest_alike()) >= _JOINED:
            self._join(alike)

    def _create(self, level: int, data: bytes) -> None:
        attempt = self._attempt
        self._number += 1
        name = segment_name(attempt.job, attempt.key, attempt.number, self._start, self._id, self._number)
        self._store.create(name, data)
        self._segments.append((level, name))

    def _newest_alike(self) -> list[str]:
        """Return the newest segments that were merged equally often."""
        return [name for level, name in self._segments if level == self._segments[-1][0]]

    def _join(self, names: list[str]) -> None:
        """Merge the newest segments into one."""
        level = self._segments[-1][0]
        parts = [self._store.read(name) or b"" for name in names]
        del self._segments[-len(names) :]  # even if their removal fails: the new segment has all their lines
        self._create(level + 1, b"".join(parts))
        self._store.remove(names)


class Reporting(NamedTuple):
    """Where the log of a training goes, and the unit of its progress lines."""

    writer: LogWriter | None = None
    """the first worker's writer; None: nothing is written to the store"""
    unit: str = "step"
    """what a progress line calls a step"""


class Log:
    """The log of a training, which only the first worker writes.

    Args:
        flops: FLOPs of training on one image.
        images: the number of training images.
        steps: the last step; None: the configuration's.
        is_limit: whether the training may end before that step.
    """

    def __init__(
        self,
        config: Pretrain | Finetune,
        flops: int,
        images: int,
        loader: Loader,
        reporting: Reporting = Reporting(),  # noqa: B008 (never changed)
        worker: Worker = ALONE,
        steps: int | None = None,
        is_limit: bool = False,
    ) -> None:
        self._is_silent, self._writer, self._loader = worker.rank > 0, reporting.writer, loader
        self._batch, self._images = config.batch_size, images
        self.last = steps or config.steps
        """the last step"""
        self._unit, self._is_limit = reporting.unit, is_limit
        self._progress = progress.Progress(self.last)
        device = devices.device(worker.local_rank)
        peak = devices.peak_flops(device, devices.torch_dtype(config.dtype, device))
        self._peak = None if peak is None else worker.world * peak / flops  # images/s
        self._sum, self._summed = torch.zeros((), device=device), 0  # since the last line
        self.first = 0
        """the step that the training begins with"""
        self._time, self._step, self._waited = time.monotonic(), self.first, loader.seconds_waited

    def continue_from(self, step: int, unsaved: Sequence[LogLine]) -> None:
        """Continue from a checkpoint after `step` steps, with the lines that were not in the store at that time."""
        self.first = self._step = step
        if self._writer is not None:
            self._writer.continue_from(step, unsaved)

    def add(
        self,
        step: Step,
        loss: float | None = None,
        evaluation: Evaluation | None = None,
        few_shot: dict[str, float] | None = None,
        measures: dict[str, float] | None = None,
    ) -> None:
        """Log a step, if a line is due or if there is a mean loss or an evaluation."""
        if self._is_silent:
            return
        done = step.done
        for share in step.losses:
            self._sum += share
            self._summed += 1
        seconds = time.monotonic() - self._time
        is_shown = self._summed > 0 and self._progress.due(done)
        is_written = self._writer is not None and (
            loss is not None or evaluation is not None or seconds >= LINE_SECONDS
        )
        if not is_shown and not is_written:
            return
        if is_shown:
            self._progress.reach(done)
        recent, waited = self._sum.item() / max(1, self._summed), self._loader.seconds_waited
        speed = (done - self._step) * self._batch / seconds if seconds > 0 else None
        norm = None if step.norm is None else float(step.norm)
        line = LogLine(
            time=now(),
            fit=None if self._writer is None else self._writer.fit,
            step=done,
            epoch=done * self._batch / self._images,
            loss=finite(recent if loss is None else loss),
            learning_rate=step.rate,
            gradient_norm=None if norm is None or not is_finite_norm(norm) else norm,
            images_per_second=speed,
            data_wait=min(1.0, (waited - self._waited) / seconds) if seconds > 0 else None,
            mfu=None if speed is None or self._peak is None else speed / self._peak,
            seconds_left=self._progress.left(done),
            dev_loss=None if evaluation is None else finite(evaluation.loss),
            dev_accuracy=None if evaluation is None else evaluation.accuracy,
            few_shot=few_shot,
            measures=measures,
        )
        if is_shown:
            total, unit = self.last, self._unit
            progress.show(ProgressLine(done=done, total=total, unit=unit, line=line, may_end_before=self._is_limit))
        if self._writer is not None and is_written:
            self._writer.add(line)
            self._sum.zero_()
            self._summed = 0
            self._time, self._step, self._waited = time.monotonic(), done, waited

    def unsaved(self) -> tuple[LogLine, ...]:
        """Return the lines that a checkpoint has to contain."""
        return () if self._writer is None else self._writer.unsaved()


def finite(value: float) -> float | None:
    """Return the value; None if it is not finite, because JSON cannot express that."""
    return value if math.isfinite(value) else None


class Gauges:
    """The gauges of one training, or of one fit of a fine-tuning."""

    def __init__(self, attempt: Attempt, fit: str | None = None) -> None:
        tags = {
            "run": attempt.run,
            "stage": attempt.stage,
            "key": attempt.key[:12],
            "attempt": str(attempt.number),
            "fit": fit or "",
        }
        self._gauges = {
            name: Gauge(f"vitflow_{name}", description, tuple(tags)) for name, description in _GAUGES.items()
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags(tags)

    def show(self, line: LogLine) -> None:
        """Show the values of a line; a gauge without a value in it does not change."""
        for name, gauge in self._gauges.items():
            if (value := getattr(line, name)) is not None:
                gauge.set(value)
