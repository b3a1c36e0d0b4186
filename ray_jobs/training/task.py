"""The types that a fine-tuning's entry process and its Ray tasks exchange. Free of torch, as the entry process is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.spec import Finetune
from pipelines.spec.search import Point
from pipelines.store import FileEntry
from ray_jobs.data.shards import Dataset, Images, Split
from vit_model.config import ModelContract
from vit_model.errors import UserError

Indices = NDArray[np.int64]
Folds = list[tuple[Indices, Indices]]
"""Rows to fit on and rows to score on, per fold."""
Place = tuple[int, int]
"""A trial of a sweep: the number of its point, and that of its fold."""
Evaluated = tuple[int, float, float]
"""An evaluation of a trial: (step, accuracy, loss)."""


class DivergenceError(UserError):
    """A training whose loss or gradient is no longer finite."""


class Task(NamedTuple):
    """The parts that all fits of a stage share, or those of a point that it tries."""

    config: Finetune
    contract: ModelContract
    backbone: Path | None
    number: int
    """Of the point whose values `config` has, in the order in which they were tried; 0 if it is of none."""
    point: Point
    """Empty if it is of none."""
    attempts: tuple[int, ...] = ()
    """Earlier ones, from whose checkpoints a fit continues."""
    last_step: int | None = None
    """Of a refit, whose trial was best there (`early_stopping`); None: the configuration's last."""
    temperature: float | None = None
    """Of a refit's calibrated probabilities, from images that the trials held out; None: there are none."""

    @property
    def learning_rate(self) -> float:
        """Of the point."""
        (rate,) = self.config.learning_rates
        return rate


class Score(NamedTuple):
    """A model's results on n images.

    `predictions` [n] are labels, `probabilities` is a table of `ray_jobs.evaluation.rows.PROBABILITIES` [n], `loss` is
    the mean cross-entropy. `mean_ap` is the mean average precision of the classes (`ray_jobs.evaluation
    .average_precision.multi_label`) if images have several labels, otherwise None.
    """

    accuracy: float
    loss: float
    predictions: NDArray[np.int64]
    probabilities: pa.Table
    mean_ap: float | None = None


class Trial(NamedTuple):
    """The results of a trial on the images that it was not fitted on."""

    accuracy: float
    loss: float
    step: int
    """after which it had them: the best one with `early_stopping`, otherwise the last"""
    evaluations: tuple[Evaluated, ...] = ()
    """with ASHA, which decides by them"""
    is_pruned: bool = False
    """whether ASHA ended it there"""
    seconds: float = 0.0
    """that it took"""
    temperature: float | None = None
    """that minimises the loss on these images; None: it ended early, or its model is not the last one"""


class Refit(NamedTuple):
    """The results of one draw's model on test. `files` are the model's files; empty if it was not kept."""

    score: Score
    curve: list[dict[str, float | int]]
    substitutes: int
    files: tuple[FileEntry, ...]


def read_split(dataset: Dataset, split: Split) -> Images:
    """Return the images of a split. Raises UserError if it is empty."""
    dataset.require(split)
    return Images(dataset, dataset.index(split))
