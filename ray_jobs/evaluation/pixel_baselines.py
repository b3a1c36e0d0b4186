"""Pixel baselines: simple classifiers on plain pixels, as a reference for learned features.

In: flattened pixels [n, d], labels [n], and folds of the labelled images
(`ray_jobs.evaluation.supports.stratified_folds`). Out: selected settings and predictions. Pure scikit-learn, on one
thread, so that the same input gives the same output on any number of cores.

With several labels per image, labels are whether each image has each class, bool [n, classes], and predictions are
probabilities.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.svm import SVC
from threadpoolctl import threadpool_limits

from ray_jobs.evaluation.multi_label import best_thresholds, mean_ap, mean_thresholds
from ray_jobs.evaluation.supports import most_frequent, permutation
from ray_jobs.randomness import Purpose

Settings = Mapping[str, float]
Folds = Sequence[tuple[np.ndarray, np.ndarray]]


# The smoothest first, because the first of equally accurate settings is taken. C and gamma refer to pixels scaled by
# `_scaled`; gamma = 1 then equals scikit-learn's gamma="scale".
GRIDS: dict[str, tuple[Settings, ...]] = {
    "majority": ({},),
    "k-NN": tuple({"n_neighbors": k} for k in (1, 3, 5, 10)),
    "logistic regression": tuple({"C": c} for c in (0.1, 1.0, 10.0, 100.0, 1000.0)),
    "RBF SVM": tuple({"C": c, "gamma": gamma} for c in (1.0, 10.0, 100.0) for gamma in (0.25, 0.5, 1.0, 2.0)),
}
# Rankings need more neighbours than votes (2x2 digits per image, 1,400 images: mAP .836 with 10, .881 with 100).
_MORE_NEIGHBOURS: tuple[Settings, ...] = tuple({"n_neighbors": k} for k in (1, 3, 10, 30, 100, 300))


def choose(method: str, x: np.ndarray, y: np.ndarray, folds: Folds) -> Settings:
    """Return the settings with the most correct predictions, or the highest mAP, over the folds' validation parts.

    The first in the grid wins a tie, and is also taken without folds (one label per class cannot be split).
    """
    grid = _MORE_NEIGHBOURS if method == "k-NN" and y.ndim == 2 else GRIDS[method]
    if method == "k-NN" and folds:
        smallest = min(len(train) for train, _ in folds)
        grid = tuple(settings for settings in grid if settings["n_neighbors"] <= smallest)
    if len(grid) == 1 or not folds:
        return grid[0]
    results = np.zeros(len(grid))
    for train, validation in folds:
        for i, settings in enumerate(grid):
            predictions = fit_predict(method, settings, x[train], y[train], x[validation])
            truth = y[validation]
            results[i] += mean_ap(truth, predictions) if y.ndim == 2 else np.sum(predictions == truth)
    return grid[int(np.argmax(results))]


def thresholds(method: str, settings: Settings, x: np.ndarray, y: np.ndarray, folds: Folds) -> tuple[float, ...]:
    """Return each class's threshold with the highest F1 on the validation parts, the mean over folds."""
    by_fold = []
    for train, validation in folds:
        probabilities = fit_predict(method, settings, x[train], y[train], x[validation])
        by_fold.append(best_thresholds(y[validation], probabilities).tolist())
    return mean_thresholds(by_fold)


def fit_predict(
    method: str, settings: Settings, x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray
) -> np.ndarray:
    """Fit `method` with `settings` to the train images and return the predicted labels [n_test].

    With several labels per image, return the probability of each class, float32 [n_test, classes].
    """
    if y_train.ndim == 2:
        return _probabilities(method, settings, x_train, y_train, x_test).astype(np.float32)
    if method == "majority":
        classes = most_frequent(y_train)
        return np.asarray(classes[permutation(len(x_test), Purpose.DIVIDE_PIXEL_TIES) % len(classes)])
    if len(np.unique(y_train)) == 1:  # scikit-learn's classifiers refuse a single class
        return np.full(len(x_test), y_train[0])
    with threadpool_limits(1):
        train, test = _scaled(x_train, x_test)
        predictions: np.ndarray = _classifier(method, settings).fit(train, y_train).predict(test)
    return predictions


def _probabilities(
    method: str, settings: Settings, x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray
) -> np.ndarray:
    """Return each class's frequency, its share of the neighbours, or the probability by a regression of its own."""
    frequencies = np.tile(y_train.mean(axis=0), (len(x_test), 1))
    if method == "majority":
        return frequencies
    with threadpool_limits(1):
        train, test = _scaled(x_train, x_test)
        if method == "k-NN":
            neighbours = KNeighborsRegressor(int(settings["n_neighbors"]), n_jobs=1)
            return np.asarray(neighbours.fit(train, y_train.astype(np.float64)).predict(test))
        for number in np.flatnonzero(y_train.any(axis=0) & ~y_train.all(axis=0)):  # the others keep their frequency
            classifier = _classifier(method, settings).fit(train, y_train[:, number])
            frequencies[:, number] = classifier.predict_proba(test)[:, 1]
    return frequencies


def _classifier(method: str, settings: Settings) -> Any:
    match method:
        case "k-NN":
            return KNeighborsClassifier(n_neighbors=int(settings["n_neighbors"]), n_jobs=1)
        case "logistic regression":
            return LogisticRegression(C=settings["C"], max_iter=10_000)
        case _:
            return SVC(C=settings["C"], gamma=settings["gamma"])


def _scaled(x_train: np.ndarray, x_test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centre by the train mean and divide by one number, so that train images have mean squared norm 1.

    All pixels are divided by one number, because they share a unit. Dividing each pixel by its standard deviation would
    amplify the nearly constant pixels at the border (digits, 100 labels, 5 draws: RBF SVM .899 instead of .926, 1-NN
    .864 instead of .909).
    """
    train, test = np.asarray(x_train, np.float64), np.asarray(x_test, np.float64)
    mean = train.mean(axis=0)
    scale = np.sqrt(train.var(axis=0).sum()) or 1.0
    return (train - mean) / scale, (test - mean) / scale
