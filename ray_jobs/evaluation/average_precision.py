"""Mean average precision of retrieval among test images, and of scores for several labels per image.

The average precision of a ranking is the mean over the relevant items of the precision at their scores. Items with
equal scores share a rank, so it does not depend on their order (as in scikit-learn's `average_precision_score`).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

BLOCK = 2**24  # similarities in memory at once, in float32


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


def multi_label(scores: NDArray[np.floating], labels: pa.ListArray) -> float | None:
    """Return the mean over classes of the average precision of a class's scores; None if no image has a label.

    Classes without images and images without labels are left out.

    Args:
        scores: [n, classes].
        labels: [n], the classes of each image; an image with an empty list or null is not scored.
    """
    sizes = labels.value_lengths().fill_null(0).to_numpy()
    owners, classes = np.repeat(np.arange(len(sizes)), sizes), labels.flatten().to_numpy()
    scored = sizes > 0
    precisions = []
    for number in np.unique(classes):
        column = scores[:, number]
        relevant = np.sort(column[np.unique(owners[classes == number])])
        precisions.append(average_precision(np.sort(column[scored]), relevant))
    return float(np.mean(precisions)) if precisions else None
