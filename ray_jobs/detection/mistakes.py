"""What is wrong about a detector's boxes: each detection and each box of an image gets one of a few names.

As TIDE divides errors (Bolya et al. 2020): a detection with a score of `SHOWN` or more is right, of a wrong class, in a
wrong place, double, or background; a box is found or missed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ray_jobs.detection.average_precision import Boxes, Detected
from vit_model.detection.contract import SHOWN

SAME, NEAR = 0.5, 0.1  # IoU from which on a detection is of a box, or near it
KINDS = ("right", "class", "place", "double", "background")
IGNORED = "ignored"


class Named(NamedTuple):
    """An image's detections that are named, by descending score, and its boxes."""

    shown: NDArray[np.int64]
    """the numbers of the named detections"""
    kinds: list[str]
    """of each of these; IGNORED: most of it lies in a region to ignore"""
    is_missed: NDArray[np.bool_]
    """of each box"""


def named(truth: Boxes, found: Detected) -> Named:
    """Name an image's detections; a box is found by the detection of its class with the highest score."""
    shown = np.flatnonzero(found.scores >= SHOWN)
    shown = shown[np.argsort(-found.scores[shown], kind="stable")]
    counted = np.flatnonzero(~truth.ignored)
    overlaps = iou(found.boxes[shown], truth.boxes)
    taken = np.zeros(len(truth.boxes), bool)
    kinds = []
    for number, overlap in zip(shown, overlaps, strict=True):
        is_class = truth.classes == found.classes[number]
        best = max(counted, key=lambda box: (is_class[box] and not taken[box], overlap[box]), default=None)
        if best is not None and is_class[best] and not taken[best] and overlap[best] >= SAME:
            taken[best] = True
            kinds.append("right")
            continue
        same, other = (max(overlap[counted][is_class[counted] == of], default=0.0) for of in (True, False))
        inside = _inside(found.boxes[number], truth.boxes[truth.ignored])
        names = {
            IGNORED: inside >= SAME,
            "double": same >= SAME,
            "class": other >= SAME,
            "place": same >= NEAR,
            "background": True,
        }
        kinds.append(next(name for name, is_so in names.items() if is_so))
    return Named(shown, kinds, ~taken & ~truth.ignored)


def iou(one: NDArray[np.floating], other: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the intersection over union of each of n boxes with each of m: [n, m]."""
    low, high = np.maximum(one[:, None, :2], other[None, :, :2]), np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.prod((high - low).clip(min=0), axis=-1)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], axis=-1) for boxes in (one, other)]
    union = areas[0][:, None] + areas[1][None] - shared
    return np.asarray(np.divide(shared, union, out=np.zeros_like(shared, float), where=union > 0), np.float64)


def _inside(box: NDArray[np.floating], regions: NDArray[np.floating]) -> float:
    """Return the largest share of a box that lies in one of the regions."""
    low, high = np.maximum(box[:2], regions[:, :2]), np.minimum(box[2:], regions[:, 2:])
    area = float(np.prod(box[2:] - box[:2]))
    return max((np.prod((high - low).clip(min=0), axis=1) / area).tolist(), default=0.0) if area else 0.0
