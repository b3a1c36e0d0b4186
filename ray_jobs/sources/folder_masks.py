"""Masks of a user's own images: PNGs with the number of each pixel's class, or what COCO's annotations outline.

The PNGs are in a folder beside the images:

    images/train/1.jpg      masks/train/1.png, or in another folder of `names.MASKS`
    train/images/1.jpg      train/masks/1.png
    JPEGImages/1.jpg        SegmentationClass/1.png, as in Pascal VOC

In: the names of a folder's files, or annotations. Out: the file of each image's mask or its outlines; then, its pixels.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
from pycocotools.mask import area, decode, frPyObjects, merge

from pipelines.spec import FolderSource, nearest
from ray_jobs.data.boxes import MOST
from ray_jobs.data.masks import IGNORED, Mask, colours, decode_mask
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, table
from ray_jobs.sources.boxes.folders import Annotation
from ray_jobs.sources.names import MASKS, listed
from vit_model.errors import UserError
from vit_model.preprocessing import MAX_PIXELS

_OF_MASKS = {name for names in MASKS.values() for name in names}


def beside(images: Iterable[str], files: Iterable[str]) -> dict[str, str]:
    """Return the mask's file of each image that has one. Raises UserError if an image has several."""
    by_folder: dict[str, dict[str, str]] = {}  # the names of folders may have capitals, as in Images
    for file in files:
        folder, _, name = file.rpartition("/")
        by_folder.setdefault(folder.lower(), {})[name] = file
    found = {}
    for image in images:
        path = PurePosixPath(image)
        folders = [part.lower() for part in path.parts[:-1]]
        candidates = [
            by_folder.get("/".join([*folders[:depth], other, *folders[depth + 1 :]]), {}).get(f"{path.stem}.png")
            for depth, name in enumerate(folders)
            for other in MASKS.get(name, ())
        ]
        masks = [mask for mask in candidates if mask is not None]
        if len(masks) > 1:
            raise UserError(f"source.mask_classes: {image} has two masks, {masks[0]} and {masks[1]}; remove one")
        if masks:
            found[image] = masks[0]
    return found


def is_mask(file: str) -> bool:
    """Return whether a file is in a folder of masks."""
    return any(part.lower() in _OF_MASKS for part in PurePosixPath(file).parts[:-1])


def masks(source: FolderSource, files: Files, entries: pa.Table) -> Iterator[Mask | UserError]:
    """Yield the mask [h, w] of each entry's image, in order, or why it cannot be used.

    Raises:
        UserError: after the last one, if palettes show one value in different colours: a program that reduced colours
            may have numbered them anew for each mask.
    """
    shown: dict[int, dict[tuple[int, ...], list[str]]] = {}  # of each value: the images by its colour
    given = entries.select(["key", "mask", "objects"]).to_pylist()
    rows = ({"key": entry["key"], "label": 0} | entry["mask"] for entry in given if entry["mask"] is not None)
    stored = containers.read(files, table(rows))
    for entry in given:
        try:
            if entry["objects"] is not None:
                yield drawn(**json.loads(entry["objects"]))
                continue
            if isinstance(data := next(stored), UserError):
                raise data
            mask = decode_mask(data)
            for value, colour in colours(data, mask).items():
                shown.setdefault(value, {}).setdefault(colour, []).append(entry["key"])
            yield mask
        except UserError as error:
            yield error
    for value, by_colour in shown.items():
        if len(by_colour) > 1 and value != IGNORED:
            said = (f"{colour} in the masks of {listed(sorted(keys))}" for colour, keys in sorted(by_colour.items()))
            raise UserError(
                f"source.mask_classes: palettes show the value {value} as {'; and as '.join(said)}. It may mean "
                "different classes: write all masks with one palette"
            )


def outlined(images: Mapping[str, Annotation], categories: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of `drawn` for each image as JSON.

    Pixels without an object are of the first class, unless that has objects, too; then they are ignored. Categories
    without an object do not count: tools write one for all, or for the background.

    Args:
        categories: of the annotations. names: of the classes of pixels.

    Raises:
        UserError: a category with objects is not among the names, or the size of an image is not known.
    """
    used = {categories[box.label]: None for found in images.values() for box in found.boxes}
    if unknown := [category for category in used if category not in names]:
        raise UserError(f"category {unknown[0]!r} is not in mask_classes{nearest(unknown[0], names)}")
    background = IGNORED if names[0] in used else 0
    for found in images.values():
        objects = [
            [IGNORED if box.ignored else names.index(categories[box.label]), outline]
            for box, outline in zip(found.boxes, found.outlines, strict=True)
        ]
        yield json.dumps({"size": found.of, "background": background, "objects": objects})


def drawn(size: tuple[int, int] | None, background: int, objects: Sequence[tuple[int, Any]]) -> Mask:
    """Return the mask of an image of this width and height, in which smaller objects are in front of larger ones.

    Args:
        objects: the value of each, and COCO's `segmentation`: polygons, or a run-length encoding as a list.

    Raises:
        UserError: the size is unknown or too large, or the name of an object that cannot be drawn.
    """
    if size is None or not 0 < size[0] * size[1] <= MAX_PIXELS:
        raise UserError(f"its annotations are of {size and ' x '.join(map(str, size))} pixels; expected its size")
    if len(objects) > MOST:
        raise UserError(f"{len(objects):,} objects; at most {MOST:,} are read")
    mask = np.full(size[::-1], background, np.uint8)
    regions = [(value, _region(outline, *size)) for value, outline in objects]
    # what is ignored is behind everything else
    with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):  # pycocotools 2.0.11 with NumPy 2
        for value, region in sorted(regions, key=lambda each: (each[0] != IGNORED, -int(area(each[1])))):
            mask[decode(region) == 1] = value
    return mask


def _region(outline: Any, width: int, height: int) -> Any:
    """Return where an object is, as pycocotools encodes it."""
    match outline:
        case {"counts": [*counts], "size": [*of]} if of == [height, width] and all(type(n) is int for n in counts):
            if min(counts, default=-1) < 0 or sum(counts) != width * height:
                raise UserError(f"runs of {sum(counts)} pixels; expected {width * height}")
            return frPyObjects(outline, height, width)
        case [[*_], *_] if all(_is_polygon(each, width, height) for each in outline):
            return merge(frPyObjects(outline, height, width))
    said = str(outline)
    said = f"{said[:40]}..." if len(said) > 40 else said
    raise UserError(f"the segmentation {said} is neither polygons in the image nor a list of runs")


def _is_polygon(found: Any, width: int, height: int) -> bool:
    """Return whether this is x, y, x, y, ... of three points or more, none far outside of the image."""
    is_list = isinstance(found, list) and len(found) >= 6 and len(found) % 2 == 0
    return is_list and all(
        type(side) in (int, float) and -most <= side <= 2 * most
        for side, most in zip(found, cycle((width, height)), strict=False)
    )
