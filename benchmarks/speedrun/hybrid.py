"""Hybrid: a convolutional stem, blocks of a ViT, and pooling by attention (CCT, Hassani et al. 2021)"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from training import CLASSES, SIDE, convolution, entry

from vit_model.config import ViTConfig
from vit_model.model import ViT


class Hybrid(nn.Module):
    """Two convolutions with pooling make 7 x 7 tokens of a 28 x 28 image; the ViT embeds each as a patch of 1 x 1."""

    def __init__(self, settings: argparse.Namespace) -> None:
        super().__init__()
        narrow, width = settings.stem, settings.width
        self.stem = nn.Sequential(
            *convolution(1, narrow),
            *convolution(narrow, narrow),
            nn.MaxPool2d(2),
            *convolution(narrow, width),
            nn.MaxPool2d(2),
        )
        config = ViTConfig(
            image_size=SIDE // 4,
            in_channels=width,
            patch_size=1,
            num_classes=0,
            width=width,
            depth=settings.depth,
            num_heads=settings.heads,
            mlp_dim=settings.mlp * width,
            pooling="gap",
            stochastic_depth=settings.drop,
        )
        self.vit = ViT(config)
        self.vit.initialise(seed=torch.initial_seed() % 2**32)
        self.score, self.head = nn.Linear(width, 1), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """[b, 1, 28, 28] -> logits [b, 10]."""
        tokens, _ = self.vit.forward_features(self.stem(images).float())
        return self.head((self.score(tokens).softmax(1) * tokens).sum(1))  # type: ignore[no-any-return]


if __name__ == "__main__":
    entry(
        Hybrid,
        flips=True,
        width=128,
        depth=4,
        heads=4,
        mlp=2,
        drop=0.1,
        stem=32,
        optimizer="muon",
        rate=5e-3,
        shift=1,
        epochs=17.0,
    )
