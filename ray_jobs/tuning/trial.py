"""The records of a fine-tuning's finished work in the ledger, and a point with its trials.

A record is created without `name` and `sha256`; the ledger sets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Finetune
from pipelines.spec.search import Point
from pipelines.store import FileEntry
from ray_jobs.evaluation.rows import AP, MEAN_AP, MEAN_IOU
from ray_jobs.training.task import DIVERGED, Evaluation, Fraction, Task, describe, mean, rank, selecting
from vit_model.contract import MODEL_FILES
from vit_model.fields import Frozen


class Record(Frozen):
    """The fields that all records have."""

    name: str = ""
    """The record's name in the store."""
    sha256: str = ""
    """The digest of the other fields, see `checksum`."""

    def checksum(self) -> str:
        """Return the sha256 of all other fields."""
        return sha256(canonical_json(self.model_dump(mode="json", exclude={"sha256"})))


class ProposedPoint(Record):
    """A point that Optuna proposed: {field: value}."""

    point: dict[str, JsonValue]


class Trial(Record):
    """The results of a trial on the images that it was not fitted on."""

    accuracy: Fraction
    loss: float
    metrics: dict[str, Fraction] = Field(default={})
    """the value of the `select_by` metric, by name, unless that is accuracy"""
    step: PositiveInt
    """the step with these results: the best with `early_stopping`, otherwise the last"""
    evaluations: tuple[Evaluation, ...] = ()
    """the evaluations that ASHA decides by; empty without ASHA"""
    is_pruned: bool = False
    """whether ASHA ended the trial at this step"""
    seconds: float = 0.0
    """the time that the trial took"""
    temperature: PositiveFloat | None = None
    """the temperature that minimises the loss on these images; None: the trial ended early"""
    thresholds: tuple[Fraction, ...] = ()
    """with several labels per image: each class's threshold with the highest F1; empty: the trial ended early"""

    @property
    def outcome(self) -> str:
        """The results in words."""
        if self.loss == DIVERGED:
            return "diverged"
        pruned = f", ended by ASHA at step {self.step}" if self.is_pruned else ""
        accuracy = {} if self.metrics.keys() & {MEAN_AP, AP, MEAN_IOU} else {"accuracy": self.accuracy}
        metrics = accuracy | self.metrics | {"loss": self.loss}
        return ", ".join(f"{name} {value:.3f}" for name, value in metrics.items()) + pruned


class CurvePoint(Frozen):
    """A point of a refit's training curve."""

    step: PositiveInt
    learning_rate: float
    loss: float


class Refit(Trial):
    """The results of one draw's model on test."""

    point: dict[str, JsonValue]
    images: FileEntry
    """A table of `ledger.IMAGES` or `detection.tables.FOUND` in the ledger's folder, a row per test image."""
    mean_ap: Fraction | None = None
    """The mean average precision of the classes, if images have several labels (multi-label, or ReaL's)."""
    curve: tuple[CurvePoint, ...]
    substitutes: NonNegativeInt
    files: tuple[FileEntry, ...]
    """The model's files, in the folder `files` of the same attempt; empty if the model is not kept."""

    @property
    def on_test(self) -> str:
        """The result in words."""
        metric, value = next(iter(self.metrics.items()), ("accuracy", self.accuracy))
        return f"test {metric} {value:.3f}"

    @model_validator(mode="after")
    def _whole(self) -> Self:
        expected = sorted(MODEL_FILES) if self.name.endswith("/refit-0.json") else []
        if self.name and [file.path for file in self.files] != expected:
            raise ValueError(f"files: expected {expected}")
        if "/" in self.images.path:
            raise ValueError(f"images: {self.images.path} is not the name of a file beside this entry")
        return self


class Part(Record):
    """A finished part of a stage's work: an audit's fold, a part of the images of embed or predict."""

    files: tuple[FileEntry, ...]
    """The files, in the folder `files` of the same attempt."""


class Refitted(NamedTuple):
    """A refit, and its table of test images."""

    record: Refit
    images: pa.Table


def pruned(evaluations: Sequence[Evaluation], seconds: float = 0.0) -> Trial:
    """Return a trial that ASHA has ended after its last evaluation."""
    evaluations = storable(evaluations)
    *_, last = evaluations
    return Trial(**last._asdict(), evaluations=evaluations, is_pruned=True, seconds=seconds)


def storable(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """Return evaluations without infinite losses, which JSON does not have."""
    return tuple(evaluation._replace(loss=min(evaluation.loss, DIVERGED)) for evaluation in evaluations)


def fit_title(config: Finetune, task: Task, fold: int, folds: int) -> str:
    """Name a trial of a sweep in the log: `trial 3: learning rate 0.01, fold 0`; `config` is the stage's."""
    number = "" if config.search is None else f"trial {task.number}: "
    return number + describe(task.point) + (f", fold {fold}" if folds > 1 else "")


def refit_title(config: Finetune, draw: int) -> str:
    """Name a refit in the log: `draw 0`; `refit` if there is only one."""
    draws = config.refits if config.labels.per_class is None else config.labels.draws
    return f"draw {draw}" if draws > 1 else "refit"


class TriedPoint(NamedTuple):
    """A point whose trials have ended, one per fold."""

    number: int
    point: Point
    folds: Sequence[Trial]

    @property
    def is_pruned(self) -> bool:
        """Whether ASHA ended the point's trial."""
        return self.folds[0].is_pruned

    @property
    def accuracy(self) -> float:
        """The mean accuracy over folds."""
        return float(np.mean([trial.accuracy for trial in self.folds]))

    @property
    def selecting(self) -> float:
        """The mean over folds of the `select_by` metric."""
        return mean(self.folds)

    @property
    def rank(self) -> tuple[int, float, float]:
        """The sort key of points, see `rank`."""
        return rank(self.folds)

    @property
    def title(self) -> str:
        """The point's name in the log: `trial 3: learning rate 0.01`."""
        return f"trial {self.number}: {describe(self.point)}"

    def in_sweep(self, config: Finetune) -> dict[str, Any]:
        """Return the point's entry in sweep.json."""
        entry: dict[str, Any] = {
            "learning_rate": self.point["learning_rate"],
            "accuracies": [trial.accuracy for trial in self.folds],
            "losses": [trial.loss for trial in self.folds],
        }
        for metric in dict.fromkeys(name for trial in self.folds for name in trial.metrics):
            entry["selected_by"] = {metric: [*map(selecting, self.folds)]}
        if config.early_stopping is not None:
            entry["steps"] = [trial.step for trial in self.folds]
        if config.search is not None:
            entry |= {"number": self.number, "point": self.point}
            if self.is_pruned:
                entry["pruned_at"] = self.folds[0].step
        return entry
