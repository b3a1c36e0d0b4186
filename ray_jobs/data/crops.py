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
    """Boxes in whole pixels inside their images, int64 [n] per field; `flipped`, bool [n], marks mirrored crops."""

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
    part = np.require(pixels[None, top : top + height, left : left + width], requirements=["C", "W"])
    resized = functional.interpolate(
        torch.from_numpy(part).permute(0, 3, 1, 2),
        (side, side),
        mode=preprocessing.interpolation,
        antialias=True,
    )
    output = resized[0].permute(1, 2, 0)
    return (output.flip(1) if flipped else output).numpy()


def crop(images: torch.Tensor, crops: Crops, side: int | None = None) -> torch.Tensor:
    """Crop images [n, h, w, c], resize to [h, w], or to [side, side], and mirror as `crops` says.

    Resizing is bilinear without antialiasing, as in TensorFlow.
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
    return cropped.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
