"""The architecture of a timm checkpoint, from its config.json, if any, and the shapes of its tensors.

In: the content of config.json and the tensors, by our names. Out: a `ViTConfig`, and lines about what was assumed.
Sources: timm's models/vision_transformer.py and models/deit.py, arguments and entry points.
"""

import math
import re
from typing import Any, NamedTuple

from torch import Tensor

from vit_model.config import ViTConfig
from vit_model.errors import UserError

GELUS = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}
POOLING = {"token": "cls", "avg": "gap", "map": "map"}
# Supported arguments of timm's VisionTransformer; dynamic_img_size and the following do not change its outputs.
ARGUMENTS = {
    *("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio"),
    *(
        "global_pool",
        "pool_include_prefix",
        "fc_norm",
        "class_token",
        "no_embed_class",
        "reg_tokens",
        "pos_embed",
    ),
    *("pre_norm", "init_values", "act_layer", "qkv_bias", "dynamic_img_size", "strict_img_size"),
    *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"),
    *("weight_init", "fix_init"),
}


# Names of models with the plain block. The giants of DINOv2 and similar models have SwiGLU.
PLAIN = re.compile(
    r"deit3?_\w+|flexivit_\w+|eva_large_patch14_\d+"
    r"|vit_(?!d?pwee|dwee|dlittle|giant_patch14_(reg\d_)?(dinov2|tipsv2))[a-z0-9]+_patch\d+"
    r"(_(plus|clip|quickgelu|siglip|gap|map|dinov2|tipsv2|reg\d|miil|36x1|\d+))*"
)


class Conventions(NamedTuple):
    """The properties that timm implies by a name."""

    num_heads: int
    gelu: str
    layer_norm_eps: float


