"""The parts of a Vision Transformer: positions, patches, attention, MLP, blocks, pooling.

Letters in shapes: `vit_model.model`.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_model.config import ViTConfig
from vit_model.resnet import Stem
from vit_model.variants import stem_channels

Grid = tuple[int, int]
"""(rows, columns) of patches."""
Angles = tuple[Tensor, Tensor]
"""The cosines and sines [patches, e] of rotary positions."""


def sincos2d(grid: Grid, width: int, device: torch.device | None = None) -> Tensor:
    """Return big_vision's fixed table [1, rows * columns, width] (models/vit.py): sin x, cos x, sin y, cos y.

    Frequencies fall from 1 to 1/10000 in width / 4 steps, both included. x and y count patches, so another grid gets
    another table and not a stretched one.
    """
    y, x = _coordinates(grid, device)
    return _waves(x, y, torch.arange(width // 4, device=device, dtype=torch.float64) / (width / 4 - 1))


def sincos2d_moco(grid: Grid, width: int, device: torch.device | None = None) -> Tensor:
    """Return MoCo v3's fixed table [1, rows * columns, width] (facebookresearch/moco-v3, vits.py).

    It differs from big_vision's: the order is sin y, cos y, sin x, cos x, and frequencies stop one step short of
    1/10000. The authors call the first half "w", but build it in column order and add it in row order, so on their
    square grids it counts rows.
    """
    y, x = _coordinates(grid, device)
    return _waves(y, x, torch.arange(width // 4, device=device, dtype=torch.float64) / (width / 4))


def _coordinates(grid: Grid, device: torch.device | None) -> tuple[Tensor, ...]:
    """Return the row and column of each patch in raster order, [n] each."""
    sides = (torch.arange(side, device=device).double() for side in grid)
    return tuple(coordinate.flatten() for coordinate in torch.meshgrid(*sides, indexing="ij"))


def _waves(first: Tensor, second: Tensor, exponents: Tensor) -> Tensor:
    """Return sines and cosines of coordinates [n] times 10000 ** -exponents [k], as a table [1, n, 4 k]."""
    omega = 10000.0**-exponents
    angles = (coordinate[:, None] * omega for coordinate in (first, second))
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1).float()[None]


def rope(grid: Grid, width: int, device: torch.device | None = None) -> Angles:
    """Return DINOv3's axial rotary positions for heads of this width.

    A patch's middle has coordinates from -1 to 1 in the image, so another grid gets a denser table. The first quarter
    of the angles is y times 2 pi * 100 ** -(4 k / width), the second x; the second half repeats the first.
    """
    periods = 100.0 ** -torch.arange(0, 1, 4 / width, device=device, dtype=torch.float32)
    y, x = (2 * (place + 0.5) / side - 1 for place, side in zip(_coordinates(grid, device), grid, strict=True))
    angles = torch.cat([2 * math.pi * place.float()[:, None] * periods for place in (y, x)], dim=1).tile(2)
    return angles.cos(), angles.sin()


def rotated(heads: Tensor, angles: Angles | None) -> Tensor:
    """Turn the heads [b, h, n, e] of the last tokens, which are the patches; the others stay as they are."""
    if angles is None:
        return heads
    cosines, sines = (part.to(heads.dtype) for part in angles)
    before, patches = heads[:, :, : -len(sines)], heads[:, :, -len(sines) :]
    half = patches.shape[-1] // 2
    turned = torch.cat([-patches[..., half:], patches[..., :half]], dim=-1)
    return torch.cat([before, patches * cosines + turned * sines], dim=2)


def relative_scores(query: Tensor, table: Tensor) -> Tensor:
    """Multiply each of the first q queries by the embeddings of its distances to n keys, from a table [2n - 1, e].

    [b, h, q, e] -> [b, h, q, n]; entry (i, j) uses row i - j + n - 1 of the table, which the heads share.
    """
    n = (len(table) + 1) // 2
    index = torch.arange(n, device=query.device)
    offset = index[: query.shape[-2], None] - index[None, :] + n - 1  # [q, n]
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
    """
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


