"""Where AP is a proportion, its interval is a proportion's; benchmarks/ap_intervals.py counts coverage."""

import numpy as np
import pytest

from ray_jobs.detection.average_precision import Boxes, Detected, match
from ray_jobs.detection.intervals import Halves, ap_interval, difference_interval, halves

BOX = np.array([[10.0, 10.0, 90.0, 90.0]])


def found_in(images: np.ndarray) -> Halves:
    """The APs of images with one object each, which is found exactly or not at all, so that AP is recall."""
    truths = [Boxes(BOX, np.array([0]), np.array([False]))] * len(images)
    detected = [Detected(BOX[:count], np.full(count, 0.5), np.zeros(count, int)) for count in images.astype(int)]
    return halves([match(truths, detected, 1)["all"]])


@pytest.mark.parametrize(("images", "share"), [(400, 0.7), (400, 0.25), (60, 0.5)])
def test_of_a_recall_it_is_that_of_a_proportion(images: int, share: float) -> None:
    found = ap_interval(found_in(np.arange(images) < share * images))
    margin = 1.96 * (share * (1 - share) / images) ** 0.5
    assert found.value == pytest.approx(share, abs=0.011)  # recalls are counted in hundredths
    assert (found.low, found.high) == pytest.approx((share - margin, share + margin), abs=0.15 * margin + 0.011)


def test_a_difference_is_of_the_same_images() -> None:
    rng = np.random.default_rng(0)
    one = rng.random(300) < 0.6
    other = one ^ (rng.random(300) < 0.05)  # differs in a few images
    same = difference_interval(found_in(one), found_in(one))
    assert same.value == 0 and -0.02 < same.low < 0 < same.high < 0.02, "as wide as of 300 images without a difference"
    perfect, none = found_in(np.ones(40)), found_in(np.zeros(40))
    value, low, high = difference_interval(perfect, none)
    assert (value, high) == (pytest.approx(1), 1) and 0.8 < low < 1
    paired = difference_interval(found_in(one), found_in(other))
    alone = ap_interval(found_in(one))
    assert paired.low < paired.value < paired.high
    assert paired.high - paired.low < 0.5 * (alone.high - alone.low)
    of_ten = difference_interval(found_in(one), found_in(other), comparisons=10)
    assert of_ten.value == paired.value
    assert of_ten.high - of_ten.low == pytest.approx((paired.high - paired.low) * 2.807 / 1.960, rel=0.02)


def test_it_contains_ap_between_0_and_1() -> None:
    for share in (0.0, 0.02, 1.0):
        value, low, high = ap_interval(found_in(np.arange(100) < 100 * share))
        assert 0 <= low <= value <= high <= 1 and 0.02 < high - low < 0.15
