"""Supports: the labelled images that a learner may use, their folds, and what settings are selected on.

Fine-tuning and the pixel baselines use `Supports`, and the linear probe the same draws, so that every method sees the
same images. In: labels, or rows of a dataset's index. Out: indices into them.
"""

import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from pipelines.spec import Labels
from ray_jobs.randomness import Purpose
from vit_model.errors import UserError


@dataclass(frozen=True)
class Supports:
    """The labelled images that a learner sees; the same for every learner with the same `Labels`.

    With few labels, every draw takes other images of train, and settings are selected on folds of draw 0. With all
    labels there is one draw: settings are selected on dev, and the final fit includes dev; without a dev split, or
    without `labels.use_dev`, they are selected on folds of train. Test is never used. `train` and `dev` are rows of the
    index; with all labels, at most `max_images` of train are taken.
    """

    train: pa.Table
    dev: pa.Table
    labels: Labels
    max_images: int | None = None

    @cached_property
    def pool(self) -> pa.Table:
        """All of train, then all of dev; row numbers refer to this table."""
        return pa.concat_tables([self.train, self.dev])

    @cached_property
    def draws(self) -> list[np.ndarray]:
        """For each draw, the rows [m] of the pool that the learner is fitted on."""
        y = self.train["label"].to_numpy()
        numbers = range(1 if self.labels.per_class is None else self.labels.draws)
        return [support_rows(y, len(self.dev), self.labels, draw, self.max_images) for draw in numbers]

    @property
    def rows(self) -> np.ndarray:
        """The rows of the pool [n] in any draw, ascending and unique."""
        return np.unique(np.concatenate(self.draws))

    @cached_property
    def folds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(train indices, validation indices) into draw 0; settings are selected on the validation parts.

        Raises UserError if the labels cannot be split into folds.
        """
        first = self.draws[0]
        if self._is_selected_on_dev:
            end = len(first) - len(self.dev)
            return [(np.arange(end), np.arange(end, len(first)))]
        y = self.train["label"].to_numpy().astype(np.int64)
        return stratified_folds(y[first], self.labels.folds, self.labels.seed)

    @property
    def selected_on(self) -> str:
        """A description of the folds, as rows and sweep.json record it."""
        if self._is_selected_on_dev:
            return "dev"
        images = "train" if self.labels.per_class is None else "draw 0"
        return f"{self.labels.folds}-fold cross-validation in {images}"

    @property
    def _is_selected_on_dev(self) -> bool:
        return self.labels.per_class is None and self.labels.use_dev and len(self.dev) > 0


def support_rows(
    train: np.ndarray, num_dev: int, labels: Labels, draw: int, max_images: int | None = None
) -> np.ndarray:
    """Return the rows [m] of a draw; rows of train, with labels [n], are numbered before dev. See `Supports`."""
    if labels.per_class is not None:
        return draw_labels(train, labels.per_class, labels.seed, draw)
    kept = np.arange(len(train))
    if max_images is not None and max_images < len(train):
        kept = np.sort(permutation(len(train), labels.seed, Purpose.KEEP_LABELS)[:max_images])
    return np.concatenate([kept, len(train) + np.arange(num_dev if labels.use_dev else 0)])


def draw_labels(labels: np.ndarray, per_class: int, seed: int, draw: int) -> np.ndarray:
    """Draw `per_class` random images of each class without replacement; return indices [m], classes ascending.

    Each class is permuted once per (seed, draw) and the first `per_class` images are taken, so a draw's 1-shot images
    are among its 5-shot images and so on. A class with fewer images gives all of them (as in big_vision's few-shot
    evaluation), so m can be less than per_class * classes.
    """
    counts = np.unique(labels, return_counts=True)[1]
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    order = permutation(len(labels), seed, Purpose.DRAW_LABELS, draw)
    return np.concatenate([images[np.argsort(order[images])][:per_class] for images in by_class])


def draw_as_big_vision(labels: np.ndarray, per_class: int, seed: int) -> np.ndarray:
    """Draw as big_vision's `fewshot_lsr` does with this seed; return indices [m], classes ascending.

    big_vision's draws also depend on the order of the images, which it takes from the TFDS files.
    """
    generator = np.random.default_rng(seed)
    by_class = [generator.permutation(np.flatnonzero(labels == number)) for number in range(labels.max() + 1)]
    return np.concatenate([images[:per_class] for images in by_class])


def first_of_each(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Return the first images of each class, as scenic's few-shot evaluation takes them: indices [m], ascending."""
    return np.concatenate([np.flatnonzero(labels == number)[:per_class] for number in np.unique(labels)])


def most_frequent(labels: np.ndarray) -> np.ndarray:
    """Return the most frequent label; several if they are equally frequent.

    A baseline that ignores the images assigns them to images at random. If all are equally frequent, it is right in
    1 / classes of the images, whatever their labels; the accuracy of the lowest label alone depends on its frequency.
    """
    classes, counts = np.unique(labels, return_counts=True)
    return np.asarray(classes[counts == counts.max()])


def permutation(count: int, *entropy: int) -> np.ndarray:
    """Return a random permutation of range(count), a pure function of the arguments.

    numpy guarantees the streams of its bit generators, but not its distributions or `Generator.permutation`.
    """
    raw = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(raw, kind="stable")


def stratified_folds(labels: np.ndarray, num_folds: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (train indices, validation indices) of each fold; the validation parts partition range(n).

    Classes are balanced over the folds. A class with fewer images than folds is validated in as many folds as it has
    images. Raises UserError if the largest class has fewer images than folds (one label per class cannot be split).
    """
    largest = int(np.unique(labels, return_counts=True)[1].max())
    if not 2 <= num_folds <= largest:
        raise UserError(f"num_folds is {num_folds}; it must be from 2 to {largest}, the size of the largest class")
    from sklearn.model_selection import StratifiedKFold

    splitter = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        # Rare classes are allowed, see above.
        warnings.filterwarnings("ignore", message="The least populated class", category=UserWarning)
        return list(splitter.split(np.zeros((len(labels), 1)), labels))
