"""Decode a stored image for a model, mostly in C and without the GIL.

In: an image's bytes as stored in a shard. Out: uint8 [resolution, resolution, channels], the same pixels as
`load_image` returns. `ray_jobs.data.crops` decodes crops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from ray_jobs.data.jpeg import plain_jpeg
from vit_model.contract import Preprocessing
from vit_model.errors import UserError
from vit_model.preprocessing import load_image


class DamagedError(UserError):
    """An image whose stored bytes have changed since ingest."""


class Stored(NamedTuple):
    """One image as stored in a shard: a file's bytes, or pixels if format is "raw"."""

    key: str
    data: bytes
    format: str
    width: int
    height: int
    channels: int


def square(image: Stored, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """Decode an image as `load_image` does, pixel for pixel.

    Raises:
        DamagedError: the image cannot be decoded; the message has its key.
    """
    side, source = preprocessing.resolution, raw_pixels(image)
    if source is not None and source.shape == (side, side, preprocessing.channels):
        return source
    with damage_of(image):
        if source is None and is_plain_jpeg(image):
            source = decode_jpeg(image.data)
        return load_image(image.data if source is None else source, preprocessing)


@contextmanager
def damage_of(image: Stored) -> Iterator[None]:
    """Raise DamagedError with the image's key if the block cannot decode the image."""
    try:
        yield
    except UserError as error:
        raise DamagedError(f"image {image.key!r} was readable at ingest, but not now: {error}") from error


def raw_pixels(image: Stored) -> NDArray[np.uint8] | None:
    """Return the pixels [h, w, c] of a raw image; None for an image file."""
    if image.format != "raw":
        return None
    return np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, image.channels)


def is_plain_jpeg(image: Stored) -> bool:
    """Return whether a file is a JPEG that libjpeg decodes to the same pixels as Pillow."""
    jpeg = plain_jpeg(image.data) if image.format == "jpeg" else None
    return jpeg is not None and (jpeg.height, jpeg.width) == (image.height, image.width)


def decode_jpeg(data: bytes, height: int = 0, width: int = 0) -> NDArray[np.uint8] | None:
    """Return RGB pixels, of this size unless it is 0; None if Pillow has to decode the image."""
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width, min_factor=2)
    except ValueError:  # damaged in a way that Pillow may tolerate, as it did at ingest
        return None
    return pixels if not height or pixels.shape[:2] == (height, width) else None
