"""The two views of an image that MoCo v3 compares (Chen, Xie and He 2021; the authors' main_moco.py).

In and out: uint8 tensors [n, h, w, c] at the model's resolution, on any device. Each view of each sample has its own
random numbers. Grey images have no colours to change. The blur, meant for 224 pixels, is scaled to other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ray_jobs.augment import colour
from ray_jobs.augment.batch import augment
from ray_jobs.augment.random import uniform

JITTER = 0.8  # probability
# Maximum changes: factors around 1; for the hue, a fraction of the circle.
STRENGTHS = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
GREY = 0.2
SIGMAS = (0.1, 2.0)
_MADE_FOR = 224
_DRAWS = 16


class View(NamedTuple):
    """The probabilities that a view is blurred and solarized; the two views do not differ otherwise."""

    blur: float
    solarize: float


VIEWS = (View(1.0, 0.0), View(0.1, 0.2))

Draws = NDArray[np.float64]
Chosen = NDArray[np.bool_]


def two_views(images: Tensor, policy: str, seed: int, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Make two views of each image [n, h, w, c]: cropped and flipped by `policy` (the authors' is resized_crop_flip),
    then coloured.

    `positions` [n] number the samples over the whole training.
    """
    first, second = (
        coloured(
            augment(images, policy, seed, positions, f"view {number}"),
            view,
            uniform(seed, positions, _DRAWS, f"colours of view {number}"),
        )
        for number, view in enumerate(VIEWS)
    )
    return first, second


def coloured(images: Tensor, view: View, draws: Draws) -> Tensor:
    """Apply jitter, grey, blur and solarize, each to the images whose draws [n, 16] select it."""
    images = jitter(images, draws[:, :9])
    images = _some(images, draws[:, 9] < GREY, lambda some, _: colour.grey(some).expand_as(some))
    scale = min(images.shape[1:3]) / _MADE_FOR
    sigmas = scale * (SIGMAS[0] + draws[:, 11] * (SIGMAS[1] - SIGMAS[0]))
    radius = max(1, math.ceil(3 * SIGMAS[1] * scale))
    images = _some(
        images,
        draws[:, 10] < view.blur,
        lambda some, chosen: colour.gaussian_blur(some, torch.from_numpy(sigmas[chosen]), radius),
    )
    return _some(images, draws[:, 12] < view.solarize, lambda some, _: colour.solarize(some, 128))


def jitter(images: Tensor, draws: Draws) -> Tensor:
    """Change brightness, contrast, saturation and hue of most images, in random order.

    `draws` [n, 9] decide whether an image changes, the four amounts, and the order.
    """
    changes = (colour.brightness, colour.contrast, colour.saturation, colour.hue)
    all_amounts = (2 * draws[:, 1:5] - 1) * list(STRENGTHS.values()) + [1, 1, 1, 0]
    order = np.argsort(draws[:, 5:9], axis=1, kind="stable")
    for turn in range(len(changes)):
        for number, change in enumerate(changes):
            amounts = all_amounts[:, number]
            images = _some(
                images,
                (draws[:, 0] < JITTER) & (order[:, turn] == number),
                lambda some, chosen, change=change, amounts=amounts: change(  # type: ignore[misc]
                    some, torch.from_numpy(amounts[chosen])
                ),
            )
    return images


def _some(images: Tensor, chosen: Chosen, change: Callable[[Tensor, Chosen], Tensor]) -> Tensor:
    """Apply `change` to the images for which `chosen` [n] is true."""
    if not chosen.any():
        return images
    rows = torch.from_numpy(np.flatnonzero(chosen)).to(images.device)
    return images.index_copy(0, rows, change(images[rows], chosen))
