"""Folders of Hugging Face transformers: config.json, safetensors, preprocessor_config.json.

In: a folder with a ViT, DeiT, ViTMAE, DINOv2 (with registers or not), CLIP or SigLIP image encoder, with or without a
classifier. Out: an `Imported`, or such a folder of a model of ours. Transformers is not needed.
Use: `imported = read(folder)`; `write(folder, model, contract)`.

Tensors have the names of transformers 4, which files on the hub have and every version reads; those of version 5 are
renamed first. Sources: transformers' models/{vit,deit,vit_mae,dinov2,dinov2_with_registers,clip,siglip}.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from vit_model.config import ModelContract, Preprocessing, ViTConfig
from vit_model.formats import Imported
from vit_model.formats.files import (
    README,
    Source,
    read_json,
    read_license,
    read_tensors,
    require_plausible,
    shapes_of,
    take,
    to_ours,
    to_theirs,
    write_json,
)
from vit_model.model import ViT

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
# From the names of transformers 5 to those of 4; CLIP and SigLIP have kept theirs.
RENAMED = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)
RENAMED_MLP = ((r"\.mlp\.fc1\.", ".intermediate.dense."), (r"\.mlp\.fc2\.", ".output.dense."))
PREFIX = re.compile(r"^(vit|deit|dinov2|dinov2_with_registers|vision_model)\.")

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
    """What the models of one model_type have in common."""

    names: dict[str, str]
    classes: tuple[str, ...]
    """That compute what a `ViTConfig` can say."""
    defaults: dict[str, Any]
    """Of transformers: its files leave out what equals them."""
    dropped: str
    """Tensors that the image encoder does not use."""


MASK = r"embeddings\.mask_token"
TEXT = r"text_model\..*|text_projection\..*|logit_scale|logit_bias|embeddings\.position_ids"
DINOV2 = SIZES | {"patch_size": 14, "layer_norm_eps": 1e-6, "mlp_ratio": 4, "layerscale_value": 1.0}
REGISTERS = DINOV2 | {"patch_size": 16, "num_register_tokens": 4}
CLIP = SIZES | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
SIGLIP = SIZES | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
CLIP_FAMILY = Family(
    CLIP_NAMES, ("CLIPModel", "CLIPVisionModel", "CLIPVisionModelWithProjection"), CLIP, TEXT
)
SIGLIP_FAMILY = Family(
    SIGLIP_NAMES, ("SiglipModel", "SiglipVisionModel", "SiglipForImageClassification"), SIGLIP, TEXT
)
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
    "clip": CLIP_FAMILY,
    "clip_vision_model": CLIP_FAMILY,
    "siglip": SIGLIP_FAMILY,
    "siglip_vision_model": SIGLIP_FAMILY,
}
REFUSED = {
    "dinov3_vit": "it has rotary position embeddings (RoPE)",
    "beit": "it has relative position biases",
    "data2vec-vision": "it has relative position biases",
    "siglip2_vision_model": "it takes patches of images of any shape",
}
GELUS = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "quick_gelu": "quick",
}
RESAMPLE = {2: "bilinear", 3: "bicubic"}


def read(folder: Path) -> Imported:
    """The image encoder in a folder of Hugging Face's, and its classifier if it has one.

    Raises ValueError, naming the file, for a model_type or class that `ViTConfig` cannot say exactly, for damaged
    files, and for missing, surplus, misshapen, quantised, NaN or infinite tensors.
    """
    path = folder / "config.json"
    config = read_json(path)
    kind, sizes = _sizes(path, config)
    family = FAMILIES[kind]
    found, weights_file = _find_tensors(folder)
    found = {_old_name(kind, name): tensor for name, tensor in found.items()}
    lines = _adapt(weights_file, kind, sizes, found)
    unused = sorted(name for name in found if re.fullmatch(family.dropped, name))
    for name in unused:
        del found[name]
    architecture = _architecture(path, kind, sizes, found)
    require_plausible(weights_file, architecture, found)
    sources = _sources(family.names, architecture, bool(sizes.get("qkv_bias", True)))
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in found.values()} - {"float32"})
    weights = to_ours(weights_file, sources, architecture, found)
    preprocessing, how = _read_preprocessing(folder, architecture, sizes["image_size"])
    lines = [
        f"weights: all of the {kind} encoder's {architecture.depth} blocks of width {architecture.width}"
        f"{f' and a head for {architecture.num_classes} outputs' if architecture.num_classes else ', no head'},"
        f" GELU {architecture.gelu}, layer norm eps {architecture.layer_norm_eps:g}.",
        *lines,
        *([f"weights: converted from {', '.join(dtypes)} to float32."] if dtypes else []),
        *([f"weights: {len(unused)} tensors that the encoder does not use were dropped."] if unused else []),
        *(
            f"{name}: zeros, since the model has none."
            for name, source in sources.items()
            if not source.names
        ),
        *how,
    ]
    if architecture.image_shape != _both(sizes["image_size"]):
        lines.append(
            f"image_size: {architecture.image_size} instead of {sizes['image_size']}, which is not a multiple of"
            f" {architecture.patch_size}; transformers ignores the pixels beyond."
        )
    return Imported(
        architecture=architecture,
        weights=weights,
        preprocessing=preprocessing,
        class_names=_class_names(path, config, architecture.num_classes),
        license=read_license(folder),
        lines=tuple(lines),
    )


def _sizes(path: Path, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model_type, and the image encoder's own part of the configuration with transformers' defaults filled in."""
    kind = config["model_type"]
    if not isinstance(kind, str) or kind not in FAMILIES:
        why = f" ({REFUSED[kind]})" if isinstance(kind, str) and kind in REFUSED else ""
        raise ValueError(f"{path}: model_type {kind!r} is not read{why}; {', '.join(FAMILIES)} are")
    if "quantization_config" in config:
        raise ValueError(f"{path}: quantized weights (quantization_config) are not read; floating point is")
    family = FAMILIES[kind]
    classes = config.get("architectures") or [family.classes[0]]
    if not isinstance(classes, list) or classes[0] not in family.classes:
        raise ValueError(f"{path}: architectures {classes!r} is not read; {', '.join(family.classes)} are")
    part = config.get("vision_config", {}) if kind in ("clip", "siglip") else config
    if not isinstance(part, dict):
        raise ValueError(f"{path}: vision_config is {part!r}; an object was expected")
    sizes = family.defaults | {key: value for key, value in part.items() if value is not None}
    if sizes.get("use_swiglu_ffn"):
        raise ValueError(f"{path}: use_swiglu_ffn: SwiGLU is not read; an MLP of two layers is")
    if sizes["hidden_act"] not in list(GELUS):
        raise ValueError(f"{path}: hidden_act {sizes['hidden_act']!r} is not read; {', '.join(GELUS)} are")
    if isinstance(patch := sizes["patch_size"], list) and len(set(map(str, patch))) == 1:
        sizes["patch_size"] = patch[0]
    return kind, sizes


