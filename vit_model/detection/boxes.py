"""Boxes, float [n, 4]: x1, y1, x2, y2 in pixels, from the image's upper left corner, with x1 <= x2 and y1 <= y2."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def areas(boxes: Tensor) -> Tensor:
    """Return the areas of boxes [..., 4]."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def iou(one: Tensor, other: Tensor) -> Tensor:
    """Return the intersection over union of each of n boxes with each of m: [n, m]; 0 for two without area."""
    shared, either = _overlap(one[:, None], other[None])
    return torch.where(either > 0, shared / either.clamp(min=torch.finfo(either.dtype).tiny), 0)


def giou(one: Tensor, other: Tensor) -> Tensor:
    """Return the generalized IoU of n pairs of boxes [n], from -1 to 1 (Rezatofighi et al. 2019, algorithm 1)."""
    shared, either = _overlap(one, other)
    around = torch.cat([torch.minimum(one, other)[..., :2], torch.maximum(one, other)[..., 2:]], dim=-1)
    hull = areas(around)
    small = torch.finfo(hull.dtype).eps
    return shared / (either + small) - (hull - either) / (hull + small)


def _overlap(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the areas of intersection and union of boxes whose shapes broadcast."""
    corners = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    shared = (corners[1] - corners[0]).clamp(min=0).prod(dim=-1)
    return shared, areas(one) + areas(other) - shared


def clip(boxes: Tensor, height: int, width: int) -> Tensor:
    """Cut boxes [..., 4] at the borders of an image."""
    return torch.stack([boxes[..., place].clamp(0, (width, height)[place % 2]) for place in range(4)], dim=-1)


def nms(boxes: Tensor, scores: Tensor, classes: Tensor, threshold: float) -> Tensor:
    """Return the places of the boxes to keep, by descending score.

    A box is dropped if its IoU with a kept box of its class and a higher score is above the threshold; of equal scores,
    the first counts as higher.
    """
    order = scores.argsort(descending=True, stable=True)
    boxes, classes = boxes[order], classes[order]
    is_kept = np.ones(len(order), bool)
    for of_class in classes.unique():  # type: ignore[no-untyped-call]
        places = torch.where(classes == of_class)[0]
        apart = ~(iou(boxes[places], boxes[places]) > threshold).cpu().numpy()
        alive = np.ones(len(places), bool)
        for place in range(len(places)):
            if alive[place]:
                alive[place + 1 :] &= apart[place, place + 1 :]
        is_kept[places.cpu()] = alive
    return order[torch.from_numpy(is_kept).to(order.device)]
