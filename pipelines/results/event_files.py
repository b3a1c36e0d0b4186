"""Event files for TensorBoard, from the logs of trainings. In: `LogLine`s. Out: a folder per training."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from pipelines.store import LogLine

TAGS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "epoch": "train/epoch",
    "dev_loss": "dev/loss",
    "dev_accuracy": "dev/accuracy",
    "images_per_second": "speed/images_per_second",
    "data_wait": "speed/data_wait",
    "mfu": "speed/mfu",
}
"""A line's field -> its tag."""
_NAME = "events.out.tfevents."  # and a number


class EventFiles:
    """A context manager that writes event files below a folder, which TensorBoard may read at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, _Run] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs.values():
            run.writer.close()

    def update(self, name: str, lines: Iterable[LogLine]) -> None:
        """Write the new lines of a training's whole log; TensorBoard discards superseded steps."""
        if name not in self._runs:
            self._runs[name] = _Run(self._folder / name)
        self._runs[name].update(lines)


class _Run:
    """The event files of one training: a new one each time that steps were superseded.

    It also supersedes the files of an earlier writer in this folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[int, dict[str, float]] = {}  # step -> tag -> value
        folder.mkdir(parents=True, exist_ok=True)
        self._files = max((int(path.name[len(_NAME) :]) for path in folder.glob(f"{_NAME}[0-9]*")), default=0)
        self.writer = self._begin(0)

    def update(self, lines: Iterable[LogLine]) -> None:
        values_at = {line.step: (datetime.fromisoformat(line.time), scalars(line)) for line in lines}
        gone = [
            step
            for step, written in self._written.items()
            if step not in values_at or not written.items() <= values_at[step][1].items()
        ]
        if gone:
            self.writer.close()
            self.writer = self._begin(min(gone))
            self._written = {step: values for step, values in self._written.items() if step < min(gone)}
        for step, (time, values) in sorted(values_at.items()):
            new = values.items() - self._written.get(step, {}).items()
            if new:
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in new])
                self._write(Event(wall_time=time.timestamp(), step=step, summary=summary))
            self._written[step] = values
        self.writer.flush()

    def _begin(self, step: int) -> Any:
        """Open a file that takes over at a step; TensorBoard reads files in the order of their names."""
        self._files += 1
        path = self._folder / f"{_NAME}{self._files:09d}"
        self.writer = RecordWriter(path.open("xb"))
        self._write(Event(file_version="brain.Event:2"))
        # For TensorBoard, each start after the first voids earlier events from its step on.
        self._write(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        return self.writer

    def _write(self, event: Any) -> None:
        self.writer.write(event.SerializeToString())


def scalars(line: LogLine) -> dict[str, float]:
    """Return a line's measurements by tag."""
    values = {tag: getattr(line, name) for name, tag in TAGS.items()}
    values |= {f"few-shot/{name}": accuracy for name, accuracy in (line.few_shot or {}).items()}
    values |= {f"objective/{name}": value for name, value in (line.measures or {}).items()}
    return {tag: value for tag, value in values.items() if value is not None}
