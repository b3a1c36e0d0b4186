"""SUN397: a tar of 108,754 images, and the lists of TFDS's splits, which are in its wheel."""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import Any, cast

from pipelines.spec.vtab import VtabSource
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.vtab import archives, splits
from ray_jobs.sources.vtab.splits import Records
from vit_model.errors import UserError

_FILE = "SUN397.tar.gz"
_LISTS = {"train": "tr", "validation": "va", "test": "te"}
# Not decoded alike by two readers, or by none: TFDS leaves them out.
_SKIPPED = frozenset(
    ("/c/church/outdoor/sun_bhenjvsvrtumjuri.jpg", "/t/track/outdoor/sun_aophkoiosslinihb.jpg")
)
_MAX_PIXELS = 120_000
_QUALITY = 95  # OpenCV's default; TFDS's documentation says 72, its code leaves it unset
_NOTES = {
    "published": "pixels: shrunk to 120,000 by OpenCV and encoded as JPEG of quality 95 again, as TFDS does",
    "raw": "raw pixels: VTAB's are shrunk to 120,000 and encoded as JPEG again",
}


def listing(source: VtabSource, files: Files) -> Listing:
    """Images of 397 classes, whose names are their folders, "/c/car_interior/backseat", in plain order."""
    members = archives.by_path(files, _FILE)
    lists = keys(files)
    names = sorted({_class(key) for each in lists.values() for key in each})
    label = {name: number for number, name in enumerate(names)}
    parts = {
        part: Records(
            each, [label[_class(key)] for key in each], [members.get(f"SUN397{key}") for key in each]
        )
        for part, each in lists.items()
    }
    return splits.listing("sun397", names, parts, notes=(_NOTES[source.pixels],))


def keys(files: Files) -> dict[str, list[str]]:
    """The images of each TFDS split, in TFDS's form, less those that can't be decoded."""
    return {part: _list(files, f"sun397_tfds_{short}.txt") for part, short in _LISTS.items()}


def _list(files: Files, name: str) -> list[str]:
    """The images of one of TFDS's lists, a text file or in the wheel, without those that TFDS skips."""
    data = containers.read_file(files, name)
    if data[:2] == b"PK":
        members = archives.by_path(files, name)
        data = archives.content(files, name, members, f"tensorflow_datasets/image_classification/{name}")
    found = archives.lines(data, name)
    if wrong := [line for line in found if not line.startswith("/") or line.count("/") < 3]:
        raise UserError(f"{name}: {wrong[0]!r} is not like /a/abbey/sun_aaalbzqrimafwbiv.jpg")
    return [line for line in found if line not in _SKIPPED]


def _class(key: str) -> str:
    return str(PurePosixPath(key).parent)


def processed(source: VtabSource, key: str, image: bytes) -> bytes:
    """An image of at most 120,000 pixels, as JPEG. Raises UserError for what can't be decoded."""
    import cv2

    pixels = archives.decode_bgr(image, upright=True)
    height, width = pixels.shape[:2]
    if height * width > _MAX_PIXELS:
        factor = math.sqrt(_MAX_PIXELS / (height * width))
        pixels = cast(Any, cv2.resize(pixels, None, fx=factor, fy=factor))
    return archives.encode_jpeg(pixels, _QUALITY)
