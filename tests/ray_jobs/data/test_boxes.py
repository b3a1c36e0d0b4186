"""Boxes of a dataset: what an image may have."""

import pytest

from ray_jobs.data.boxes import SHARES, Box, in_image
from vit_model.errors import UserError

NAN = float("nan")


def test_boxes_are_cut_at_the_borders() -> None:
    assert in_image([Box(-5, -1, 20, 70, 2, ignored=True)], None, 100, 50) == [Box(0, 0, 20, 50, 2, ignored=True)]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box(0, 0, 1, 1, 0)] * 1_001, "1,001 boxes; an image can have 1,000"),
        ([Box(0, 0, 1, 1, 0), Box(NAN, 0, 1, 1, 0)], r"box \[nan, 0, 1, 1\] has a side that is not a number"),
        ([Box(3, 0, 3, 9, 0)], r"box \[3, 0, 3, 9\] has no area"),
        ([Box(9, 0, 3, 9, 0)], "should ascend"),
        ([Box(-9, -9, -1, -1, 0)], "is outside the image of 100 x 50 pixels"),
        ([Box(0, 0, 1e9, 1e9, 0)], "is more than twice as large as the image"),
    ],
)
def test_a_box_that_cannot_be_is_named(boxes: list[Box], message: str) -> None:
    with pytest.raises(UserError, match=message):
        in_image(boxes, None, 100, 50)


def test_boxes_are_of_the_images_pixels() -> None:
    share = Box(0.25, 0.5, 0.75, 1.0, 2, ignored=True)
    assert in_image([share], SHARES, 100, 50) == [Box(25, 25, 75, 50, 2, ignored=True)]
    assert in_image([Box(1, 2, 3, 4, 0)], (100, 50), 100, 50) == [Box(1, 2, 3, 4, 0)]
    with pytest.raises(UserError, match="its annotations are of 100 x 50 pixels, the image has 50 x 100"):
        in_image([], (100, 50), 50, 100)
