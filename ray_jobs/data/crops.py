"""Crop images: an image file while it is decoded, or a batch of images that are already at the model's resolution.

`Crops` are the parts to take; `ray_jobs.augment.crops` draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ray_jobs.data.decode import Stored, damage_of, decode_jpeg, is_plain_jpeg
from ray_jobs.data.decode_pool import DecodeCrops, DecodeImage
from vit_model.contract import Preprocessing
from vit_model.preprocessing import decode_image

Pixels = NDArray[np.int64]

_SCALES = (8, 4, 2)  # decoding a JPEG at an eighth, a quarter or half of its size is cheaper


class Crops(NamedTuple):
    """Boxes in whole pixels, int64 [n] per field, zero outside their images; `flipped`, bool [n]: mirrored crops."""

    top: Pixels
    left: Pixels
    height: Pixels
    width: Pixels
    flipped: NDArray[np.bool_]


Draw = Callable[[Pixels, Pixels, Pixels], Crops]
"""Draws crops for samples from their positions in the training stream, heights and widths, all [n]."""


def decode_crops(draw: Draw, preprocessing: Preprocessing) -> DecodeCrops:
    """Return the function with which a `Decoder` decodes crops."""
    return partial(_decoder, draw, preprocessing)


def _decoder(
    draw: Draw, preprocessing: Preprocessing, positions: Pixels, heights: Pixels, widths: Pixels
) -> DecodeImage:
    crops = draw(positions, heights, widths)
    return lambda image, number: decode_crop(image, preprocessing, crops, number)


def decode_crop(image: Stored, preprocessing: Preprocessing, crops: Crops, number: int) -> NDArray[np.uint8]:
    """Decode the crop with this number of an image file, resized with antialiasing: uint8 [side, side, channels].

    Large crops are decoded at a fraction of their size.

    Raises:
        DamagedError: the image cannot be decoded; the message has its key.
    """
    side, channels = preprocessing.resolution, preprocessing.channels
    top, left, height, width, flipped = (part[number].item() for part in crops)
    pixels = None
    with damage_of(image):
        if channels == 3 and is_plain_jpeg(image):
            scale = next((s for s in _SCALES if min(height, width) >= s * side), 1)
            pixels = decode_jpeg(image.data, -(-image.height // scale), -(-image.width // scale))
            if pixels is not None and scale > 1:
                top, left = top // scale, left // scale
                height, width = height // scale, width // scale
        if pixels is None:
            pixels = decode_image(image.data, channels)
    # Contiguous with four dimensions, so that torch sees channels_last: it then resizes in half the time and returns
    # pixels in [h, w, c] order, which saves as much again.
    rows, to_rows = _inside(top, height, pixels.shape[0], side)
    columns, to_columns = _inside(left, width, pixels.shape[1], side)
    part = np.require(pixels[None, rows, columns], requirements=["C", "W"])
    resized = functional.interpolate(
        torch.from_numpy(part).permute(0, 3, 1, 2),
        (to_rows.stop - to_rows.start, to_columns.stop - to_columns.start),
        mode=preprocessing.interpolation,
        antialias=True,
    )
    output = resized[0].permute(1, 2, 0)
    if output.shape[:2] != (side, side):
        output, inner = output.new_zeros(side, side, channels), output
        output[to_rows, to_columns] = inner
    return (output.flip(1) if flipped else output).numpy()


def _inside(start: int, extent: int, size: int, side: int) -> tuple[slice, slice]:
    """Return which pixels of an image's side a crop has, and where they are in the crop, resized to `side` pixels.

    The second are whole pixels, at least one; all of them if the crop lies in the image.
    """
    first, last = max(start, 0), min(start + extent, size)
    to_first = min(round((first - start) / extent * side), side - 1)
    return slice(first, last), slice(to_first, max(to_first + 1, round((last - start) / extent * side)))


def crop(images: torch.Tensor, crops: Crops, side: int | None = None) -> torch.Tensor:
    """Crop images [n, h, w, c], resize to [h, w], or to [side, side], and mirror as `crops` says.

    Resizing is bilinear without antialiasing, as in TensorFlow; but with it for images that lie inside their crop.
    """
    n, height, width, channels = images.shape
    top, left, crop_height, crop_width, flipped = crops
    # Map the output square [-1, 1] to the crop's position in the input square; a flip reverses x.
    scale_x = crop_width / width * np.where(flipped, -1.0, 1.0)
    matrix = np.zeros((n, 2, 3), np.float32)
    matrix[:, 0, 0], matrix[:, 0, 2] = scale_x, (2 * left + crop_width) / width - 1
    matrix[:, 1, 1], matrix[:, 1, 2] = (crop_height / height, (2 * top + crop_height) / height - 1)
    size = [n, channels, side or height, side or width]
    grid = functional.affine_grid(torch.from_numpy(matrix).to(images.device), size, align_corners=False)
    pixels = images.permute(0, 3, 1, 2).float()
    cropped = functional.grid_sample(pixels, grid, "bilinear", "border", align_corners=False)
    for number in np.flatnonzero((crop_height > height) | (crop_width > width)):
        _, rows = _inside(top[number], crop_height[number], height, size[2])
        _, columns = _inside(left[number], crop_width[number], width, size[3])
        extent = (rows.stop - rows.start, columns.stop - columns.start)
        whole = functional.interpolate(pixels[number : number + 1], extent, mode="bilinear", antialias=True)[0]
        cropped[number] = 0
        cropped[number, :, rows, columns] = whole
        if flipped[number]:
            cropped[number] = cropped[number].flip(2)
    return cropped.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
