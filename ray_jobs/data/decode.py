"""One stored image as a model gets it: decoded, cut, resized; mostly in C, without Python's lock.

In: an image's bytes as they lie in a shard. Out: uint8 [resolution, resolution, channels].
Use: `square(stored, preprocessing)` is what `load_image` gives for any reader; `cropped` is a random part of the
original image for training, which is decoded at a fraction of its size where the part allows it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from ray_jobs.data.jpeg import plain_jpeg
from vit_model.config import Preprocessing
from vit_model.errors import UserError
from vit_model.preprocessing import decode_image, load_image

_SCALES = (8, 4, 2)  # a JPEG is decoded at a half, a quarter or an eighth for less


class DamagedError(UserError):
    """An image that is not what it was at ingest."""


class Stored(NamedTuple):
    """One image as it lies in a shard: a file's bytes, or pixels where format is "raw"."""

    key: str
    data: bytes
    format: str
    width: int
    height: int
    channels: int


class Crop(NamedTuple):
    """A part of an image in whole pixels, and whether it is mirrored."""

    top: int
    left: int
    height: int
    width: int
    flipped: bool


def square(image: Stored, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """As `load_image` does it, to the pixel. Raises DamagedError with the image's key."""
    side, source = preprocessing.resolution, raw_pixels(image)
    if source is not None and source.shape == (side, side, preprocessing.channels):
        return source
    try:
        if source is None and _is_plain_jpeg(image):
            source = _decode_jpeg(image.data)
        return load_image(image.data if source is None else source, preprocessing)
    except UserError as error:
        raise DamagedError(f"image {image.key!r} was readable at ingest and is not now: {error}") from error


def cropped(image: Stored, preprocessing: Preprocessing, crop: Crop) -> NDArray[np.uint8]:
    """A part of an image file, resized with antialiasing. Raises DamagedError with the image's key."""
    import torch  # here: an ingest, which reads nothing so, need not wait for it
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
        raise DamagedError(f"image {image.key!r} was readable at ingest and is not now: {error}") from error
    # Contiguous with four dimensions, so that torch sees channels_last: then it resizes in half the time and gives
    # pixels in our order, which saves as much again.
    part = np.require(pixels[None, top : top + height, left : left + width], requirements=["C", "W"])
    resized = functional.interpolate(
        torch.from_numpy(part).permute(0, 3, 1, 2),
        (side, side),
        mode=preprocessing.interpolation,
        antialias=True,
    )
    found = resized[0].permute(1, 2, 0)
    return (found.flip(1) if flipped else found).numpy()


def raw_pixels(image: Stored) -> NDArray[np.uint8] | None:
    """The pixels [h, w, c] of a raw image; None for an image file."""
    if image.format != "raw":
        return None
    return np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, image.channels)


def _is_plain_jpeg(image: Stored) -> bool:
    """Whether a file is a JPEG that a bare decoder reads as Pillow does."""
    found = plain_jpeg(image.data) if image.format == "jpeg" else None
    return found is not None and (found.height, found.width) == (image.height, image.width)


def _decode_jpeg(data: bytes, height: int = 0, width: int = 0) -> NDArray[np.uint8] | None:
    """RGB pixels, of this size where one is given; None where Pillow must be asked."""
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width, min_factor=2)
    except ValueError:  # damaged in a way that Pillow may forgive, as it did at ingest
        return None
    return pixels if not height or pixels.shape[:2] == (height, width) else None
