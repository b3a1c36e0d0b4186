"""Pixel baselines: simple classifiers on plain pixels, as a reference for learned features.

In: flattened pixels [n, d], labels [n], and folds of the labelled images
(`ray_jobs.evaluation.supports.stratified_folds`). Out: selected settings and predictions. Pure scikit-learn, on one
thread, so that the same input gives the same output on any number of cores.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC
from threadpoolctl import threadpool_limits

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


def choose(method: str, x: np.ndarray, y: np.ndarray, folds: Folds) -> Settings:
    """Return the settings of `GRIDS[method]` with the most correct predictions over the folds' validation parts.

    The first in the grid wins a tie, and is also taken without folds (one label per class cannot be split).
    """
    grid = GRIDS[method]
    if method == "k-NN" and folds:
        smallest = min(len(train) for train, _ in folds)
        grid = tuple(settings for settings in grid if settings["n_neighbors"] <= smallest)
    if len(grid) == 1 or not folds:
        return grid[0]
    correct = np.zeros(len(grid), np.int64)
    for train, validation in folds:
        for i, settings in enumerate(grid):
            predictions = fit_predict(method, settings, x[train], y[train], x[validation])
            correct[i] += np.sum(predictions == y[validation])
    return grid[int(np.argmax(correct))]


def fit_predict(
    method: str, settings: Settings, x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray
) -> np.ndarray:
    """Fit `method` with `settings` to the train images and return the predicted labels [n_test]."""
    if method == "majority":
        classes = most_frequent(y_train)
        return np.asarray(classes[permutation(len(x_test), Purpose.DIVIDE_PIXEL_TIES) % len(classes)])
    if len(np.unique(y_train)) == 1:  # scikit-learn's classifiers refuse a single class
        return np.full(len(x_test), y_train[0])
    with threadpool_limits(1):
        train, test = _scaled(x_train, x_test)
        predictions: np.ndarray = _classifier(method, settings).fit(train, y_train).predict(test)
    return predictions


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
