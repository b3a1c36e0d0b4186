"""Boxes of objects in crops of their images.

In: the boxes of an image, and the crop of it that a training sees. Out: its boxes there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vit_model.detection.boxes import areas

LEAST = 0.25  # of a box that a crop has to show, for it to be learned


def in_crop(
    boxes: Tensor, crop: tuple[float, float, float, float], is_flipped: bool, side: int
) -> tuple[Tensor, Tensor]:
    """Return the boxes [m, 4] of an image in a crop, resized to side x side pixels, and how much it shows of each.

    Args:
        boxes: x1, y1, x2, y2 in pixels of the image, of some area.
        crop: its top, left, height and width in these pixels.
        is_flipped: whether it is then mirrored, left to right.

    Returns:
        (boxes in pixels of the crop, cut at its borders; the share of each box's area that is inside [m]).
    """
    top, left, height, width = crop
    low = boxes.new_tensor([left, top, left, top])
    scale = boxes.new_tensor([side / width, side / height] * 2)
    whole = (boxes - low) * scale
    if is_flipped:
        whole = torch.stack([side - whole[:, 2], whole[:, 1], side - whole[:, 0], whole[:, 3]], dim=1)
    cut = whole.clamp(0, side)
    return cut, areas(cut) / areas(whole)
