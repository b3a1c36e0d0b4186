"""The log of a training: `LogLine`s, where they are while it trains and afterwards, and `read_log`.

While a stage trains, its processes add their lines to the store as *segments*, objects that are created once:

    attempts/<n>/log/<start>-<writer>-<number>.jsonl

A *writer* is one process that trains one fit (a pretraining is one fit); it began after `start` steps, from a
checkpoint if that is not 0. A writer may join segments: then it creates one with all their lines and removes them. The
finished artifact has all lines in one file, log.jsonl, and the segments are removed.

A writer that continues after step s repeats the steps that an earlier writer did after s. So for each fit, the log has
the earlier writer's lines up to s and the later writer's lines after s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field, ValidationError

from pipelines.errors import StoreDamaged
from pipelines.store.artifacts import local_file, read_manifest
from pipelines.store.fits import FitName
from pipelines.store.objects import numbers, warn
from pipelines.store.protocol import Store, wait_for_store
from pipelines.store.records import Attempt, Layout, Manifest, Name, Time
from vit_model.fields import Frozen

LOG = "log.jsonl"
PROGRESS = "progress "  # begins a stage's lines of progress
_SEGMENT = re.compile(r"(\d{1,18})-([0-9A-Z]{26})-\d+\.jsonl")
_LONGEST = timedelta.max.total_seconds() - 1  # that can be shown; a log may contain any number
_TRIES = 3  # while a writer joins segments or the artifact is committed, listed objects may disappear


class LogLine(Frozen):
    """The state of a training after a step. Speeds and shares are measured since the line before.

    A value is None if it was not measured, or is not finite.
    """

    model_config = ConfigDict(extra="ignore")  # of a later version

    time: Time
    fit: Annotated[Name, Field(max_length=100)] | None = None
    """The `FitName` of a fine-tuning's fit."""
    step: int = Field(ge=0, lt=2**63)
    epoch: float
    """The images so far, divided by the number of training images."""
    loss: float | None
    """At a point of the curve, the mean over all images since the point before; otherwise the mean over the first
    worker's images since the line before."""
    learning_rate: float
    gradient_norm: float | None = None
    """The norm of this step's gradients, before clipping."""
    images_per_second: float | None = None
    """The speed of all workers."""
    data_wait: float | None = None
    """The share of the time that the first worker waited for its loader."""
    mfu: float | None = None
    """Model FLOPs utilisation: the model's operations per second, divided by the devices' peak."""
    seconds_left: float | None = None
    """The estimated time until the last step."""
    dev_loss: float | None = None
    dev_accuracy: float | None = None
    """Measured on dev, or on a trial's held-out images."""
    few_shot: dict[str, float] | None = None
    """Few-shot accuracies of a pretraining with `fewshot`: {"5-shot dev": accuracy}, means over draws of labels."""
    measures: dict[str, float] | None = None
    """Measures of the objective at a point of the curve, by name, such as dino's `feature_rank`."""


def describe_line(line: LogLine, steps: int, unit: str = "step", may_end_before: bool = False) -> str:
    """Return a line as text.

    step 120/1781 (7%) · epoch 2.4 · loss 4.21 · rate 0.001 · gradient norm 1.3 · 5,812 images/s · MFU 41% · waiting for
    images 3% · 0:00:58 left of this trial.

    Args:
        steps: the fit's last step.
        unit: the name of a step, such as "draw 0, step".
        may_end_before: whether the fit may end before its last step.
    """
    values: list[tuple[str, float | None]] = [
        ("epoch {:.3g}", line.epoch),
        ("loss {:.4g}", line.loss),
        ("rate {:.3g}", line.learning_rate),
        ("gradient norm {:.3g}", line.gradient_norm),
        ("{:,.0f} images/s", line.images_per_second),
        ("MFU {:.0%}", line.mfu),
        ("waiting for images {:.0%}", line.data_wait),
        *((f"{name.replace('_', ' ')} {{:.3g}}", value) for name, value in (line.measures or {}).items()),
    ]
    parts = [f"{unit} {line.step}/{steps} ({line.step / steps:.0%})"]
    parts += [form.format(value) for form, value in values if value is not None]
    if line.seconds_left is not None:
        fit = FitName.parse(line.fit)
        left = f"{_duration(line.seconds_left)} left" + (f" of this {fit.kind}" if fit else "")
        parts.append(f"{'at most ' * may_end_before}{left}")
    return " · ".join(parts)


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=round(min(max(seconds, 0), _LONGEST)))


class ProgressLine(Frozen):
    """The progress of a stage. The stage prints PROGRESS and this as JSON; displays show it as text or as a bar."""

    model_config = ConfigDict(extra="ignore")  # of a later version

    done: int
    total: int
    unit: str
    """The counted unit: shard, step, or `draw 0, step`."""
    seconds_left: float | None = None
    line: LogLine | None = None
    """The line of a training's log after this step, at points of the curve and at evaluations."""
    may_end_before: bool = False

    def encode(self) -> str:
        """Return the line."""
        return PROGRESS + self.model_dump_json(exclude_defaults=True)

    def words(self) -> str:
        """Return it as text: `shard 3/12 · 0:00:58 left`, or as `describe_line`."""
        if self.line is not None:
            return describe_line(self.line, self.total, self.unit, self.may_end_before)
        left = "" if self.seconds_left is None else f" · {_duration(self.seconds_left)} left"
        return f"{self.unit} {self.done}/{self.total}{left}"


