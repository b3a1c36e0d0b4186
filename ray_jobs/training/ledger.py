"""The ledger of a fine-tuning: its finished trials and refits, which later attempts at the same key take over. That of
an audit has its finished folds.


In: the result of a trial or a refit. Out: an object, `ledger/trial-<point>-<fold>.json` or `ledger/refit-<draw>.json`,
in the attempt's folder, created once, by the process that computed the result, as soon as it has it; for a point that
Optuna proposed also `ledger/point-<number>.json`, before its first trial. An attempt reads the ledgers of the attempts
before it and writes to its own, so several attempts may run at once.

The entries of an attempt that ran other code are not used, because its results may differ. No manifest lists an entry,
so each has a checksum. A damaged entry is computed again, with a line in the log: this costs one fit, while an error
would block the key until somebody removes the entry.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Annotated, Self, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Finetune
from pipelines.spec.search import Point
from pipelines.store import (
    MODEL_FILES,
    FileEntry,
    Layout,
    StoreDamaged,
    check_name,
    encode,
    read_attempt,
    read_record,
)
from ray_jobs.evaluation.rows import PROBABILITIES
from ray_jobs.process.stage import Context
from ray_jobs.training.task import Place, Refit, Score, Trial
from vit_model.config import Frozen

Fraction = Annotated[float, Field(ge=0, le=1)]


class LedgerEntry(Frozen):
    """What all entries have."""

    name: str
    """Of this object in the store."""
    sha256: str = ""
    """Of the other fields, see `checksum`."""

    def checksum(self) -> str:
        """Return the sha256 of all other fields."""
        return sha256(canonical_json(self.model_dump(mode="json", exclude={"sha256"})))


class PointEntry(LedgerEntry):
    """A point that Optuna proposed: {field: value}."""

    point: dict[str, JsonValue]


class TrialEntry(LedgerEntry):
    """A finished trial, see `Trial`: its results on the validation part of its fold, after `step` steps."""

    accuracy: Fraction
    loss: float
    step: PositiveInt
    """Of a refit, its last."""
    evaluations: tuple[tuple[PositiveInt, Fraction, float], ...] = ()
    is_pruned: bool = False
    seconds: float = 0.0
    temperature: PositiveFloat | None = None


class CurvePoint(Frozen):
    """A point of a refit's training curve."""

    step: PositiveInt
    learning_rate: float
    loss: float


class ImageProbabilities(Frozen):
    """The columns of a table of PROBABILITIES, each of n images; calibrated ones are null without a temperature."""

    probability: tuple[Fraction, ...]
    nll: tuple[float, ...]
    top5: tuple[tuple[NonNegativeInt, ...], ...]
    top5_probabilities: tuple[tuple[Fraction, ...], ...]
    calibrated_probability: tuple[Fraction | None, ...]
    calibrated_nll: tuple[float | None, ...]


class RefitEntry(TrialEntry):
    """A finished refit: its results on n test images, and its model's files if they are kept.

    The numbers per image are JSON, too (2.8 MB for 10,000 images), so that an entry is one object, complete or absent,
    and validated like any other record.
    """

    point: dict[str, JsonValue]
    predictions: tuple[NonNegativeInt, ...]
    """[n], labels."""
    probabilities: ImageProbabilities
    curve: tuple[CurvePoint, ...]
    substitutes: NonNegativeInt
    files: tuple[FileEntry, ...]
    """In the folder `files` of the same attempt."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for name, column in self.probabilities:
            if len(column) != len(self.predictions):
                raise ValueError(f"{len(self.predictions)} predictions, but {len(column)} of {name}")
        self.table()
        expected = sorted(MODEL_FILES) if self.name.endswith(f"/{_refit(0)}") else []
        if [file.path for file in self.files] != expected:
            raise ValueError(f"files: expected {expected}")
        return self

    def table(self) -> pa.Table:
        """Return the probabilities as a table. Raises ValueError if a class is too large for its column."""
        try:
            return pa.Table.from_pydict(self.probabilities.model_dump(), PROBABILITIES)
        except (OverflowError, pa.ArrowException) as error:
            raise ValueError(f"probabilities: {error}") from None


class FoldEntry(LedgerEntry):
    """A finished fold of an audit's cross-validation: the file with its images' probabilities."""

    files: tuple[FileEntry, ...]
    """In the folder `files` of the same attempt."""


Entry = TypeVar("Entry", bound=LedgerEntry)


def add_trial(context: Context[Finetune], place: Place, trial: Trial) -> None:
    """Record a finished trial."""
    name = _name(context, context.attempt.number, _trial(place))
    _add(context, TrialEntry(name=name, **trial._asdict()))


def add_point(context: Context[Finetune], number: int, point: Point) -> bool:
    """Record a point that Optuna proposed; return False if there is another with this number."""
    name = _name(context, context.attempt.number, f"point-{number}.json")
    return _add(context, PointEntry(name=name, point=point))


def add_refit(
    context: Context[Finetune], draw: int, point: Point, step: int, refit: Refit, temperature: float | None
) -> None:
    """Record a finished refit, whose files are in the attempt's folder."""
    entry = RefitEntry(
        name=_name(context, context.attempt.number, _refit(draw)),
        accuracy=refit.score.accuracy,
        loss=refit.score.loss,
        step=step,
        point=point,
        predictions=refit.score.predictions.tolist(),
        probabilities=refit.score.probabilities.to_pydict(),
        temperature=temperature,
        curve=refit.curve,
        substitutes=refit.substitutes,
        files=refit.files,
    )
    _add(context, entry)


def add_fold(context: Context[Finetune], number: int, files: tuple[FileEntry, ...]) -> None:
    """Record a finished fold of an audit, whose files are in the attempt's folder."""
    _add(context, FoldEntry(name=_name(context, context.attempt.number, _fold(number)), files=files))


