"""RandAugment as AugReg and big_vision use it: the original TensorFlow version (Cubuk et al., arXiv 1909.13719).

In and out: uint8 tensors [n, h, w, c] at the model's resolution, after crop and flip, with the same result on any
device. It differs from TensorFlow in two ways. Contrast blends with the mean grey, as in Pillow and the paper, and not
with (number of pixels / 256), which is 196 at 224 x 224. Amounts in pixels, meant for 224, are scaled to other sizes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ray_jobs.augment import colour
from ray_jobs.augment.random import uniform

OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast"),
    *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"),
)
FILL = 128
_DRAWS = 4  # per layer: the operation, its sign, and the centre (y, x) of a cutout
_MADE_FOR = 224

Numbers = NDArray[np.float64]


def randaugment(images: Tensor, layers: int, magnitude: float, seed: int, positions: NDArray[np.int64]) -> Tensor:
    """Apply `layers` random operations to each image [n, h, w, c], one after the other.

    `magnitude` is on the original scale of 0 to 10; `positions` [n] number the samples over the whole training.
    """
    draws = uniform(seed, positions, _DRAWS * layers, "randaugment").reshape(len(positions), layers, _DRAWS)
    for layer in range(layers):
        chosen = (draws[:, layer, 0] * len(OPERATIONS)).astype(np.int64)
        changed = torch.empty_like(images)
        for number in np.unique(chosen):
            rows = np.flatnonzero(chosen == number)
            index = torch.from_numpy(rows).to(images.device)
            changed[index] = apply(OPERATIONS[number], images[index], magnitude, draws[rows, layer, 1:])
        images = changed
    return images


def apply(operation: str, images: Tensor, magnitude: float, draws: Numbers) -> Tensor:
    """Apply one operation to all images. `draws` [n, 3] are the sign (negative below 0.5) and a place (y, x)."""
    level = magnitude / 10
    sign = np.where(draws[:, 0] < 0.5, -1.0, 1.0)
    match operation:
        case "AutoContrast":
            return colour.autocontrast(images)
        case "Equalize":
            return colour.equalize(images)
        case "Invert":
            return colour.invert(images)
        case "Rotate":
            return rotate(images, sign * np.deg2rad(level * 30))
        case "Posterize":
            return colour.posterize(images, int(level * 4))
        case "Solarize":
            return colour.solarize(images, int(level * 256))
        case "SolarizeAdd":
            return colour.solarize_add(images, int(level * 110))
        case "Color":
            return colour.saturation(images, level * 1.8 + 0.1)
        case "Contrast":
            return colour.contrast(images, level * 1.8 + 0.1)
        case "Brightness":
            return colour.brightness(images, level * 1.8 + 0.1)
        case "Sharpness":
            return colour.sharpness(images, level * 1.8 + 0.1)
        case "ShearX":
            return warp(images, [1, sign * level * 0.3, 0], [0, 1, 0])
        case "ShearY":
            return warp(images, [1, 0, 0], [sign * level * 0.3, 1, 0])
        case "TranslateX":
            return warp(images, [1, 0, sign * level * 100 * images.shape[2] / _MADE_FOR], [0, 1, 0])
        case "TranslateY":
            return warp(images, [1, 0, 0], [0, 1, sign * level * 100 * images.shape[1] / _MADE_FOR])
        case _:  # Cutout
            return cutout(images, int(level * 40 * min(images.shape[1:3]) / _MADE_FOR), draws[:, 1:])


def rotate(images: Tensor, radians: Numbers) -> Tensor:
    """Rotate each image about its centre by its own angle [n]."""
    y, x = (images.shape[1] - 1) / 2, (images.shape[2] - 1) / 2
    cos, sin = np.cos(radians), np.sin(radians)
    return warp(images, [cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y])


def warp(images: Tensor, to_x: list[float | Numbers], to_y: list[float | Numbers]) -> Tensor:
    """Warp each image: the pixel at (x, y) is copied from the pixel nearest to (to_x, to_y) . (x, y, 1).

    Each entry is a number, or one per image [n]. Coordinates are pixel centres. Pixels from outside are grey.
    """
    n, height, width, c = images.shape
    device = images.device
    columns, rows = (torch.arange(size, dtype=torch.float64, device=device)[None, :] for size in (width, height))

    def nearest(row: list[float | Numbers]) -> Tensor:
        by_x, by_y, offset = (
            torch.from_numpy(np.broadcast_to(np.asarray(entry, np.float64), n).copy()).to(device)[:, None]
            for entry in row
        )
        return ((by_x * columns)[:, None, :] + (by_y * rows + offset)[:, :, None] + 0.5).floor().long()

    x, y = nearest(to_x), nearest(to_y)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    first = torch.arange(n, device=device)[:, None, None] * (height * width)
    source = torch.where(inside, first + y * width + x, 0)
    taken = images.reshape(-1, c).index_select(0, source.flatten()).view(images.shape)
    return taken.masked_fill_(~inside[..., None], FILL)


def cutout(images: Tensor, half: int, centres: Numbers) -> Tensor:
    """Fill a grey square with sides of 2 * `half` pixels at `centres` [n, 2], fractions of (h, w)."""
    sides = images.shape[1:3]
    covered = []
    for number, side in enumerate(sides):
        middle = torch.from_numpy((centres[:, number] * side).astype(np.int64)).to(images.device)[:, None]
        place = torch.arange(side, device=images.device)
        covered.append((place >= middle - half) & (place < middle + half))
    square = covered[0][:, :, None, None] & covered[1][:, None, :, None]
    return images.masked_fill(square, FILL)
