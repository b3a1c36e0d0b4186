"""Calibration of a classifier's probabilities.

In: logits or probabilities of n images, and their labels. Out: columns of predictions.parquet, a temperature (Guo et
al., "On Calibration of Modern Neural Networks", 2017), the expected calibration error. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from ray_jobs.evaluation.rows import PROBABILITIES, filled

BINS = 15  # as in Guo et al.
_LIMITS = math.log(0.05), math.log(20)  # if every image is right, the best temperature is 0


def probability_table(
    logits: NDArray[np.floating], labels: NDArray[np.integer], temperature: float | None = None
) -> pa.Table:
    """Return the columns of PROBABILITIES [n], from logits [n, classes] and labels [n].

    Args:
        temperature: scales the calibrated columns; None: they are null.
    """
    rows = np.arange(len(labels))
    logs = log_softmax(np.asarray(logits, np.float64), axis=1)
    top = np.argsort(-logs, axis=1, kind="stable")[:, :5]
    columns: dict[str, Any] = {
        "probability": np.exp(logs.max(axis=1)),
        "nll": -logs[rows, labels],
        "top5": top.tolist(),
        "top5_probabilities": np.exp(np.take_along_axis(logs, top, axis=1)).tolist(),
    }
    if temperature is not None:
        scaled = log_softmax(np.asarray(logits, np.float64) / temperature, axis=1)
        columns["calibrated_probability"] = np.exp(scaled.max(axis=1))
        columns["calibrated_nll"] = -scaled[rows, labels]
    return filled(PROBABILITIES, columns, {}, len(rows))


def fit_temperature(logits: NDArray[np.floating], labels: NDArray[np.integer]) -> float:
    """Return the temperature that divides logits [n, classes] for the lowest mean cross-entropy with labels [n].

    It is at least 0.05 and at most 20, see `is_identified`. The model should not have been trained on these images.
    """
    logits, rows = np.asarray(logits, np.float64), np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        return -float(log_softmax(logits / np.exp(log_temperature), axis=1)[rows, labels].mean())

    best = minimize_scalar(loss, bounds=_LIMITS, method="bounded", options={"xatol": 1e-6})
    return float(np.exp(best.x))


def is_identified(temperature: float, accuracies: Sequence[float]) -> bool:
    """Return whether held-out images with these accuracies, one per fold, determine the folds' mean temperature.

    If all images of a fold are right, a lower temperature always has a lower loss, so the fold's temperature is just
    the lower bound of the search, which would make wrong predictions near-certain. The upper bound is as arbitrary.
    """
    lowest, highest = (math.exp(limit) for limit in _LIMITS)
    return max(accuracies, default=0.0) < 1 and lowest * 1.001 < temperature < highest / 1.001


def calibration_error(probabilities: NDArray[np.floating], correct: NDArray[np.bool_]) -> float:
    """Return the expected calibration error of predictions with these probabilities [n], a fraction.

    This is the mean over images of |accuracy - mean probability| in the image's bin, with 15 bins of equal width.
    """
    bins = np.minimum((np.asarray(probabilities, np.float64) * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, np.asarray(correct, np.float64) - probabilities, minlength=BINS)
    return float(np.abs(gaps).sum() / len(bins))
