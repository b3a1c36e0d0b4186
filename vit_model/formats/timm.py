"""timm checkpoints: folders in the layout of its hub, and single state dicts.

In: a folder with config.json and weights, or a file of weights (safetensors or torch.save). Out: an `Imported`, or such
a folder of our model, for `timm.create_model("local-dir:FOLDER", pretrained=True)`. timm is not needed.
Use: `imported = read(path)`; `write(folder, model, contract)`.

Our tensors have timm's names, but timm's patch kernels are [d, c, p, p] and its registers can have positions. What a
timm name implies beyond shapes (heads, GELU, eps) is in `timm_architecture`.
Sources: timm's models/vision_transformer.py, models/deit.py, models/_hub.py.
"""

import re
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from vit_model.config import ViTConfig
from vit_model.contract import ModelContract, Preprocessing
from vit_model.errors import UserError
from vit_model.formats.files import (
    Source,
    read_json,
    read_tensors,
    require_plausible,
    shapes_of,
    to_ours,
    to_theirs,
    write_json,
)
from vit_model.formats.imported import Imported
from vit_model.formats.timm_architecture import GELUS, POOLING, architecture_of
from vit_model.model import ViT
from vit_model.weights import checked_weights

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# The files of DINO, DINOv2, MAE and DeiT III have timm's names except for these.
RENAMED = (
    (r"^register_tokens$", "reg_token"),
    (r"\.gamma_([12])$", r".ls\1.gamma"),
    (r"^pre_logits\.fc\.", "pre_logits."),
)
DROPPED = re.compile(r"mask_token|decoder_.*")
# The meaning of tensors that are not supported, for messages.
FOREIGN = {
    r".*rope.*|.*freqs.*": "rotary position embeddings (RoPE)",
    r".*mlp\.(w12|w3|fc1_[gx])\..*": "SwiGLU",
    r".*[qk]_norm\..*": "norms of queries and keys",
    r".*relative_position.*": "relative position biases",
    r"patch_embed\.backbone\..*": "a convolutional stem",
    r".*attns\..*|.*in_norm\..*": "parallel blocks",
    r".*embeddings\..*": "names of Hugging Face; give the folder with its config.json",
}


def read(path: Path, averages: bool = True) -> Imported:
    """Read the ViT in a folder or a file; `averages` as in `read_tensors`.

    A single file does not state the number of heads or the preprocessing. Heads of 64 channels, the exact GELU and eps
    1e-6 are then assumed, and reported. Raises UserError, naming the file, for models that `ViTConfig` cannot express
    exactly, for damaged files, and for missing, unexpected, misshapen, quantised, NaN or infinite tensors.
    """
    config = read_json(path / "config.json") if path.is_dir() else {}
    file = path if path.is_file() else next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise UserError(f"{path} does not contain weights (expected {' or '.join(WEIGHTS)})")
    foreign, which = read_tensors(file, averages)
    tensors = {_our_name(name): tensor for name, tensor in foreign.items()}
    unused = sorted(name for name in tensors if DROPPED.fullmatch(name))
    for name in unused:
        del tensors[name]
    _require_ours(file, tensors)
    pretrained_cfg = config.get("pretrained_cfg", config)
    arguments = config.get("model_args") or {}
    if not isinstance(pretrained_cfg, dict) or not isinstance(arguments, dict):
        raise UserError(f"{path / 'config.json'}: pretrained_cfg and model_args must be objects")
    try:
        architecture, lines = architecture_of(config, pretrained_cfg, arguments, tensors)
    except (TypeError, ArithmeticError, AttributeError, ValueError) as error:
        raise UserError(f"{path}: unsupported model: {error}") from error
    require_plausible(file, architecture, tensors)
    lines += _fold_positions(file, architecture, tensors)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()} - {"float32"})
    sources = _sources(architecture, qkv_bias="blocks.0.attn.qkv.bias" in tensors)
    weights = to_ours(file, sources, architecture, tensors)
    # a head of CLIP without a bias projects into the space that it shares with texts
    projects = architecture.norm_first and "head.bias" in weights and not weights["head.bias"].any()
    classes = 0 if projects else architecture.num_classes
    class_names = _class_names(path, config, pretrained_cfg, classes)
    preprocessing, how = _read_preprocessing(path, pretrained_cfg, architecture)
    license_ = pretrained_cfg.get("license")
    return Imported(
        architecture=architecture,
        weights=weights,
        preprocessing=preprocessing,
        class_names=class_names,
        license=license_ if isinstance(license_, str) else None,
        lines=(
            f"weights: all {architecture.depth} blocks of width {architecture.width} with {architecture.num_heads}"
            f" heads, {len(class_names) or 'no'} classes,"
            f" GELU {architecture.gelu}, layer norm eps {architecture.layer_norm_eps:g}.",
            *which,
            *lines,
            *([f"weights: converted from {', '.join(dtypes)} to float32."] if dtypes else []),
            *([f"weights: dropped {', '.join(unused)}."] if unused else []),
            *(f"{name}: zeros, because the model has none." for name, source in sources.items() if not source.names),
            *how,
        ),
    )


