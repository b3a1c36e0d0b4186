"""Results with several labels per image: average precision, thresholds, F1, and the table scores.parquet.

In: whether each image has each class, bool [n, classes], and the classes' probabilities. Out: metrics, as a
contribution of each image (`ray_jobs.evaluation.metrics`), so that their intervals are those of other metrics.

mAP is the mean over classes with test images of the average precision, which needs no threshold. F1 needs one per
class, which is chosen on held-out images, never on test. An image without labels counts: every class is wrong for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_jobs.evaluation.metrics import average_precision
from ray_jobs.evaluation.rows import MEAN_AP, Row, filled, measurement, split_by_seen

FILE = "scores.parquet"
MACRO_F1, MICRO_F1 = "macro-F1", "micro-F1"
METRICS = (MEAN_AP, MACRO_F1, MICRO_F1)
THRESHOLD = 0.5  # of a class without held-out images, or if no image was held out
_CLASSES = pa.list_(pa.field("element", pa.int32()))
SCORES = pa.schema(
    [
        pa.field("task", pa.string(), nullable=False),
        pa.field("protocol", pa.string(), nullable=False),
        pa.field("method", pa.string(), nullable=False),
        pa.field("draw", pa.int32(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("labels", _CLASSES, nullable=False),
        # the probability of each class, in the order of the dataset's classes
        pa.field("scores", pa.list_(pa.field("element", pa.float32())), nullable=False),
        # the classes whose probability reaches their threshold
        pa.field("predicted", _CLASSES, nullable=False),
    ]
)


class Scored(NamedTuple):
    """n test images: whether each has each class [n, classes], the probabilities, and whether each is predicted."""

    truth: NDArray[np.bool_]
    scores: NDArray[np.float32]
    predicted: NDArray[np.bool_]

    def contributions(self, metric: str) -> NDArray[np.float64]:
        """Return each image's contribution [n] to one of METRICS; their mean is the metric."""
        match metric:
            case "mAP":
                return mean_ap_contributions(self.truth, self.scores)
            case "macro-F1":
                return _f1_contributions(self.truth, self.predicted)
            case _:
                every = self.truth & self.predicted, self.truth, self.predicted
                return _f1_of_counts(*(flags.sum(axis=1, keepdims=True) for flags in every))


