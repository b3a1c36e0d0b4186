"""The simple feature pyramid of ViTDet (Li et al. 2022, section 3): maps of several scales from the last one alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vit_model.detection.contract import SCALES


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of maps [b, c, rows, columns] (detectron2's `LayerNorm`)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, rows, columns] -> the same."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SimpleFeaturePyramid(nn.Module):
    """From a ViT's last map to a map for each scale, as in detectron2 (modeling/backbone/vit.py)."""

    def __init__(self, width: int, channels: int, scales: Sequence[float] = SCALES) -> None:
        """`width` is the ViT's; the maps have `channels` channels; scales are 4, 2, 1 or 0.5."""
        super().__init__()
        self.levels = nn.ModuleList(_level(width, channels, scale) for scale in scales)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """[b, width, rows, columns] -> for each scale [b, channels, scale * rows, scale * columns]."""
        return [level(tokens) for level in self.levels]


def _level(width: int, channels: int, scale: float) -> nn.Sequential:
    parts: list[nn.Module] = []
    if scale == 4:
        parts = [
            nn.ConvTranspose2d(width, width // 2, 2, stride=2),
            ChannelNorm(width // 2),
            nn.GELU(),
            nn.ConvTranspose2d(width // 2, width // 4, 2, stride=2),
        ]
    elif scale == 2:
        parts = [nn.ConvTranspose2d(width, width // 2, 2, stride=2)]
    elif scale == 0.5:
        parts = [nn.MaxPool2d(2)]
    inputs = round(width / scale) if scale > 1 else width
    return nn.Sequential(
        *parts,
        nn.Conv2d(inputs, channels, 1, bias=False),
        ChannelNorm(channels),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        ChannelNorm(channels),
    )
