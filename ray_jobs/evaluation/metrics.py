"""The metrics of results in one table: names, meanings, and how they are computed.

Accuracy, mAP and mIoU are stored: the stages write them into rows.parquet. A report, `report compare` and SQL compute
the others from predictions, so artifacts of any age have them.

A computed metric is a mean over classes of a function of three counts per class: the images with this label and
prediction (hits), with this label, and with this prediction. Its interval is computed as for an accuracy
(`ray_jobs.evaluation.intervals`), from each image's influence on the metric.

The average precision of a ranking is the mean over the relevant items of the precision at their scores. Items with
equal scores share a rank, so it does not depend on their order (as in scikit-learn's `average_precision_score`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ray_jobs.evaluation.rows import ACCURACY, MEAN_AP, MEAN_IOU

Counts = NDArray[np.float64]  # [classes]
_STEP = 1e-4  # added to a count for its derivative
BLOCK = 2**24  # similarities in memory at once, in float32


class Metric(NamedTuple):
    """A metric of a result on test, a fraction.

    `of_class` returns a class's value of a computed metric, or NaN if the class does not count (a class without labels
    and predictions never does); None: stages store the metric.
    """

    name: str
    title: str
    meaning: str
    of_class: Callable[[Counts, Counts, Counts], Counts] | None = None


def f1(hits: Counts, labelled: Counts, predicted: Counts) -> Counts:
    """Return the harmonic mean of each class's precision and recall."""
    return 2 * hits / (labelled + predicted)


def recall(hits: Counts, labelled: Counts, predicted: Counts) -> Counts:
    """Return the fraction of each class's images that are classified correctly."""
    return hits / labelled


METRICS = (
    Metric(ACCURACY, "Accuracy", "the fraction of images that are classified correctly"),
    Metric(MEAN_AP, "mAP", "the mean average precision, over queries of a retrieval or over classes"),
    Metric(MEAN_IOU, "mIoU", "the mean over classes of the intersection over union of pixels"),
    Metric("macro-F1", "Macro-F1", "the mean over classes of F1, including predicted classes without images", f1),
    Metric("balanced accuracy", "Balanced accuracy", "the mean over classes of recall", recall),
)
COMPUTED = tuple(metric for metric in METRICS if metric.of_class is not None)


def computed(name: str) -> Metric:
    """Return the computed metric with this name."""
    return next(metric for metric in COMPUTED if metric.name == name)


def mean_iou(counts: NDArray[np.integer]) -> float:
    """Return the mean of intersection / union over the classes in the masks, from a confusion [classes, classes].

    So all methods are measured on the same classes, whatever they predict.
    """
    both, in_masks = np.diag(counts), counts.sum(axis=1)
    union = counts.sum(axis=0) + in_masks - both
    return float(np.mean(both[in_masks > 0] / union[in_masks > 0]))


class Pixels(NamedTuple):
    """The pixels of n test images by class: rightly predicted, with this label, and with this prediction."""

    right: NDArray[np.int64]
    """[n, classes], like the others"""
    labelled: NDArray[np.int64]
    predicted: NDArray[np.int64]

    def contributions(self, metric: str) -> NDArray[np.float64]:
        """Return each image's contribution [n] to mIoU; their mean is the metric (see `contributions`)."""
        assert metric == MEAN_IOU
        counted = self.labelled.any(axis=0)
        right, union = (part[:, counted] for part in (self.right, self.labelled + self.predicted - self.right))
        iou = right.sum(axis=0) / union.sum(axis=0)
        influence = (right - iou * union) / union.sum(axis=0)
        return np.asarray((iou + len(right) * influence).mean(axis=1), np.float64)


def value(metric: Metric, labels: NDArray[Any], predictions: NDArray[Any]) -> float:
    """Return a computed metric of one draw, from labels [n] and predictions [n]."""
    return float(np.mean(_of_classes(metric, *_counts(labels, predictions))))


def of_lists(metric: Metric) -> Callable[[Any, Any], Any]:
    """Return the metric as a function of two columns of Arrow lists, labels and predictions, for DuckDB."""

    def values(labels: Any, predictions: Any) -> Any:
        draws = zip(labels.combine_chunks(), predictions.combine_chunks(), strict=True)
        return pa.array([value(metric, *(column.values.to_numpy() for column in draw)) for draw in draws])

    return values