def class_precisions(truth: NDArray[np.bool_], scores: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the average precision of each class [classes]; NaN for a class without images."""
    return np.array(
        [
            average_precision(np.sort(column), np.sort(column[images])) if images.any() else np.nan
            for column, images in zip(scores.T, truth.T, strict=True)
        ]
    )


def mean_ap(truth: NDArray[np.bool_], scores: NDArray[np.floating]) -> float:
    """Return the mean average precision of the classes with images; 0 if there are none."""
    precisions = class_precisions(truth, scores)
    return float(np.nanmean(precisions)) if truth.any() else 0.0


def mean_ap_contributions(truth: NDArray[np.bool_], scores: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return each image's contribution [n] to the mean average precision.

    With weights of the images, the average precision of a class is the weighted mean over its images of T / F: the
    weight of the images at the same rank or above that have the class, and of all of them. A contribution is the mean
    plus n times the derivative by the image's weight (`ray_jobs.evaluation.metrics.contributions`).
    """
    classes = np.flatnonzero(truth.any(axis=0))
    contributions = np.zeros(len(truth))
    for number in classes:
        order = np.argsort(-scores[:, number], kind="stable")
        ranked, has = -scores[order, number], truth[order, number].astype(np.float64)
        above = np.searchsorted(ranked, ranked, side="right")
        right = np.cumsum(has)[above - 1]
        first = np.searchsorted(ranked, ranked, side="left")
        # sums over the images of the class at this rank or below
        by_right, by_all = (np.cumsum((has * part)[::-1])[::-1][first] for part in (1 / above, right / above**2))
        precision = has @ (right / above) / has.sum()
        influence = (has * (right / above - precision + by_right) - by_all) / has.sum()
        contributions[order] += precision + len(truth) * influence
    return contributions / len(classes)


def _f1_contributions(truth: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return each image's contribution [n] to the mean F1 of the classes with images or predictions."""
    counted = (truth | predicted).any(axis=0)
    if not counted.any():
        return np.zeros(len(truth))
    truth, predicted = truth[:, counted], predicted[:, counted]
    return _f1_of_counts(truth & predicted, truth, predicted)


def _f1_of_counts(hits: NDArray[Any], labelled: NDArray[Any], predicted: NDArray[Any]) -> NDArray[np.float64]:
    """Return each image's contribution [n] to the mean of 2 hits / (labelled + predicted) over columns [n, columns]."""
    f1 = f1_by_class(*(counts.sum(axis=0) for counts in (hits, labelled, predicted)))
    total = labelled.sum(axis=0) + predicted.sum(axis=0, dtype=np.float64)
    both = labelled.astype(np.float64) + predicted
    influence = (2 * hits - f1 * both) / np.maximum(total, 1)
    return (f1 + len(hits) * influence).mean(axis=1)


def f1_by_class(hits: NDArray[Any], labelled: NDArray[Any], predicted: NDArray[Any]) -> NDArray[np.float64]:
    """Return F1 from each class's counts [classes]: right predictions, labels and predictions; 0 without any."""
    return np.asarray(2 * hits / np.maximum(labelled + predicted, 1), np.float64)


def best_thresholds(truth: NDArray[np.bool_], scores: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return each class's threshold [classes] with the highest F1, halfway between two probabilities of these images.

    Of equally good thresholds the highest is taken; a class without images has THRESHOLD.
    """
    thresholds = np.full(truth.shape[1], THRESHOLD)
    for number in np.flatnonzero(truth.any(axis=0)):
        order = np.argsort(-scores[:, number], kind="stable")
        ranked, has = scores[order, number].astype(np.float64), truth[order, number]
        following = np.append(ranked[1:], 0.0)
        f1 = 2 * np.cumsum(has) / (np.arange(1, len(has) + 1) + has.sum())
        best = int(np.argmax(np.where(ranked > following, f1, -1.0)))
        thresholds[number] = (ranked[best] + following[best]) / 2
    return thresholds


def mean_thresholds(by_fold: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the mean over folds of each class's threshold; empty without folds."""
    return tuple(map(statistics.fmean, zip(*by_fold, strict=True)))


def reaches(scores: NDArray[np.floating], thresholds: Sequence[float]) -> NDArray[np.bool_]:
    """Return whether each class's probability reaches its threshold, [n, classes]; without thresholds THRESHOLD."""
    return np.asarray(scores >= np.asarray(thresholds or THRESHOLD, np.float64), bool)


def scored(
    common: Row,
    ids: Sequence[str],
    results: Scored,
    seen: NDArray[np.bool_] | None,
    selected_on: str,
    settings: dict[str, Any],
) -> tuple[list[Row], list[pa.Table]]:
    """Return the rows of METRICS (`ray_jobs.evaluation.rows`) and tables of SCORES of a method on test.

    If the model was trained on some of the images, these are scored apart from the others.

    Args:
        common: task, protocol, method, labels_per_class and draw.
        ids: the images' ids [n].
        seen: which images the model was trained on [n]; None: on none.
    """
    rows, tables, every = [], [], np.arange(len(ids))
    for _, method, places, _ in split_by_seen([(common["task"], every, every)], common["method"], seen):
        part = Scored(*(array[places] for array in results))
        named = common | {"method": method}
        for metric in METRICS if part.truth.any() else ():
            value = float(np.clip(part.contributions(metric).mean(), 0, 1))
            rows.append(measurement(named, metric, value, len(places), selected_on, settings))
        columns = {
            "sample_id": [ids[place] for place in places],
            "labels": [np.flatnonzero(image) for image in part.truth],
            "scores": list(part.scores),
            "predicted": [np.flatnonzero(image) for image in part.predicted],
        }
        tables.append(filled(SCORES, columns, named, len(places)))
    return rows, tables