def _architecture(path: Path, kind: str, sizes: dict[str, Any], found: dict[str, Tensor]) -> ViTConfig:
    names = FAMILIES[kind].names
    head = found.get(f"{names['head']}.weight")
    fields: dict[str, Any] = {
        "position_resize": "bicubic_antialias" if kind == "dinov2_with_registers" else "bicubic",
        "num_classes": 0 if head is None else head.shape[0] if head.ndim else 1,
        "gelu": GELUS[sizes["hidden_act"]],
    }
    if kind == "vit":
        fields["representation_head"] = "pooler.dense.weight" in found
    elif kind == "deit":
        fields |= {"registers": 1} if "embeddings.register_tokens" in found else {"distillation": True}
    elif kind.startswith("dinov2"):
        fields |= {"layer_scale": sizes["layerscale_value"], "registers": sizes.get("num_register_tokens", 0)}
    elif kind.startswith("clip"):
        fields |= {"norm_first": True, "patch_bias": False}
    elif kind.startswith("siglip"):
        fields["pooling"] = "map" if "head.probe" in found else "gap"
    try:
        patch = int(sizes["patch_size"])
        shape = tuple(side // patch * patch for side in _both(sizes["image_size"]))
        return ViTConfig(
            image_size=shape[0] if shape[0] == shape[1] else shape,
            patch_size=patch,
            in_channels=sizes["num_channels"],
            width=sizes["hidden_size"],
            depth=sizes["num_hidden_layers"],
            num_heads=sizes["num_attention_heads"],
            mlp_dim=int(sizes["hidden_size"] * sizes["mlp_ratio"])
            if kind.startswith("dinov2")
            else sizes["intermediate_size"],
            layer_norm_eps=sizes["layer_norm_eps"],
            **fields,
        )
    except (TypeError, ArithmeticError, ValueError) as error:
        raise ValueError(f"{path} describes no ViT: {error}") from error


def _both(size: Any) -> tuple[int, int]:
    """(height, width) of an image_size, which can be the side of a square."""
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    return int(height), int(width)


def _find_tensors(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """All tensors of the folder, and the file to name when something is wrong with them."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return read_tensors(folder / name), folder / name
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise ValueError(f"{folder} has neither model.safetensors nor {index.name} nor pytorch_model.bin")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise ValueError(f"{index}: weight_map must name the file of each tensor")
    found: dict[str, Tensor] = {}
    for file in sorted(set(shards.values())):
        if Path(file).name != file:
            raise ValueError(f"{index}: {file!r} is not the name of a file in the same folder")
        found |= read_tensors(folder / file)
    return found, index


def _old_name(kind: str, name: str) -> str:
    """The name that transformers 4 gave a tensor, without what it puts in front of an encoder's."""
    name = PREFIX.sub("", name)
    if FAMILIES[kind].names["norm"] == "layernorm":
        for pattern, old in RENAMED if kind.startswith("dinov2") else RENAMED + RENAMED_MLP:
            name = re.sub(pattern, old, name)
    return name


def _adapt(path: Path, kind: str, sizes: dict[str, Any], found: dict[str, Tensor]) -> list[str]:
    """Replace, in `found`, what transformers stores or computes otherwise; returns lines that say what changed."""
    lines = []
    width = int(sizes["hidden_size"])
    if kind == "vit" and "classifier.weight" in found:
        for name in [name for name in found if name.startswith("pooler.")]:
            del found[name]
    if kind == "vit_mae":
        lines.append("pooling: the class token, as in MAE's linear probes; the file holds an encoder alone.")
    if kind == "deit" and "classifier.weight" in found:
        # The distillation token is attended to but not read: a register, but for its position.
        positions = (
            found["embeddings.position_embeddings"] if "embeddings.position_embeddings" in found else None
        )
        if positions is None or positions.ndim != 3 or positions.shape[1] < 3:
            raise ValueError(f"{path}: embeddings.position_embeddings is missing or too short")
        token = take(path, found, "embeddings.distillation_token", (1, 1, width))
        found["embeddings.register_tokens"] = token + positions[:, 1:2]
        found["embeddings.position_embeddings"] = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
        for leaf in ("weight", "bias"):
            found[f"cls_classifier.{leaf}"] = found.pop(f"classifier.{leaf}")
        lines.append("reg_token: the distillation token and its position, which have no classifier here.")
    if kind.startswith("dinov2") and "classifier.weight" in found:
        classes = found["classifier.weight"].shape[0]
        both = take(path, found, "classifier.weight", (classes, 2 * width))
        if both[:, width:].any():
            raise ValueError(
                f"{path}: classifier.weight reads the class token and the mean of the patches side by side, which"
                " is not read; a model without a classifier is"
            )
        found["classifier.weight"] = both[:, :width].contiguous()
    if kind.startswith("siglip") and "classifier.weight" in found:
        dropped = [name for name in found if name.startswith("head.")]
        for name in dropped:
            del found[name]
        if dropped:
            lines.append("attn_pool: dropped; the classifier reads the mean of the tokens.")
    if "head.probe" in found:
        for leaf, shape in (("weight", (3 * width, width)), ("bias", (3 * width,))):
            stacked = take(path, found, f"head.attention.in_proj_{leaf}", shape)
            found[f"head.attention.q.{leaf}"] = stacked[:width]
            found[f"head.attention.kv.{leaf}"] = stacked[width:]
    return lines


def _sources(names: dict[str, str], config: ViTConfig, qkv_bias: bool = True) -> dict[str, Source]:
    """Where each of our tensors lies in a checkpoint with the given names."""
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
            letters = ("q", "k", "v") if clip else ("query", "key", "value")
            parts = tuple(theirs.format(i=index, qkv=letter) for letter in letters)
            sources[name] = Source(parts, (config.width, *shape[1:]))
        else:
            if key == "patch_embed.proj.weight":
                shape = (config.width, config.in_channels, config.patch_size, config.patch_size)
            elif clip and key in ("cls_token", "pos_embed"):
                shape = shape[-1:] if key == "cls_token" else shape[1:]
            sources[name] = Source((theirs.format(i=index),), shape)
    return sources


def _class_names(path: Path, config: dict[str, Any], num_classes: int) -> tuple[str, ...]:
    """In the order of the logits; numbers where the file has none or only LABEL_0, LABEL_1, ..."""
    said = config.get("id2label")
    if (
        num_classes == 0
        or said is None
        or "architectures" in config
        and "Projection" in str(config["architectures"])
    ):
        return tuple(map(str, range(num_classes)))
    names = [said.get(str(index)) for index in range(num_classes)] if isinstance(said, dict) else []
    if (
        not isinstance(said, dict)
        or len(said) != num_classes
        or not all(isinstance(name, str) for name in names)
    ):
        raise ValueError(
            f"{path}: id2label does not name the classes 0 to {num_classes - 1} that the classifier has"
        )
    if all(name == f"LABEL_{index}" for index, name in enumerate(names)):
        return tuple(map(str, range(num_classes)))
    return tuple(map(str, names))


def _read_preprocessing(
    folder: Path, architecture: ViTConfig, image_size: Any
) -> tuple[Preprocessing | None, list[str]]:
    """What preprocessor_config.json says, as far as `Preprocessing` can say it; None and the reason otherwise."""
    path = folder / "preprocessor_config.json"
    if not path.is_file() and (folder / "processor_config.json").is_file():
        path = folder / "processor_config.json"
    if not path.is_file():
        return None, [f"preprocessing: {path.name} is missing."]
    said = read_json(path)
    inner = said.get("image_processor")
    said = inner if isinstance(inner, dict) else said
    size, crop = said.get("size"), said.get("crop_size")
    if isinstance(size, int):
        kind = str(said.get("image_processor_type") or said.get("feature_extractor_type"))
        size = {"shortest_edge": size} if kind.startswith("CLIP") else {"height": size, "width": size}
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    side = _both(image_size)[0]
    square = {"height": side, "width": side}
    crops = said.get("do_center_crop", isinstance(size, dict) and "shortest_edge" in size)
    fields: dict[str, Any] = {}
    if isinstance(size, dict) and list(size) == ["shortest_edge"] and crops and crop == square:
        shorter = size["shortest_edge"]
        if isinstance(shorter, int) and shorter >= side:
            fields = {"crop": "center", "crop_fraction": side / shorter}
    elif size == square and (not crops or crop == square):
        fields = {"crop": "squash"}
    unlike = [
        f"size {said.get('size')!r} and crop_size {said.get('crop_size')!r} don't make {side}x{side} pixels"
        if not fields
        else "",
        f"resample is {said.get('resample')!r}" if said.get("resample") not in list(RESAMPLE) else "",
        *(
            f"{key} is not true"
            for key in ("do_resize", "do_rescale", "do_normalize")
            if not said.get(key, True)
        ),
        "rescale_factor is not 1/255" if abs(said.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6 else "",
        *(f"{key} is missing" for key in ("image_mean", "image_std") if not isinstance(said.get(key), list)),
    ]
    if reasons := ", ".join(filter(None, unlike)):
        return None, [f"preprocessing: {path.name} says what cannot be done here: {reasons}."]
    try:
        preprocessing = Preprocessing(
            mean=said["image_mean"],
            std=said["image_std"],
            interpolation=RESAMPLE[said["resample"]],  # type: ignore[arg-type]
            resolution=architecture.image_shape[0],
            channels=architecture.in_channels,  # type: ignore[arg-type]
            **fields,
        )
    except ValidationError as error:
        raise ValueError(f"{path} says no preprocessing: {error}") from error
    return preprocessing, []


def write(folder: Path, model: ViT, contract: ModelContract) -> None:
    """Write a folder that transformers loads with `from_pretrained`, and that computes what `model` does.

    Raises ValueError for an architecture that no class of transformers has, and for NaN or infinite weights.
    """
    architecture = model.config
    if contract.architecture != architecture:
        raise ValueError(f"contract is for {contract.architecture!r}, the model is {architecture!r}")
    kind, name = _class_of(architecture)
    tensors = _for_class(
        kind, name, to_theirs(model.state_dict(), _sources(FAMILIES[kind].names, architecture))
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", _config(kind, name, architecture, contract.class_names))
    write_json(folder / "preprocessor_config.json", _preprocessor(contract.preprocessing))
    if contract.license:
        card = f"---\nlicense: {contract.license}\nlibrary_name: transformers\n---\n"
        (folder / README).write_text(card, encoding="utf-8")


def _class_of(config: ViTConfig) -> tuple[str, str]:
    """The model_type and the class of transformers that compute what an architecture says, or ValueError."""
    common = (
        config.position == "learned1d"
        and config.position_at == "stem"
        and config.residual
        and not config.axial
        and config.stem is None
        and not config.norm_after_pooling
        and config.class_position == config.class_token
        and not (config.representation_head and (config.num_classes or config.pooling != "cls"))
    )
    extras = (
        config.norm_first,
        not config.patch_bias,
        config.layer_scale is not None,
        config.distillation,
        config.registers > 0,
        config.representation_head,
    )
    square = config.grid[0] == config.grid[1]
    head = config.num_classes > 0
    if common and config.pooling == "cls":
        if not any(extras[:5]):
            return "vit", "ViTForImageClassification" if head else "ViTModel"
        if extras == (True, True, False, False, False, False) and square:
            return "clip_vision_model", f"CLIPVisionModel{'WithProjection' if head else ''}"
        if extras[:4] == (False, False, True, False) and not extras[5] and not config.mlp_dim % config.width:
            name = "Dinov2WithRegisters" if config.registers else "Dinov2"
            kind = "dinov2_with_registers" if config.registers else "dinov2"
            return kind, f"{name}{'ForImageClassification' if head else 'Model'}"
        if extras == (False, False, False, True, False, False):
            return "deit", "DeiTForImageClassificationWithTeacher" if head else "DeiTModel"
        if extras == (False, False, False, False, True, False) and config.registers == 1 and head:
            return "deit", "DeiTForImageClassification"
    if common and not any(extras) and not config.class_token and square:
        if config.pooling == "map" and not head:
            return "siglip_vision_model", "SiglipVisionModel"
        if config.pooling == "gap":
            return "siglip", "SiglipForImageClassification"
    raise ValueError(
        "no class of transformers computes what this architecture says; it is written for ViT, DeiT, DINOv2 and CLIP"
        " (class token, without or with what those have) and SigLIP (mean of all tokens, or the MAP head without a"
        f" classifier): {config!r}"
    )


def _for_class(kind: str, name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names and in the shapes that a class of transformers 4 has."""
    tensors = dict(tensors)
    positions = tensors.get("embeddings.position_embeddings")
    if name == "DeiTForImageClassification":
        assert positions is not None
        token = tensors.pop("embeddings.register_tokens")
        tensors["embeddings.distillation_token"] = token
        tensors["embeddings.position_embeddings"] = torch.cat(
            [positions[:, :1], torch.zeros_like(token), positions[:, 1:]], dim=1
        )
        for leaf in ("weight", "bias"):
            tensors[f"classifier.{leaf}"] = tensors.pop(f"cls_classifier.{leaf}")
    if kind.startswith("dinov2"):
        tensors["embeddings.mask_token"] = torch.zeros_like(tensors["embeddings.cls_token"][0])
        if "classifier.weight" in tensors:  # it reads the mean of the patches too
            weight = tensors["classifier.weight"]
            tensors["classifier.weight"] = torch.cat([weight, torch.zeros_like(weight)], dim=1)
    if "head.probe" in tensors:
        for leaf in ("weight", "bias"):
            parts = [tensors.pop(f"head.attention.{part}.{leaf}") for part in ("q", "kv")]
            tensors[f"head.attention.in_proj_{leaf}"] = torch.cat(parts)
    if kind.startswith(("clip", "siglip")):
        prefix = "vision_model."
    else:
        prefix = "" if name.endswith("Model") else f"{kind}."
    heads = tuple(
        f"{head}."
        for head in ("classifier", "cls_classifier", "distillation_classifier", "visual_projection")
    )
    return {name if name.startswith(heads) else prefix + name: tensor for name, tensor in tensors.items()}


def _config(kind: str, name: str, config: ViTConfig, class_names: tuple[str, ...]) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.in_channels,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": {"exact": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}[config.gelu],
        "layer_norm_eps": config.layer_norm_eps,
    }
    if kind.startswith("dinov2"):
        sizes |= {"mlp_ratio": config.mlp_dim // config.width, "layerscale_value": config.layer_scale}
        sizes |= {"num_register_tokens": config.registers} if config.registers else {}
        del sizes["intermediate_size"]
    if name == "CLIPVisionModelWithProjection":
        sizes["projection_dim"] = config.num_classes
        class_names = ()
    if name == "SiglipForImageClassification":
        sizes = {"vision_config": sizes | {"vision_use_head": False}}
    labels = {str(index): label for index, label in enumerate(class_names)}
    return {
        "architectures": [name],
        "model_type": kind,
        **sizes,
        "id2label": labels,
        "label2id": {label: int(index) for index, label in labels.items()},
    }


def _preprocessor(preprocessing: Preprocessing) -> dict[str, Any]:
    side = preprocessing.resolution
    square = {"height": side, "width": side}
    crops = preprocessing.crop == "center"
    return {
        "image_processor_type": "CLIPImageProcessor" if crops else "ViTImageProcessor",
        "do_convert_rgb": preprocessing.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": int(side / preprocessing.crop_fraction + 1e-6)} if crops else square,
        "resample": {kind: number for number, kind in RESAMPLE.items()}[preprocessing.interpolation],
        "do_center_crop": crops,
        **({"crop_size": square} if crops else {}),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
