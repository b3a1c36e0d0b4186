"""Boxes of a dataset: what an image may have, and that they are read as they were written."""

from pathlib import Path

import pyarrow as pa
import pytest

from ray_jobs.data.boxes import Box, checked, read_boxes, write_boxes
from vit_model.errors import UserError

NAN = float("nan")


def test_boxes_are_cut_at_the_borders() -> None:
    assert checked([Box(-5, -1, 20, 70, 2, ignored=True)], 100, 50) == [Box(0, 0, 20, 50, 2, ignored=True)]


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
        checked(boxes, 100, 50)


def test_they_are_read_as_they_were_written(tmp_path: Path) -> None:
    boxes = {"a": [Box(0.5, 1, 2, 3, 4), Box(5, 6, 7, 8, 9, ignored=True)], "b": []}
    path = tmp_path / "boxes.parquet"
    write_boxes(path, boxes)
    before = path.read_bytes()
    write_boxes(path, boxes)
    assert path.read_bytes() == before
    assert read_boxes(path, pa.array(["b", "a"])) == [boxes["b"], boxes["a"]]
    with pytest.raises(UserError, match="no boxes of image c"):
        read_boxes(path, pa.array(["a", "c"]))
    path.write_bytes(before[:-10])
    with pytest.raises(UserError, match="missing or damaged"):
        read_boxes(path, pa.array(["a"]))
