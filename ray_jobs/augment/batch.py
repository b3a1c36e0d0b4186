"""Crops, flips and shifts of a batch of images that are already at the model's resolution.

In and out: uint8 tensors [n, h, w, c], on any device.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from pipelines.spec import Augmentation
from ray_jobs.augment.crops import CROPPING, Crops, crops
from ray_jobs.augment.random import uniform

POLICIES = get_args(Augmentation)


def augment(
    images: torch.Tensor, policy: str, seed: int, positions: NDArray[np.int64], purpose: str = "augment"
) -> torch.Tensor:
    """Augment each image [n, h, w, c] by `policy`, see `pipelines.spec.Augmentation`.

    `positions` [n] number the samples over the whole training; `purpose` gives several views of an image different
    random numbers. Crops are taken from the loaded image, not from the original file. Raises ValueError for an unknown
    policy.
    """
    if len(positions) != len(images):
        raise ValueError(f"{len(positions)} positions for {len(images)} images")
    if policy not in POLICIES:
        raise ValueError(f"unknown augmentation policy {policy!r}; expected one of: {', '.join(POLICIES)}")
    if policy == "none":
        return images
    if policy in CROPPING:
        _, height, width, _ = images.shape
        boxes = crops(policy, seed, positions, height, width, purpose)
        return flip(images, boxes.flipped) if policy == "flip" else crop(images, boxes)
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


def crop(images: torch.Tensor, boxes: Crops) -> torch.Tensor:
    """Crop images [n, h, w, c], resize to [h, w] and mirror as `boxes` says.

    Bilinear without antialiasing, as TensorFlow's resize.
    """
    n, height, width, channels = images.shape
    top, left, crop_height, crop_width, flipped = boxes
    # Maps the output square [-1, 1] to the crop's place in the input square; a flip reverses x.
    scale_x = crop_width / width * np.where(flipped, -1.0, 1.0)
    matrix = np.zeros((n, 2, 3), np.float32)
    matrix[:, 0, 0], matrix[:, 0, 2] = scale_x, (2 * left + crop_width) / width - 1
    matrix[:, 1, 1], matrix[:, 1, 2] = (crop_height / height, (2 * top + crop_height) / height - 1)
    grid = functional.affine_grid(
        torch.from_numpy(matrix).to(images.device), [n, channels, height, width], align_corners=False
    )
    pixels = images.permute(0, 3, 1, 2).float()
    cropped = functional.grid_sample(pixels, grid, "bilinear", "border", align_corners=False)
    return cropped.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