class Ledger:
    """What some attempts at a key have finished; of several entries for the same, the newest attempt's."""

    def __init__(self, context: Context[Finetune], attempts: Sequence[int]) -> None:
        """Open the ledger of the context's attempt, and those of these attempts, the newest first."""
        self._context, self._store, self.attempts = context, context.open_store(), tuple(attempts)
        self._all = tuple(dict.fromkeys((context.attempt.number, *attempts)))

    def trial(self, place: Place) -> tuple[int, Trial] | None:
        """Return a finished trial and its attempt; None if it is not finished."""
        for attempt, entry in self._find(_trial(place), TrialEntry):
            return attempt, Trial(**{field: getattr(entry, field) for field in Trial._fields})
        return None

    def points(self) -> dict[int, Point]:
        """Return the points that Optuna proposed, by number, in this order."""
        job, key = self._context.attempt.job, self._context.attempt.key
        files = {
            name for attempt in self._all for name in self._store.names(Layout.ledger(job, key, attempt))
        }
        found: dict[int, Point] = {}
        for file in files:
            if match := re.fullmatch(r"point-(\d+)\.json", file):
                for _, entry in self._find(file, PointEntry):
                    found[int(match[1])] = dict(entry.point)
        return dict(sorted(found.items()))

    def refit(self, draw: int, point: Point, step: int, temperature: float | None) -> Refit | None:
        """Return a finished refit with this point, last step and temperature, and say so; None if it is not finished.

        Its files are copied into the folder of the context's attempt.
        """
        for attempt, entry in self._find(_refit(draw), RefitEntry):
            # on GPUs, results vary a little, and the trials of another attempt may have chosen others
            if (entry.point, entry.step, entry.temperature) != (point, step, temperature):
                continue
            try:
                files = self._copy(attempt, entry.files)
            except StoreDamaged as error:
                print(f"{error}; the refit is not used", flush=True)
                continue
            print(f"draw {draw}: test accuracy {entry.accuracy:.3f} (from attempt {attempt})", flush=True)
            predictions = np.array(entry.predictions, np.int64)
            score = Score(entry.accuracy, entry.loss, predictions, entry.table())
            return Refit(score, [point.model_dump() for point in entry.curve], entry.substitutes, files)
        return None

    def fold(self, number: int) -> tuple[FileEntry, ...] | None:
        """Return the files of a finished fold, in the folder of the context's attempt; None if it is not finished."""
        for attempt, entry in self._find(_fold(number), FoldEntry):
            try:
                files = self._copy(attempt, entry.files) if attempt != self._all[0] else entry.files
            except StoreDamaged as error:
                print(f"{error}; the fold is not used", flush=True)
                continue
            print(f"fold {number}: from attempt {attempt}", flush=True)
            return files
        return None

    def _find(self, file: str, model: type[Entry]) -> Iterator[tuple[int, Entry]]:
        """Yield each attempt that has this entry, and the entry; skip damaged ones with a line in the log."""
        for attempt in self._all:
            name = _name(self._context, attempt, file)
            try:
                entry = read_record(self._store, name, model)
                if entry is None:
                    continue
                check_name(self._store, name, entry.name)
                if entry.sha256 != entry.checksum():
                    raise StoreDamaged(
                        f"{self._store.uri}/{name} is damaged: its checksum is of other contents"
                    )
            except StoreDamaged as error:
                print(f"{error}; it is not used", flush=True)
                continue
            yield attempt, entry

    def _copy(self, attempt: int, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        """Copy an attempt's files into the own attempt's folder. Raises StoreDamaged if one is not what it was."""
        if not files:
            return ()
        folder = Layout.files(self._context.attempt.job, self._context.attempt.key, attempt)
        source = self._store.local(folder, files)
        with self._context.staging() as staging:
            for file in files:
                (staging.path / file.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / file.path, staging.path / file.path)
        # Staging hashes the copies; `local` may remember the sha256 of bytes that a disk has lost since.
        if staging.files != files:
            raise StoreDamaged(f"{self._store.uri}/{folder} is damaged: the model's files have changed")
        return staging.files


def open_ledger(context: Context[Finetune]) -> Ledger:
    """Open the ledgers of all attempts by the same code, from the context's own back to the first.

    Its `attempts` include those that have only checkpoints, in which their fits were when they ended.
    """
    own, store, usable = context.attempt, context.open_store(), []
    for number in range(own.number, 0, -1):
        of = (own.job, own.key, number)
        if not (store.names(Layout.ledger(*of)) or store.names(Layout.checkpoints(*of))):
            continue
        try:
            attempt = read_attempt(store, Layout.attempt(own.job, own.key, number))
        except StoreDamaged as error:
            print(f"the work of attempt {number} is not used: {error}", flush=True)
            continue
        if attempt is not None and attempt.code_digest == own.code_digest:
            usable.append(number)
        else:
            print(f"the work of attempt {number} is not used: it ran other code", flush=True)
    return Ledger(context, usable)


def _trial(place: Place) -> str:
    return f"trial-{place[0]}-{place[1]}.json"


def _fold(number: int) -> str:
    return f"fold-{number}.json"


def _refit(draw: int) -> str:
    return f"refit-{draw}.json"


def _name(context: Context[Finetune], attempt: int, file: str) -> str:
    return f"{Layout.ledger(context.attempt.job, context.attempt.key, attempt)}/{file}"


def _add(context: Context[Finetune], entry: LedgerEntry) -> bool:
    """Return False if the entry exists. Of a trial or refit, Ray has run a task again; either result will do."""
    checked = entry.model_copy(update={"sha256": entry.checksum()})
    return context.open_store().create(entry.name, encode(checked))
