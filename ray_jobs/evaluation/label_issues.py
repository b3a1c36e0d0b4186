"""Likely wrong labels by confident learning (Northcutt et al., "Confident Learning", 2021), and their table.

In: the given labels of n images, and each image's class probabilities by a model that was not trained on that image.
Out: the images with a likely wrong label, the most likely first.

Confident learning estimates how many these are. A class's threshold is the mean probability of the class over the
images with that label (the paper, equation 2), so a class that the model is never sure of has a low threshold. An image
is assigned to the class whose threshold it reaches; if it reaches several, to its most probable class. Images that are
assigned to another class than their label are the off-diagonal counts of the paper's confident joint. They do not count
if their label is their most probable class.

The list takes that many images with the lowest self-confidence, the probability of the given label. On planted wrong
labels it is more often right than the off-diagonal images or the lowest margins (benchmarks/results/label_audit.md).
cleanlab estimates the same number and uses the same order with `filter_by="low_self_confidence"`, but its list may
include images whose label is their most probable class. This module takes a few lines, leaves these images out and
breaks ties by position; a test compares both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.special import softmax
from threadpoolctl import threadpool_limits

from ray_jobs.evaluation.calibration import fit_temperature
from ray_jobs.evaluation.linear_probe import (
    FIXED_L2,
    L2_GRID,
    RidgePath,
    Standardised,
    check_features,
    select_l2,
)
from vit_model.errors import UserError

FILE = "label_issues.parquet"
LABEL_ISSUES = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),  # 1: the most likely wrong label
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),  # the image's key: its name in the source
        pa.field("split", pa.string(), nullable=False),
        pa.field("label", pa.string(), nullable=False),  # names of classes
        pa.field("suggested", pa.string(), nullable=False),
        pa.field("label_probability", pa.float32(), nullable=False),
        pa.field("suggested_probability", pa.float32(), nullable=False),
    ]
)
FLIPPED = 0.02  # the share of labels that an audit replaces on purpose per round
_FLIPS = 1000  # the minimum of replaced labels, in several rounds if there are few images
# The most errors a model may make, relative to guessing the largest class, for its list to count as evidence. A worse
# one mostly lists its mistakes (tests/ray_jobs/evaluation/test_label_issues.py), and `expected_precision` says little.
MOST_ERRORS = 0.4
_TOLERANCE = 1e-6  # in comparisons with a threshold, as in cleanlab


class Issues(NamedTuple):
    """The images with a likely wrong label, the most likely first."""

    places: NDArray[np.int64]
    """[m], the indices of the images."""
    suggested: NDArray[np.int64]
    """[m], the probable class of each."""


def find_issues(labels: NDArray[np.integer], probabilities: NDArray[np.floating]) -> Issues:
    """Find the images with a probably wrong label.

    Args:
        labels: [n], the given labels.
        probabilities: [n, classes], out of sample.

    Raises:
        UserError: a probability is not finite.
    """
    if not (finite := np.isfinite(probabilities).all(axis=1)).all():
        raise UserError(f"probabilities of image {finite.argmin()} are not finite")
    self_confidence = probabilities[np.arange(len(labels)), labels]
    confident = probabilities >= thresholds(labels, probabilities).astype(probabilities.dtype) - _TOLERANCE
    reached = confident.sum(axis=1)
    guess = np.where(reached > 1, probabilities.argmax(axis=1), confident.argmax(axis=1))
    is_doubtful = self_confidence + _TOLERANCE < probabilities.max(axis=1)
    count = int(((reached > 0) & (guess != labels) & is_doubtful).sum())
    doubtful = np.flatnonzero(is_doubtful)
    places = doubtful[np.argsort(self_confidence[doubtful], kind="stable")[:count]]
    return Issues(places, probabilities[places].argmax(axis=1))


def measure_list(
    labels: NDArray[np.integer], probabilities: NDArray[np.floating], listed: int, seed: int
) -> dict[str, float]:
    """Measure the quality of a list of likely wrong labels, with labels that are replaced on purpose.

    An image's probabilities do not depend on its label, so labels can be replaced after the fits. A share FLIPPED of
    them gets another class at random, and `find_issues` runs again. Its recall for these labels (`flip_recall`)
    estimates its recall for wrong labels. If wrong labels have self-confidences as low as replaced ones, a threshold
    below which a share s of the replaced labels lies bounds their number: (images below it) / s. The smallest of these
    bounds for s of a half or more limits the precision of the list (`expected_precision`). Labels that people confuse
    are harder to find than random ones.

    Args:
        labels, probabilities: see `find_issues`.
        listed: the length of the list for these labels.
    """
    largest = float(np.bincount(labels).max() / max(len(labels), 1)) if len(labels) else 1.0
    classes, flips = np.unique(labels), max(1, round(FLIPPED * len(labels)))
    measured = {"largest_class": largest, "flip_recall": 0.0, "expected_precision": 0.0}
    if len(classes) < 2:
        return measured
    rng, is_listed, confidence = np.random.default_rng(seed), [], []
    for _ in range(math.ceil(_FLIPS / flips)):
        places = rng.permutation(len(labels))[:flips]
        flipped = labels.copy()
        steps = rng.integers(1, len(classes), flips)
        flipped[places] = classes[(np.searchsorted(classes, labels[places]) + steps) % len(classes)]
        is_listed.append(np.isin(places, find_issues(flipped, probabilities).places))
        confidence.append(probabilities[places, flipped[places]])
    recall = float(np.concatenate(is_listed).mean())
    flip_confidence = np.sort(np.concatenate(confidence))
    label_confidence = np.sort(probabilities[np.arange(len(labels)), labels])
    shares = np.arange(1, len(flip_confidence) + 1) / len(flip_confidence)
    as_low = np.searchsorted(label_confidence, flip_confidence, side="right")
    # plus two standard errors of the count, because the minimum of many noisy ratios is too small
    wrong = float(((as_low + 2 * np.sqrt(as_low)) / len(labels) / shares)[shares >= 0.5].min())
    precision = min(1.0, wrong * recall * len(labels) / listed) if listed else 0.0
    return measured | {"flip_recall": recall, "expected_precision": precision}


def doubts(metrics: Mapping[str, float | int | str]) -> str | None:
    """Return why an audit with these metrics is not evidence of wrong labels, in words; None if it is.

    Evidence needs an agreement of 60% with many classes of equal size, and of 80% with two.
    """
    agreement, largest = float(metrics["agreement"]), float(metrics["largest_class"])
    needed = 1 - MOST_ERRORS * (1 - largest)
    if agreement >= needed:
        return None
    return (
        f"the model agrees with only {agreement:.1%} of the labels; below {needed:.1%} it mostly lists its own mistakes"
    )


def headline(metrics: Mapping[str, float | int | str]) -> str:
    """Return an audit's result in one line."""
    listed, audited = (int(metrics[name]) for name in ("label_issues", "audited"))
    if why := doubts(metrics):
        text = f"{why}. Its list of {listed:,} of {audited:,} does not show how many labels are wrong"
    else:
        text = f"{listed:,} of {audited:,} labels are listed as likely wrong; the model agrees with"
        text += f" {float(metrics['agreement']):.1%} of all"
    if why or metrics["largest_class"] == 1:  # of a single class, no label can be replaced
        return text
    text += f". It lists {float(metrics['flip_recall']):.0%} of the labels that the audit replaced to test it"
    if not listed:
        return text
    return f"{text}; at most about {float(metrics['expected_precision']):.0%} of the listed labels are wrong"