def read_progress(text: str) -> ProgressLine | None:
    """Return the progress in a line of a stage's output; None for any other line."""
    if not text.startswith(f"{PROGRESS}{{"):
        return None
    with suppress(ValidationError):  # any program may print such a line
        return ProgressLine.model_validate_json(text.removeprefix(PROGRESS))
    return None


def segment_name(job: str, key: str, attempt: int, start: int, writer: str, number: int) -> str:
    """Return the name of a segment; `writer` is a ULID."""
    return f"{Layout.log(job, key, attempt)}/{start}-{writer}-{number}.jsonl"


def encode_lines(lines: Iterable[LogLine]) -> bytes:
    """Return the lines as JSON lines."""
    return b"".join(line.model_dump_json().encode() + b"\n" for line in lines)


def decode_lines(data: bytes, where: str) -> list[LogLine]:
    """Return the lines in JSON lines. Raises StoreDamaged."""
    try:
        return [LogLine.model_validate_json(line) for line in data.splitlines()]
    except ValidationError as error:
        raise StoreDamaged(f"{where} is damaged: {error.errors()[0]['msg']}") from None


def read_log(store: Store, job: str, key: str, seen: dict[str, list[LogLine]] | None = None) -> list[LogLine]:
    """Return the log of a training, finished or not: fit after fit, each by step. Empty if it has none.

    Args:
        seen: a cache of segments by name; new ones are added.

    Raises:
        StoreDamaged: the finished artifact's log cannot be read.
    """
    manifest = read_manifest(store, job, key)
    return running_log(store, job, key, seen) if manifest is None else finished_log(store, manifest)


def finished_log(store: Store, manifest: Manifest) -> list[LogLine]:
    """Return the log of an artifact; empty if it has none, as in earlier versions. Raises StoreDamaged."""
    if (path := local_file(store, manifest, LOG)) is None:
        return []
    return decode_lines(path.read_bytes(), f"{store.uri}/{manifest.folder}/{LOG}")


def running_log(
    store: Store,
    job: str,
    key: str,
    seen: dict[str, list[LogLine]] | None = None,
    attempt: int | None = None,
) -> list[LogLine]:
    """Return the log in the segments of one attempt (None: of all); damaged ones are skipped with a warning."""
    seen = {} if seen is None else seen
    for _ in range(_TRIES):
        segments = [each for each in _segments(store, job, key) if attempt in (None, each.attempt)]
        new = [segment.name for segment in segments if segment.name not in seen]
        read = dict(zip(new, store.read_all(new), strict=True))
        for name, data in read.items():
            try:
                if isinstance(data, StoreDamaged):
                    raise data
                if data is not None:
                    seen[name] = decode_lines(data, f"{store.uri}/{name}")
            except StoreDamaged as error:
                warn(f"{error}; ignoring this part of the log")
                seen[name] = []
        if None not in read.values():
            break
    return _joined((segment, seen.get(segment.name, [])) for segment in segments)


def write_log(
    store: Store, attempt: Attempt, folder: Path, has_fit: Callable[[str | None], bool] = lambda fit: True
) -> None:
    """Write log.jsonl with the lines of the result's fits (`has_fit`), once the store answers."""
    lines = wait_for_store(lambda: running_log(store, attempt.job, attempt.key), warn)
    (folder / LOG).write_bytes(encode_lines(line for line in lines if has_fit(line.fit)))


class _Segment(NamedTuple):
    """A segment, in the order in which later ones supersede earlier ones.

    Within an attempt, a later writer starts from the same checkpoint or a later one.
    """

    attempt: int
    start: int
    writer: str
    name: str


def _segments(store: Store, job: str, key: str) -> Iterator[_Segment]:
    for attempt in numbers(store, Layout.attempts(job, key), suffix=""):
        folder = Layout.log(job, key, attempt)
        for name in store.names(folder):
            if match := _SEGMENT.fullmatch(name):
                yield _Segment(attempt, int(match[1]), match[2], f"{folder}/{name}")


def _joined(segments: Iterable[tuple[_Segment, list[LogLine]]]) -> list[LogLine]:
    writers: dict[tuple[int, int, str, str | None], list[LogLine]] = {}
    for segment, lines in segments:
        for line in lines:
            writers.setdefault((*segment[:3], line.fit), []).append(line)
    fits: dict[str | None, dict[int, LogLine]] = {}
    for attempt, start, writer, fit in sorted(writers, key=lambda writer: writer[:3]):
        earlier = {step: line for step, line in fits.get(fit, {}).items() if step <= start}
        later = sorted(writers[attempt, start, writer, fit], key=lambda line: line.time)
        fits[fit] = earlier | {line.step: line for line in later}
    return [line for lines in fits.values() for _, line in sorted(lines.items())]
