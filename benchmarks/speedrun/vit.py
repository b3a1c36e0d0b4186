"""Pure ViT: one linear projection of patches, no convolution, no teacher"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from training import CLASSES, SIDE, entry

from vit_model.config import ViTConfig
from vit_model.model import ViT


class Sampled(nn.Module):
    """A ViT that trains on some of the patches, drawn anew for each batch, and predicts from all of them."""

    def __init__(self, vit: ViT, kept: float) -> None:
        super().__init__()
        self.vit, self.kept = vit, round(kept * vit.config.num_patches)

    def forward(self, images: Tensor) -> Tensor:
        """[b, 1, 28, 28] -> logits [b, 10]."""
        tokens = self.vit.embed(images)
        if self.training and self.kept < tokens.shape[1]:
            tokens = tokens[:, torch.randperm(tokens.shape[1])[: self.kept]]
        representation = self.vit.represent(self.vit.encode(tokens))
        return self.vit.classify(representation)


def build(settings: argparse.Namespace) -> Sampled:
    """Return a ViT on 28 x 28 pixels, with the mean of the tokens."""
    shape = {"width": settings.width, "depth": settings.depth, "num_heads": settings.heads}
    image = {"image_size": SIDE, "in_channels": 1, "num_classes": CLASSES, "patch_size": settings.patch}
    config = ViTConfig(
        **image, **shape, mlp_dim=settings.mlp * settings.width, pooling="gap", stochastic_depth=settings.drop
    )
    vit = ViT(config)
    vit.initialise(seed=torch.initial_seed() % 2**32)
    return Sampled(vit, settings.kept)


if __name__ == "__main__":
    entry(build, patch=4, width=128, depth=6, heads=4, mlp=4, drop=0.0, kept=1.0)
