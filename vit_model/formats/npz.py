"""Google's checkpoints: .npz files of google-research/vision_transformer, big_vision and big_transfer (BiT).

In: a file, or a model and its contract. Out: an `Imported`, or the file, the same bytes for the same weights.
Both generations of names are read. Files are written with the paper's names, which both libraries and timm read, or
with big_vision's for models that only big_vision has.
Use: `imported = read(path)`; `lines = write(path, model, contract)`.
"""

import math
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit_model.build import Network, build
from vit_model.config import Architecture, ResNetConfig, ViTConfig, ViTOptions
from vit_model.contract import ModelContract, Preprocessing
from vit_model.errors import UserError
from vit_model.formats.imported import Imported
from vit_model.formats.npz_archive import Stored, as_float32, headers, opened
from vit_model.formats.npz_layout import BIT_ROOT, BLOCK, POSITIONS, Part, layout, newer, put, taken
from vit_model.variants import stem_stride
from vit_model.weights import checked_weights, require_finite, require_shapes

# The files of sincos2d models and ResNets do not contain the image size; Google trains these models at this one.
UNSAID_IMAGE_SIZE = 224
BIT_HEAD = "resnet/head/conv2d/kernel"


def read(path: Path) -> Imported:
    """Read the ViT, hybrid or ResNet in `path`: of the paper, AugReg, big_vision, BiT or a training checkpoint.

    Raises UserError, naming the file, if it is missing, truncated or not an .npz, claims more than it holds, does not
    have the arrays of one of these models, holds NaN, or has dtypes other than float32, float16 or bfloat16.
    """
    with opened(path) as archive:
        return _read(archive, path.stat().st_size)


