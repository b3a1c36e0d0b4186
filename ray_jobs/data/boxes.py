"""Boxes of objects in a dataset's images.

If a dataset's source has boxes, the column `boxes` of its index has them for each image, in pixels of the image as it
is decoded, from its upper left corner. A box that is ignored is a region where nothing is right or wrong: a crowd
(COCO), a difficult object (VOC), DontCare (KITTI). An image without boxes shows none of the objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vit_model.errors import UserError

MOST = 1_000  # boxes in an image
ANY_CLASS = -1  # the label of a region to ignore that is not of one class
SHARES = (1, 1)  # the size that boxes are of whose sides are shares of the image's
BOX = pa.struct(
    [
        *(pa.field(name, pa.float32(), False) for name in ("x1", "y1", "x2", "y2")),
        pa.field("label", pa.int32(), False),
        pa.field("ignored", pa.bool_(), False),
    ]
)
BOXES = pa.schema(
    [pa.field("sample_id", pa.string(), False), pa.field("boxes", pa.list_(pa.field("item", BOX, False)), False)]
)


class Box(NamedTuple):
    """A box: its left, upper, right and lower side in pixels, and its class."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: int
    ignored: bool = False


def in_image(boxes: Sequence[Box], of: tuple[int, int] | None, width: int, height: int) -> list[Box]:
    """Return the boxes of an image of `width` x `height` pixels in its pixels, cut at its borders.

    Args:
        of: the width and height that the annotations say the image has; SHARES; or None if they do not say it.

    Raises:
        UserError: the annotations are of another size; more than `MOST` boxes; or the name of a box with a side that is
            not a finite number, of no area, outside the image, or far larger than it.
    """
    if of == SHARES:
        boxes = [Box(b.x1 * width, b.y1 * height, b.x2 * width, b.y2 * height, b.label, b.ignored) for b in boxes]
    elif of not in (None, (width, height)):
        raise UserError(f"its annotations are of {of[0]} x {of[1]} pixels, the image has {width} x {height}")
    if len(boxes) > MOST:
        raise UserError(f"{len(boxes):,} boxes; an image can have {MOST:,}")
    return [_checked(box, width, height) for box in boxes]


def _checked(box: Box, width: int, height: int) -> Box:
    x1, y1, x2, y2 = sides = box[:4]
    named = f"box [{', '.join(f'{side:g}' for side in sides)}]"
    if not all(map(math.isfinite, sides)):
        raise UserError(f"{named} has a side that is not a number")
    if x2 <= x1 or y2 <= y1:
        raise UserError(f"{named} has no area: x1, y1, x2, y2 should ascend")
    cut = max(0.0, x1), max(0.0, y1), min(float(width), x2), min(float(height), y2)
    if cut[2] <= cut[0] or cut[3] <= cut[1]:
        raise UserError(f"{named} is outside the image of {width} x {height} pixels")
    if x2 - x1 > 2 * width or y2 - y1 > 2 * height:
        raise UserError(f"{named} is more than twice as large as the image of {width} x {height} pixels")
    return box._replace(x1=cut[0], y1=cut[1], x2=cut[2], y2=cut[3])


def table(boxes: Mapping[str, Sequence[Box]]) -> pa.Table:
    """Return the boxes of images by sample_id as a table of BOXES."""
    rows = [[box._asdict() for box in some] for some in boxes.values()]
    return pa.table([[*boxes], rows], schema=BOXES)


def sizes_of(rows: pa.Table) -> NDArray[np.int64]:
    """Return the width and height of each image of an index, [n, 2]."""
    return np.stack([rows[name].to_numpy() for name in ("width", "height")], axis=1).astype(np.int64)


def of_rows(rows: pa.Table) -> list[list[Box]]:
    """Return the boxes of each image of a table with the column `boxes`."""
    return [[Box(**box) for box in some] for some in rows["boxes"].to_pylist()]
