"""The mapping between the arrays of Google's checkpoints and our tensors: one table for reading and writing.

The names come from the paper's files (google-research/vision_transformer), for ResNets from BiT's. An array is a flax
parameter: kernels are [inputs..., outputs...] or, in convolutions, [height, width, in, out], and heads have an axis.
Use: `for part in layout(config): put(part, arrays[part.theirs], weights[part.ours])`.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit_model.config import Architecture, ResNetConfig, ViTConfig

POSITIONS = "Transformer/posembed_input/pos_embedding"
BLOCK = "Transformer/encoderblock_"
_GROUP_NORM = ("gamma", "beta")
BIT_ROOT = "resnet/root_block/standardized_conv2d/kernel"
# The paper's name and big_vision's. Newer versions of flax number the modules of a block by kind.
RENAMED = (
    ("/MultiHeadDotProductAttention_1/", "/MultiHeadDotProductAttention_0/"),
    ("/LayerNorm_2/", "/LayerNorm_1/"),
    ("/MlpBlock_3/", "/MlpBlock_0/"),
)


class Part(NamedTuple):
    """One of their arrays, and its place in our tensor: share `share` of `shares` equal shares of its rows."""

    theirs: str
    shape: tuple[int, ...]
    ours: str
    axes: tuple[int, ...]
    """The order of the array's axes in our tensor, outputs first."""
    share: int = 0
    shares: int = 1


def layout(config: Architecture) -> list[Part]:
    """Return every array of a model's file, by the names of the paper's files."""
    return _vit(config) if isinstance(config, ViTConfig) else _bit(config)


def _vit(config: ViTConfig) -> list[Part]:
    width, patch = config.width, config.patch_size // config.stem_stride
    parts: list[Part] = []
    channels = config.in_channels
    if config.stem is not None:
        parts, channels = _stem(config.stem, channels)
    parts.append(_convolution("embedding/kernel", "patch_embed.proj.weight", (patch, patch, channels, width)))
    parts.append(_as_it_is("embedding/bias", "patch_embed.proj.bias", (width,)))
    if config.class_token:
        parts.append(_as_it_is("cls", "cls_token", (1, 1, width)))
    if config.position == "learned1d":
        entries = config.num_patches + config.num_class_positions
        parts.append(_as_it_is(POSITIONS, "pos_embed", (1, entries, width)))
    for index in range(config.depth):
        theirs, ours = f"{BLOCK}{index}", f"blocks.{index}"
        parts += _norm(f"{theirs}/LayerNorm_0", f"{ours}.norm1", width)
        for place, name in enumerate(("query", "key", "value")):
            attention = f"{theirs}/MultiHeadDotProductAttention_1"
            parts += _heads(f"{attention}/{name}", f"{ours}.attn.qkv", config, place, 3)
        parts += _joined(f"{theirs}/MultiHeadDotProductAttention_1/out", f"{ours}.attn.proj", config)
        parts += _norm(f"{theirs}/LayerNorm_2", f"{ours}.norm2", width)
        parts += _mlp(f"{theirs}/MlpBlock_3", f"{ours}.mlp", config)
    parts += _norm("Transformer/encoder_norm", "norm", width)
    if config.pooling == "map":
        attention = "MAPHead_0/MultiHeadDotProductAttention_0"
        parts.append(_as_it_is("MAPHead_0/probe", "attn_pool.latent", (1, 1, width)))
        parts += _heads(f"{attention}/query", "attn_pool.q", config, 0, 1)
        parts += _heads(f"{attention}/key", "attn_pool.kv", config, 0, 2)
        parts += _heads(f"{attention}/value", "attn_pool.kv", config, 1, 2)
        parts += _joined(f"{attention}/out", "attn_pool.proj", config)
        parts += _norm("MAPHead_0/LayerNorm_0", "attn_pool.norm", width)
        parts += _mlp("MAPHead_0/MlpBlock_0", "attn_pool.mlp", config)
    if config.representation_head:
        parts += _dense("pre_logits", "pre_logits", width, width)
    if config.num_classes:
        parts += _dense("head", "head", width, config.num_classes)
    return parts


def older(name: str) -> str:
    """Return the paper's name for an array that may have big_vision's."""
    if name in ("pos_embedding", "Transformer/pos_embedding"):
        return POSITIONS
    if name.startswith(BLOCK):
        for old, new in RENAMED:
            name = name.replace(new, old)
    return name


def newer(name: str) -> str:
    """Return big_vision's name for an array that has the paper's."""
    if name == POSITIONS:
        return "pos_embedding"
    for old, new in RENAMED:
        name = name.replace(old, new)
    return name


def _stem(stem: tuple[int, ...], in_channels: int) -> tuple[list[Part], int]:
    """Return the arrays of a hybrid's ResNet, and the channels of its feature map."""
    ours = "patch_embed.backbone"
    parts = [_convolution("conv_root/kernel", f"{ours}.stem.conv.weight", (7, 7, in_channels, 64))]
    parts += _norm("gn_root", f"{ours}.stem.norm", 64)
    channels = 64
    for stage, units in enumerate(stem):
        middle = 64 * 2**stage
        for unit in range(units):
            names = f"block{stage + 1}/unit{unit + 1}", f"{ours}.stages.{stage}.blocks.{unit}"
            kernels = {1: (1, 1, channels, middle), 2: (3, 3, middle, middle), 3: (1, 1, middle, 4 * middle)}
            for place, shape in kernels.items():
                parts.append(_convolution(f"{names[0]}/conv{place}/kernel", f"{names[1]}.conv{place}.weight", shape))
                parts += _norm(f"{names[0]}/gn{place}", f"{names[1]}.norm{place}", shape[-1])
            if unit == 0:
                theirs, shortcut = f"{names[0]}/conv_proj/kernel", f"{names[1]}.downsample"
                parts.append(_convolution(theirs, f"{shortcut}.conv.weight", (1, 1, channels, 4 * middle)))
                parts += _norm(f"{names[0]}/gn_proj", f"{shortcut}.norm", 4 * middle)
            channels = 4 * middle
    return parts, channels


