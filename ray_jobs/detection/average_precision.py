"""Average precision (AP) of detections as COCO defines it (pycocotools, `COCOeval`), for any weights of the images.

In: the boxes of images and what was detected. Out: AP as fractions.
Use: `matches = match(truths, found, num_classes)`; `average_precisions(matches)`; with weights,
`mean_ap(matches, weights)` is the AP of a test set that has each image as often as its weight says.

pycocotools matches detections and boxes once; a resample of the images only adds up the matches again. It equals
pycocotools' result for images that are repeated, unless an image has equal scores of a class. Letters in shapes:
i images, d detections of a class, t thresholds of IoU, m boxes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ray_jobs.data.boxes import ANY_CLASS

THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""The IoUs from which on a detection matches a box; AP is the mean over them."""
RECALLS = np.linspace(0, 1, 101)
SIZES = ("all", "small", "medium", "large")
"""By area in pixels: below 32 x 32, from there to 96 x 96, above."""
_TINY = np.spacing(1)


class Boxes(NamedTuple):
    """The boxes of an image: x1, y1, x2, y2 in pixels."""

    boxes: NDArray[np.floating[Any]]
    """[m, 4]"""
    classes: NDArray[np.integer[Any]]
    """[m]"""
    ignored: NDArray[np.bool_]
    """[m]; a detection of which enough lies in such a region of its class, or of ANY_CLASS, is neither right nor wrong
    (COCO's crowds)"""


class Detected(NamedTuple):
    """What was detected in an image; of each class, the 100 detections with the highest scores count."""

    boxes: NDArray[np.floating[Any]]
    scores: NDArray[np.floating[Any]]
    classes: NDArray[np.integer[Any]]


class Matches(NamedTuple):
    """The detections of a class, sorted by descending score."""

    image: NDArray[np.integer[Any]]
    """the number of each detection's image [d]"""
    is_right: NDArray[np.bool_]
    """whether it matches a box [t, d]"""
    is_counted: NDArray[np.bool_]
    """whether it is right or wrong at all [t, d]: not in an ignored region, nor of another size"""
    boxes: NDArray[np.integer[Any]]
    """the number of boxes to find in each image [i]"""


def match(truths: Sequence[Boxes], found: Sequence[Detected], num_classes: int) -> dict[str, list[Matches]]:
    """Match the detections of each class with its boxes; return {size: [matches of each class]}."""
    with redirect_stdout(io.StringIO()):  # it reports its progress
        truth = _coco(len(truths), num_classes, _annotations(truths, num_classes))
        evaluation = COCOeval(truth, _coco(len(truths), num_classes, _results(found)), "bbox")
        evaluation.evaluate()
    params, count = evaluation.params, len(truths)
    parts = iter(evaluation.evalImgs)
    by_class = [[[next(parts) for _ in range(count)] for _ in SIZES] for _ in params.catIds]
    return {size: [_matches(of_class[place]) for of_class in by_class] for place, size in enumerate(SIZES)}


def _coco(images: int, num_classes: int, annotations: Iterable[dict[str, Any]]) -> Any:
    made = COCO()
    made.dataset = {
        "images": [{"id": number} for number in range(images)],
        "categories": [{"id": number} for number in range(num_classes)],
        "annotations": [each | {"id": number} for number, each in enumerate(annotations, start=1)],  # 0 is "no match"
    }
    made.createIndex()
    return made


def _annotations(truths: Sequence[Boxes], num_classes: int) -> Iterable[dict[str, Any]]:
    for image, truth in enumerate(truths):
        for box, of_class, is_ignored in zip(truth.boxes, truth.classes, truth.ignored, strict=True):
            for each in range(num_classes) if of_class == ANY_CLASS else [of_class]:
                yield _annotation(image, box, each) | {"iscrowd": int(is_ignored)}


def _results(found: Sequence[Detected]) -> Iterable[dict[str, Any]]:
    for image, detected in enumerate(found):
        for box, score, of_class in zip(*detected, strict=True):
            yield _annotation(image, box, of_class) | {"score": float(score)}


def _annotation(image: int, box: NDArray[np.floating[Any]], of_class: int) -> dict[str, Any]:
    x1, y1, x2, y2 = map(float, box)
    width, height = x2 - x1, y2 - y1
    place = {"image_id": image, "category_id": int(of_class), "bbox": [x1, y1, width, height]}
    return place | {"area": width * height, "iscrowd": 0}


