"""Which labelled images a learner may use, how they are split into folds, and what it selects its settings on.

Fine-tuning and the pixel baselines get their `Supports` here, and the linear probe its draws, so that every method sees
the same images. In: labels, or rows of a dataset's index. Out: indices into them.
"""

import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from pipelines.spec import Labels
from vit_model.errors import UserError

# keep this module's random numbers apart from other users of the same seed
_DRAW_LABELS, _KEEP = 1, 2


@dataclass(frozen=True)
class Supports:
    """What a learner sees of the labelled images: the same for every learner with the same `Labels`.

    With few labels, every draw takes its own images of train, and folds of draw 0 select the settings. With all labels
    there is one draw: dev selects and is then fitted on, too; without a dev split, folds of train select. Test plays no
    part. `train` and `dev` are rows of the index; of all labels at most `max_images` of train are taken.
    """

    train: pa.Table
    dev: pa.Table
    labels: Labels
    max_images: int | None = None

    @cached_property
    def pool(self) -> pa.Table:
        """All of train, then all of dev: what rows are numbered through."""
        return pa.concat_tables([self.train, self.dev])

    @cached_property
    def draws(self) -> list[np.ndarray]:
        """For each draw the rows [m] of the pool that the learner is fitted on."""
        y = self.train["label"].to_numpy()
        numbers = range(1 if self.labels.per_class is None else self.labels.draws)
        return [support_rows(y, len(self.dev), self.labels, draw, self.max_images) for draw in numbers]

    @property
    def rows(self) -> np.ndarray:
        """The rows of the pool [n] that some draw takes, ascending, each once."""
        return np.unique(np.concatenate(self.draws))

    @cached_property
    def folds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(train indices, validation indices) into draw 0, on which settings are selected.

        Raises ValueError if its labels cannot be split into folds.
        """
        first = self.draws[0]
        if self._is_selected_on_dev:
            end = len(first) - len(self.dev)
            return [(np.arange(end), np.arange(end, len(first)))]
        y = self.train["label"].to_numpy().astype(np.int64)
        return stratified_folds(y[first], self.labels.folds, self.labels.seed)

    @property
    def selected_on(self) -> str:
        """What the folds are, as rows and sweep.json record it."""
        if self._is_selected_on_dev:
            return "dev"
        where = "train" if self.labels.per_class is None else "draw 0"
        return f"{self.labels.folds}-fold cross-validation in {where}"

    @property
    def _is_selected_on_dev(self) -> bool:
        return self.labels.per_class is None and len(self.dev) > 0


def support_rows(
    train: np.ndarray, num_dev: int, labels: Labels, draw: int, max_images: int | None = None
) -> np.ndarray:
    """The rows [m] of one draw, numbered through train (its labels [n]) and then dev; see `Supports`."""
    if labels.per_class is not None:
        return draw_labels(train, labels.per_class, labels.seed, draw)
    kept = np.arange(len(train))
    if max_images is not None and max_images < len(train):
        kept = np.sort(permutation(len(train), labels.seed, _KEEP)[:max_images])
    return np.concatenate([kept, len(train) + np.arange(num_dev)])


def draw_labels(labels: np.ndarray, per_class: int, seed: int, draw: int) -> np.ndarray:
    """Indices [m] of `per_class` random images of each class, classes in ascending order, without
    replacement.

    Each class is permuted once per (seed, draw) and the first `per_class` are taken, so the 1-shot images of
    a draw are among its 5-shot images and so on. A class with fewer images gives all that it has (as
    big_vision's few-shot evaluation does), so m can be less than per_class * classes.
    """
    labels = _checked(labels)
    if per_class < 1:
        raise ValueError(f"per_class is {per_class}; it must be at least 1")
    if draw < 0:
        raise ValueError(f"draw is {draw}; draws are numbered from 0")
    counts = np.unique(labels, return_counts=True)[1]
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    order = permutation(len(labels), seed, _DRAW_LABELS, draw)
    return np.concatenate([images[np.argsort(order[images])][:per_class] for images in by_class])


def permutation(count: int, *entropy: int) -> np.ndarray:
    """A random permutation of range(count), a pure function of both: bit generators keep their streams for ever,
    numpy's distributions and `Generator.permutation` need not."""
    raw = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(raw, kind="stable")


def stratified_folds(labels: np.ndarray, num_folds: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(train indices, validation indices) of each fold; the validation parts partition range(n), classes
    balanced.

    A class with fewer images than folds is validated in as many folds as it has images. Raises ValueError
    when not even the largest class reaches every fold (one label per class cannot be split).
    """
    labels = _checked(labels)
    largest = int(np.unique(labels, return_counts=True)[1].max())
    if not 2 <= num_folds <= largest:
        raise UserError(
            f"num_folds is {num_folds}; it must be from 2 to {largest}, the images of the largest class"
        )
    from sklearn.model_selection import StratifiedKFold  # a second, which drawing labels does not need

    splitter = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        # Rare classes are allowed, as said above.
        warnings.filterwarnings("ignore", message="The least populated class", category=UserWarning)
        return list(splitter.split(np.zeros((len(labels), 1)), labels))


def _checked(labels: np.ndarray) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1 or len(labels) == 0 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels are {labels.dtype} of shape {labels.shape}; they must be integers [n] with n at least 1"
        )
    return labels
