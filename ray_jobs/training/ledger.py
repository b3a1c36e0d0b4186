"""The ledger of a fine-tuning: its finished trials and refits, which later attempts at the same key take over.

In: the result of a trial or a refit. Out: an object, `ledger/trial-<rate>-<fold>.json` or `ledger/refit-<draw>.json` in
the attempt's folder, created once, by the process that computed the result, as soon as it has it. An attempt reads the
ledgers of the attempts before it and writes to its own, so several attempts may run at once.

The entries of an attempt that ran other code are not used, because its results may differ. No manifest lists an entry,
so each has a checksum. A damaged entry is computed again, with a line in the log: this costs one fit, while an error
would block the key until somebody removes the entry.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from typing import Annotated, Self, TypeVar

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Finetune
from pipelines.store import (
    FileEntry,
    Layout,
    StoreDamaged,
    check_name,
    encode,
    read_attempt,
    read_record,
)
from ray_jobs.process.stage import MODEL_FILES, Context
from ray_jobs.training.task import Place, Refit, Score
from vit_model.config import Frozen

Fraction = Annotated[float, Field(ge=0, le=1)]


class TrialEntry(Frozen):
    """A finished trial: its results on the validation part of its fold."""

    name: str
    """Of this object in the store."""
    accuracy: Fraction
    loss: float
    sha256: str = ""
    """Of the other fields, see `checksum`."""

    def checksum(self) -> str:
        """Return the sha256 of all other fields."""
        return sha256(canonical_json(self.model_dump(mode="json", exclude={"sha256"})))


class CurvePoint(Frozen):
    """A point of a refit's training curve."""

    step: PositiveInt
    learning_rate: float
    loss: float


class RefitEntry(TrialEntry):
    """A finished refit: its results on n test images, and its model's files if they are kept.

    The numbers per image are JSON, too (280 kB for 10,000 images), so that an entry is one object, complete or absent,
    and validated like any other record.
    """

    learning_rate: float
    predictions: tuple[NonNegativeInt, ...]
    """[n], labels."""
    probabilities: tuple[Fraction, ...]
    """[n], of the predictions."""
    curve: tuple[CurvePoint, ...]
    substitutes: NonNegativeInt
    files: tuple[FileEntry, ...]
    """In the folder `files` of the same attempt."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(self.predictions) != len(self.probabilities):
            raise ValueError(
                f"{len(self.predictions)} predictions, but {len(self.probabilities)} probabilities"
            )
        expected = sorted(MODEL_FILES) if self.name.endswith(f"/{_refit(0)}") else []
        if [file.path for file in self.files] != expected:
            raise ValueError(f"files: expected {expected}")
        return self


Entry = TypeVar("Entry", bound=TrialEntry)


def add_trial(context: Context[Finetune], place: Place, accuracy: float, loss: float) -> None:
    """Record a finished trial."""
    name = _name(context, context.attempt.number, _trial(place))
    _add(context, TrialEntry(name=name, accuracy=accuracy, loss=loss))


def add_refit(context: Context[Finetune], draw: int, learning_rate: float, refit: Refit) -> None:
    """Record a finished refit, whose files are in the attempt's folder."""
    entry = RefitEntry(
        name=_name(context, context.attempt.number, _refit(draw)),
        accuracy=refit.score.accuracy,
        loss=refit.score.loss,
        learning_rate=learning_rate,
        predictions=refit.score.predictions.tolist(),
        probabilities=refit.score.probabilities.tolist(),
        curve=refit.curve,
        substitutes=refit.substitutes,
        files=refit.files,
    )
    _add(context, entry)


