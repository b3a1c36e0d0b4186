"""Decode a stored image for a model: decode, crop, resize; mostly in C and without the GIL.

In: an image's bytes as stored in a shard. Out: uint8 [resolution, resolution, channels].
`square(stored, preprocessing)` gives the same pixels as `load_image`. `cropped` gives a random crop of the original
image for training; large crops are decoded at a fraction of the size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from ray_jobs.data.jpeg import plain_jpeg
from vit_model.contract import Preprocessing
from vit_model.errors import UserError
from vit_model.preprocessing import decode_image, load_image

_SCALES = (8, 4, 2)  # decoding a JPEG at an eighth, a quarter or half of its size is cheaper


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


class Crop(NamedTuple):
    """A crop of an image in whole pixels, and whether it is mirrored."""

    top: int
    left: int
    height: int
    width: int
    flipped: bool


def square(image: Stored, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """Decode an image as `load_image` does, pixel for pixel.

    Raises:
        DamagedError: the image cannot be decoded; the message has its key.
    """
    side, source = preprocessing.resolution, raw_pixels(image)
    if source is not None and source.shape == (side, side, preprocessing.channels):
        return source
    try:
        if source is None and _is_plain_jpeg(image):
            source = _decode_jpeg(image.data)
        return load_image(image.data if source is None else source, preprocessing)
    except UserError as error:
        raise DamagedError(
            f"image {image.key!r} was readable at ingest, but no longer is: {error}"
        ) from error


def cropped(image: Stored, preprocessing: Preprocessing, crop: Crop) -> NDArray[np.uint8]:
    """Decode a crop of an image file, resized with antialiasing.

    Raises:
        DamagedError: the image cannot be decoded; the message has its key.
    """
    import torch
    from torch.nn import functional

    side, channels = preprocessing.resolution, preprocessing.channels
    top, left, height, width, flipped = crop
    try:
        pixels = None
        if channels == 3 and _is_plain_jpeg(image):
            scale = next((s for s in _SCALES if min(height, width) >= s * side), 1)
            pixels = _decode_jpeg(image.data, -(-image.height // scale), -(-image.width // scale))
            if pixels is not None and scale > 1:
                top, left = top // scale, left // scale
                height, width = height // scale, width // scale
        if pixels is None:
            pixels = decode_image(image.data, channels)
    except UserError as error:
        raise DamagedError(
            f"image {image.key!r} was readable at ingest, but no longer is: {error}"
        ) from error
    # Contiguous with four dimensions, so that torch sees channels_last: it then resizes in half the time and returns
    # pixels in [h, w, c] order, which saves as much again.
    part = np.require(pixels[None, top : top + height, left : left + width], requirements=["C", "W"])
    resized = functional.interpolate(
        torch.from_numpy(part).permute(0, 3, 1, 2),
        (side, side),
        mode=preprocessing.interpolation,
        antialias=True,
    )
    output = resized[0].permute(1, 2, 0)
    return (output.flip(1) if flipped else output).numpy()


def raw_pixels(image: Stored) -> NDArray[np.uint8] | None:
    """Return the pixels [h, w, c] of a raw image; None for an image file."""
    if image.format != "raw":
        return None
    return np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, image.channels)


def _is_plain_jpeg(image: Stored) -> bool:
    """Return whether a file is a JPEG for which libjpeg gives the same pixels as Pillow."""
    jpeg = plain_jpeg(image.data) if image.format == "jpeg" else None
    return jpeg is not None and (jpeg.height, jpeg.width) == (image.height, image.width)


def _decode_jpeg(data: bytes, height: int = 0, width: int = 0) -> NDArray[np.uint8] | None:
    """Return RGB pixels, of the given size if there is one; None if Pillow has to decode the image."""
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width, min_factor=2)
    except ValueError:  # damaged in a way that Pillow may tolerate, as it did at ingest
        return None
    return pixels if not height or pixels.shape[:2] == (height, width) else None
