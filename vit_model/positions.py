"""Learned position embeddings on another grid (section 3.2). In: the table of one. Out: that of another."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_position_embedding(table: Tensor, grid: int, class_token: bool) -> Tensor:
    """[1, n, d] -> [1, grid * grid (+ 1), d], interpolated bilinearly, corner patches onto corner patches.

    That is what the authors' code does (scipy's zoom, order 1). The class token's entry, the first, is kept.
    Raises ValueError when the entries do not form a square.
    """
    kept, patches = table[:, : int(class_token)], table[:, int(class_token) :]
    old = math.isqrt(patches.shape[1])
    if old * old != patches.shape[1]:
        raise ValueError(f"position embedding of {patches.shape[1]} patches is not a square grid")
    if old == grid:
        return table.clone()
    image = patches.reshape(1, old, old, -1).permute(0, 3, 1, 2).double()  # [1, d, old, old]
    image = F.interpolate(image, size=(grid, grid), mode="bilinear", align_corners=True)
    resized = image.permute(0, 2, 3, 1).reshape(1, grid * grid, -1).to(table.dtype)
    return torch.cat([kept, resized], dim=1)
