"""Hugging Face's supported image encoders, and their tensors by the names of transformers 4.

In: tensors by the names of any version. Out: tensors that `Source` can locate; for a class, all tensors that it needs.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vit_model.config import ViTConfig
from vit_model.errors import UserError
from vit_model.formats.files import Source, shapes_of, take

BLOCK = "encoder.layer.{i}."
VIT_NAMES = {
    "cls_token": "embeddings.cls_token",
    "dist_token": "embeddings.distillation_token",
    "reg_token": "embeddings.register_tokens",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "blocks.norm1": BLOCK + "layernorm_before",
    "blocks.norm2": BLOCK + "layernorm_after",
    "blocks.attn.qkv": BLOCK + "attention.attention.{qkv}",
    "blocks.attn.proj": BLOCK + "attention.output.dense",
    "blocks.mlp.fc1": BLOCK + "intermediate.dense",
    "blocks.mlp.fc2": BLOCK + "output.dense",
    "norm": "layernorm",
    "pre_logits": "pooler.dense",
    "head": "classifier",
}
DEIT_NAMES = VIT_NAMES | {"head": "cls_classifier", "head_dist": "distillation_classifier"}
DINOV2_NAMES = VIT_NAMES | {
    "blocks.norm1": BLOCK + "norm1",
    "blocks.norm2": BLOCK + "norm2",
    "blocks.ls1.gamma": BLOCK + "layer_scale1.lambda1",
    "blocks.ls2.gamma": BLOCK + "layer_scale2.lambda1",
    "blocks.mlp.fc1": BLOCK + "mlp.fc1",
    "blocks.mlp.fc2": BLOCK + "mlp.fc2",
}
TOWER = "encoder.layers.{i}."
LAYER = "layer.{i}."
DINOV3_NAMES = {
    "cls_token": "embeddings.cls_token",
    "reg_token": "embeddings.register_tokens",
    "patch_embed.proj": "embeddings.patch_embeddings",
    "blocks.norm1": LAYER + "norm1",
    "blocks.norm2": LAYER + "norm2",
    "blocks.attn.qkv": LAYER + "attention.{qkv}_proj",
    "blocks.attn.proj": LAYER + "attention.o_proj",
    "blocks.ls1.gamma": LAYER + "layer_scale1.lambda1",
    "blocks.ls2.gamma": LAYER + "layer_scale2.lambda1",
    "blocks.mlp.gate": LAYER + "mlp.gate_proj",
    "blocks.mlp.fc1": LAYER + "mlp.up_proj",
    "blocks.mlp.fc2": LAYER + "mlp.down_proj",
    "norm": "norm",
    "head": "classifier",
}
CLIP_NAMES = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding.weight",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm_pre": "pre_layrnorm",
    "blocks.norm1": TOWER + "layer_norm1",
    "blocks.norm2": TOWER + "layer_norm2",
    "blocks.attn.qkv": TOWER + "self_attn.{qkv}_proj",
    "blocks.attn.proj": TOWER + "self_attn.out_proj",
    "blocks.mlp.fc1": TOWER + "mlp.fc1",
    "blocks.mlp.fc2": TOWER + "mlp.fc2",
    "norm": "post_layernorm",
    "head": "visual_projection",
}
SIGLIP_NAMES = CLIP_NAMES | {
    "attn_pool.latent": "head.probe",
    "attn_pool.q": "head.attention.q",  # these two are one in the file: in_proj_weight, in_proj_bias
    "attn_pool.kv": "head.attention.kv",
    "attn_pool.proj": "head.attention.out_proj",
    "attn_pool.norm": "head.layernorm",
    "attn_pool.mlp.fc1": "head.mlp.fc1",
    "attn_pool.mlp.fc2": "head.mlp.fc2",
    "head": "classifier",
}
# Names in transformers 5 -> names in transformers 4; the names of CLIP and SigLIP did not change.
RENAMED = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)
RENAMED_MLP = ((r"\.mlp\.fc1\.", ".intermediate.dense."), (r"\.mlp\.fc2\.", ".output.dense."))
PREFIX = re.compile(r"^(vit|deit|dinov2|dinov2_with_registers|vision_model|model)\.")

SIZES = {
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}


class Family(NamedTuple):
    """The properties that models of one model_type share."""

    names: dict[str, str]
    classes: tuple[str, ...]
    """The classes that a `ViTConfig` can express."""
    defaults: dict[str, Any]
    """The defaults of transformers, which its files leave out."""
    dropped: str
    """A pattern for tensors that the image encoder does not use."""


MASK = r"embeddings\.mask_token"
TEXT = r"text_model\..*|text_projection\..*|logit_scale|logit_bias|embeddings\.position_ids"
DINOV2 = SIZES | {"patch_size": 14, "layer_norm_eps": 1e-6, "mlp_ratio": 4, "layerscale_value": 1.0}
REGISTERS = DINOV2 | {"patch_size": 16, "num_register_tokens": 4}
DINOV3 = SIZES | {
    "hidden_size": 384,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-5,
    "layerscale_value": 1.0,
    "rope_theta": 100.0,
    "num_register_tokens": 0,
}
CLIP = SIZES | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
SIGLIP = SIZES | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
CLIP_FAMILY = Family(CLIP_NAMES, ("CLIPModel", "CLIPVisionModel", "CLIPVisionModelWithProjection"), CLIP, TEXT)
SIGLIP_FAMILY = Family(SIGLIP_NAMES, ("SiglipModel", "SiglipVisionModel", "SiglipForImageClassification"), SIGLIP, TEXT)
FAMILIES = {
    "vit": Family(VIT_NAMES, ("ViTModel", "ViTForImageClassification"), SIZES, MASK),
    "deit": Family(
        DEIT_NAMES,
        ("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
        SIZES,
        rf"{MASK}|pooler\..*",
    ),
    "vit_mae": Family(VIT_NAMES, ("ViTMAEModel", "ViTMAEForPreTraining"), SIZES, r"decoder\..*"),
    "dinov2": Family(DINOV2_NAMES, ("Dinov2Model", "Dinov2ForImageClassification"), DINOV2, MASK),
    "dinov2_with_registers": Family(
        DINOV2_NAMES,
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
        REGISTERS,
        MASK,
    ),
    "dinov3_vit": Family(DINOV3_NAMES, ("DINOv3ViTModel",), DINOV3, MASK),
    "clip": CLIP_FAMILY,
    "clip_vision_model": CLIP_FAMILY,
    "siglip": SIGLIP_FAMILY,
    "siglip_vision_model": SIGLIP_FAMILY,
}
REFUSED = {
    "beit": "it has relative position biases",
    "data2vec-vision": "it has relative position biases",
    "siglip2_vision_model": "it takes patches of images of any shape",
}


def old_name(names: dict[str, str], name: str) -> str:
    """Return a tensor's name in transformers 4, without the encoder's prefix."""
    name = PREFIX.sub("", name)
    if names["norm"] == "layernorm":
        for pattern, old in RENAMED if names["blocks.mlp.fc1"].endswith("mlp.fc1") else RENAMED + RENAMED_MLP:
            name = re.sub(pattern, old, name)
    return name


def adapt(path: Path, kind: str, sizes: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """Convert tensors, in place, that transformers stores or uses differently; return lines about the changes."""
    lines = []
    width = int(sizes["hidden_size"])
    if kind == "vit" and "classifier.weight" in tensors:
        for name in [name for name in tensors if name.startswith("pooler.")]:
            del tensors[name]
    if kind == "vit_mae":
        lines.append("pooling: the class token, as in MAE's linear probes; the file holds an encoder alone.")
    if kind == "deit" and "classifier.weight" in tensors:
        # The distillation token is attended to but not read, so it is a register with a position.
        positions = tensors.get("embeddings.position_embeddings")
        if positions is None or positions.ndim != 3 or positions.shape[1] < 3:
            raise UserError(f"{path}: embeddings.position_embeddings is missing or too short")
        token = take(path, tensors, "embeddings.distillation_token", (1, 1, width))
        tensors["embeddings.register_tokens"] = token + positions[:, 1:2]
        tensors["embeddings.position_embeddings"] = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
        for leaf in ("weight", "bias"):
            tensors[f"cls_classifier.{leaf}"] = tensors.pop(f"classifier.{leaf}")
        lines.append("reg_token: the distillation token and its position, which have no classifier here.")
    if kind == "dinov3_vit" and sizes["num_register_tokens"] == 0:
        tensors.pop("embeddings.register_tokens", None)  # [1, 0, d]
    for part, default in (("query", True), ("key", False), ("value", True)) if kind == "dinov3_vit" else ():
        weights = [name for name in tensors if name.endswith(f".attention.{part[0]}_proj.weight")]
        for name in () if sizes.get(f"{part}_bias", default) else weights:  # read as zeros
            tensors[name.replace(".weight", ".bias")] = torch.zeros(tensors[name].shape[:1])
    if kind.startswith("dinov2") and "classifier.weight" in tensors:
        classes = tensors["classifier.weight"].shape[0]
        both = take(path, tensors, "classifier.weight", (classes, 2 * width))
        if both[:, width:].any():
            raise UserError(
                f"{path}: classifier.weight reads the class token and the mean of the patches side by side, which"
                " is not supported; a model without a classifier is"
            )
        tensors["classifier.weight"] = both[:, :width].contiguous()
    if kind.startswith("siglip") and "classifier.weight" in tensors:
        dropped = [name for name in tensors if name.startswith("head.")]
        for name in dropped:
            del tensors[name]
        if dropped:
            lines.append("attn_pool: dropped; the classifier reads the mean of the tokens.")
    if kind.startswith("siglip") and "classifier.weight" not in tensors and "head.probe" not in tensors:
        lines.append("pooling: the mean of the tokens; the model in the file has none.")
    if "head.probe" in tensors:
        for leaf, shape in (("weight", (3 * width, width)), ("bias", (3 * width,))):
            stacked = take(path, tensors, f"head.attention.in_proj_{leaf}", shape)
            tensors[f"head.attention.q.{leaf}"] = stacked[:width]
            tensors[f"head.attention.kv.{leaf}"] = stacked[width:]
    return lines


def sources_of(names: dict[str, str], config: ViTConfig, qkv_bias: bool = True) -> dict[str, Source]:
    """Return where each of our tensors lies in a checkpoint with these names."""
    clip = names["norm"] == "post_layernorm"
    sources = {}
    for name, shape in shapes_of(config).items():
        index, inside = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.*)", name).groups()  # type: ignore[union-attr]
        key = inside if index is None else f"blocks.{inside}"
        owner, _, leaf = key.rpartition(".")
        theirs = names[key] if key in names else f"{names[owner]}.{leaf}"
        if (theirs == "visual_projection.bias") or (key == "blocks.attn.qkv.bias" and not qkv_bias):
            sources[name] = Source((), shape)
        elif key.startswith("blocks.attn.qkv."):
            letters = ("q", "k", "v") if theirs.partition("{qkv}")[2].startswith("_proj") else ("query", "key", "value")
            parts = tuple(theirs.format(i=index, qkv=letter) for letter in letters)
            sources[name] = Source(parts, (config.width, *shape[1:]))
        else:
            if key == "patch_embed.proj.weight":
                shape = (config.width, config.in_channels, config.patch_size, config.patch_size)
            elif clip and key in ("cls_token", "pos_embed"):
                shape = shape[-1:] if key == "cls_token" else shape[1:]
            sources[name] = Source((theirs.format(i=index),), shape)
    return sources


def for_class(kind: str, name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the names and shapes that a class of transformers 4 has."""
    tensors = dict(tensors)
    if kind == "deit" and "embeddings.register_tokens" in tensors:
        token = tensors.pop("embeddings.register_tokens")
        positions = tensors["embeddings.position_embeddings"]
        tensors["embeddings.position_embeddings"] = torch.cat(
            [positions[:, :1], torch.zeros_like(token), positions[:, 1:]], dim=1
        )
        tensors["embeddings.distillation_token"] = token
        for leaf in ("weight", "bias"):
            tensors[f"classifier.{leaf}"] = tensors.pop(f"cls_classifier.{leaf}")
    if kind == "dinov3_vit":
        tensors["embeddings.mask_token"] = torch.zeros_like(tensors["embeddings.cls_token"])
        if "embeddings.register_tokens" not in tensors:
            tensors["embeddings.register_tokens"] = tensors["embeddings.cls_token"][:, :0].contiguous()
    if kind.startswith("dinov2"):
        tensors["embeddings.mask_token"] = torch.zeros_like(tensors["embeddings.cls_token"][0])
        if "classifier.weight" in tensors:  # it reads the mean of the patches too
            weight = tensors["classifier.weight"]
            tensors["classifier.weight"] = torch.cat([weight, torch.zeros_like(weight)], dim=1)
    if "head.probe" in tensors:
        for leaf in ("weight", "bias"):
            parts = [tensors.pop(f"head.attention.{part}.{leaf}") for part in ("q", "kv")]
            tensors[f"head.attention.in_proj_{leaf}"] = torch.cat(parts)
    base = "" if name.endswith("Model") else f"{kind}."
    prefix = "vision_model." if kind.startswith(("clip", "siglip")) else base
    heads = tuple(
        f"{head}." for head in ("classifier", "cls_classifier", "distillation_classifier", "visual_projection")
    )
    return {name if name.startswith(heads) else prefix + name: tensor for name, tensor in tensors.items()}
