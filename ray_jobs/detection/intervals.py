"""95% intervals of AP, and of the difference of two detectors on the same images, over test images.

AP of few images is biased: the envelope of the precision and classes with few boxes raise it. The bootstrap sees a
part of this only, and its percentile intervals are too short. Here AP is taken again of random halves of the images. If
the bias falls with 1 / n, the mean over halves is as far above AP as AP is above that of all images. The variance over
halves estimates the variance of AP, because a half, drawn without repetition, is as far from the whole as the whole is
from its source. Student's t has the degrees of freedom of a sum over classes of different sizes (Satterthwaite 1946).
The interval of an AP is computed on the scale of its logit, which keeps it between 0 and 1; if all halves agree, it is
Wilson's for a share of the images.

An interval says how far AP could move with other test images from the same source. With several trainings ("draws") it
is about the mean of their APs, and says how far this could move with other trainings, too. benchmarks/ap_intervals.py
counts how often it contains the AP of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit, stdtrit

from ray_jobs.detection.average_precision import Matches, class_aps
from ray_jobs.evaluation.intervals import Interval, mean_interval, paired_difference

HALVES = 400
_SEED_PURPOSE = 0x68616C66  # "half": keeps this stream apart from others
_AT_ONCE = 50
_INSIDE = 1e-3  # an AP is moved so far from 0 and 1 before its logit is taken


class Halves(NamedTuple):
    """The AP of each of k classes, NaN for one without boxes, as a mean over trainings ("draws")."""

    whole: NDArray[np.float64]
    """of all images [k]"""
    halves: NDArray[np.float64]
    """of random halves of them [h, k]"""
    draws: NDArray[np.float64]
    """the AP of each draw, over all classes"""
    images: NDArray[np.int64]
    """how many images have boxes of each class [k]"""
    with_boxes: int
    """how many images have boxes"""


def halves(draws: Sequence[Sequence[Matches]]) -> Halves:
    """Take AP of random halves of the images, the same for every detector on these images.

    Args:
        draws: the matches of each class, for each training that detected objects in the same images.
    """
    boxes = np.stack([each.boxes for each in draws[0]])
    count = boxes.shape[1]
    rng = np.random.default_rng([_SEED_PURPOSE, count])
    parts = []
    for _ in range(HALVES // _AT_ONCE):
        weights = np.zeros((_AT_ONCE, count))
        for row in weights:
            row[rng.choice(count, count // 2, replace=False)] = 1.0
        parts.append(np.mean([class_aps(matches, weights) for matches in draws], axis=0))
    whole = np.stack([class_aps(matches) for matches in draws])
    return Halves(
        whole.mean(axis=0),
        np.concatenate(parts),
        np.nanmean(whole, axis=1),
        np.count_nonzero(boxes, axis=1),
        int(np.count_nonzero(boxes.sum(axis=0))),
    )


def ap_interval(taken: Halves) -> Interval:
    """Return the mean AP of some trainings with its interval; at least two images have boxes."""
    value = float(np.nanmean(taken.whole))
    centre, margin = _estimate(taken, _quantile(1))
    if margin == 0:  # everything is right, or wrong, in each half
        return mean_interval(np.full((1, taken.with_boxes), value))
    inside = min(max(centre, _INSIDE), 1 - _INSIDE)
    scaled = margin / (inside * (1 - inside))
    low, high = (float(expit(logit(inside) + sign * scaled)) for sign in (-1, 1))
    return Interval(value, min(low, value), max(high, value))


def difference_interval(new: Halves, old: Halves, comparisons: int = 1) -> Interval:
    """Return the mean AP of `new` minus that of `old` on the same images, with its interval.

    With several `comparisons`, the intervals of all of them hold together (Bonferroni).
    """
    quantile = _quantile(comparisons)
    both = new._replace(whole=new.whole - old.whole, halves=new.halves - old.halves)
    centre, margin = _estimate(both, quantile)
    margin = float(np.hypot(margin, _among(old.draws, quantile)))
    if margin == 0:  # the same in each half, as for a share of the images on which the two agree
        agreed = np.zeros((1, new.with_boxes))
        margin = paired_difference(agreed, agreed, comparisons=comparisons).high
    low, high = max(-1.0, centre - margin), min(1.0, centre + margin)
    return Interval(float(np.nanmean(both.whole)), low, high)


def _quantile(comparisons: int) -> float:
    return 1 - 0.025 / comparisons


def _among(draws: NDArray[np.float64], quantile: float) -> float:
    """Return half of the interval of a mean over draws that is due to these; 0 for one."""
    count = len(draws)
    return float(stdtrit(count - 1, quantile) * draws.std(ddof=1) / count**0.5) if count > 1 else 0.0


def _estimate(taken: Halves, quantile: float) -> tuple[float, float]:
    """Return the mean over classes without its bias, and half of the interval around it."""
    known = ~np.isnan(taken.whole)
    whole, of_classes, images = taken.whole[known], taken.halves[:, known], taken.images[known]
    of_classes = of_classes[~np.isnan(of_classes).all(axis=1)]
    of_halves = np.nanmean(of_classes, axis=1)
    value: Any = whole.mean()
    centre = float(2 * value - of_halves.mean())
    variances = np.nanvar(of_classes, axis=0, ddof=1)
    counts = (images > 1) & (variances > 0)
    freedom = 1.0
    if counts.any():
        shares = variances[counts]
        freedom = float(shares.sum() ** 2 / (shares**2 / (images[counts] - 1)).sum())
    of_images = float(stdtrit(max(1.0, freedom), quantile) * of_halves.std(ddof=1))
    return centre, float(np.hypot(of_images, _among(taken.draws, quantile)))
