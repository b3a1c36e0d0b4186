"""The ledger of a stage's finished work, which later attempts reuse: trials and refits, or `part`s of other stages.

In: the result of a trial or a refit, or the files of an audit's fold or of a part of embed and predict. Out: an object,
`ledger/trial-<point>-<fold>.json`, `refit-<draw>.json`, `fold-<number>.json` or `part-<number>.json`, in the attempt's
folder, which the process that computed the result creates at once. A point that Optuna proposed has
`ledger/point-<number>.json` before its first trial, and its trials are
`trial-<number>-<digest of the point>-<fold>.json`. A refit's predictions for the test images are in a Parquet file
beside its entry, `ledger/refit-<draw>-<digest>.parquet`, created before the entry, which has its sha256. An attempt
reads the ledgers of earlier attempts and writes only to its own, so several attempts may run at once.

The entries of an attempt that ran other code are not used, because its results may differ. No manifest lists an entry,
so each has a checksum. A damaged entry is recomputed, with a line in the log: this costs one fit, while an error would
block the key until somebody removes the entry.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.spec import AnyStage, Finetune
from pipelines.spec.search import Point
from pipelines.store import (
    FileEntry,
    FitName,
    Layout,
    StoreDamaged,
    check_name,
    encode,
    read_attempt,
    read_record,
)
from ray_jobs.evaluation.rows import PREDICTIONS, PROBABILITIES, write_parquet
from ray_jobs.process.context import Context
from ray_jobs.training.task import Score, Task
from ray_jobs.tuning.trial import Part, ProposedPoint, Record, Refit, Refitted, Trial, refit_title

IMAGES = pa.schema([PREDICTIONS.field("prediction"), *PROBABILITIES])
AnyRecord = TypeVar("AnyRecord", bound=Record)


def add_trial(context: Context[Finetune], fit: FitName, trial: Trial) -> None:
    """Record a finished trial."""
    _add(context, f"{fit}.json", trial)


def add_point(context: Context[Finetune], number: int, point: Point) -> bool:
    """Record a point that Optuna proposed; return False if there is another with this number."""
    return _add(context, f"point-{number}.json", ProposedPoint(point=point))


def add_refit(context: Context[Finetune], draw: int, refit: Refit) -> None:
    """Record a finished refit; its files are in the attempt's folder, and `add_images` has written its images."""
    _add(context, f"refit-{draw}.json", refit)


def add_part(context: Context[AnyStage], name: str, files: tuple[FileEntry, ...]) -> None:
    """Record a finished part, such as fold-0 of an audit; its files are in the attempt's folder."""
    _add(context, f"{name}.json", Part(files=files))


def add_images(context: Context[Finetune], draw: int, images: pa.Table) -> FileEntry:
    """Write the table of a refit's test images; its digest is in the name, so a rerun task overwrites nothing."""
    buffer = pa.BufferOutputStream()
    write_parquet(buffer, images)
    data = buffer.getvalue().to_pybytes()
    digest = hashlib.sha256(data).hexdigest()
    file = FileEntry(path=f"refit-{draw}-{digest[:16]}.parquet", size=len(data), sha256=digest)
    context.open_store().create(_name(context, context.attempt.number, file.path), data)
    return file


def images_table(score: Score) -> pa.Table:
    """Return a model's results as a table of `IMAGES`."""
    columns = [pa.array(score.predictions, IMAGES.field(0).type), *score.probabilities.columns]
    return pa.table(columns, schema=IMAGES)


def scores_table(scores: NDArray[np.float32]) -> pa.Table:
    """Return a model's probabilities [n, classes] as a table, for images with several labels."""
    return pa.table({"scores": pa.FixedSizeListArray.from_arrays(pa.array(scores.ravel()), scores.shape[1])})


