"""Masks of a user's own images: PNGs with the number of each pixel's class, in a folder beside the images.

    images/train/1.jpg      masks/train/1.png, or in annotations, labels, gt, segmentations
    train/images/1.jpg      train/masks/1.png
    JPEGImages/1.jpg        SegmentationClass/1.png, as in Pascal VOC

In: the names of a folder's files. Out: the mask of each image, by its file; later, its pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

import pyarrow as pa

from ray_jobs.data.masks import Mask, decode_mask
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, table
from ray_jobs.sources.names import IMAGES, MASKS
from vit_model.errors import UserError

_BESIDE = dict.fromkeys(IMAGES, MASKS) | {"jpegimages": ("segmentationclass",)}
"""A folder of images -> folders of their masks, in small letters."""
_OF_MASKS = {name for names in _BESIDE.values() for name in names}


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
            for other in _BESIDE.get(name, ())
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


def masks(files: Files, entries: pa.Table) -> Iterator[Mask | UserError]:
    """Yield the mask [h, w] of each entry's image, in order, or why it cannot be used."""
    rows = ({"key": entry["key"], "label": 0} | entry["mask"] for entry in entries.select(["key", "mask"]).to_pylist())
    for data in containers.read(files, table(rows)):
        try:
            yield data if isinstance(data, UserError) else decode_mask(data)
        except UserError as error:
            yield error
