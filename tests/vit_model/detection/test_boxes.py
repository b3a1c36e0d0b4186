"""Box arithmetic, against loops over pixels and boxes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vit_model.detection.boxes import areas, clip, giou, iou, nms

SIDE = 12


def coordinates(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(lambda pair: (min(pair), max(pair)))


def boxes(most: int) -> st.SearchStrategy[Tensor]:
    box = st.tuples(coordinates(0, SIDE), coordinates(0, SIDE)).map(lambda xy: [xy[0][0], xy[1][0], xy[0][1], xy[1][1]])
    return st.lists(box, min_size=1, max_size=most).map(lambda some: torch.tensor(some, dtype=torch.float64))


def pixels(box: Tensor) -> np.ndarray:
    drawn = np.zeros((SIDE, SIDE), dtype=bool)
    x1, y1, x2, y2 = map(int, box)
    drawn[y1:y2, x1:x2] = True
    return drawn


@given(boxes(4), boxes(4))
def test_iou_is_that_of_the_pixels(one: Tensor, other: Tensor) -> None:
    for row, first in zip(iou(one, other), one, strict=True):
        for value, second in zip(row, other, strict=True):
            a, b = pixels(first), pixels(second)
            assert value == pytest.approx((a & b).sum() / max(1, (a | b).sum()))


@given(boxes(1), boxes(1))
def test_giou_is_iou_less_the_share_of_the_hull_that_neither_has(one: Tensor, other: Tensor) -> None:
    both = torch.cat([one, other])
    hull = areas(torch.cat([both[:, :2].amin(0), both[:, 2:].amax(0)])).item()
    union = (pixels(one[0]) | pixels(other[0])).sum()
    expected = iou(one, other).item() - (hull - union) / hull if hull else 0.0
    assert giou(one, other).item() == pytest.approx(expected)


@given(boxes(12), st.data())
def test_nms_keeps_what_two_loops_keep(some: Tensor, data: st.DataObject) -> None:
    count = len(some)
    numbers = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    scores, classes = data.draw(numbers), data.draw(numbers)
    threshold = data.draw(st.sampled_from([0.0, 0.3, 0.5]))
    kept: list[int] = []
    for place in sorted(range(count), key=lambda each: -scores[each]):
        same = [other for other in kept if classes[other] == classes[place]]
        if all(iou(some[place : place + 1], some[other : other + 1]) <= threshold for other in same):
            kept.append(place)
    assert nms(some, torch.tensor(scores).double(), torch.tensor(classes), threshold).tolist() == kept


def test_boxes_are_cut_at_the_borders() -> None:
    assert clip(torch.tensor([[-3.0, 2.0, 90.0, 70.0]]), height=50, width=80).tolist() == [[0.0, 2.0, 80.0, 50.0]]