class PatchEmbed(nn.Module):
    """Eq. 1, first part: cut the image into patches and map each to a token.

    A convolution with stride equal to its kernel size, as one matrix product: `proj.weight` [d, c*p*p] is the kernel
    [d, c, p, p], flattened. In a hybrid the patches are cut from the stem's feature map (section 3.1).
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size // config.stem_stride
        channels = config.in_channels if config.stem is None else stem_channels(config.stem)
        self.backbone = None if config.stem is None else Stem(config.stem, config.in_channels)
        self.proj = nn.Linear(channels * self.patch_size**2, config.width, bias=config.patch_bias)

    def forward(self, images: Tensor) -> Tensor:
        """[b, c, height, width] -> [b, patches, d], in raster order."""
        maps = images if self.backbone is None else self.backbone(images)
        b, c, height, width = maps.shape
        p = self.patch_size
        rows, columns = height // p, width // p
        patches = maps.reshape(b, c, rows, p, columns, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5)  # [b, rows, columns, c, p, p]
        tokens: Tensor = self.proj(patches.reshape(b, rows * columns, c * p * p))
        return tokens


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(query key^T / sqrt(e) + bias) value for [b, h, n, e] (eq. 5-7), by the faster implementation.

    On CPUs, SDPA is slow for few tokens, and its backward pass is slow in bf16. Milliseconds for forward and backward
    with SDPA and written out, on one thread of an AMD EPYC with AVX-512 bf16, torch 2.13: b 128, n 17, h 4, e 16: bf16
    33 and 2.8, fp32 4.0 and 2.9; b 8, n 197, h 3, e 64: bf16 19 and 8.5, fp32 14.5 and 16.5.
    """
    if not is_fused(query.device, query.dtype, key.shape[-2]):
        scores = attention_scores(query, key, bias)
        precise = torch.promote_types(scores.dtype, torch.float32)
        return scores.softmax(dim=-1, dtype=precise).to(value.dtype) @ value
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def is_fused(device: torch.device, dtype: torch.dtype, tokens: int) -> bool:
    """Return whether `attention` uses SDPA, which keeps no scores for the backward pass."""
    return device.type != "cpu" or (dtype != torch.bfloat16 and tokens >= 32)


