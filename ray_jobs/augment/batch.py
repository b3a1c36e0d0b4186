"""Crops, flips and shifts of a batch of images that are already at the model's resolution.

In and out: uint8 tensors [n, h, w, c], on any device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ray_jobs.augment.crops import CROPPING, RESIZED_CROP_AREA, crops
from ray_jobs.augment.random import uniform
from ray_jobs.data.crops import crop


def augment(
    images: torch.Tensor,
    policy: str,
    seed: int,
    positions: NDArray[np.int64],
    purpose: str = "augment",
    area: tuple[float, float] = RESIZED_CROP_AREA,
    side: int | None = None,
) -> torch.Tensor:
    """Augment each image [n, h, w, c] by `policy`, see `pipelines.spec.Augmentation`.

    `positions` [n] number the samples over the whole training; `purpose` gives several views of an image different
    random numbers. Crops are taken from the loaded image, not from the original file; they get its size, or `side`.
    `area` has the limits of resized_crop_flip.
    """
    if policy == "none":
        return images
    if policy in CROPPING:
        _, height, width, _ = images.shape
        boxes = crops(policy, seed, positions, height, width, purpose, area)
        return flip(images, boxes.flipped) if policy == "flip" else crop(images, boxes, side)
    draws = uniform(seed, positions, purpose=purpose)
    shifted = shift(images, draws)
    return flip(shifted, draws[:, 4] < 0.5) if policy == "shift_flip" else shifted


def flip(images: torch.Tensor, flipped: NDArray[np.bool_]) -> torch.Tensor:
    """Mirror the images for which `flipped` [n] is true, left to right."""
    chosen = torch.from_numpy(flipped).to(images.device)[:, None, None, None]
    return torch.where(chosen, images.flip(2), images)


def shift(images: torch.Tensor, draws: NDArray[np.float64]) -> torch.Tensor:
    """Move each image by -1, 0 or 1 pixel in each direction, filling with zeros."""
    n, height, width, _ = images.shape
    padded = functional.pad(images, (0, 0, 1, 1, 1, 1))
    offsets = torch.from_numpy((draws[:, :2] * 3).astype(np.int64)).to(images.device)
    rows = offsets[:, :1] + torch.arange(height, device=images.device)
    columns = offsets[:, 1:] + torch.arange(width, device=images.device)
    samples = torch.arange(n, device=images.device)[:, None, None]
    return padded[samples, rows[:, :, None], columns[:, None, :]]
