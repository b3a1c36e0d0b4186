"""SUN397: a tar of 108,754 images, and the lists of TFDS's splits from the wheel of TFDS."""

from __future__ import annotations

import math
from typing import Any, cast

import cv2

from pipelines.spec.vtab import VtabSource
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.vtab import archives, splits
from vit_model.errors import UserError

_FILE = "SUN397.tar.gz"
_LISTS = {"train": "tr", "validation": "va", "test": "te"}
# TFDS leaves these out, because decoders disagree on them or fail.
_SKIPPED = frozenset(("/c/church/outdoor/sun_bhenjvsvrtumjuri.jpg", "/t/track/outdoor/sun_aophkoiosslinihb.jpg"))
_MAX_PIXELS = 120_000
_QUALITY = 95  # OpenCV's default; TFDS's documentation says 72, its code leaves it unset
_NOTES = {
    "published": "pixels: shrunk to 120,000 by OpenCV and encoded as JPEG of quality 95 again, as TFDS does",
    "raw": "raw pixels: VTAB's are shrunk to 120,000 and encoded as JPEG again",
}


def listing(source: VtabSource, files: Files) -> Listing:
    """List images of 397 classes; class names are the sorted folders, such as "/c/car_interior/backseat"."""
    members = archives.by_path(files, _FILE)
    names, parts = archives.by_folder(keys(files), "SUN397", members)
    return splits.listing(source, names, parts, notes=(_NOTES[source.pixels],))


def keys(files: Files) -> dict[str, list[str]]:
    """Return the images of each TFDS split, in TFDS's notation, without those that TFDS leaves out."""
    return {part: _list(files, f"sun397_tfds_{short}.txt") for part, short in _LISTS.items()}


def _list(files: Files, name: str) -> list[str]:
    """Return the images in one of TFDS's lists, which is a text file or in the wheel."""
    data = containers.read_file(files, name)
    if data[:2] == b"PK":
        members = archives.by_path(files, name)
        data = archives.content(files, name, members, f"tensorflow_datasets/image_classification/{name}")
    lines = containers.lines(data, name)
    if wrong := [line for line in lines if not line.startswith("/") or line.count("/") < 3]:
        raise UserError(f"{name}: expected lines like /a/abbey/sun_aaalbzqrimafwbiv.jpg, not {wrong[0]!r}")
    return [line for line in lines if line not in _SKIPPED]


def processed(source: VtabSource, key: str, image: bytes) -> bytes:
    """Shrink an image to at most 120,000 pixels, and encode it as JPEG. Raises UserError if it cannot be decoded."""
    pixels = archives.decode_bgr(image, upright=True)
    height, width = pixels.shape[:2]
    if height * width > _MAX_PIXELS:
        factor = math.sqrt(_MAX_PIXELS / (height * width))
        pixels = cast(Any, cv2.resize(pixels, None, fx=factor, fy=factor))
    return archives.encode_jpeg(pixels, _QUALITY)