def _matches(images: Sequence[dict[str, Any] | None]) -> Matches:
    """Put the images of a class together; an image is None if it has neither boxes nor detections of it."""
    boxes = np.array([0 if each is None else np.count_nonzero(~_bool(each["gtIgnore"])) for each in images])
    parts = [(number, each) for number, each in enumerate(images) if each is not None]
    scores = np.concatenate([[], *(each["dtScores"] for _, each in parts)])
    order = np.argsort(-scores, kind="stable")
    none = np.zeros((len(THRESHOLDS), 0), dtype=bool)
    is_matched = np.concatenate([none, *(_bool(each["dtMatches"]) for _, each in parts)], axis=1)[:, order]
    is_ignored = np.concatenate([none, *(_bool(each["dtIgnore"]) for _, each in parts)], axis=1)[:, order]
    image = np.repeat([number for number, _ in parts], [len(each["dtScores"]) for _, each in parts]).astype(np.int64)
    return Matches(image[order], is_matched & ~is_ignored, ~is_ignored, boxes)


def _bool(values: Any) -> NDArray[np.bool_]:
    return np.asarray(values).astype(bool)


def class_ap(matches: Matches, weights: NDArray[np.floating[Any]] | None = None) -> NDArray[np.float64]:
    """Return a class's AP at each threshold [..., t]; NaN if no image with a weight has a box of it.

    Args:
        weights: how often each image counts [..., i]; None: once.
    """
    weights = np.ones(len(matches.boxes)) if weights is None else weights
    values = []
    for precision, recall in _curves(matches, weights):
        # how many of the recalls are reached by each detection for the first time
        reached = np.diff(np.searchsorted(RECALLS, recall, side="right"), axis=-1, prepend=0)
        values.append((precision * reached).sum(axis=-1) / len(RECALLS))
    return np.where((weights @ matches.boxes)[..., None] > 0, np.stack(values, axis=-1), np.nan)


def precisions(matches: Matches) -> NDArray[np.float64]:
    """Return a class's precision at each threshold and each of RECALLS [t, 101]; the mean is AP. NaN without boxes."""
    if not matches.boxes.any():
        return np.full((len(THRESHOLDS), len(RECALLS)), np.nan)
    return np.stack(
        [
            np.append(precision, 0.0)[np.searchsorted(recall, RECALLS)]  # a recall that is not reached has 0
            for precision, recall in _curves(matches, np.ones(len(matches.boxes)))
        ]
    )


def _curves(
    matches: Matches, weights: NDArray[np.floating[Any]]
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Yield, for each threshold, precision, which never rises, and recall down to each right detection [..., r].

    Precision falls at a wrong detection, so the highest one from any recall on is at a right one.
    """
    each, total, before = weights[..., matches.image], (weights @ matches.boxes)[..., None], None
    for is_right, is_counted in zip(matches.is_right, matches.is_counted, strict=True):
        if before is None or not np.array_equal(before, is_counted):  # it differs only where regions are ignored
            counted, before = np.cumsum(each * is_counted, axis=-1), is_counted
        places = np.flatnonzero(is_right)
        right = np.cumsum(each[..., places], axis=-1)
        precision = right / (counted[..., places] + _TINY)
        precision = np.maximum.accumulate(precision[..., ::-1], axis=-1)[..., ::-1]
        with np.errstate(invalid="ignore", divide="ignore"):
            yield precision, right / total


def class_aps(matches: Sequence[Matches], weights: NDArray[np.floating[Any]] | None = None) -> NDArray[np.float64]:
    """Return the AP of each class [..., k], the mean over thresholds; weights: see `class_ap`."""
    return np.stack([class_ap(each, weights).mean(axis=-1) for each in matches], axis=-1)


def mean_ap(matches: Sequence[Matches], weights: NDArray[np.floating[Any]] | None = None) -> NDArray[np.float64]:
    """Return the mean over thresholds and over the classes that have boxes [...]; NaN without any.

    Args:
        weights: how often each image counts [..., i]; None: once.
    """
    of_classes = class_aps(matches, weights)
    known = ~np.isnan(of_classes)
    with np.errstate(invalid="ignore"):
        return np.nansum(of_classes, axis=-1) / known.sum(axis=-1)


def average_precisions(matches: dict[str, list[Matches]]) -> dict[str, float]:
    """Return AP, AP50, AP75, and AP by size of the boxes; NaN for a size without boxes."""
    of_size = {size: [class_ap(each) for each in matches[size]] for size in SIZES}
    every = np.array(of_size["all"]).reshape(-1, len(THRESHOLDS))
    named = {"AP": _mean(every), "AP50": _mean(every[:, :1]), "AP75": _mean(every[:, 5:6])}
    return named | {f"AP {size}": _mean(of_size[size]) for size in SIZES[1:]}


def _mean(values: Any) -> float:
    known = np.asarray(values)[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