def _bit(config: ResNetConfig) -> list[Part]:
    """The paper's baseline, as google-research/big_transfer keeps it."""
    parts = [_convolution(BIT_ROOT, "stem.conv.weight", (7, 7, config.in_channels, 64 * config.width_factor))]
    for index, (units, channels, middle, _) in enumerate(config.stages):
        for unit in range(units):
            theirs, ours = f"resnet/block{index + 1}/unit{unit + 1:02}", f"stages.{index}.blocks.{unit}"
            into = 4 * middle if unit else channels
            kernels = {
                "a": (1, 1, into, middle),
                "b": (3, 3, middle, middle),
                "c": (1, 1, middle, 4 * middle),
            }
            for place, (name, shape) in enumerate(kernels.items(), 1):
                kernel = f"{theirs}/{name}/standardized_conv2d/kernel"
                parts.append(_convolution(kernel, f"{ours}.conv{place}.weight", shape))
                parts += _norm(f"{theirs}/{name}/group_norm", f"{ours}.norm{place}", shape[2], _GROUP_NORM)
            if unit == 0:
                kernel = f"{theirs}/a/proj/standardized_conv2d/kernel"
                parts.append(_convolution(kernel, f"{ours}.downsample.conv.weight", (1, 1, into, 4 * middle)))
    parts += _norm("resnet/group_norm", "norm", config.width, _GROUP_NORM)
    if config.num_classes:
        kernel = "resnet/head/conv2d/kernel"
        parts.append(_convolution(kernel, "head.weight", (1, 1, config.width, config.num_classes)))
        parts.append(_as_it_is("resnet/head/conv2d/bias", "head.bias", (config.num_classes,)))
    return parts


def _as_it_is(theirs: str, ours: str, shape: tuple[int, ...], share: int = 0, shares: int = 1) -> Part:
    return Part(theirs, shape, ours, tuple(range(len(shape))), share, shares)


def _convolution(theirs: str, ours: str, shape: tuple[int, int, int, int]) -> Part:
    return Part(theirs, shape, ours, (3, 2, 0, 1))


def _norm(theirs: str, ours: str, width: int, names: tuple[str, str] = ("scale", "bias")) -> list[Part]:
    leaves = zip(names, ("weight", "bias"), strict=True)
    return [_as_it_is(f"{theirs}/{their}", f"{ours}.{our}", (width,)) for their, our in leaves]


def _dense(theirs: str, ours: str, inputs: int, outputs: int) -> list[Part]:
    kernel = Part(f"{theirs}/kernel", (inputs, outputs), f"{ours}.weight", (1, 0))
    return [kernel, _as_it_is(f"{theirs}/bias", f"{ours}.bias", (outputs,))]


def _mlp(theirs: str, ours: str, config: ViTConfig) -> list[Part]:
    first = _dense(f"{theirs}/Dense_0", f"{ours}.fc1", config.width, config.mlp_dim)
    return first + _dense(f"{theirs}/Dense_1", f"{ours}.fc2", config.mlp_dim, config.width)


def _heads(theirs: str, ours: str, config: ViTConfig, share: int, shares: int) -> list[Part]:
    """Return the arrays of queries, keys or values, one of the matrices that our tensor stacks."""
    heads = (config.num_heads, config.width // config.num_heads)
    kernel = Part(f"{theirs}/kernel", (config.width, *heads), f"{ours}.weight", (1, 2, 0), share, shares)
    return [kernel, _as_it_is(f"{theirs}/bias", f"{ours}.bias", heads, share, shares)]


def _joined(theirs: str, ours: str, config: ViTConfig) -> list[Part]:
    """Return the arrays of the layer that joins the heads."""
    shape = (config.num_heads, config.width // config.num_heads, config.width)
    kernel = Part(f"{theirs}/kernel", shape, f"{ours}.weight", (2, 0, 1))
    return [kernel, _as_it_is(f"{theirs}/bias", f"{ours}.bias", (config.width,))]


def put(part: Part, array: NDArray[np.float32], tensor: Tensor) -> None:
    """Copy one of their arrays to its rows of our tensor."""
    rows = tensor.chunk(part.shares)[part.share]
    rows.copy_(torch.from_numpy(np.ascontiguousarray(array.transpose(part.axes))).reshape(rows.shape))


def taken(part: Part, tensor: Tensor) -> NDArray[np.float32]:
    """Return the array of a part of our tensor; the inverse of `put`."""
    rows = tensor.chunk(part.shares)[part.share].numpy()
    array = rows.reshape([part.shape[axis] for axis in part.axes]).transpose(np.argsort(part.axes))
    return np.ascontiguousarray(array)
