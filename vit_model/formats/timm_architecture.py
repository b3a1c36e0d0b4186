"""The architecture of a checkpoint of timm's: from config.json where there is one, and from the tensors' shapes.

In: what config.json says and the tensors, by our names. Out: a `ViTConfig`, and lines about what was assumed.
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
# Arguments of timm's VisionTransformer that are read; from dynamic_img_size on they change no outputs.
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


# Names behind which there is the plain block; of the giants of DINOv2 and the like SwiGLU.
PLAIN = re.compile(
    r"deit3?_\w+|flexivit_\w+|eva_large_patch14_\d+"
    r"|vit_(?!d?pwee|dwee|dlittle|giant_patch14_(reg\d_)?(dinov2|tipsv2))[a-z0-9]+_patch\d+"
    r"(_(plus|clip|quickgelu|siglip|gap|map|dinov2|tipsv2|reg\d|miil|36x1|\d+))*"
)


class Conventions(NamedTuple):
    """What timm builds into a name."""

    num_heads: int
    gelu: str
    layer_norm_eps: float


def conventions(architecture: str, width: int) -> Conventions:
    """What an architecture's name means for a model of this width. Raises UserError for one that is not read."""
    name = architecture.partition(".")[0]  # what follows is the training
    if not PLAIN.fullmatch(name):
        raise UserError(
            f"architecture {architecture!r} is not read; timm's plain ViTs, DeiTs, DINOv2s, CLIPs and SigLIPs are"
        )
    sixteen = re.search(r"_(huge|giant|gigantic|giantopt|so400m)_|_base_patch16_gap_", name)
    tanh = re.search(r"patch32_siglip|giantopt|so400m_patch16_siglip|large_patch16_siglip_(gap_)?512", name)
    return Conventions(
        num_heads=16 if sixteen else max(1, width // 64),
        gelu="quick_gelu" if "quickgelu" in name else "gelu_tanh" if tanh else "gelu",
        layer_norm_eps=1e-5 if "_clip_" in name else 1e-6,
    )


def architecture_of(
    config: dict[str, Any], said: dict[str, Any], arguments: dict[str, Any], found: dict[str, Tensor]
) -> tuple[ViTConfig, list[str]]:
    """The architecture of the tensors `found`, and lines about what is only assumed.

    `config` is the whole config.json, `said` its pretrained_cfg, `arguments` its model_args; empty for a file alone.
    Raises UserError for what is not read; TypeError or ArithmeticError for values of wrong types.
    """
    if unknown := sorted(arguments.keys() - ARGUMENTS):
        raise UserError(f"model_args {', '.join(unknown)} are not read")
    width, channels, patch, _ = found["patch_embed.proj.weight"].shape
    width = arguments.get("embed_dim", width)
    implied, lines = _implied(config.get("architecture"), width, found)
    gelu = arguments.get("act_layer", implied.gelu)
    if gelu not in list(GELUS):
        raise UserError(f"act_layer {gelu!r} is not read; {', '.join(GELUS)} are")
    head, registers = found.get("head.weight"), found.get("reg_token")
    num_classes = 0 if head is None or not head.ndim else head.shape[0]
    if config.get("num_classes", num_classes) != num_classes:
        raise UserError(f"num_classes is {config['num_classes']}, but head.weight is for {num_classes}")
    fields: dict[str, Any] = {
        "patch_size": arguments.get("patch_size", patch),
        "in_channels": arguments.get("in_chans", channels),
        "width": width,
        "depth": arguments.get("depth", 1 + max(_index(name) for name in found)),
        "num_heads": arguments.get("num_heads", implied.num_heads),
        "mlp_dim": found["blocks.0.mlp.fc1.weight"].shape[0],
        "num_classes": num_classes,
        "pooling": _pooling(config, arguments, found),
        "class_token": arguments.get("class_token", "cls_token" in found),
        "distillation": "dist_token" in found,
        "registers": arguments.get("reg_tokens", 0 if registers is None else registers.numel() // width),
        "norm_first": arguments.get("pre_norm", "norm_pre.weight" in found),
        "patch_bias": "patch_embed.proj.bias" in found,
        "norm_after_pooling": arguments.get("fc_norm", "fc_norm.weight" in found),
        "representation_head": "pre_logits.weight" in found,
        "gelu": GELUS[gelu],
        "layer_norm_eps": implied.layer_norm_eps,
        "layer_scale": (arguments.get("init_values") or 1e-5) if "blocks.0.ls1.gamma" in found else None,
        "position_resize": "bicubic_antialias",
    }
    return ViTConfig(**fields, **_positions(said, arguments, found, fields)), lines


def _implied(architecture: Any, width: int, found: dict[str, Tensor]) -> tuple[Conventions, list[str]]:
    if architecture is not None:
        return conventions(str(architecture), width), []
    if "norm_pre.weight" in found:
        raise UserError(
            "norm_pre means CLIP, which there is with two kinds of GELU; give a folder with this file and a config.json"
            ' that says {"architecture": "vit_base_patch16_clip_quickgelu_224"} or the like'
        )
    heads = max(1, width // 64)
    line = f"num_heads {heads} (width / 64), the exact GELU and layer_norm_eps 1e-6: assumed, the file does not say."
    return Conventions(heads, "gelu", 1e-6), [line]


def _pooling(config: dict[str, Any], arguments: dict[str, Any], found: dict[str, Tensor]) -> str:
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool is None:
        after = "fc_norm.weight" in found or "cls_token" not in found
        pool = "map" if "attn_pool.latent" in found else "avg" if after else "token"
    prefix = any(token in found for token in ("cls_token", "dist_token", "reg_token"))
    include = bool(arguments.get("pool_include_prefix", False))
    if pool not in list(POOLING) or (prefix and pool != "token" and include != (pool == "map")):
        raise UserError(
            f"global_pool {pool!r} with pool_include_prefix {include} is not read; 'token', 'avg' over the patches and"
            " 'map' over all tokens are"
        )
    return POOLING[pool]


def _index(name: str) -> int:
    """The number of the block that a tensor belongs to; -1 for none."""
    inside = re.match(r"blocks\.(\d{1,9})\.", name)
    return int(inside.group(1)) if inside else -1


def _positions(
    said: dict[str, Any], arguments: dict[str, Any], found: dict[str, Tensor], fields: dict[str, Any]
) -> dict[str, Any]:
    """image_size, position and class_position: the table's length and the grid tell which tokens have one."""
    size = arguments.get("img_size") or said.get("input_size", [None])[1:]
    patch = int(fields["patch_size"])
    sides = [int(side) // patch for side in (size if isinstance(size, list) else [size, size])]  # of the grid
    table = found.get("pos_embed")
    if table is None:
        if arguments.get("pos_embed") not in ("", "none"):
            raise UserError("pos_embed is missing, and positions of another kind (RoPE) are not read")
        return {"image_size": _size([side * patch for side in sides]), "position": "none"}
    entries = table.shape[1] if table.ndim == 3 else 0
    classes = int(fields["class_token"]) + fields["distillation"]
    prefix = classes + int(fields["registers"])
    choices = [prefix, 0, classes]  # the last is Meta's DINOv2, where registers have none
    if arguments.get("no_embed_class") is not None:
        choices = [0] if arguments["no_embed_class"] else [prefix]
    for before in choices:
        grid = sides or [math.isqrt(max(0, entries - before))] * 2
        if entries > before and math.prod(grid) == entries - before:
            size = _size([side * patch for side in grid])
            return {"image_size": size, "class_position": before > 0 and classes > 0}
    grid_said = f"{'x'.join(map(str, sides))} patches" if sides else "a square grid"
    raise UserError(
        f"pos_embed has {entries} entries, which are not {grid_said} and {' or '.join(map(str, choices))} before them"
    )


def _size(sides: list[int]) -> int | list[int]:
    """An image_size: the side of a square, or height and width."""
    return sides[0] if sides and sides[0] == sides[-1] else sides