def conventions(architecture: str, width: int) -> Conventions:
    """Return the conventions of an architecture's name at this width. Raises UserError if it is not supported."""
    name = architecture.partition(".")[0]  # the rest names the training
    if not PLAIN.fullmatch(name):
        raise UserError(
            f"architecture {architecture!r} is not supported; timm's plain ViTs, DeiTs, DINOv2s, CLIPs and SigLIPs are"
        )
    sixteen = re.search(r"_(huge|giant|gigantic|giantopt|so400m)_|_base_patch16_gap_", name)
    tanh = re.search(r"patch32_siglip|giantopt|so400m_patch16_siglip|large_patch16_siglip_(gap_)?512", name)
    return Conventions(
        num_heads=16 if sixteen else max(1, width // 64),
        gelu="quick_gelu" if "quickgelu" in name else "gelu_tanh" if tanh else "gelu",
        layer_norm_eps=1e-5 if "_clip_" in name else 1e-6,
    )


def architecture_of(
    config: dict[str, Any],
    pretrained_cfg: dict[str, Any],
    arguments: dict[str, Any],
    tensors: dict[str, Tensor],
) -> tuple[ViTConfig, list[str]]:
    """Return the architecture of the tensors, and lines about assumptions.

    Args:
        config: the content of config.json, empty for a single file.
        pretrained_cfg: its pretrained_cfg.
        arguments: its model_args.
        tensors: by our names.

    Raises UserError for unsupported values, and TypeError or ArithmeticError for values of wrong types.
    """
    if unknown := sorted(arguments.keys() - ARGUMENTS):
        raise UserError(f"model_args {', '.join(unknown)} are not supported")
    width, channels, patch, _ = tensors["patch_embed.proj.weight"].shape
    width = arguments.get("embed_dim", width)
    implied, lines = _implied(config.get("architecture"), width, tensors)
    gelu = arguments.get("act_layer", implied.gelu)
    if gelu not in list(GELUS):
        raise UserError(f"act_layer {gelu!r} is not supported; {', '.join(GELUS)} are")
    head, registers = tensors.get("head.weight"), tensors.get("reg_token")
    num_classes = 0 if head is None or not head.ndim else head.shape[0]
    if config.get("num_classes", num_classes) != num_classes:
        raise UserError(f"num_classes is {config['num_classes']}, but head.weight is for {num_classes}")
    fields: dict[str, Any] = {
        "patch_size": arguments.get("patch_size", patch),
        "in_channels": arguments.get("in_chans", channels),
        "width": width,
        "depth": arguments.get("depth", 1 + max(_index(name) for name in tensors)),
        "num_heads": arguments.get("num_heads", implied.num_heads),
        "mlp_dim": tensors["blocks.0.mlp.fc1.weight"].shape[0],
        "num_classes": num_classes,
        "pooling": _pooling(config, arguments, tensors),
        "class_token": arguments.get("class_token", "cls_token" in tensors),
        "distillation": "dist_token" in tensors,
        "registers": arguments.get("reg_tokens", 0 if registers is None else registers.numel() // width),
        "norm_first": arguments.get("pre_norm", "norm_pre.weight" in tensors),
        "patch_bias": "patch_embed.proj.bias" in tensors,
        "norm_after_pooling": arguments.get("fc_norm", "fc_norm.weight" in tensors),
        "representation_head": "pre_logits.weight" in tensors,
        "gelu": GELUS[gelu],
        "layer_norm_eps": implied.layer_norm_eps,
        "layer_scale": (arguments.get("init_values") or 1e-5) if "blocks.0.ls1.gamma" in tensors else None,
        "position_resize": "bicubic_antialias",
    }
    return ViTConfig(**fields, **_positions(pretrained_cfg, arguments, tensors, fields)), lines


def _implied(architecture: Any, width: int, tensors: dict[str, Tensor]) -> tuple[Conventions, list[str]]:
    if architecture is not None:
        return conventions(str(architecture), width), []
    if "norm_pre.weight" in tensors:
        raise UserError(
            "norm_pre means CLIP, which exists with two kinds of GELU; give a folder with this file and a config.json"
            ' with {"architecture": "vit_base_patch16_clip_quickgelu_224"} or similar'
        )
    heads = max(1, width // 64)
    line = f"assumed, because the file does not say: num_heads {heads} (width / 64), exact GELU, layer_norm_eps 1e-6."
    return Conventions(heads, "gelu", 1e-6), [line]


def _pooling(config: dict[str, Any], arguments: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool is None:
        after = "fc_norm.weight" in tensors or "cls_token" not in tensors
        pool = "map" if "attn_pool.latent" in tensors else "avg" if after else "token"
    prefix = any(token in tensors for token in ("cls_token", "dist_token", "reg_token"))
    include = bool(arguments.get("pool_include_prefix", False))
    if pool not in list(POOLING) or (prefix and pool != "token" and include != (pool == "map")):
        raise UserError(
            f"global_pool {pool!r} with pool_include_prefix {include} is not supported; 'token', 'avg' over the patches"
            " and 'map' over all tokens are"
        )
    return POOLING[pool]


def _index(name: str) -> int:
    """Return the number of the block that a tensor belongs to; -1 for none."""
    inside = re.match(r"blocks\.(\d{1,9})\.", name)
    return int(inside.group(1)) if inside else -1


def _positions(
    pretrained_cfg: dict[str, Any],
    arguments: dict[str, Any],
    tensors: dict[str, Tensor],
    fields: dict[str, Any],
) -> dict[str, Any]:
    """Return image_size, position and class_position; the table's length and the grid say which tokens have one."""
    size = arguments.get("img_size") or pretrained_cfg.get("input_size", [None])[1:]
    patch = int(fields["patch_size"])
    sides = [int(side) // patch for side in (size if isinstance(size, list) else [size, size])]  # of the grid
    table = tensors.get("pos_embed")
    if table is None:
        if arguments.get("pos_embed") not in ("", "none"):
            raise UserError("pos_embed is missing, and positions of another kind (RoPE) are not supported")
        return {"image_size": _size([side * patch for side in sides]), "position": "none"}
    entries = table.shape[1] if table.ndim == 3 else 0
    classes = int(fields["class_token"]) + fields["distillation"]
    prefix = classes + int(fields["registers"])
    choices = [prefix, 0, classes]  # the last is Meta's DINOv2, in which registers have none
    if arguments.get("no_embed_class") is not None:
        choices = [0] if arguments["no_embed_class"] else [prefix]
    for before in choices:
        grid = sides or [math.isqrt(max(0, entries - before))] * 2
        if entries > before and math.prod(grid) == entries - before:
            size = _size([side * patch for side in grid])
            return {"image_size": size, "class_position": before > 0 and classes > 0}
    expected = f"{'x'.join(map(str, sides))} patches" if sides else "a square grid"
    raise UserError(
        f"pos_embed has {entries} entries; expected {expected} and {' or '.join(map(str, choices))} before them"
    )


def _size(sides: list[int]) -> int | list[int]:
    """Return an image_size: the side of a square, or height and width."""
    return sides[0] if sides and sides[0] == sides[-1] else sides
