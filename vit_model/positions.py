"""Position embeddings (section 3.1 and D.4): the fixed table, distances, and learned tables on another grid."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]
"""(rows, columns) of patches."""


def sincos2d(grid: Grid, width: int, device: torch.device | None = None) -> Tensor:
    """The fixed table [1, rows * columns, width] of big_vision (models/vit.py): sin x, cos x, sin y, cos y.

    Frequencies fall from 1 to 1/10000 in width / 4 steps, both included; x and y count patches, so another grid gets
    another table and not a stretched one.
    """
    y, x = _places(grid, device)
    return _waves(x, y, torch.arange(width // 4, device=device, dtype=torch.float64) / (width / 4 - 1))


def sincos2d_moco(grid: Grid, width: int, device: torch.device | None = None) -> Tensor:
    """The fixed table [1, rows * columns, width] of MoCo v3 (facebookresearch/moco-v3, vits.py), which big_vision's
    departs from: sin y, cos y, sin x, cos x, and frequencies that stop one step short of 1/10000.

    The authors call the first half "w". They build it in column order and add it in row order, so on their square
    grids it counts rows.
    """
    y, x = _places(grid, device)
    return _waves(y, x, torch.arange(width // 4, device=device, dtype=torch.float64) / (width / 4))


def _places(grid: Grid, device: torch.device | None) -> tuple[Tensor, ...]:
    """Row and column of each patch in raster order, [n] each."""
    sides = (torch.arange(side, device=device).double() for side in grid)
    return tuple(place.flatten() for place in torch.meshgrid(*sides, indexing="ij"))


def _waves(first: Tensor, second: Tensor, exponents: Tensor) -> Tensor:
    """Sines and cosines of places [n] times 10000 ** -exponents [k], as a table [1, n, 4 k]."""
    omega = 10000.0**-exponents
    angles = (place[:, None] * omega for place in (first, second))
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1).float()[None]


def relative_scores(query: Tensor, table: Tensor) -> Tensor:
    """Query times the embedding of its distance to each of n keys, for the first q queries and a table [2n - 1, e].

    [b, h, q, e] -> [b, h, q, n]; entry (i, j) takes row i - j + n - 1 of the table, shared by the heads.
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
    """[t, prefix + n, d] of the grid `old` -> the same for the grid `new`; the first `prefix` entries are kept.

    "bilinear" puts corner patches onto corner patches, as the authors' code does (scipy's zoom, order 1). The
    others do not align corners: "bicubic" is Hugging Face's, "bicubic_antialias" timm's.
    Raises ValueError when the table has not the entries that the old grid needs.
    """
    entries = prefix + math.prod(old)
    if table.shape[1] != entries:
        raise ValueError(
            f"position embedding has {table.shape[1]} entries; {old[0]}x{old[1]} patches"
            f"{f' and {prefix} before them' if prefix else ''} are {entries}"
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
    """[t, old, d] -> [t, new, d]: the table of rows or of columns on another grid, ends onto ends."""
    line = table.transpose(1, 2).double()  # [t, d, old]
    resized = F.interpolate(line, size=new, mode="linear", align_corners=True)
    return resized.transpose(1, 2).to(table.dtype)
