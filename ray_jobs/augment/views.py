"""The two views of an image that MoCo v3 compares (Chen, Xie and He 2021; the authors' main_moco.py).

In and out: uint8 tensors [n, h, w, c] at the model's resolution, on any device. Each view has its own random numbers,
by sample. Grey images have no colours to change. Blur, made for 224 pixels, is in proportion at other sizes.
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

JITTER = 0.8  # how often
# By how much at most, each way: factors around 1, and of the hues' circle.
STRENGTHS = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
GREY = 0.2
SIGMAS = (0.1, 2.0)
_MADE_FOR = 224
_DRAWS = 16


class View(NamedTuple):
    """How often a view is blurred and solarized; in all else the two are alike."""

    blur: float
    solarize: float


VIEWS = (View(1.0, 0.0), View(0.1, 0.2))

Draws = NDArray[np.float64]
Chosen = NDArray[np.bool_]


def two_views(images: Tensor, policy: str, seed: int, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Each image [n, h, w, c] twice: cropped and flipped by `policy` (the authors': resized_crop_flip), then coloured.

    `positions` [n] number the samples over the whole training.
    """
    one, other = (
        coloured(
            augment(images, policy, seed, positions, f"view {number}"),
            view,
            uniform(seed, positions, _DRAWS, f"colours of view {number}"),
        )
        for number, view in enumerate(VIEWS)
    )
    return one, other


def coloured(images: Tensor, view: View, draws: Draws) -> Tensor:
    """Jitter, grey, blur and solarize, each of some of the images, as their draws [n, 16] say."""
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
    """Brightness, contrast, saturation and hue of most images, in any order: draws [n, 9] say of which, by how much
    each, and in what order."""
    changes = (colour.brightness, colour.contrast, colour.saturation, colour.hue)
    by = (2 * draws[:, 1:5] - 1) * list(STRENGTHS.values()) + [1, 1, 1, 0]
    order = np.argsort(draws[:, 5:9], axis=1, kind="stable")
    for turn in range(len(changes)):
        for number, change in enumerate(changes):
            amounts = by[:, number]
            images = _some(
                images,
                (draws[:, 0] < JITTER) & (order[:, turn] == number),
                lambda some, chosen, change=change, amounts=amounts: change(  # type: ignore[misc]
                    some, torch.from_numpy(amounts[chosen])
                ),
            )
    return images


def _some(images: Tensor, chosen: Chosen, change: Callable[[Tensor, Chosen], Tensor]) -> Tensor:
    """The images, those that are chosen [n] changed."""
    if not chosen.any():
        return images
    where = torch.from_numpy(np.flatnonzero(chosen)).to(images.device)
    return images.index_copy(0, where, change(images[where], chosen))
