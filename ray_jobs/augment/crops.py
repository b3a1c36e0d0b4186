"""Random crops and flips as numbers, so that a decoder knows them before it decodes.

In: a policy, image sizes and random numbers. Out: boxes in whole pixels. This module does not touch pixels.
Use, before decoding: `RandomCrop("crop_flip", seed)(positions, heights, widths)`, for one image or a batch; the
crop is then resized to the model's square, and mirrored if `flipped`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ray_jobs.augment.random import uniform
from ray_jobs.data.crops import Crops, Pixels

Numbers = NDArray[np.float64]
Size = int | Pixels  # one size for all images, or one per image

CROP_AREA = (0.05, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)
RESIZED_CROP_AREA = (0.08, 1.0)
RESIZED_CROP_TRIES = 10
SCALE_JITTER = (0.1, 2.0)
SQUASH_CROP = 384 / 448  # a fraction of each side: the paper's fine-tuning squashes to 448 and crops 384

# How many numbers each policy draws per sample.
_DRAWS = {"flip": 8, "crop_flip": 8, "squash_crop": 8, "squash_crop_flip": 8, "scale_jitter_flip": 8}
_DRAWS |= {"resized_crop_flip": 24}
_FLIP = {"resized_crop_flip": 2 * RESIZED_CROP_TRIES + 2}
CROPPING = frozenset(_DRAWS)
"""The policies that crop or flip the original image. The others ("none", "shift", "shift_flip") change an image
that is already at the model's resolution."""


def crops(
    policy: str,
    seed: int,
    positions: Pixels,
    height: Size,
    width: Size,
    purpose: str = "augment",
    area: tuple[float, float] = RESIZED_CROP_AREA,
) -> Crops:
    """Draw the crops of a policy of `CROPPING` for images of these sizes (an int, or [n]).

    `positions` [n] number the samples over the whole training; `purpose` gives several views of an image different
    random numbers; `area` has the limits of resized_crop_flip's shares of the image.
    """
    draws = uniform(seed, positions, _DRAWS[policy], purpose)
    if policy == "crop_flip":
        box = crop_boxes(draws, height, width)
    elif policy == "resized_crop_flip":
        box = resized_crop_boxes(draws, height, width, area)
    elif policy == "scale_jitter_flip":
        box = scale_jitter_boxes(draws, height, width)
    elif policy == "flip":
        zero = np.zeros(len(draws), np.int64)
        box = (zero, zero, zero + height, zero + width)
    else:
        box = squash_crop_boxes(draws, height, width)
    flipped = draws[:, _FLIP.get(policy, 4)] < 0.5
    return Crops(*box, np.zeros_like(flipped) if policy == "squash_crop" else flipped)


@dataclass(frozen=True)
class RandomCrop:
    """A training's random crop, which the loader applies to each original image while decoding it."""

    policy: str
    seed: int

    def __call__(self, positions: Pixels, height: Size, width: Size) -> Crops:
        """Draw the crops of images of these sizes (an int, or [n]) at these positions [n] of the training."""
        return crops(self.policy, self.seed, positions, height, width)


def crop_boxes(draws: Numbers, height: Size, width: Size) -> tuple[Pixels, Pixels, Pixels, Pixels]:
    """Return (top, left, height, width) of the Inception crop of ViT's pretraining, from a sample's first four draws.

    Area 5-100%, aspect 3/4-4/3. As in TensorFlow's sampler, the height is uniform between its limits, not the area.
    """
    aspect = CROP_ASPECT[0] + draws[:, 0] * (CROP_ASPECT[1] - CROP_ASPECT[0])
    area = np.asarray(height * width)
    highest = np.minimum(np.minimum(np.sqrt(CROP_AREA[1] * area / aspect), width / aspect), height)
    lowest = np.minimum(np.sqrt(CROP_AREA[0] * area / aspect), highest)
    tall = lowest + draws[:, 1] * (highest - lowest)
    crop_height = np.clip(np.round(tall), 1, height).astype(np.int64)
    crop_width = np.clip(np.round(tall * aspect), 1, width).astype(np.int64)
    return *_placed(draws[:, 2:4], height, width, crop_height, crop_width), crop_height, crop_width


