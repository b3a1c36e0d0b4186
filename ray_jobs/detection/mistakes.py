"""What is wrong about a detector's boxes: each detection and each box of an image gets one of a few names.

As TIDE divides errors (Bolya et al. 2020): a detection with a score of `SHOWN` or more is right, of a wrong class, in a
wrong place, double, or background; a box is found or missed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask

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
    overlaps = _overlaps(found.boxes[shown], truth)
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
        names = {
            IGNORED: max(overlap[truth.ignored], default=0.0) >= SAME,
            "double": same >= SAME,
            "class": other >= SAME,
            "place": same >= NEAR,
            "background": True,
        }
        kinds.append(next(name for name, is_so in names.items() if is_so))
    return Named(shown, kinds, ~taken & ~truth.ignored)


def _overlaps(found: NDArray[np.floating], truth: Boxes) -> NDArray[np.float64]:
    """Return COCO's overlap of each of n detections with each of m boxes [n, m].

    It is the intersection over union; with a region to ignore, the share of the detection that lies in it.
    """
    sides = [np.hstack([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]]) for boxes in (found, truth.boxes)]
    return np.reshape(mask.iou(*sides, truth.ignored), (len(found), len(truth.boxes)))