class Ledger:
    """The finished work of some attempts at a key; the newest attempt's entry if several have the same."""

    def __init__(self, context: Context[AnyStage], attempts: Sequence[int]) -> None:
        """Open the ledgers of the context's attempt and of `attempts`, the newest first."""
        self._context, self._store, self.attempts = context, context.open_store(), tuple(attempts)
        self._all = tuple(dict.fromkeys((context.attempt.number, *attempts)))

    def trial(self, fit: FitName) -> tuple[int, Trial] | None:
        """Return a finished trial and its attempt; None if it is not finished."""
        return next(self._find(f"{fit}.json", Trial), None)

    def points(self) -> dict[int, Point]:
        """Return the points that Optuna proposed, by number, in ascending order."""
        job, key = self._context.attempt.job, self._context.attempt.key
        files = {name for attempt in self._all for name in self._store.names(Layout.ledger(job, key, attempt))}
        proposed: dict[int, Point] = {}
        for file in files:
            if match := re.fullmatch(r"point-(\d+)\.json", file):
                for _, entry in self._find(file, ProposedPoint):
                    proposed.setdefault(int(match[1]), dict(entry.point))
        return dict(sorted(proposed.items()))

    def refit(self, task: Task, draw: int) -> Refitted | None:
        """Return a finished refit with the task's point, last step and temperature, and log it; None if there is none.

        Its files are copied into the folder of the context's attempt.
        """
        for attempt, refit in self._find(f"refit-{draw}.json", Refit):
            # results on GPUs vary a little, so the trials of another attempt may have led to another choice
            chosen = task.point, task.steps, task.temperature, task.thresholds
            if (refit.point, refit.step, refit.temperature, refit.thresholds) != chosen:
                continue
            try:
                images = self._images(attempt, refit.images)
                files = self._copy(attempt, refit.files)
            except StoreDamaged as error:
                print(f"{error}; the refit is not used", flush=True)
                continue
            print(f"{refit_title(task.config, draw)}: {refit.on_test} (from attempt {attempt})", flush=True)
            return Refitted(refit.model_copy(update={"files": files}), images)
        return None

    def part(self, name: str) -> tuple[FileEntry, ...] | None:
        """Return the files of a finished part, in the folder of the context's attempt; None if it is not finished."""
        for attempt, entry in self._find(f"{name}.json", Part):
            try:
                files = self._copy(attempt, entry.files) if attempt != self._all[0] else entry.files
            except StoreDamaged as error:
                print(f"{error}; {name} is not used", flush=True)
                continue
            print(f"{name.replace('-', ' ')}: from attempt {attempt}", flush=True)
            return files
        return None

    def _find(self, file: str, model: type[AnyRecord]) -> Iterator[tuple[int, AnyRecord]]:
        """Yield each attempt that has this entry, and the entry; skip damaged ones with a line in the log."""
        for attempt in self._all:
            name = _name(self._context, attempt, file)
            try:
                entry = read_record(self._store, name, model)
                if entry is None:
                    continue
                check_name(self._store, name, entry.name)
                if entry.sha256 != entry.checksum():
                    raise StoreDamaged(f"{self._store.uri}/{name} is damaged: its checksum does not match its contents")
            except StoreDamaged as error:
                print(f"{error}; it is not used", flush=True)
                continue
            yield attempt, entry

    def _images(self, attempt: int, file: FileEntry) -> pa.Table:
        """Return the table beside an attempt's entry. Raises StoreDamaged if it is missing or has changed."""
        name = _name(self._context, attempt, file.path)
        data = self._store.read(name, limit=file.size)
        if data is None or hashlib.sha256(data).hexdigest() != file.sha256:
            problem = "it is missing" if data is None else "its sha256 differs from its entry's"
            raise StoreDamaged(f"{self._store.uri}/{name} is damaged: {problem}")
        try:
            return pq.read_table(pa.BufferReader(data))
        except (pa.ArrowException, OSError) as error:
            raise StoreDamaged(f"{self._store.uri}/{name} is damaged: {error}") from None

    def _copy(self, attempt: int, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        """Copy an attempt's files into this attempt's folder. Raises StoreDamaged if one is missing or has changed."""
        if not files:
            return ()
        folder = Layout.files(self._context.attempt.job, self._context.attempt.key, attempt)
        source = self._store.local(folder, files)
        with self._context.staging() as staging:
            for file in files:
                (staging.path / file.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / file.path, staging.path / file.path)
        # Staging hashes the copies; the sha256 that `local` remembers may be older than damage on the disk.
        if staging.files != files:
            raise StoreDamaged(f"{self._store.uri}/{folder} is damaged: the model's files have changed")
        return staging.files


def open_ledger(context: Context[AnyStage]) -> Ledger:
    """Open the ledgers of all attempts by the same code, from the context's attempt back to the first.

    Its `attempts` include attempts that have only checkpoints, from which their fits continue.
    """
    current, store, usable = context.attempt, context.open_store(), []
    for number in range(current.number, 0, -1):
        folder = (current.job, current.key, number)
        if not (store.names(Layout.ledger(*folder)) or store.names(Layout.checkpoints(*folder))):
            continue
        try:
            attempt = read_attempt(store, Layout.attempt(*folder))
        except StoreDamaged as error:
            print(f"the work of attempt {number} is not used: {error}", flush=True)
            continue
        if attempt is not None and attempt.code_digest == current.code_digest:
            usable.append(number)
        else:
            print(f"the work of attempt {number} is not used: it ran other code", flush=True)
    return Ledger(context, usable)


def _name(context: Context[AnyStage], attempt: int, file: str) -> str:
    return f"{Layout.ledger(context.attempt.job, context.attempt.key, attempt)}/{file}"


def _add(context: Context[AnyStage], file: str, record: Record) -> bool:
    """Create an entry; return False if it exists. Then Ray has rerun a task, and either result is valid."""
    named = record.model_copy(update={"name": _name(context, context.attempt.number, file)})
    checked = named.model_copy(update={"sha256": named.checksum()})
    return context.open_store().create(named.name, encode(checked))
