"""Folders of Hugging Face transformers: config.json, safetensors, preprocessor_config.json.

In: a folder with a ViT, DeiT, ViTMAE, DINOv2 (with or without registers), DINOv3, CLIP or SigLIP image encoder, with or
without a classifier. Out: an `Imported`, or such a folder of our model. transformers is not needed.
Use: `imported = read(folder)`; `write(folder, model, contract)`.

Tensors have the names of transformers 4, which the files on the hub have and every version reads; names of version 5
are converted first. Sources: transformers' models/{vit,deit,vit_mae,dinov2,dinov2_with_registers,dinov3_vit,clip,
siglip}.
"""

import re
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from vit_model.config import ViTConfig
from vit_model.contract import ModelContract
from vit_model.errors import UserError
from vit_model.formats.files import (
    read_json,
    read_license,
    read_tensors,
    require_plausible,
    to_ours,
    to_theirs,
    write_json,
)
from vit_model.formats.hugging_face_names import FAMILIES, REFUSED, adapt, for_class, old_name, sources_of
from vit_model.formats.hugging_face_pixels import (
    Processor,
    preprocessing_of,
    processor_config,
    read_processor,
)
from vit_model.formats.imported import Imported
from vit_model.model import ViT
from vit_model.weights import checked_weights, resize_positions

MOST_PIXELS = 4096  # of a side of DINOv3's images; its files have no table of positions that limits it
ROPE_THETA = 100  # of `vit_model.blocks.rope`
GELUS = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "quick_gelu": "quick",
}


def read(folder: Path) -> Imported:
    """Read the image encoder in a folder of transformers, and its classifier if it has one.

    Raises UserError, naming the file, for a model_type or class that `ViTConfig` cannot express exactly, for damaged
    files, and for missing, unexpected, misshapen, quantised, NaN or infinite tensors.
    """
    path = folder / "config.json"
    config = read_json(path)
    kind, sizes = _sizes(path, config)
    family = FAMILIES[kind]
    tensors, weights_file = _find_tensors(folder)
    tensors = {old_name(family.names, name): tensor for name, tensor in tensors.items()}
    lines = adapt(weights_file, kind, sizes, tensors)
    unused = sorted(name for name in tensors if re.fullmatch(family.dropped, name))
    for name in unused:
        del tensors[name]
    architecture = _architecture(path, kind, sizes, tensors)
    require_plausible(weights_file, architecture, tensors)
    sources = sources_of(family.names, architecture, bool(sizes.get("qkv_bias", True)))
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()} - {"float32"})
    weights = to_ours(weights_file, sources, architecture, tensors)
    image_size = _height_and_width(sizes["image_size"])
    if architecture.image_shape != image_size:
        lines.append(
            f"image_size: {architecture.image_size} instead of {sizes['image_size']}, which is not a multiple of"
            f" {architecture.patch_size}; transformers ignores the pixels beyond."
        )
    processor = read_processor(folder, kind)
    if processor is not None and kind.startswith("dino"):
        architecture, image_size, resized = _at_processors_size(architecture, processor, weights)
        lines += resized
    class_names = _class_names(path, config, architecture.num_classes)
    preprocessing, how = (
        (None, ["preprocessing: preprocessor_config.json is missing."])
        if processor is None
        else preprocessing_of(processor, architecture, image_size)
    )
    lines = [
        f"weights: all of the {kind} encoder's {architecture.depth} blocks of width {architecture.width}"
        f" with {architecture.num_heads} heads, {len(class_names) or 'no'} classes,"
        f" GELU {architecture.gelu}, layer norm eps {architecture.layer_norm_eps:g}.",
        *lines,
        *([f"weights: converted from {', '.join(dtypes)} to float32."] if dtypes else []),
        *([f"weights: {len(unused)} tensors that the encoder does not use were dropped."] if unused else []),
        *(f"{name}: zeros, because the model has none." for name, source in sources.items() if not source.names),
        *how,
    ]
    return Imported(
        architecture=architecture,
        weights=weights,
        preprocessing=preprocessing,
        class_names=class_names,
        problem_type=_problem_type(path, config, len(class_names)),
        license=read_license(folder),
        lines=tuple(lines),
    )


