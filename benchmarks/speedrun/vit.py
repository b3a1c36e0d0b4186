"""Pure ViT: one linear projection of patches, no convolution, no teacher"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from training import CLASSES, SIDE, entry

from vit_model.blocks import Attention
from vit_model.config import ViTConfig
from vit_model.model import ViT

NEIGHBOURS = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])  # (row, column), of one head each


class NearAttention(Attention):
    """Attention whose heads begin at the neighbours of a patch: a table is added to the scores, and trained.

    It is -strength times the squared distance from the neighbour of the head, as ConViT's heads begin (d'Ascoli et al.
    2021, section 3).
    """

    def __init__(self, config: ViTConfig, strength: float) -> None:
        super().__init__(config)
        patches = torch.cartesian_prod(*map(torch.arange, config.grid))  # [n, 2]
        distances = patches[None] - patches[:, None] - NEIGHBOURS[:, None, None]  # [heads, n, n, 2]
        self.near = nn.Parameter(-strength * distances.square().sum(dim=-1)[None].float())

    def bias(self, query: Tensor) -> Tensor:
        """Return what is added to the scores, [1, heads, n, n]."""
        return self.near.to(query.dtype)


def build(settings: argparse.Namespace) -> ViT:
    """Return a ViT on 28 x 28 pixels, with the mean of the tokens."""
    shape = {"width": settings.width, "depth": settings.depth, "num_heads": len(NEIGHBOURS)}
    image = {"image_size": SIDE, "in_channels": 1, "num_classes": CLASSES, "patch_size": settings.patch}
    config = ViTConfig(**image, **shape, mlp_dim=4 * settings.width, pooling="gap", gelu="exact")
    vit = ViT(config)
    vit.initialise(seed=torch.initial_seed() % 2**32)
    for block in vit.blocks:
        drawn, block.attn = block.attn.state_dict(), NearAttention(config, settings.near)
        block.attn.load_state_dict(drawn, strict=False)
    return vit


if __name__ == "__main__":
    # torch's approximated GELU takes five times as long as the exact one in bf16 on a CPU
    entry(
        build,
        flips=True,
        shifts=True,
        patch=4,
        width=64,
        depth=6,
        near=4.0,
        optimizer="muon",
        rate=5e-3,
        shift=1,
        epochs=14.0,
    )