def contributions(metric: Metric, labels: NDArray[Any], predictions: NDArray[Any]) -> NDArray[np.float64]:
    """Return a table [draws, n] of contributions; their mean over images is the metric of each draw.

    An image's contribution is the metric plus the image's influence on it: the derivative by the image's weight, as in
    the infinitesimal jackknife (Efron, "The Jackknife, the Bootstrap and Other Resampling Plans", 1982).
    """
    table = np.empty(predictions.shape)
    for row, predicted in zip(table, predictions, strict=True):
        counts = _counts(labels, predicted)
        by_hit, by_label, by_prediction = (_slope(metric, counts, place) for place in range(3))
        influence = by_label[labels] + by_prediction[predicted] + by_hit[labels] * (labels == predicted)
        row[:] = np.mean(_of_classes(metric, *counts)) + len(labels) * (influence - influence.mean())
    return table


def _counts(labels: NDArray[Any], predictions: NDArray[Any]) -> tuple[Counts, Counts, Counts]:
    classes = 1 + int(max(labels.max(), predictions.max()))
    columns = (labels[labels == predictions], labels, predictions)
    hits, labelled, predicted = (np.bincount(column, minlength=classes).astype(np.float64) for column in columns)
    return hits, labelled, predicted


def _of_classes(metric: Metric, *counts: Counts) -> Counts:
    """Return the values of the classes that count."""
    return _parts(metric, *counts)[_is_counted(metric, *counts)]


def _is_counted(metric: Metric, hits: Counts, labelled: Counts, predicted: Counts) -> NDArray[np.bool_]:
    return (labelled + predicted > 0) & ~np.isnan(_parts(metric, hits, labelled, predicted))


def _parts(metric: Metric, *counts: Counts) -> Counts:
    assert metric.of_class is not None
    with np.errstate(divide="ignore", invalid="ignore"):
        return metric.of_class(*counts)


def _slope(metric: Metric, counts: tuple[Counts, Counts, Counts], place: int) -> Counts:
    """Return the metric's derivative by one of the counts of each class; 0 if the class does not count."""
    steps = [_STEP * (place == number) for number in range(len(counts))]
    above = _parts(metric, *(count + step for count, step in zip(counts, steps, strict=True)))
    below = _parts(metric, *(count - step for count, step in zip(counts, steps, strict=True)))
    is_counted = _is_counted(metric, *counts)
    return np.where(is_counted, (above - below) / (2 * _STEP), 0.0) / np.count_nonzero(is_counted)


def average_precision(scores: NDArray[np.floating], relevant: NDArray[np.floating]) -> float:
    """Return the average precision of one ranking.

    Args:
        scores: [n], the scores of all items, ascending.
        relevant: [m], the scores of the relevant items, ascending; m is at least 1.
    """
    ranks = len(scores) - np.searchsorted(scores, relevant)
    relevant_ranks = len(relevant) - np.searchsorted(relevant, relevant)
    return float(np.mean(relevant_ranks / ranks))


def retrieval(features: NDArray[np.floating], labels: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the average precision [n] of each image as a query that ranks the others by cosine similarity.

    An image is relevant if it has the query's label. The result is NaN if no other image has the label. Runs on one
    thread, with at most `BLOCK` similarities in memory.

    Args:
        features: [n, d].
        labels: [n].
    """
    count, precisions = len(labels), np.full(len(labels), np.nan)
    lengths = np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    directions = (features / np.maximum(lengths, 1e-12)).astype(np.float32)
    images = np.arange(count)
    step = max(1, BLOCK // count)
    with threadpool_limits(1):
        for start in range(0, count, step):
            similar = directions[start : start + step] @ directions.T
            for query, row in enumerate(similar, start):
                relevant = np.sort(row[(labels == labels[query]) & (images != query)])
                if len(relevant):
                    precisions[query] = average_precision(np.sort(np.delete(row, query)), relevant)
    return precisions
