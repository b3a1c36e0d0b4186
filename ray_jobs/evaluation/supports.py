"""Which labelled images a run with few labels may use, and how they are split into folds.

In: integer labels [n] of a train split. Out: indices into it. Pure numpy and scikit-learn; fine-tuning, the
linear probe and the pixel baselines all call this, so that every method sees the same images.
"""

import warnings

import numpy as np

from vit_model.errors import UserError

_DRAW_LABELS = 1  # keeps this module's random numbers apart from other users of the same seed


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
