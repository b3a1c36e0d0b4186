"""COCO's annotations (cocodataset.org, "Data format"): one JSON for all images of a split.

A `bbox` is x, y, width and height, in pixels from the upper left corner. Crowds (`iscrowd` 1) are regions to ignore.
Classes are numbered in the order of their ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ray_jobs.data.boxes import Box
from vit_model.errors import UserError


class Annotations(NamedTuple):
    """What a file says about the images of a split."""

    class_names: tuple[str, ...]
    boxes: dict[str, list[Box]]
    """of each image, by its `file_name`; images without boxes have an empty list"""
    outlines: dict[str, list[Any]]
    """the `segmentation` of each of these boxes, as it is in the file"""
    sizes: dict[str, tuple[int, int]]
    """width and height of each image, as far as the file says so"""


def read(data: bytes, name: str) -> Annotations:
    """Return the annotations of a file, which messages call `name`.

    Raises:
        UserError: it is not JSON of this format, has an image or a class twice, or a box of an unknown image or class.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not JSON: {error}") from None
    if not isinstance(found, dict) or "images" not in found:
        raise UserError(f"{name}: not COCO's annotations: an object with images, annotations and categories")
    classes = _classes(found, name)
    labels = {number: label for label, number in enumerate(sorted(classes))}
    files: dict[int, str] = {}
    boxes: dict[str, list[Box]] = {}
    outlines: dict[str, list[Any]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for image in _entries(found, "images", {"id": int, "file_name": str}, name):
        file = image["file_name"]
        if image["id"] in files or file in boxes:
            raise UserError(f"{name}: image {image['id']}, {file}, is listed twice")
        files[image["id"]] = file
        boxes[file], outlines[file] = [], []
        if isinstance(width := image.get("width"), int) and isinstance(height := image.get("height"), int):
            sizes[file] = width, height
    for entry in _entries(found, "annotations", {"image_id": int, "category_id": int, "bbox": list}, name):
        if entry["image_id"] not in files:
            raise UserError(
                f"{name}: annotation {entry.get('id')} is of image {entry['image_id']}, which is not listed"
            )
        if entry["category_id"] not in labels:
            raise UserError(
                f"{name}: annotation {entry.get('id')} is of class {entry['category_id']}, which is not listed"
            )
        boxes[files[entry["image_id"]]].append(_box(entry, labels[entry["category_id"]], name))
        outlines[files[entry["image_id"]]].append(entry.get("segmentation"))
    return Annotations(tuple(classes[number] for number in sorted(classes)), boxes, outlines, sizes)


def _classes(found: Mapping[str, Any], name: str) -> dict[int, str]:
    """Return the classes by their ids. Of several with one name, as in Roboflow's exports, only one may have boxes."""
    used = {entry["category_id"] for entry in _entries(found, "annotations", {"category_id": int}, name)}
    classes: dict[int, str] = {}
    ids: dict[str, int] = {}
    for category in _entries(found, "categories", {"id": int, "name": str}, name):
        number, other = category["id"], ids.get(category["name"])
        if number in classes or {number, other} <= used:
            raise UserError(f"{name}: class {number}, {category['name']}, is listed twice")
        if other is not None and number not in used:
            continue
        if other is not None:
            del classes[other]
        classes[number], ids[category["name"]] = category["name"], number
    return classes


def _entries(found: Mapping[str, Any], part: str, fields: Mapping[str, type], name: str) -> Iterator[dict[str, Any]]:
    """Yield the entries of a list of the file. Raises UserError for an entry without these fields of these types."""
    entries = found.get(part)
    if not isinstance(entries, list):
        raise UserError(f"{name}: {part} is not a list")
    for number, entry in enumerate(entries):
        for field, kind in fields.items():
            value = entry.get(field) if isinstance(entry, dict) else None
            if not isinstance(value, kind) or isinstance(value, bool):
                raise UserError(f"{name}: {part}[{number}].{field} is {value!r}; expected {_KINDS[kind]}")
        yield entry


_KINDS: dict[type, str] = {int: "a whole number", str: "text", list: "[x, y, width, height]"}


def _box(entry: Mapping[str, Any], label: int, name: str) -> Box:
    sides = entry["bbox"]
    if len(sides) != 4 or not all(isinstance(side, int | float) and not isinstance(side, bool) for side in sides):
        raise UserError(f"{name}: bbox of annotation {entry.get('id')} is {sides!r}; expected [x, y, width, height]")
    try:
        x, y, width, height = map(float, sides)
    except OverflowError:
        raise UserError(f"{name}: bbox of annotation {entry.get('id')} has a number of more than 300 digits") from None
    return Box(x, y, x + width, y + height, label, ignored=entry.get("iscrowd") == 1)