def attention_scores(query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return query key^T / sqrt(e) + bias, [b, h, n, n]."""
    scores: Tensor = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    return scores if bias is None else scores + bias


class Attention(nn.Module):
    """Multi-head self-attention (appendix A). `qkv` stacks the query, key and value matrices."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.pos_embed: nn.Parameter | None = None
        if config.position == "relative":
            self.pos_embed = nn.Parameter(torch.empty(2 * config.num_tokens - 1, config.width // config.num_heads))
        self.lora: nn.ModuleDict | None = None
        """LoRA's matrices while it trains, by the name of the projection that they add to (`vit_model.lora`)."""

    def forward(self, x: Tensor, first: int | None = None, angles: Angles | None = None) -> Tensor:
        """[b, n, d] -> [b, n, d], or with `first` only the first tokens' part, [b, first, d]."""
        query, key, value = self.heads(x, angles) if first is None else self.heads_of_first(x, first, angles)
        mixed = attention(query, key, value, self.bias(query)).transpose(1, 2).flatten(2)
        projected: Tensor = self.proj(mixed)
        if self.lora is not None and "proj" in self.lora:
            projected = projected + self.lora["proj"](mixed)
        out: Tensor = self.dropout(projected)
        return out

    def heads(self, x: Tensor, angles: Angles | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[b, n, d] -> queries, keys and values, each [b, h, n, e]."""
        query, key, value = self._split(self.qkv(x), 3)
        return (
            rotated(self._adapted(query, "query", x), angles),
            rotated(self._adapted(key, "key", x), angles),
            self._adapted(value, "value", x),
        )

    def heads_of_first(self, x: Tensor, first: int, angles: Angles | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[b, n, d] -> queries [b, h, first, e] of the first tokens, keys and values [b, h, n, e] of all.

        The first tokens are no patches, so their queries are not turned.
        """
        weight, bias, d = self.qkv.weight, self.qkv.bias, x.shape[2]
        (query,) = self._split(F.linear(x[:, :first], weight[:d], bias[:d]), 1)
        key, value = self._split(F.linear(x, weight[d:], bias[d:]), 2)
        query = self._adapted(query, "query", x[:, :first])
        return query, rotated(self._adapted(key, "key", x), angles), self._adapted(value, "value", x)

    def _adapted(self, heads: Tensor, projection: str, x: Tensor) -> Tensor:
        """Add LoRA's part of a projection of x [b, n, d], if it has one, to its heads [b, h, n, e]."""
        if self.lora is None or projection not in self.lora:
            return heads
        (change,) = self._split(self.lora[projection](x), 1)
        return heads + change

    def _split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[b, n, parts * d] -> `parts` tensors [b, h, n, e]."""
        b, n, _ = x.shape
        return x.view(b, n, parts, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def bias(self, query: Tensor) -> Tensor | None:
        """Return the relative positions' part of the scores, [b, h, n, n], scaled like them (Shaw et al. 2018)."""
        if self.pos_embed is None:
            return None
        return relative_scores(query * query.shape[-1] ** -0.5, self.pos_embed)

    def weights(self, x: Tensor, angles: Angles | None = None) -> Tensor:
        """[b, n, d] -> attention weights, float32 [b, h, n, n]; rows sum to 1."""
        query, key, _ = self.heads(x, angles)
        return attention_scores(query, key, self.bias(query)).softmax(dim=-1, dtype=torch.float32)


class Mlp(nn.Module):
    """Two linear layers around a GELU, or three of a SwiGLU; dropout after each but the last addition (section B.1)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.gelu = config.gelu
        self.fc1 = nn.Linear(config.width, config.mlp_dim)
        self.gate = nn.Linear(config.width, config.mlp_dim) if config.is_gated else None
        self.fc2 = nn.Linear(config.mlp_dim, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, d] -> [b, n, d]."""
        hidden = self.fc1(x)
        if self.gate is not None:
            hidden = F.silu(self.gate(x)) * hidden
        elif self.gelu == "quick":
            hidden = hidden * torch.sigmoid(1.702 * hidden)
        else:
            hidden = F.gelu(hidden, approximate="tanh" if self.gelu == "tanh" else "none")
        out: Tensor = self.dropout(self.fc2(self.dropout(hidden)))
        return out


class Block(nn.Module):
    """Eq. 2 and 3: attention, then the MLP, each after a layer norm and with a residual connection."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.residual = config.residual
        self.norm1 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)
        self.ls1 = self.ls2 = None
        if config.layer_scale is not None:
            self.ls1, self.ls2 = (nn.ParameterDict({"gamma": torch.empty(config.width)}) for _ in range(2))

    def forward(
        self, x: Tensor, first: int | None = None, factors: Tensor | None = None, angles: Angles | None = None
    ) -> Tensor:
        """[b, n, d] -> [b, n, d], or with `first` only the first tokens' part, [b, first, d].

        `factors` [2, b, 1, 1] multiply the outputs of attention and MLP for each image (`ViT.drop_path_factors`);
        `angles` turn the queries and keys of patches (`ViT.angles`).
        """
        of_attention, of_mlp = (None, None) if factors is None else factors.unbind()
        x = self._join(x[:, :first], self.attn(self.norm1(x), first, angles), self.ls1, of_attention)
        return self._join(x, self.mlp(self.norm2(x)), self.ls2, of_mlp)

    def _join(self, x: Tensor, branch: Tensor, scale: nn.ParameterDict | None, factors: Tensor | None) -> Tensor:
        if scale is not None:
            branch = branch * scale["gamma"]
        if factors is not None:
            branch = branch * factors
        return x + branch if self.residual else branch


class AttentionPool(nn.Module):
    """The MAP head: a learned query attends to all tokens, then an MLP (Zhai et al. 2022; big_vision's MAPHead).

    Its MLP has dropout like every other; big_vision, whose recipes do not use dropout, has none here.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.latent = nn.Parameter(torch.empty(1, 1, config.width))
        self.q = nn.Linear(config.width, config.width)
        self.kv = nn.Linear(config.width, 2 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, d] -> [b, d]."""
        b, n, d = x.shape
        query = self.q(self.latent).view(1, 1, self.num_heads, -1).transpose(1, 2).expand(b, -1, -1, -1)
        key, value = self.kv(x).view(b, n, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        pooled = self.proj(attention(query, key, value).transpose(1, 2).reshape(b, 1, d))
        out: Tensor = pooled + self.mlp(self.norm(pooled))
        return out[:, 0]
