"""Small ViTs with weights that no test can overlook, and their names in transformers."""

from typing import Any

import torch
from torch import Tensor

from vit_model.config import ViTConfig
from vit_model.model import ViT

SMALL: dict[str, Any] = {
    "image_size": 12,
    "patch_size": 4,
    "width": 32,
    "depth": 3,
    "num_heads": 4,
    "mlp_dim": 48,
    "num_classes": 7,
}


def randomised(config: ViTConfig, seed: int = 0) -> ViT:
    """Every weight away from zero and one, so that none can be forgotten unnoticed."""
    model = ViT(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def hugging_face_names(weights: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors (weights or gradients) as transformers' ViTForImageClassification names and shapes them."""
    out = {
        "vit.embeddings.cls_token": weights["cls_token"],
        "vit.embeddings.position_embeddings": weights["pos_embed"],
        "vit.embeddings.patch_embeddings.projection.weight": weights["patch_embed.proj.weight"].reshape(
            config.width, config.in_channels, config.patch_size, config.patch_size
        ),
        "vit.embeddings.patch_embeddings.projection.bias": weights["patch_embed.proj.bias"],
    }
    renamed = {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj"}
    renamed |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    for kind in ("weight", "bias"):
        out[f"vit.layernorm.{kind}"] = weights[f"norm.{kind}"]
        out[f"classifier.{kind}"] = weights[f"head.{kind}"]
        for layer in range(config.depth):
            ours, theirs = f"blocks.{layer}", f"vit.layers.{layer}"
            for old, new in renamed.items():
                out[f"{theirs}.{new}.{kind}"] = weights[f"{ours}.{old}.{kind}"]
            for name, part in zip("qkv", weights[f"{ours}.attn.qkv.{kind}"].chunk(3), strict=True):
                out[f"{theirs}.attention.{name}_proj.{kind}"] = part
    return out