def write(path: Path, model: Network, contract: ModelContract) -> list[str]:
    """Write the model's weights as in Google's files; return lines about properties that such a file cannot store.

    Raises UserError if the contract describes another model, if a weight is NaN or infinite, and for a model that
    readers of such a file would misinterpret: with exact GELU, registers, another mean ...
    """
    config = model.config
    weights = checked_weights(model, contract)
    _require_expressible(config, contract.preprocessing)
    name_of = newer if isinstance(config, ViTConfig) and _is_big_visions(config) else str
    with zipfile.ZipFile(path, "w") as archive:
        for part in layout(config):
            # ZipInfo's own date is 1980, so that the bytes depend on the weights only.
            with archive.open(zipfile.ZipInfo(f"{name_of(part.theirs)}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, taken(part, weights[part.ours]), allow_pickle=False)
    return _lost(contract)


def _read(archive: "np.lib.npyio.NpzFile", file_size: int) -> Imported:
    lines = []
    prefix, stored = headers(archive, file_size)
    if left := [name for name in archive.files if not name.startswith(prefix)]:
        lines.append(f"dropped: {len(left)} arrays outside {prefix}, of an optimizer or another tower")
    if prefix.endswith("img/") and "head/kernel" in stored:
        stored = {name: array for name, array in stored.items() if not name.startswith("head/")}
        lines.append("head: dropped; a tower's head maps to the space shared with texts and is not a classifier")
    shapes = {name: array.shape for name, array in stored.items()}
    config = _architecture(shapes)
    if isinstance(config, ResNetConfig):
        lines.append(f"image_size: not in the file; assumed {config.image_size}, at which BiT was trained")
    elif config.position == "sincos2d":
        lines.append(f"position: no table in the file, so sincos2d, with big_vision's image_size {config.image_size}")
    parts = {part.theirs: part for part in layout(config)}
    require_shapes("", {name: part.shape for name, part in parts.items()}, shapes)
    weights, halves = _weights(archive, stored, parts, config)
    if halves:
        lines.append(f"converted {halves} arrays of half precision to float32")
    if not config.num_classes:
        lines.append("head: none in the file, so the model returns representations, not classes")
    elif not weights["head.weight"].any():
        lines.append("head: its kernel is zero (as in the paper's ImageNet-21k files), so it cannot classify yet")
    if isinstance(config, ViTConfig):
        lines.append("gelu is tanh and layer_norm_eps 1e-06, as in Google's code")
    preprocessing = _preprocessing(config)
    if preprocessing is not None:
        size = preprocessing.resolution
        lines.append(f"preprocessing as in Google's code: mean and std 0.5, bilinear, squashed to {size} x {size}")
    names = tuple(map(str, range(config.num_classes)))
    count = sum(tensor.numel() for tensor in weights.values())
    summary = f"imported: {len(stored)} arrays with {count} parameters"
    return Imported(config, weights, preprocessing, names, None, (summary, *lines))


# -- detection of the architecture


def _architecture(shapes: dict[str, tuple[int, ...]]) -> Architecture:
    """Return the architecture that has arrays of these names and shapes."""

    def shape(name: str, letters: str) -> tuple[int, ...]:
        if name not in shapes:
            raise UserError(f"missing array {name!r}, which all of Google's ViTs have")
        if len(shapes[name]) != len(letters.split()):
            raise UserError(f"array {name!r} is {list(shapes[name])}; expected [{letters}]")
        return shapes[name]

    if BIT_ROOT in shapes:
        root = shape(BIT_ROOT, "height width channels width")
        return ResNetConfig.model_validate(
            {
                "image_size": UNSAID_IMAGE_SIZE,
                "units": _units(name.removeprefix("resnet/") for name in shapes),
                "width_factor": root[3] // 64,
                "in_channels": root[2],
                "num_classes": shape(BIT_HEAD, "1 1 width classes")[3] if BIT_HEAD in shapes else 0,
            }
        )
    if "cls" in shapes and "MAPHead_0/probe" in shapes:
        raise UserError("the file has a class token and a MAP head; Google's models have one of the two")
    kernel = shape("embedding/kernel", "height width channels width")
    if kernel[0] != kernel[1]:
        raise UserError(f"patches are {kernel[0]} x {kernel[1]}; they must be square")
    _, heads, _ = shape(f"{BLOCK}0/MultiHeadDotProductAttention_1/query/kernel", "width heads head")
    _, mlp_dim = shape(f"{BLOCK}0/MlpBlock_3/Dense_0/kernel", "width mlp")
    stem = _units(shapes)
    channels = kernel[2] if stem is None else shape("conv_root/kernel", "height width channels width")[2]
    patch = kernel[0] * (1 if stem is None else stem_stride(stem))
    class_token = "cls" in shapes
    if POSITIONS in shapes:
        entries = shape(POSITIONS, "1 entries width")[1]
        side, class_position = _grid(entries, class_token)
        image_size, position = side * patch, "learned1d"
    else:
        image_size, position, class_position = UNSAID_IMAGE_SIZE, "sincos2d", False
    return ViTConfig.model_validate(
        {
            "image_size": image_size,
            "patch_size": patch,
            "in_channels": channels,
            "width": kernel[3],
            "depth": len({match[1] for name in shapes if (match := re.match(rf"{BLOCK}(\d+)/", name))}),
            "num_heads": heads,
            "mlp_dim": mlp_dim,
            "num_classes": shape("head/kernel", "width classes")[1] if "head/kernel" in shapes else 0,
            "stem": stem,
            "pooling": "map" if "MAPHead_0/probe" in shapes else "cls" if class_token else "gap",
            "position": position,
            "class_position": class_position,
            "representation_head": "pre_logits/kernel" in shapes,
        }
    )


def _grid(entries: int, class_token: bool) -> tuple[int, bool]:
    """Return the side of the grid, and whether the class token has an entry, for a table with this many entries."""
    for class_position in (True, False) if class_token else (False,):
        side = math.isqrt(entries - class_position)
        if side and side * side == entries - class_position:
            return side, class_position
    raise UserError(
        f"array {POSITIONS!r} has {entries} entries; expected a square of patches"
        f"{', with or without the class token' if class_token else ''}"
    )


def _units(arrays: Iterable[str]) -> tuple[int, ...] | None:
    """Return the units in each stage of a hybrid's stem; None if there is no stem."""
    units: dict[int, set[int]] = {}
    names = set(arrays)
    for name in names:
        if match := re.match(r"block(\d{1,3})/unit(\d{1,3})/", name):
            units.setdefault(int(match[1]), set()).add(int(match[2]))
    if not units and "conv_root/kernel" not in names:
        return None
    if sorted(units) != list(range(1, len(units) + 1)) or len(units) > 4:
        raise UserError(f"ResNet stages {sorted(units)[:8]}; expected 1, 2, ... up to 4, without gaps")
    return tuple(len(units[stage]) for stage in sorted(units))


def _preprocessing(config: Architecture) -> Preprocessing | None:
    """Return the preprocessing of Google's code; None unless images are square with 1 or 3 channels."""
    height, width = config.image_shape
    if height != width or config.in_channels not in (1, 3):
        return None
    half = (0.5,) * config.in_channels
    return Preprocessing(mean=half, std=half, resolution=height, channels=config.in_channels)


def _weights(
    archive: "np.lib.npyio.NpzFile", stored: dict[str, Stored], parts: dict[str, Part], config: Architecture
) -> tuple[dict[str, Tensor], int]:
    """Return the arrays as our float32 tensors, and how many had half precision. Each array is read once."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in build(config).state_dict().items()}
    weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    names_by_member: dict[str, list[str]] = {}
    for name, array in stored.items():
        names_by_member.setdefault(array.member, []).append(name)
    halves = 0
    for member, names in names_by_member.items():
        numbers = archive[member]
        halves += numbers.dtype != np.float32
        numbers = as_float32(numbers)
        for name in names:
            layer, part = stored[name].layer, parts[name]
            part_numbers = numbers if layer is None else numbers[layer]
            put(part, part_numbers.reshape(part.shape), weights[part.ours])
    for name, tensor in weights.items():
        require_finite(f"weight {name!r}", tensor)
    return weights, halves


# -- limits of the format


def _is_big_visions(config: ViTConfig) -> bool:
    """Return whether only big_vision has such models: with a MAP head, or a class token without a learned position."""
    return (
        config.pooling == "map" or config.position == "sincos2d" or (config.class_token and not config.class_position)
    )


def _require_expressible(config: Architecture, preprocessing: Preprocessing) -> None:
    half = (0.5,) * config.in_channels
    if (preprocessing.mean, preprocessing.std) != (half, half):
        raise UserError(
            f"preprocessing has mean {preprocessing.mean} and std {preprocessing.std}; readers of Google's .npz assume"
            f" {half} for both; use another format"
        )
    if isinstance(config, ResNetConfig):
        return
    paper = ViTOptions(pooling=config.pooling)
    for field in (
        *("class_token", "distillation", "registers", "position_at", "norm_first", "norm_after_pooling"),
        *("patch_bias", "layer_scale", "residual", "axial", "gelu", "layer_norm_eps"),
    ):
        if getattr(config, field) != getattr(paper, field):
            raise UserError(
                f"{field} {getattr(config, field)!r} cannot be stored in Google's .npz, which implies"
                f" {getattr(paper, field)!r}; use another format"
            )
    if config.position not in ("learned1d", "sincos2d"):
        raise UserError(f"position {config.position!r} cannot be stored in Google's .npz; 'learned1d' can")
    height, width = config.image_shape
    if height != width or (config.position == "sincos2d" and height != UNSAID_IMAGE_SIZE):
        fits = "a square" if config.position == "learned1d" else UNSAID_IMAGE_SIZE
        raise UserError(f"image_size {config.image_size} cannot be stored in Google's .npz; {fits} can")


def _lost(contract: ModelContract) -> list[str]:
    lines = []
    preprocessing = contract.preprocessing
    if (preprocessing.interpolation, preprocessing.crop) != ("bilinear", "squash"):
        lines.append(
            f"preprocessing: {preprocessing.interpolation} and crop {preprocessing.crop!r} are not in the file;"
            " its readers assume bilinear and 'squash'"
        )
    if isinstance(contract.architecture, ResNetConfig):
        lines.append(f"image_size: {contract.architecture.image_size} is not in the file")
        lines.append(
            "root pool: exact for big_transfer's bit_pytorch and timm, which pad it with zeros, as here; big_vision"
            " pads it with -inf, and its outputs differ (by 1.9% in one comparison)"
        )
    if contract.problem_type != "single_label_classification":
        lines.append(f"problem_type: {contract.problem_type} is not in the file; use a sigmoid")
    if contract.class_names:
        lines.append(f"class_names: the names of {len(contract.class_names)} classes are not in the file")
    return lines
