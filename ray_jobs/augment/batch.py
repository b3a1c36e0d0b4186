"""What is done to a batch of images that are already at the model's resolution.

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
    """Change each image [n, h, w, c] by `policy`, see `pipelines.spec.Augmentation`.

    `positions` [n] number the samples over the whole training; `purpose` keeps several views of an image apart. Crops
    are taken from the loaded image, not from the original file. Raises ValueError for an unknown policy.
    """
    if len(positions) != len(images):
        raise ValueError(f"{len(positions)} positions for {len(images)} images")
    if policy not in POLICIES:
        raise ValueError(f"augmentation policy {policy!r} is none of {', '.join(POLICIES)}")
    if policy == "none":
        return images
    if policy in CROPPING:
        _, height, width, _ = images.shape
        taken = crops(policy, seed, positions, height, width, purpose)
        return flip(images, taken.flipped) if policy == "flip" else crop(images, taken)
    draws = uniform(seed, positions, purpose=purpose)
    shifted = shift(images, draws)
    return flip(shifted, draws[:, 4] < 0.5) if policy == "shift_flip" else shifted


def flip(images: torch.Tensor, flipped: NDArray[np.bool_]) -> torch.Tensor:
    """Mirror those images, left to right, of which `flipped` [n] says so."""
    chosen = torch.from_numpy(flipped).to(images.device)[:, None, None, None]
    return torch.where(chosen, images.flip(2), images)


def shift(images: torch.Tensor, draws: NDArray[np.float64]) -> torch.Tensor:
    """Move each image by -1, 0 or 1 pixel in each direction, zeros coming in."""
    n, height, width, _ = images.shape
    padded = functional.pad(images, (0, 0, 1, 1, 1, 1))
    offsets = torch.from_numpy((draws[:, :2] * 3).astype(np.int64)).to(images.device)
    rows = offsets[:, :1] + torch.arange(height, device=images.device)
    columns = offsets[:, 1:] + torch.arange(width, device=images.device)
    samples = torch.arange(n, device=images.device)[:, None, None]
    return padded[samples, rows[:, :, None], columns[:, None, :]]


def crop(images: torch.Tensor, taken: Crops) -> torch.Tensor:
    """The parts of images [n, h, w, c], resized to [h, w] bilinearly, no antialias, as TensorFlow's resize does it;
    mirrored where that is said."""
    n, height, width, channels = images.shape
    top, left, crop_height, crop_width, flipped = taken
    # From the output square [-1, 1] to the crop's place in the input square; a flip runs it backwards.
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
