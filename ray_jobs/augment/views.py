"""The views of an image that an objective compares: MoCo v3's two (Chen, Xie and He 2021; the authors' main_moco.py),
and DINO's, which are the same beside smaller ones (Caron et al. 2021; main_dino.py).

In: uint8 tensors [n, h, w, c] at the model's resolution, on any device. Out: such tensors, local views smaller. Each
view of each sample has its own random numbers. Grey images have no colours to change. The blur, meant for 224 pixels,
is scaled to other resolutions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.spec import Pretrain
from ray_jobs.augment import colour
from ray_jobs.augment.batch import augment
from ray_jobs.augment.crops import RESIZED_CROP_AREA
from ray_jobs.augment.random import uniform

JITTER = 0.8  # probability
# Maximum changes: factors around 1; for the hue, a fraction of the circle.
STRENGTHS = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
GREY = 0.2
SIGMAS = (0.1, 2.0)
_MADE_FOR = 224
_DRAWS = 16


class View(NamedTuple):
    """The properties by which views differ."""

    blur: float
    """the probability"""
    solarize: float
    """the probability"""
    area: tuple[float, float] = RESIZED_CROP_AREA
    """the limits of resized_crop_flip"""
    side: int | None = None
    """in pixels; None: the image's"""


VIEWS = (View(1.0, 0.0), View(0.1, 0.2))


def views_of(config: Pretrain) -> tuple[View, ...]:
    """Return the views that a step of an objective with views makes of each image."""
    if config.objective != "dino":
        return VIEWS
    settings = config.dino
    whole = tuple(view._replace(area=settings.global_scale) for view in VIEWS)
    local = View(blur=0.5, solarize=0.0, area=settings.local_scale, side=settings.local_size)
    return whole + (local,) * settings.local_crops


def make_views(
    images: Tensor, views: tuple[View, ...], policy: str, seed: int, positions: NDArray[np.int64]
) -> tuple[Tensor, ...]:
    """Make views of each image [n, h, w, c]: cropped and flipped by `policy` (the authors' is resized_crop_flip), then
    coloured.

    `positions` [n] number the samples over the whole training.
    """
    scale = min(images.shape[1:3]) / _MADE_FOR
    return tuple(
        coloured(
            augment(images, policy, seed, positions, f"view {number}", view.area, view.side),
            view,
            uniform(seed, positions, _DRAWS, f"colours of view {number}"),
            scale,
        )
        for number, view in enumerate(views)
    )


def coloured(images: Tensor, view: View, draws: colour.Draws, scale: float) -> Tensor:
    """Apply jitter, grey, blur and solarize, each to the images whose draws [n, 16] select it.

    `scale` multiplies the width of the blur.
    """
    images = colour.jitter(images, draws[:, :9], STRENGTHS, JITTER)
    images = colour.some(images, draws[:, 9] < GREY, lambda some, _: colour.grey(some).expand_as(some))
    sigmas = scale * (SIGMAS[0] + draws[:, 11] * (SIGMAS[1] - SIGMAS[0]))
    radius = max(1, math.ceil(3 * SIGMAS[1] * scale))
    images = colour.some(
        images,
        draws[:, 10] < view.blur,
        lambda some, chosen: colour.gaussian_blur(some, torch.from_numpy(sigmas[chosen]), radius),
    )
    return colour.some(images, draws[:, 12] < view.solarize, lambda some, _: colour.solarize(some, 128))
