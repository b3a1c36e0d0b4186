"""Position embeddings (sections 3.1 and D.4): fixed tables, relative distances, and resizing of learned tables."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]
"""(rows, columns) of patches."""


def sincos2d(grid: Grid, width: int, device: torch.device | None = None) -> Tensor:
    """Return big_vision's fixed table [1, rows * columns, width] (models/vit.py): sin x, cos x, sin y, cos y.

    Frequencies fall from 1 to 1/10000 in width / 4 steps, both included. x and y count patches, so another grid gets
    another table and not a stretched one.
    """
    y, x = _places(grid, device)
    return _waves(x, y, torch.arange(width // 4, device=device, dtype=torch.float64) / (width / 4 - 1))


def sincos2d_moco(grid: Grid, width: int, device: torch.device | None = None) -> Tensor:
    """Return MoCo v3's fixed table [1, rows * columns, width] (facebookresearch/moco-v3, vits.py).

    It differs from big_vision's: the order is sin y, cos y, sin x, cos x, and frequencies stop one step short of
    1/10000. The authors call the first half "w", but build it in column order and add it in row order, so on their
    square grids it counts rows.
    """
    y, x = _places(grid, device)
    return _waves(y, x, torch.arange(width // 4, device=device, dtype=torch.float64) / (width / 4))


def _places(grid: Grid, device: torch.device | None) -> tuple[Tensor, ...]:
    """Return the row and column of each patch in raster order, [n] each."""
    sides = (torch.arange(side, device=device).double() for side in grid)
    return tuple(place.flatten() for place in torch.meshgrid(*sides, indexing="ij"))


def _waves(first: Tensor, second: Tensor, exponents: Tensor) -> Tensor:
    """Return sines and cosines of places [n] times 10000 ** -exponents [k], as a table [1, n, 4 k]."""
    omega = 10000.0**-exponents
    angles = (place[:, None] * omega for place in (first, second))
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1).float()[None]


def relative_scores(query: Tensor, table: Tensor) -> Tensor:
    """Multiply each of the first q queries by the embeddings of its distances to n keys, from a table [2n - 1, e].

    [b, h, q, e] -> [b, h, q, n]; entry (i, j) uses row i - j + n - 1 of the table, which the heads share.
    """
    n = (len(table) + 1) // 2
    place = torch.arange(n, device=query.device)
    offset = place[: query.shape[-2], None] - place[None, :] + n - 1  # [q, n]
    products = query @ table.T  # [b, h, q, 2n - 1]
    return products.gather(-1, offset.expand(*query.shape[:-1], n))


def resize_position_embedding(
    table: Tensor,
    old: Grid,
    new: Grid,
    prefix: int = 0,
    method: Literal["bilinear", "bicubic", "bicubic_antialias"] = "bilinear",
) -> Tensor:
    """Resize a table [t, prefix + n, d] from the grid `old` to the grid `new`, keeping the first `prefix` entries.

    "bilinear" aligns corner patches, as the authors' code does (scipy's zoom, order 1). The others do not align
    corners: "bicubic" is Hugging Face's, "bicubic_antialias" timm's.
    Raises ValueError if the table does not have the entries of the old grid.
    """
    entries = prefix + math.prod(old)
    if table.shape[1] != entries:
        raise ValueError(
            f"position embedding has {table.shape[1]} entries; {old[0]}x{old[1]} patches"
            f"{f' and {prefix} before them' if prefix else ''} need {entries}"
        )
    if old == new:
        return table.clone()
    kept, patches = table[:, :prefix], table[:, prefix:]
    image = patches.reshape(len(table), *old, -1).permute(0, 3, 1, 2).double()  # [t, d, rows, columns]
    if method == "bilinear":
        image = F.interpolate(image, size=new, mode="bilinear", align_corners=True)
    else:
        image = F.interpolate(image, size=new, mode="bicubic", antialias=method == "bicubic_antialias")
    resized = image.permute(0, 2, 3, 1).reshape(len(table), math.prod(new), -1).to(table.dtype)
    return torch.cat([kept, resized], dim=1)


def resize_axis(table: Tensor, new: int) -> Tensor:
    """Resize a table of rows or columns [t, old, d] to [t, new, d], aligning the ends."""
    line = table.transpose(1, 2).double()  # [t, d, old]
    resized = F.interpolate(line, size=new, mode="linear", align_corners=True)
    return resized.transpose(1, 2).to(table.dtype)
