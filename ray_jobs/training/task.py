"""What the process of a fine-tuning and its Ray tasks hand to each other. The process does without torch, and so does
this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.spec import Finetune
from pipelines.store import FileEntry
from ray_jobs.data.shards import Dataset, Images, Split
from vit_model.config import ModelContract

Indices = NDArray[np.int64]


class Task(NamedTuple):
    """What all fits of a stage share."""

    config: Finetune
    contract: ModelContract
    backbone: Path | None


class Score(NamedTuple):
    """A model's results on some images: `predictions` [n] are labels, `probabilities` [n] their softmax probabilities,
    and `loss` is the mean cross-entropy."""

    accuracy: float
    loss: float
    predictions: NDArray[np.int64]
    probabilities: NDArray[np.float32]


class Refit(NamedTuple):
    """One draw's model on test. `files` are those of the model, where it was kept."""

    score: Score
    curve: list[dict[str, float | int]]
    substitutes: int
    files: tuple[FileEntry, ...]


def read_split(dataset: Dataset, split: Split) -> Images:
    """The images of a split. Raises ValueError when it is empty."""
    dataset.require(split)
    return Images(dataset, dataset.index(split))
