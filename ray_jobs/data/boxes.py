"""Boxes of objects in a dataset's images.

A dataset whose source has boxes has `boxes.parquet`, with a row per image: its sample_id and its boxes, in pixels of
the image as it is decoded, from its upper left corner. A box that is ignored is a region where nothing is right or
wrong: a crowd (COCO), a difficult object (VOC), DontCare (KITTI). An image without boxes shows none of the objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vit_model.errors import UserError

MOST = 1_000  # boxes in an image
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


def checked(boxes: Sequence[Box], width: int, height: int) -> list[Box]:
    """Return an image's boxes, cut at its borders.

    Raises:
        UserError: more than `MOST` boxes; or the name of a box with a side that is not a finite number, of no area,
            outside the image, or far larger than it.
    """
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


def write_boxes(path: Path, boxes: Mapping[str, Sequence[Box]]) -> None:
    """Write the boxes of images by sample_id; the same boxes in the same order give the same bytes."""
    rows = [[box._asdict() for box in some] for some in boxes.values()]
    pq.write_table(pa.table([list(boxes), rows], schema=BOXES), path, write_page_checksum=True)


def read_boxes(path: Path, sample_ids: pa.Array) -> list[list[Box]]:
    """Return the boxes of these images, in their order.

    Raises:
        UserError: the file is missing or damaged, or lacks an image.
    """
    try:
        stored = pq.read_table(path, schema=BOXES, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is missing or damaged: {error}") from error
    places = pc.index_in(sample_ids, stored["sample_id"].combine_chunks())
    if places.null_count:
        missing = sample_ids.filter(pc.is_null(places))[0].as_py()
        raise UserError(f"{path}: no boxes of image {missing}; the dataset is damaged")
    return [[Box(**box) for box in some] for some in stored["boxes"].take(places).to_pylist()]