def _at_processors_size(
    architecture: ViTConfig, processor: Processor, weights: dict[str, Tensor]
) -> tuple[ViTConfig, tuple[int, int], list[str]]:
    """Resize a DINOv2's or DINOv3's positions to the size of its processor's images, as transformers does at each call.

    Only to smaller sizes, as in published files, because a small file must not take much memory.
    """
    side = processor.side
    if side is None or side % architecture.patch_size or not 0 < side < min(architecture.image_shape):
        return architecture, architecture.image_shape, []
    resized = ViTConfig.model_validate(architecture.model_dump() | {"image_size": side})
    lines = resize_positions(weights, architecture, resized)
    why = f"for the {side}x{side} pixels of {processor.path.name}; without that file they stay as they are."
    return resized, (side, side), [f"{line}, {why}" for line in lines]


def _sizes(path: Path, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model_type, and the image encoder's configuration with the defaults of transformers filled in."""
    kind = config["model_type"]
    if not isinstance(kind, str) or kind not in FAMILIES:
        why = f" ({REFUSED[kind]})" if isinstance(kind, str) and kind in REFUSED else ""
        raise UserError(f"{path}: model_type {kind!r} is not supported{why}; {', '.join(FAMILIES)} are")
    if "quantization_config" in config:
        raise UserError(f"{path}: quantized weights (quantization_config) are not supported; floating point is")
    family = FAMILIES[kind]
    classes = config.get("architectures") or [family.classes[0]]
    if not isinstance(classes, list) or classes[0] not in family.classes:
        raise UserError(f"{path}: architectures {classes!r} is not supported; {', '.join(family.classes)} are")
    part = config.get("vision_config", {}) if kind in ("clip", "siglip") else config
    if not isinstance(part, dict):
        raise UserError(f"{path}: vision_config is {part!r}; expected an object")
    sizes = family.defaults | {key: value for key, value in part.items() if value is not None}
    for key, default in family.defaults.items():
        number = isinstance(sizes[key], int | float) or key in ("image_size", "patch_size")
        if not isinstance(default, str) and not number:
            raise UserError(f"{path}: {key} is {sizes[key]!r}; expected a number")
    if sizes.get("use_swiglu_ffn"):
        raise UserError(f"{path}: use_swiglu_ffn: SwiGLU is not supported; an MLP of two layers is")
    activations = ["silu"] if sizes.get("use_gated_mlp") else list(GELUS)
    if sizes["hidden_act"] not in activations:
        raise UserError(f"{path}: hidden_act {sizes['hidden_act']!r} is not supported; {', '.join(activations)} is")
    if kind == "dinov3_vit" and not 0 < max(_height_and_width(sizes["image_size"])) <= MOST_PIXELS:
        raise UserError(f"{path}: image_size {sizes['image_size']} is more than {MOST_PIXELS}, which no tensor limits")
    if sizes.get("rope_theta") not in (None, ROPE_THETA):
        raise UserError(f"{path}: rope_theta {sizes['rope_theta']} is not supported; {ROPE_THETA:g} is")
    if isinstance(patch := sizes["patch_size"], list) and len(set(map(str, patch))) == 1:
        sizes["patch_size"] = patch[0]
    return kind, sizes


def _architecture(path: Path, kind: str, sizes: dict[str, Any], tensors: dict[str, Tensor]) -> ViTConfig:
    names = FAMILIES[kind].names
    head = tensors.get(f"{names['head']}.weight")
    fields: dict[str, Any] = {
        "position_resize": "bicubic_antialias" if kind == "dinov2_with_registers" else "bicubic",
        "num_classes": 0 if head is None else head.shape[0] if head.ndim else 1,
        "gelu": "swiglu" if sizes.get("use_gated_mlp") else GELUS[sizes["hidden_act"]],
    }
    if kind == "vit" and "pooler.dense.weight" in tensors:
        if sizes.get("pooler_act", "tanh") != "tanh":
            raise UserError(f"{path}: pooler_act {sizes['pooler_act']!r} is not supported; tanh is")
        fields["representation_head"] = True
    elif kind == "deit":
        fields |= {"registers": 1} if "embeddings.register_tokens" in tensors else {"distillation": True}
    elif kind.startswith("dinov2"):
        fields |= {"layer_scale": sizes["layerscale_value"], "registers": sizes.get("num_register_tokens", 0)}
    elif kind == "dinov3_vit":
        fields |= {"position": "rope", "registers": sizes["num_register_tokens"]}
        fields["layer_scale"] = sizes["layerscale_value"]
    elif kind.startswith("clip"):
        fields |= {"norm_first": True, "patch_bias": False}
    elif kind.startswith("siglip"):
        fields["pooling"] = "map" if "head.probe" in tensors else "gap"
    try:
        patch = int(sizes["patch_size"])
        shape = tuple(side // patch * patch for side in _height_and_width(sizes["image_size"]))
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
        raise UserError(f"{path} does not describe a ViT: {error}") from error


def _height_and_width(size: Any) -> tuple[int, int]:
    """Return (height, width) of an image_size, which may be the side of a square."""
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    return int(height), int(width)


def _find_tensors(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """Return all tensors of the folder, and the file to name in messages about them."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return read_tensors(folder / name)[0], folder / name
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise UserError(
            f"{folder} does not contain weights (expected model.safetensors, {index.name} or pytorch_model.bin)"
        )
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise UserError(f"{index}: weight_map must name the file of each tensor")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(shards.values())):
        if Path(file).name != file:
            raise UserError(f"{index}: {file!r} is not the name of a file in the same folder")
        tensors |= read_tensors(folder / file)[0]
    return tensors, index


def _class_names(path: Path, config: dict[str, Any], num_classes: int) -> tuple[str, ...]:
    """Return the names in the order of the logits; numbers if the file has none, or only LABEL_0, LABEL_1, ..."""
    id2label = config.get("id2label")
    numbers = tuple(map(str, range(num_classes)))
    if config["model_type"].startswith("clip"):
        return ()  # its head projects into the space that it shares with texts
    if num_classes == 0 or id2label is None:
        return numbers
    names = [id2label.get(number) for number in numbers] if isinstance(id2label, dict) else []
    if (
        not isinstance(id2label, dict)
        or len(id2label) != num_classes
        or not all(isinstance(name, str) for name in names)
    ):
        raise UserError(f"{path}: id2label must name the {num_classes} classes that the classifier has")
    if all(name == f"LABEL_{number}" for number, name in zip(numbers, names, strict=True)):
        return numbers
    return tuple(map(str, names))


def _problem_type(
    path: Path, config: dict[str, Any], num_classes: int
) -> Literal["single_label_classification", "multi_label_classification"]:
    """Return the kind of the classifier. Raises UserError for outputs that are not classes."""
    kind = config.get("problem_type")
    if kind == "multi_label_classification" and num_classes:
        return "multi_label_classification"
    if num_classes and (kind not in (None, "single_label_classification") or num_classes == 1):
        why = f"problem_type {kind!r}" + (" with one output, a regression," if num_classes == 1 else "")
        raise UserError(
            f"{path}: {why} is not supported; classes are. To take the encoder alone, remove the classifier:"
            " save the model's base_model"
        )
    return "single_label_classification"


def write(folder: Path, model: ViT, contract: ModelContract) -> list[str]:
    """Write a folder that transformers loads with `from_pretrained` as a model with the same outputs.

    Returns a line for each property that the files do not keep.

    Raises UserError for an architecture that no class of transformers has, and for NaN or infinite weights.
    """
    architecture = model.config
    weights = checked_weights(model, contract)
    kind, name = _class_of(architecture)
    tensors = for_class(kind, name, to_theirs(weights, sources_of(FAMILIES[kind].names, architecture)))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(kind, name, architecture, contract.class_names)
    if contract.problem_type != "single_label_classification":
        config["problem_type"] = contract.problem_type
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", processor_config(contract.preprocessing))
    if contract.preprocessing.crop_offset == "round" and contract.preprocessing.offset_matters:
        return ["crop_offset: transformers rounds it down; the crop of a quarter of all sizes lies one pixel off"]
    return []


def _class_of(config: ViTConfig) -> tuple[str, str]:
    """Return the model_type and class of transformers for an architecture. Raises UserError if there is none."""
    common = (
        config.position in ("learned1d", "rope")
        and config.position_at == "stem"
        and config.residual
        and not config.axial
        and config.stem is None
        and not config.norm_after_pooling
        and config.class_position == config.class_token
    )
    present = {
        "norm_first": config.norm_first,
        "no patch_bias": not config.patch_bias,
        "layer_scale": config.layer_scale is not None,
        "distillation": config.distillation,
        "registers": config.registers > 0,
        "representation_head": config.representation_head,
    }
    extras = {name for name, is_there in present.items() if is_there}
    square = config.grid[0] == config.grid[1]
    head = config.num_classes > 0
    if common and config.position == "rope":
        if config.pooling == "cls" and not head and extras - {"registers"} == {"layer_scale"}:
            return "dinov3_vit", "DINOv3ViTModel"
        common = False
    if common and not config.is_gated and config.pooling == "cls":
        if not extras:
            return "vit", "ViTForImageClassification"  # without labels its classifier is the identity
        if extras == {"representation_head"} and not head:
            return "vit", "ViTModel"
        if extras == {"norm_first", "no patch_bias"} and square:
            return "clip_vision_model", f"CLIPVisionModel{'WithProjection' if head else ''}"
        if extras == {"layer_scale"} and config.mlp_dim % config.width == 0:
            return "dinov2", f"Dinov2{'ForImageClassification' if head else 'Model'}"
        if extras == {"layer_scale", "registers"} and config.mlp_dim % config.width == 0:
            return (
                "dinov2_with_registers",
                f"Dinov2WithRegisters{'ForImageClassification' if head else 'Model'}",
            )
        if extras == {"distillation"}:
            return "deit", f"DeiTForImageClassification{'WithTeacher' if head else ''}"
        if extras == {"registers"} and config.registers == 1 and head:
            return "deit", "DeiTForImageClassification"
    if common and not config.is_gated and not extras and not config.class_token and square:
        if config.pooling == "map" and not head:
            return "siglip_vision_model", "SiglipVisionModel"
        if config.pooling == "gap" and head:
            return "siglip", "SiglipForImageClassification"
    raise UserError(
        "no class of transformers computes this architecture; supported are ViT, DeiT, DINOv2, DINOv3 (without a"
        " classifier), CLIP (read at the class token) and SigLIP (classifier on the mean of all tokens, or MAP head"
        " without one):"
        f" {config.model_dump(exclude_defaults=True)}"
    )


def _config(kind: str, name: str, config: ViTConfig, class_names: tuple[str, ...]) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.in_channels,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": {"exact": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}.get(config.gelu, "silu"),
        "layer_norm_eps": config.layer_norm_eps,
    }
    if kind.startswith("dinov2"):
        sizes |= {"mlp_ratio": config.mlp_dim // config.width, "layerscale_value": config.layer_scale}
        sizes |= {"num_register_tokens": config.registers} if config.registers else {}
        del sizes["intermediate_size"]
    if kind == "dinov3_vit":
        sizes |= {"layerscale_value": config.layer_scale, "num_register_tokens": config.registers, "key_bias": True}
        sizes["use_gated_mlp"] = config.is_gated
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
