"""ResNet: 3 x 3 convolutions with batch normalisation in residual pairs"""

from __future__ import annotations

import argparse

from torch import Tensor, nn
from training import CLASSES, convolution, entry


class Residual(nn.Module):
    """Two convolutions around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*convolution(width, width), *convolution(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, h, w] -> the same."""
        return x + self.body(x)  # type: ignore[no-any-return]


def build(settings: argparse.Namespace) -> nn.Module:
    """Return stages of one convolution, a pooling by 2 and some residual pairs, each twice as wide as the last."""
    width, layers = settings.width, convolution(1, settings.width)
    for _ in range(settings.stages):
        layers += [
            *convolution(width, 2 * width),
            nn.MaxPool2d(2),
            *(Residual(2 * width) for _ in range(settings.pairs)),
        ]
        width *= 2
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


if __name__ == "__main__":
    entry(
        build,
        flips=True,
        shifts=True,
        width=16,
        stages=3,
        pairs=1,
        optimizer="sgd",
        rate=0.1,
        decay=5e-4,
        erase=8,
        epochs=26.0,
    )