def _our_name(name: str) -> str:
    for pattern, own in RENAMED:
        name = re.sub(pattern, own, name)
    return name


def _require_ours(file: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse, by name, architectures that timm supports and `ViTConfig` does not, before missing tensors are listed."""
    for pattern, meaning in FOREIGN.items():
        if names := [name for name in tensors if re.fullmatch(pattern, name)]:
            raise UserError(f"{file}: unsupported architecture: {names[0]} belongs to {meaning}")
    first, second = (tensors.get(f"blocks.0.mlp.{layer}.weight") for layer in ("fc1", "fc2"))
    if first is None or second is None or first.ndim != 2 or second.ndim != 2:
        raise UserError(f"{file} is not a timm ViT: expected blocks.0.mlp.fc1.weight and fc2.weight")
    if first.shape[0] == 2 * second.shape[1]:
        raise UserError(f"{file}: unsupported architecture: SwiGLU MLP (fc1 is twice as wide as fc2)")
    kernel = tensors.get("patch_embed.proj.weight")
    if kernel is None or kernel.ndim != 4 or 0 in kernel.shape:
        shape = "missing" if kernel is None else list(kernel.shape)
        raise UserError(f"{file}: patch_embed.proj.weight is {shape}; expected a kernel [d, c, p, p]")


def _fold_positions(file: Path, config: ViTConfig, tensors: dict[str, Tensor]) -> list[str]:
    """Add the registers' positions to the registers, because ours have no positions; the sum is the same."""
    table, registers = tensors.get("pos_embed"), tensors.get("reg_token")
    classes = config.class_token + config.distillation
    if table is None or registers is None or table.shape[1] != classes + config.registers + config.num_patches:
        return []
    if table.shape[2:] != registers.shape[2:]:
        raise UserError(f"{file}: pos_embed is {list(table.shape)}, reg_token {list(registers.shape)}")
    tensors["reg_token"] = registers.float() + table[:, classes : classes + config.registers].float()
    tensors["pos_embed"] = torch.cat([table[:, :classes], table[:, classes + config.registers :]], dim=1)
    return ["reg_token: with its positions added."]


def _sources(config: ViTConfig, qkv_bias: bool = True) -> dict[str, Source]:
    """Return where each of our tensors lies: under the same name; only the kernel's shape differs."""
    sources = {name: Source((name,), shape) for name, shape in shapes_of(config).items()}
    kernel = (config.width, config.in_channels, config.patch_size, config.patch_size)
    sources["patch_embed.proj.weight"] = Source(("patch_embed.proj.weight",), kernel)
    for name, source in sources.items():
        if name.endswith(".attn.qkv.bias") and not qkv_bias:
            sources[name] = Source((), source.shape)
    return sources


def _class_names(
    path: Path, config: dict[str, Any], pretrained_cfg: dict[str, Any], num_classes: int
) -> tuple[str, ...]:
    names = config.get("label_names", pretrained_cfg.get("label_names"))
    if isinstance(names, dict):
        names = [names.get(str(index)) for index in range(len(names))]
    if names is None or num_classes == 0:
        return tuple(map(str, range(num_classes)))
    if not isinstance(names, list) or len(names) != num_classes or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: label_names does not name the {num_classes} classes that head.weight has")
    return tuple(names)


def _read_preprocessing(
    path: Path, pretrained_cfg: dict[str, Any], architecture: ViTConfig
) -> tuple[Preprocessing | None, list[str]]:
    """Return the preprocessing of pretrained_cfg if `Preprocessing` can express it, else None and the reason."""
    if "mean" not in pretrained_cfg or "std" not in pretrained_cfg:
        return None, ["preprocessing: mean and std are missing."]
    crop, fraction = pretrained_cfg.get("crop_mode", "center"), pretrained_cfg.get("crop_pct", 0.875)
    interpolation, mean = pretrained_cfg.get("interpolation", "bicubic"), pretrained_cfg["mean"]
    height, width = architecture.image_shape
    unlike = [
        *([] if crop in ("center", "squash") else [f"crop_mode {crop!r}"]),
        *([f"images of {height}x{width}"] if height != width else []),
        *([] if interpolation in ("bilinear", "bicubic") else [f"interpolation {interpolation!r}"]),
        *([] if isinstance(mean, list) and len(mean) == architecture.in_channels else [f"mean {mean!r}"]),
    ]
    if unlike:
        return None, [f"preprocessing: config.json has unsupported settings: {', '.join(unlike)}."]
    try:
        preprocessing = Preprocessing(
            mean=pretrained_cfg["mean"],
            std=pretrained_cfg["std"],
            interpolation=interpolation,
            crop=crop,
            crop_fraction=fraction,
            resolution=height,
            channels=architecture.in_channels,
        )
    except ValidationError as error:
        raise UserError(f"{path}: pretrained_cfg has no valid preprocessing: {error}") from error
    return preprocessing, []


def write(folder: Path, model: ViT, contract: ModelContract) -> list[str]:
    """Write a folder that timm loads as a model with the same outputs.

    Returns a line for each property that the files do not keep.

    Raises UserError for an architecture that timm's VisionTransformer does not support, and for NaN or infinite
    weights.
    """
    config = model.config
    weights = checked_weights(model, contract)
    _require_timms(config)
    tensors = to_theirs(weights, _sources(config))
    positioned = config.class_position and config.registers > 0
    if positioned:  # in timm, registers have positions if the class token does
        table, classes = tensors["pos_embed"], config.class_token + config.distillation
        zeros = torch.zeros(1, config.registers, config.width)
        tensors["pos_embed"] = torch.cat([table[:, :classes], zeros, table[:, classes:]], dim=1)
    if contract.preprocessing.interpolation == "bilinear_aliased":
        raise UserError("interpolation bilinear_aliased cannot be written: timm does not support it")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS[0], metadata={"format": "pt"})
    write_json(folder / "config.json", _config(config, contract))
    return _lost(contract)


