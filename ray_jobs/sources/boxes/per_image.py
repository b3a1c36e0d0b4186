"""Annotations with a file per image: YOLO's text, Pascal VOC's XML, KITTI's labels; from its bytes to its boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from ray_jobs.data.boxes import Box
from vit_model.errors import UserError

LARGEST = 4 << 20  # bytes of an image's annotations
KITTI_COLUMNS = 15
KITTI_IGNORED = "DontCare"


class Named(NamedTuple):
    """A box with the name of its class, and with sides in pixels."""

    x1: float
    y1: float
    x2: float
    y2: float
    name: str
    ignored: bool = False


def yolo(data: bytes, class_names: Sequence[str]) -> list[Box]:
    """Return the boxes of a label file of YOLO; their sides are shares of the image's.

    A line is a class's number and the middle, width and height of a box, as shares of the image's sides
    (docs.ultralytics.com/datasets/detect).

    Raises:
        UserError: a line is not such a box, or has a number that is no class.
    """
    shares: list[Box] = []
    for line in _lines(data):
        columns = line.split()
        if len(columns) > 5:
            raise UserError(
                f"{_cut(line)} has {len(columns)} numbers; a box has 5. Outlines, rotated boxes, keypoints and"
                " predictions with a confidence have more"
            )
        number, *sides = _numbers(line, columns, 5)
        if not number.is_integer() or not 0 <= number < len(class_names):
            raise UserError(f"{_cut(line)} is of class {columns[0]}; there are 0 to {len(class_names) - 1}")
        if not all(0 <= side <= 1 for side in sides):
            raise UserError(f"{_cut(line)} is not in shares of the image, from 0 to 1")
        x, y, width, height = sides
        shares.append(Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2, int(number)))
    return shares


def kitti(data: bytes) -> list[Named]:
    """Return the boxes of a label file of KITTI, whose 15 columns its devkit's readme.txt explains.

    DontCare is a region to ignore. Raises UserError for a line of another form.
    """
    found = []
    for line in _lines(data):
        columns = line.split()
        if len(columns) != KITTI_COLUMNS:
            raise UserError(f"{_cut(line)} has {len(columns)} columns, not {KITTI_COLUMNS}")
        x1, y1, x2, y2 = _numbers(line, columns[4:8], 4)
        found.append(Named(x1, y1, x2, y2, columns[0], ignored=columns[0] == KITTI_IGNORED))
    return found


def voc(data: bytes) -> tuple[tuple[int, int], list[Named]]:
    """Return the image's width and height, and the boxes, of an XML of Pascal VOC.

    Pixels count from 1 there, and a box includes its last ones. Difficult objects are ignored, as in the benchmark.

    Raises:
        UserError: it is not such a file.
    """
    _check_size(data)
    if b"<!ENTITY" in data:
        raise UserError("its XML declares entities, which annotations do not need")
    try:
        tree = ElementTree.fromstring(data)  # noqa: S314 (without entities)
    except ElementTree.ParseError as error:
        raise UserError(f"not XML: {error}") from None
    width, height = (_xml_number(tree, f"size/{side}") for side in ("width", "height"))
    found = []
    for each in tree.iterfind("object"):
        x1, y1, x2, y2 = (_xml_number(each, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax"))
        name = (each.findtext("name") or "").strip()
        if not name:
            raise UserError("an object without a name")
        is_difficult = (each.findtext("difficult") or "0").strip() == "1"
        found.append(Named(x1 - 1, y1 - 1, x2, y2, name, is_difficult))
    return (int(width), int(height)), found


def _xml_number(element: ElementTree.Element, path: str) -> float:
    text = element.findtext(path)
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{path} of {element.tag} is {text!r}, not a number")
    return number


def _lines(data: bytes) -> Iterator[str]:
    """Yield the lines that are not empty. Raises UserError if the file is too large or not UTF-8."""
    _check_size(data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("not text in UTF-8") from None
    yield from (line for line in text.splitlines() if line.strip())


def _check_size(data: bytes) -> None:
    if len(data) > LARGEST:
        raise UserError(f"{len(data):,} bytes of annotations; an image's have at most {LARGEST:,}")


def _numbers(line: str, columns: Sequence[str], count: int) -> list[float]:
    """Return the numbers of a line. Raises UserError if there are others than `count`, or no numbers."""
    try:
        numbers = [float(column) for column in columns]
    except ValueError:
        raise UserError(f"{_cut(line)} has a column that is not a number") from None
    if len(numbers) != count:
        raise UserError(f"{_cut(line)} has {len(numbers)} numbers, not {count}")
    return numbers


def _cut(line: str) -> str:
    """Return a line as messages show it."""
    return repr(line if len(line) <= 60 else f"{line[:57]}...")
