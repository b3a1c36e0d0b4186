"""ConvNet below 100,000 parameters: six 3 x 3 convolutions, two poolings"""

from __future__ import annotations

import argparse

from torch import nn
from training import CLASSES, convolution, entry


def build(settings: argparse.Namespace) -> nn.Module:
    """Return pairs of convolutions, each pair twice as wide as the last."""
    width, before, layers = settings.width, 1, []
    for stage in range(3):
        for _ in range(2):
            layers += convolution(before, width)
            before = width
        layers += [nn.MaxPool2d(2)] if stage < 2 else []
        width *= 2
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))
    count = sum(weight.numel() for weight in module.parameters())
    assert count < 100_000, f"{count:,} parameters"
    return module


if __name__ == "__main__":
    entry(build, width=18, optimizer="sgd", rate=0.1, decay=5e-4, batch=128, epochs=15.0)
