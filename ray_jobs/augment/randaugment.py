"""RandAugment as AugReg and big_vision use it: the original one of TensorFlow (Cubuk et al., arXiv 1909.13719).

In and out: uint8 tensors [n, h, w, c] at the model's resolution, after crop and flip, on any device with the same
result. Two things are not TensorFlow's: Contrast blends with the mean grey, as Pillow and the paper have it, not with
(number of pixels / 256), 196 at 224 x 224; and what is in pixels, made for 224, is in proportion at other sizes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ray_jobs.augment import colour
from ray_jobs.augment.random import uniform

OPERATIONS = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast", "Brightness",
    "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd",
)  # fmt: skip
FILL = 128
_DRAWS = 4  # of an operation: which, its sign, and the middle of a cutout
_MADE_FOR = 224

Numbers = NDArray[np.float64]


def randaugment(
    images: Tensor, layers: int, magnitude: float, seed: int, positions: NDArray[np.int64]
) -> Tensor:
    """`layers` operations on each image [n, h, w, c], one after the other, each any of the 16 and always applied.

    `magnitude` is on the scale on which 10 is the original's most; `positions` [n] number the samples over the whole
    training.
    """
    draws = uniform(seed, positions, _DRAWS * layers, "randaugment").reshape(len(positions), layers, _DRAWS)
    for layer in range(layers):
        chosen = (draws[:, layer, 0] * len(OPERATIONS)).astype(np.int64)
        changed = torch.empty_like(images)
        for number in np.unique(chosen):
            where = np.flatnonzero(chosen == number)
            index = torch.from_numpy(where).to(images.device)
            changed[index] = apply(OPERATIONS[number], images[index], magnitude, draws[where, layer, 1:])
        images = changed
    return images


def apply(operation: str, images: Tensor, magnitude: float, draws: Numbers) -> Tensor:
    """One operation on all of these images. `draws` [n, 3]: the sign (below a half: negative), and a place (y, x)."""
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
        case "Cutout":
            return cutout(images, int(level * 40 * min(images.shape[1:3]) / _MADE_FOR), draws[:, 1:])
    raise ValueError(f"{operation!r} is none of {', '.join(OPERATIONS)}")


def rotate(images: Tensor, radians: Numbers) -> Tensor:
    """Turn each image about its middle by its own angle [n]."""
    y, x = (images.shape[1] - 1) / 2, (images.shape[2] - 1) / 2
    cos, sin = np.cos(radians), np.sin(radians)
    return warp(images, [cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y])


def warp(images: Tensor, to_x: list[float | Numbers], to_y: list[float | Numbers]) -> Tensor:
    """The pixel at (x, y) is the image's nearest to (to_x, to_y) . (x, y, 1), each entry a number or one an image [n];
    grey where there is none. Pixels are counted from the middle of the first one."""
    n, height, width, c = images.shape
    device = images.device
    columns, rows = (
        torch.arange(size, dtype=torch.float64, device=device)[None, :] for size in (width, height)
    )

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
    """A grey square of 2 `half` pixels a side, cut off at the border, its middle at `centres` [n, 2] of (h, w)."""
    sides = images.shape[1:3]
    covered = []
    for number, side in enumerate(sides):
        middle = torch.from_numpy((centres[:, number] * side).astype(np.int64)).to(images.device)[:, None]
        place = torch.arange(side, device=images.device)
        covered.append((place >= middle - half) & (place < middle + half))
    square = covered[0][:, :, None, None] & covered[1][:, None, :, None]
    return images.masked_fill(square, FILL)
