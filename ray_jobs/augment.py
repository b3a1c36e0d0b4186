"""Random changes of training images, drawn per sample: the same at any rank, thread count and restart.

In and out: uint8 tensors [n, h, w, c] that are already at the model's resolution. The numbers come from a
hash of (seed, position in the training stream), see `loader.sample_positions`; they are drawn on the CPU and
used on whatever device the images are on.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

POLICIES = ("none", "shift", "shift_flip", "crop_flip")
CROPPING = frozenset({"crop_flip"})
Size = int | NDArray[np.int64]
CROP_AREA = (0.05, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)
_DRAWS = (
    8  # numbers reserved for each sample, so that a policy can use more later without moving the first ones
)


def augment(images: torch.Tensor, policy: str, seed: int, positions: NDArray[np.int64]) -> torch.Tensor:
    """Change each image [n, h, w, c] by `policy`: "none", "shift" (tiny images), "shift_flip" (tiny images of things
    that have no left and right), "crop_flip" (photographs).

    `positions` [n] number the samples over the whole training. Raises ValueError for an unknown policy.
    """
    if len(positions) != len(images):
        raise ValueError(f"{len(positions)} positions for {len(images)} images")
    if policy == "none":
        return images
    if policy == "shift":
        return shift(images, uniform(seed, positions))
    if policy == "shift_flip":
        draws = uniform(seed, positions)
        flipped = torch.from_numpy(draws[:, 4] < 0.5).to(images.device)[:, None, None, None]
        shifted = shift(images, draws)
        return torch.where(flipped, shifted.flip(2), shifted)
    if policy == "crop_flip":
        return crop_flip(images, uniform(seed, positions))
    raise ValueError(f"augmentation policy {policy!r} is none of {', '.join(POLICIES)}")


def uniform(
    seed: int, positions: NDArray[np.int64], draws: int = _DRAWS, purpose: str = "augment"
) -> NDArray[np.float64]:
    """Numbers in [0, 1), [n, draws]: row i is a pure function of seed, purpose and positions[i] (SplitMix64)."""
    key = np.uint64(int.from_bytes(hashlib.sha256(f"{purpose}/{seed}".encode()).digest()[:8]))
    counter = positions.astype(np.uint64)[:, None] * np.uint64(draws) + np.arange(draws, dtype=np.uint64)
    state = np.asarray(key + counter * np.uint64(0x9E3779B97F4A7C15), np.uint64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return np.asarray(state >> np.uint64(11), np.float64) / 2.0**53


def shift(images: torch.Tensor, draws: NDArray[np.float64]) -> torch.Tensor:
    """Move each image by -1, 0 or 1 pixel in each direction, zeros coming in."""
    n, height, width, _ = images.shape
    padded = functional.pad(images, (0, 0, 1, 1, 1, 1))
    offsets = torch.from_numpy((draws[:, :2] * 3).astype(np.int64)).to(images.device)
    rows = offsets[:, :1] + torch.arange(height, device=images.device)
    columns = offsets[:, 1:] + torch.arange(width, device=images.device)
    samples = torch.arange(n, device=images.device)[:, None, None]
    return padded[samples, rows[:, :, None], columns[:, None, :]]


def crop_flip(images: torch.Tensor, draws: NDArray[np.float64]) -> torch.Tensor:
    """The Inception crop of ViT's pre-training, resized to [h, w] bilinearly, no antialias; flip at p 0.5.

    Area 5-100 %, aspect 3/4-4/3, height uniform between its limits as TensorFlow's sampler does (so the area
    is not uniform). The crop is taken from the loaded image, not from the original file.
    """
    n, height, width, channels = images.shape
    top, left, crop_height, crop_width = crop_boxes(draws, height, width)
    # From the output square [-1, 1] to the crop's place in the input square; a flip runs it backwards.
    scale_x = crop_width / width * np.where(draws[:, 4] < 0.5, -1.0, 1.0)
    matrix = np.zeros((n, 2, 3), np.float32)
    matrix[:, 0, 0], matrix[:, 0, 2] = scale_x, (2 * left + crop_width) / width - 1
    matrix[:, 1, 1], matrix[:, 1, 2] = (crop_height / height, (2 * top + crop_height) / height - 1)
    grid = functional.affine_grid(
        torch.from_numpy(matrix).to(images.device), [n, channels, height, width], align_corners=False
    )
    pixels = images.permute(0, 3, 1, 2).float()
    cropped = functional.grid_sample(pixels, grid, "bilinear", "border", align_corners=False)
    return cropped.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


class Crops(NamedTuple):
    """Boxes in whole pixels, int64 [n] each, inside their images; and bool [n]: whether the part is mirrored."""

    top: NDArray[np.int64]
    left: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]
    flipped: NDArray[np.bool_]


def crops(policy: str, seed: int, positions: NDArray[np.int64], height: Size, width: Size) -> Crops:
    """What a policy of `CROPPING` takes of images of these sizes (an int, or [n]) at these positions [n]."""
    assert policy in CROPPING
    draws = uniform(seed, positions)
    return Crops(*crop_boxes(draws, height, width), draws[:, 4] < 0.5)


def crop_boxes(
    draws: NDArray[np.float64], height: Size, width: Size
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(top, left, height, width) of each sample's crop in whole pixels, from its first four draws."""
    aspect = CROP_ASPECT[0] + draws[:, 0] * (CROP_ASPECT[1] - CROP_ASPECT[0])
    area = height * width
    highest = np.minimum(np.minimum(np.sqrt(CROP_AREA[1] * area / aspect), width / aspect), height)
    lowest = np.minimum(np.sqrt(CROP_AREA[0] * area / aspect), highest)
    tall = lowest + draws[:, 1] * (highest - lowest)
    crop_height = np.clip(np.round(tall), 1, height).astype(np.int64)
    crop_width = np.clip(np.round(tall * aspect), 1, width).astype(np.int64)
    top = (draws[:, 2] * (height - crop_height + 1)).astype(np.int64)
    left = (draws[:, 3] * (width - crop_width + 1)).astype(np.int64)
    return top, left, crop_height, crop_width