def usable_attempts(context: Context[Finetune]) -> list[int]:
    """Return the attempts of the same code that have a ledger, from this one back to the first."""
    own, store, usable = context.attempt, context.open_store(), []
    for number in range(own.number, 0, -1):
        entries = store.names(Layout.ledger(own.job, own.key, number))
        if not entries:
            continue
        try:
            attempt = read_attempt(store, Layout.attempt(own.job, own.key, number))
        except StoreDamaged as error:
            print(f"what attempt {number} has finished is computed again: {error}", flush=True)
            continue
        if attempt is not None and attempt.code_digest == own.code_digest:
            usable.append(number)
        else:
            print(f"what attempt {number} has finished is computed again: it ran other code", flush=True)
    return usable


def find_trial(
    context: Context[Finetune], attempts: Sequence[int], place: Place
) -> tuple[int, float, float] | None:
    """Return (attempt, accuracy, loss) of a trial that one of these attempts finished; None if none did."""
    for attempt, entry in _find(context, attempts, _trial(place), TrialEntry):
        return attempt, entry.accuracy, entry.loss
    return None


def find_refit(
    context: Context[Finetune], attempts: Sequence[int], draw: int, learning_rate: float
) -> Refit | None:
    """Return a refit with this learning rate that one of these attempts finished, and say so; None if none did.

    Its files are copied into the own attempt's folder.
    """
    for attempt, entry in _find(context, attempts, _refit(draw), RefitEntry):
        # on GPUs, results vary a little, and the trials of another attempt may have chosen another rate
        if entry.learning_rate != learning_rate:
            continue
        try:
            files = _copy(context, attempt, entry.files)
        except StoreDamaged as error:
            print(f"{error}; the refit is not used", flush=True)
            continue
        print(f"draw {draw}: test accuracy {entry.accuracy:.3f} (from attempt {attempt})", flush=True)
        predictions = np.array(entry.predictions, np.int64)
        probabilities = np.array(entry.probabilities, np.float32)
        score = Score(entry.accuracy, entry.loss, predictions, probabilities)
        return Refit(score, [point.model_dump() for point in entry.curve], entry.substitutes, files)
    return None


def _trial(place: Place) -> str:
    return f"trial-{place[0]}-{place[1]}.json"


def _refit(draw: int) -> str:
    return f"refit-{draw}.json"


def _name(context: Context[Finetune], attempt: int, file: str) -> str:
    return f"{Layout.ledger(context.attempt.job, context.attempt.key, attempt)}/{file}"


def _add(context: Context[Finetune], entry: TrialEntry) -> None:
    # If the entry exists, Ray has run a task again whose result was lost. Either result will do.
    context.open_store().create(entry.name, encode(entry.model_copy(update={"sha256": entry.checksum()})))


def _find(
    context: Context[Finetune], attempts: Sequence[int], file: str, model: type[Entry]
) -> Iterator[tuple[int, Entry]]:
    """Yield each of these attempts that has this entry, and the entry; skip damaged ones with a line in the log."""
    store = context.open_store()
    for attempt in attempts:
        name = _name(context, attempt, file)
        try:
            entry = read_record(store, name, model)
            if entry is None:
                continue
            check_name(store, name, entry.name)
            if entry.sha256 != entry.checksum():
                raise StoreDamaged(f"{store.uri}/{name} is damaged: its checksum is of other contents")
        except StoreDamaged as error:
            print(f"{error}; it is not used", flush=True)
            continue
        yield attempt, entry


def _copy(context: Context[Finetune], attempt: int, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
    """Copy files of an attempt into the own attempt's folder. Raises StoreDamaged if one is not as its entry says."""
    if not files:
        return ()
    store, folder = context.open_store(), Layout.files(context.attempt.job, context.attempt.key, attempt)
    source = store.local(folder, files)
    with context.staging() as staging:
        for file in files:
            shutil.copyfile(source / file.path, staging.path / file.path)
    # the copies are hashed when they are staged; `local` may remember the sha256 of bytes that a disk has lost since
    if staging.files != files:
        raise StoreDamaged(
            f"{store.uri}/{folder} is damaged: the model's files changed after they were written"
        )
    return staging.files