def thresholds(labels: NDArray[np.integer], probabilities: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return each class's mean probability over the images with that label; infinity if there are none."""
    classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=classes)
    self_confidence = probabilities[np.arange(len(labels)), labels]
    sums = np.bincount(labels, self_confidence.astype(np.float64), minlength=classes)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)


def left_out_probabilities(
    features: NDArray[np.floating], labels: NDArray[np.integer], classes: int
) -> tuple[NDArray[np.float32], dict[str, float]]:
    """Return each image's probabilities [n, classes] by least squares fitted to the n - 1 others, and the settings.

    The leave-one-out scores of all images come from one decomposition (`RidgePath.leave_one_out`). L2 maximises the
    correct ones; softmax with the temperature that fits the labels best turns scores into probabilities.

    Args:
        features: [n, d], from a frozen backbone.
        labels: [n], from 0 to classes - 1. The probability of a class without images is 0.

    Raises:
        UserError: features are not finite.
    """
    check_features("labelled", features)
    with threadpool_limits(1):
        support = Standardised.of(features, labels, standardise=True)
        path = RidgePath.fit(support.inputs, support.targets)
        l2 = select_l2(path, support.numbers, L2_GRID) or FIXED_L2
        scores = path.leave_one_out(l2)
    temperature = fit_temperature(scores, support.numbers)
    probabilities = np.zeros((len(labels), classes), np.float32)
    probabilities[:, support.classes] = softmax(scores / temperature, axis=1)
    return probabilities, {"l2": l2, "temperature": temperature}


def write_probabilities(path: Path, sample_ids: pa.ChunkedArray, probabilities: NDArray[np.float32]) -> None:
    """Write the probabilities [n, classes] of these images."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = pa.array(np.asarray(probabilities, np.float32).ravel())
    column = pa.FixedSizeListArray.from_arrays(flat, probabilities.shape[1])
    ids = sample_ids.cast(pa.string())
    pq.write_table(pa.table({"sample_id": ids, "probabilities": column}), path, compression="zstd")


def read_probabilities(paths: Iterable[Path], images: pa.Table) -> NDArray[np.float32]:
    """Return the probabilities [n, classes] of these rows of an index; together, the files have all of them."""
    table = pa.concat_tables([pq.read_table(path) for path in paths]).combine_chunks()
    column = table["probabilities"].combine_chunks()
    values = column.flatten().to_numpy().reshape(len(table), column.type.list_size)
    places = pc.index_in(images["sample_id"], table["sample_id"].combine_chunks())
    return np.asarray(values[places.to_numpy()], np.float32)


def issues_table(
    images: pa.Table, class_names: tuple[str, ...], probabilities: NDArray[np.floating], issues: Issues
) -> pa.Table:
    """Return LABEL_ISSUES.

    Args:
        images: rows of a dataset's index [n], with the given labels.
        probabilities: [n, classes].
    """
    names, rows = np.array(class_names, object), images.take(pa.array(issues.places))
    labels = rows["label"].to_numpy()
    columns = {
        "rank": np.arange(1, len(rows) + 1),
        "sample_id": rows["sample_id"],
        "file": rows["key"],
        "split": rows["split"],
        "label": names[labels],
        "suggested": names[issues.suggested],
        "label_probability": probabilities[issues.places, labels],
        "suggested_probability": probabilities[issues.places, issues.suggested],
    }
    return pa.table(columns).cast(LABEL_ISSUES)


def read_issues(path: Path) -> pa.Table:
    """Read LABEL_ISSUES. Raises UserError if the file is not such a table."""
    try:
        return pq.read_table(path, schema=LABEL_ISSUES)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is missing or damaged: {error}") from error


def write_issues(path: Path, table: pa.Table) -> None:
    """Write LABEL_ISSUES; the same rows give the same bytes."""
    pq.write_table(table, path, compression="zstd")