def resized_crop_boxes(
    draws: Numbers, height: Size, width: Size, area: tuple[float, float] = RESIZED_CROP_AREA
) -> tuple[Pixels, Pixels, Pixels, Pixels]:
    """Return (top, left, height, width) of torchvision's RandomResizedCrop, from a sample's first 22 draws.

    Area uniform between its limits (by default 8 to 100%), aspect log-uniform from 3/4 to 4/3. The first of ten tries
    that fits the image is used, otherwise a centre crop with the aspect clipped to that range.
    """
    tries = draws[:, : 2 * RESIZED_CROP_TRIES].reshape(len(draws), RESIZED_CROP_TRIES, 2)
    heights, widths = (np.broadcast_to(size, len(draws))[:, None] for size in (height, width))
    smallest, largest = area
    pixels = heights * widths * (smallest + tries[:, :, 0] * (largest - smallest))
    low, high = (math.log(limit) for limit in CROP_ASPECT)
    aspect = np.exp(low + tries[:, :, 1] * (high - low))
    tall, wide = np.round(np.sqrt(pixels / aspect)), np.round(np.sqrt(pixels * aspect))
    fits = (tall > 0) & (tall <= heights) & (wide > 0) & (wide <= widths)
    has_fit, first = fits.any(axis=1), fits.argmax(axis=1)
    every = np.arange(len(draws))
    middle_height = np.minimum(heights[:, 0], np.round(widths[:, 0] / CROP_ASPECT[0]))
    middle_width = np.minimum(widths[:, 0], np.round(heights[:, 0] * CROP_ASPECT[1]))
    crop_height = np.where(has_fit, tall[every, first], middle_height).astype(np.int64)
    crop_width = np.where(has_fit, wide[every, first], middle_width).astype(np.int64)
    place = draws[:, 2 * RESIZED_CROP_TRIES : 2 * RESIZED_CROP_TRIES + 2]
    top, left = _placed(place, height, width, crop_height, crop_width)
    return (
        np.where(has_fit, top, (height - crop_height) // 2),
        np.where(has_fit, left, (width - crop_width) // 2),
        crop_height,
        crop_width,
    )


def scale_jitter_boxes(draws: Numbers, height: Size, width: Size) -> tuple[Pixels, Pixels, Pixels, Pixels]:
    """Return (top, left, height, width) of large-scale jitter (Ghiasi et al. 2021), from draws 0, 2 and 3.

    What a square of the model's size shows of the image when it is resized by a factor: a part of it, anywhere, or all
    of it, anywhere in the square.
    """
    factor = SCALE_JITTER[0] + draws[:, 0] * (SCALE_JITTER[1] - SCALE_JITTER[0])
    crop_height, crop_width = (np.maximum(1, np.round(size / factor)).astype(np.int64) for size in (height, width))
    return *_placed(draws[:, 2:4], height, width, crop_height, crop_width), crop_height, crop_width


def squash_crop_boxes(draws: Numbers, height: Size, width: Size) -> tuple[Pixels, Pixels, Pixels, Pixels]:
    """Return (top, left, height, width) of BiT's crop, which the paper's fine-tuning cites, from draws 2 and 3.

    BiT squashes an image to 448 x 448 and crops 384 x 384 anywhere. That is 6/7 of each side of the original image,
    here in whole pixels.
    """
    ones = np.ones(len(draws), np.int64)
    crop_height = np.maximum(1, np.round(ones * height * SQUASH_CROP)).astype(np.int64)
    crop_width = np.maximum(1, np.round(ones * width * SQUASH_CROP)).astype(np.int64)
    return *_placed(draws[:, 2:4], height, width, crop_height, crop_width), crop_height, crop_width


def _placed(
    draws: Numbers, height: Size, width: Size, crop_height: Pixels, crop_width: Pixels
) -> tuple[Pixels, Pixels]:
    """Return (top, left); all positions of a crop in its image, or of an image in its crop, are equally likely."""
    rooms = (height - crop_height, width - crop_width)  # negative: the image lies in the crop
    top, left = (
        np.sign(room) * (draw * (np.abs(room) + 1)).astype(np.int64) for draw, room in zip(draws.T, rooms, strict=True)
    )
    return top, left
