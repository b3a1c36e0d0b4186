"""Small ViTs with weights that no test can overlook, and their names in transformers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vit_model.build import build
from vit_model.config import Architecture, ViTConfig
from vit_model.contract import ModelContract, Preprocessing

TINY: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "width": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_dim": 32,
}
SMALL: dict[str, Any] = {
    "image_size": 12,
    "patch_size": 4,
    "width": 32,
    "depth": 3,
    "num_heads": 4,
    "mlp_dim": 48,
    "num_classes": 7,
}


def randomised(of: Any, seed: int = 0) -> Any:
    """A model, or that of a configuration: every weight away from zero and one, so that none can be forgotten."""
    model = of if isinstance(of, nn.Module) else build(of)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1)
    return model


def contract_for(
    config: Architecture, names: Sequence[str] | None = None, license_name: str | None = None, **pixels: Any
) -> ModelContract:
    """A contract: classes are called 0, 1, ..., pixels go from -1 to 1, unless something else is given."""
    half = (0.5,) * config.in_channels
    pixels = {"mean": half, "std": half, "resolution": config.image_shape[0]} | pixels
    # not validated, because images of a network need not be square
    return ModelContract.model_construct(
        architecture=config,
        class_names=tuple(map(str, range(config.num_classes)) if names is None else names),
        preprocessing=Preprocessing.model_validate({"channels": config.in_channels} | pixels),
        training_data="sha256:" + "0" * 64,
        license=license_name,
    )


def hugging_face_twin(ours: Any, activation: str) -> Any:
    """transformers' model with our weights; strict: every tensor of theirs gets one of ours, and none is left over."""
    transformers = pytest.importorskip("transformers")
    config = ours.config
    sizes = transformers.ViTConfig(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_dim,
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_labels=config.num_classes,
        hidden_act=activation,
        layer_norm_eps=config.layer_norm_eps,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    theirs = transformers.ViTForImageClassification(sizes)
    theirs.load_state_dict(hugging_face_names(dict(ours.state_dict()), config), strict=True)
    return theirs


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
    for kind in ("weight", "bias"):
        out[f"vit.layernorm.{kind}"] = weights[f"norm.{kind}"]
        out[f"classifier.{kind}"] = weights[f"head.{kind}"]
    return out | hugging_face_blocks(weights, "blocks", "vit.layers", config.depth)


def hugging_face_blocks(weights: dict[str, Tensor], ours: str, theirs: str, depth: int) -> dict[str, Tensor]:
    """Our blocks' tensors below the name `ours` as transformers names them below `theirs`."""
    renamed = {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj"}
    renamed |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    out = {}
    for layer in range(depth):
        for kind in ("weight", "bias"):
            for old, new in renamed.items():
                out[f"{theirs}.{layer}.{new}.{kind}"] = weights[f"{ours}.{layer}.{old}.{kind}"]
            parts = weights[f"{ours}.{layer}.attn.qkv.{kind}"].chunk(3)
            for name, part in zip("qkv", parts, strict=True):
                out[f"{theirs}.{layer}.attention.{name}_proj.{kind}"] = part
    return out
