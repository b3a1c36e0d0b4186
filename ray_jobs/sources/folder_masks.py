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
from ray_jobs.sources.archives.entries import Files, Member, place, table
from ray_jobs.sources.names import IMAGES, MASKS
from vit_model.errors import UserError

_BESIDE = dict.fromkeys(sorted(IMAGES), tuple(sorted(MASKS))) | {"jpegimages": ("segmentationclass",)}
"""A folder of images -> folders of their masks, in small letters."""
_OF_MASKS = {name for names in _BESIDE.values() for name in names}


def beside(images: Iterable[str], files: Iterable[str]) -> dict[str, str]:
    """Return the mask's file of each image that has one."""
    present = {file.lower(): file for file in files}
    found = {}
    for image in images:
        path = PurePosixPath(image.lower())
        for depth in range(len(path.parts) - 2, -1, -1):
            folders = _BESIDE.get(path.parts[depth], ())
            before, after = path.parts[:depth], path.parts[depth + 1 : -1]
            keys = ("/".join([*before, folder, *after, f"{path.stem}.png"]) for folder in folders)
            if (key := next((key for key in keys if key in present), None)) is not None:
                found[image] = present[key]
                break
    return found


def is_mask(file: str) -> bool:
    """Return whether a file is in a folder of masks."""
    return any(part.lower() in _OF_MASKS for part in PurePosixPath(file).parts[:-1])


def masks(members: dict[str, Member], files: Files, entries: pa.Table) -> Iterator[Mask | UserError]:
    """Yield the mask [h, w] of each entry's image, in order, or why it cannot be used.

    Args:
        members: the folder's files, by their paths.
    """
    keys = entries["key"].to_pylist()
    of_images = beside(keys, members)
    rows = [{"key": of_images[key], "label": 0} | place(members[of_images[key]]) for key in keys]
    for data in containers.read(files, table(rows)):
        try:
            yield data if isinstance(data, UserError) else decode_mask(data)
        except UserError as error:
            yield error
