"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019): mix each image and its label with another.

Image i of the *global* batch is mixed with image i - 1 (big_vision rolls the batch), with one weight per step. So a
worker needs only one image of another worker, and the mixed batch is the same at any world size.
In: uint8 [n, h, w, c] and int64 labels [n], or bool [n, classes]. Out: uint8 of the same shape, and probabilities
[n, classes] as targets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ray_jobs.augment.random import uniform

_BITS = 16  # pixels are mixed as integers, so results are the same on every device
_PARTS = 1 << _BITS
_DRAWS = 8


class Mix(NamedTuple):
    """The mixing of a step's images."""

    share: int
    """The weight of an image's original label, in units of 1 / 65,536; with mixup also of its original pixels."""
    box: tuple[int, int, int, int] | None
    """With CutMix, the part that the other image replaces: (top, left, height, width)."""


def plan(mixup: float, cutmix: float, seed: int, step: int, height: int, width: int) -> Mix | None:
    """Draw the mixing of a step, a pure function of the arguments; None without mixup and CutMix.

    `mixup` and `cutmix` are the alphas of Beta(alpha, alpha); 0 turns them off. Mixup's weight is the larger of b and
    1 - b (big_vision). CutMix cuts a box with 1 - b of the area, centred anywhere, and weights labels by the part of it
    that lies inside the image. With both, each step uses one or the other, equally likely.
    """
    if not mixup and not cutmix:
        return None
    from scipy.special import betaincinv

    draws = uniform(seed, np.array([step]), _DRAWS, "mixing")[0]
    if mixup and (not cutmix or draws[0] < 0.5):
        b = float(betaincinv(mixup, mixup, draws[1]))
        return Mix(round(max(b, 1 - b) * _PARTS), None)
    side = float(np.sqrt(1 - betaincinv(cutmix, cutmix, draws[1])))
    box = []
    for place, size in ((draws[2], height), (draws[3], width)):
        middle, half = int(place * size), int(side * size) // 2
        first, end = max(0, middle - half), min(size, middle + half)
        box.append((first, end - first))
    (top, tall), (left, wide) = box
    return Mix(_PARTS - round(_PARTS * tall * wide / (height * width)), (top, left, tall, wide))


def mix(images: Tensor, labels: Tensor, classes: int, mixing: Mix) -> tuple[Tensor, Tensor]:
    """Mix a worker's share of a global batch; return uint8 [n, h, w, c] and float32 targets [n, classes].

    All workers of torch.distributed's default group call this together. Without a group the share is the whole batch.
    """
    before, before_label = _last_of_previous(images, labels)
    previous_images = torch.cat([before[None], images[:-1]])
    other_labels = torch.cat([before_label[None], labels[:-1]])
    if mixing.box is None:
        mixed = (images.int() * mixing.share + previous_images.int() * (_PARTS - mixing.share) + _PARTS // 2) >> _BITS
        mixed = mixed.to(torch.uint8)
    else:
        top, left, height, width = mixing.box
        place = (slice(None), slice(top, top + height), slice(left, left + width))
        mixed = images.clone()
        mixed[place] = previous_images[place]
    share = mixing.share / _PARTS
    targets, other_targets = (
        (several if several.ndim == 2 else functional.one_hot(several, classes)).to(torch.float32)
        for several in (labels, other_labels)
    )
    return mixed, share * targets + (1 - share) * other_targets


def _last_of_previous(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last image and label of the previous worker; the last worker precedes the first."""
    last = images[-1].contiguous(), labels[-1].contiguous()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return last
    previous = []
    for share in last:
        gathered = [torch.empty_like(share) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, share)
        previous.append(gathered[dist.get_rank() - 1])
    return previous[0], previous[1]