def _config(config: ViTConfig, contract: ModelContract) -> dict[str, Any]:
    """Return the content of timm's config.json."""
    name = "vit_base_patch16_224" if config.layer_norm_eps == 1e-6 else "vit_base_patch16_clip_224"
    pool = {ours: theirs for theirs, ours in POOLING.items()}[config.pooling]
    ratio = config.mlp_dim / config.width
    if int(config.width * ratio) != config.mlp_dim:  # timm rounds down
        ratio = (config.mlp_dim + 0.5) / config.width
    pixels = contract.preprocessing
    return {
        "architecture": "deit_base_distilled_patch16_224" if config.distillation else name,
        "num_classes": config.num_classes,
        "num_features": config.width,
        "global_pool": pool,
        **({"label_names": list(contract.class_names)} if contract.class_names else {}),
        "model_args": {
            "img_size": config.image_size,
            "patch_size": config.patch_size,
            "in_chans": config.in_channels,
            "num_classes": config.num_classes,
            "embed_dim": config.width,
            "depth": config.depth,
            "num_heads": config.num_heads,
            "mlp_ratio": ratio,
            "global_pool": pool,
            "fc_norm": config.norm_after_pooling,
            "class_token": config.class_token,
            "no_embed_class": config.num_prefix_tokens > 0 and not config.class_position,
            "reg_tokens": config.registers,
            "pool_include_prefix": config.pooling == "map" and config.num_prefix_tokens > 0,
            "pos_embed": "none" if config.position == "none" else "learn",
            "pre_norm": config.norm_first,
            "act_layer": {ours: theirs for theirs, ours in GELUS.items()}[config.gelu],
            **({"init_values": config.layer_scale} if config.layer_scale is not None else {}),
        },
        "pretrained_cfg": {
            "custom_load": False,
            "input_size": [config.in_channels, *config.image_shape],
            "fixed_input_size": True,
            "interpolation": pixels.interpolation,
            "crop_pct": pixels.crop_fraction,
            "crop_mode": pixels.crop,
            "mean": list(pixels.mean),
            "std": list(pixels.std),
            "num_classes": config.num_classes,
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if config.distillation else "head",
            **({"license": contract.license} if contract.license else {}),
        },
    }


def _lost(contract: ModelContract) -> list[str]:
    pixels = contract.preprocessing
    lines = []
    if pixels.crop_offset == "floor" and pixels.offset_matters:
        lines.append("crop_offset: timm rounds half to even; the crop of a quarter of all sizes lies one pixel off")
    if contract.problem_type != "single_label_classification":
        lines.append(f"problem_type: the format has no field for {contract.problem_type}; use a sigmoid")
    return lines


def _require_timms(config: ViTConfig) -> None:
    """Refuse, by name, settings that timm's VisionTransformer has no arguments for."""
    wrong = {
        f"position {config.position!r}": config.position not in ("none", "learned1d"),
        f"position_at {config.position_at!r}": config.position_at != "stem",
        "residual false": not config.residual,
        "axial true": config.axial,
        "gelu 'swiglu'": config.is_gated,
        "a convolutional stem": config.stem is not None,
        "representation_head true": config.representation_head,
        "patch_bias without norm_first, or the other way": config.patch_bias == config.norm_first,
        f"layer_norm_eps {config.layer_norm_eps:g} (1e-6 and 1e-5 have names)": config.layer_norm_eps
        not in ((1e-6,) if config.distillation else (1e-6, 1e-5)),
        "distillation with registers or without class_position": config.distillation
        and (config.registers > 0 or not config.class_position),
    }
    if unsupported := [description for description, is_so in wrong.items() if is_so]:
        raise UserError(f"timm's VisionTransformer does not support {', '.join(unsupported)}")
