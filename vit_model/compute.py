"""The floating-point operations of a model, from its configuration alone. No model is built.

In: a `ViTConfig` or `ResNetConfig`. Out: numbers. The module imports neither torch nor numpy.
Use: `train_flops(ViTConfig.variant("B/16", image_size=224))`; `config.num_parameters` counts parameters.

Matrix products and convolutions are counted, a multiplication with its addition as one MAC or two FLOPs; softmax,
norms, GELU, biases and sums are not. The paper counts in the same way: this reproduces its table 6 for ViTs. All tokens
count in every block, even if the implementation skips some, so that figures are comparable.
Letters: N tokens, n patches, d width, m width of the MLP, p patch size, c channels, h heads.
"""

import math
from typing import Literal

from vit_model.config import Architecture, LoRAOptions, MaeOptions, ResNetConfig, ViTConfig
from vit_model.variants import bottleneck_stages, stem_channels


def forward_macs(config: Architecture, mae: MaeOptions | None = None) -> int:
    """Return the multiply-accumulates of one image's forward pass.

    For a ViT: n c p^2 d + blocks (N (4 d^2 + 2 d m) + 2 N^2 d) + d classes, plus a hybrid's stem, scores of relative
    positions, the third matrix of a SwiGLU, the tanh layer, a MAP head and DeiT's second classifier. In axial blocks a
    token attends to its row or column and not to all N. For a ResNet: its convolutions and its classifier.

    With `mae`, a ViT's blocks see the visible patches, and the decoder is added.
    """
    width, convolutions = config.width, _convolution_macs(config)
    if isinstance(config, ResNetConfig):
        return convolutions + width * config.num_classes
    total = convolutions + _patch_values(config) * width
    if mae is not None:
        return total + _autoencoder_macs(config, mae)
    mlp, tokens = config.mlp_dim, config.num_tokens
    total += _block_macs(config, tokens)
    total += config.num_blocks * tokens * (2 * tokens - 1) * width * (config.position == "relative")
    if config.pooling == "map":
        total += 2 * tokens * (width * width + width) + 2 * width * width + (2 + config.is_gated) * width * mlp
    total += width * width * config.representation_head
    return total + width * config.num_classes * (1 + config.distillation)


def _block_macs(config: ViTConfig, tokens: int) -> int:
    """Return the MACs of all blocks for this number of tokens, without scores of relative positions."""
    width, mlp = config.width, config.mlp_dim
    total = config.num_blocks * tokens * (4 * width * width + (2 + config.is_gated) * width * mlp)
    return total + 2 * tokens * _keys(config, tokens) * width


def _autoencoder_macs(config: ViTConfig, mae: MaeOptions) -> int:
    """Return the MACs of a masked autoencoder after its patch embedding."""
    decoder, seen = mae.decoder(config), config.num_prefix_tokens + mae.visible(config.num_patches)
    masked = config.num_tokens - seen
    total = _block_macs(config, seen) + _block_macs(decoder, config.num_tokens)
    pixels = config.in_channels * config.patch_size**2
    return total + decoder.width * (seen * config.width + masked * pixels)


def forward_flops(config: Architecture, mae: MaeOptions | None = None) -> int:
    """Return the floating-point operations of one image's forward pass, two per MAC."""
    return 2 * forward_macs(config, mae)


def train_flops(config: Architecture, mae: MaeOptions | None = None) -> int:
    """Return the floating-point operations of a training step per image; the backward pass takes twice the forward's.

    Recomputation by gradient checkpointing is not counted.
    """
    return 3 * forward_flops(config, mae)


def restricted_train_flops(config: Architecture, trained: Literal["head", "biases"] | LoRAOptions) -> int:
    """Return `train_flops` if only some weights are trained.

    With "head", the backward pass ends there. Otherwise it goes through all layers, but only the head and LoRA's
    matrices have products for gradients of weights.
    """
    forward = forward_flops(config)
    heads = 1 + (isinstance(config, ViTConfig) and config.distillation)
    head = 2 * config.width * config.num_classes * heads
    if trained == "head":
        return forward + head
    total = 2 * forward + head
    if isinstance(config, ViTConfig):  # in the products of attention, both sides need a gradient
        total += 4 * config.num_tokens * _keys(config, config.num_tokens) * config.width
        if isinstance(trained, LoRAOptions):
            matrices = config.num_blocks * len(trained.targets) * 2 * trained.rank * config.width
            total += 6 * config.num_tokens * matrices
    return total


def _keys(config: ViTConfig, tokens: int) -> int:
    """Return the number of tokens that each of `tokens` tokens attends to, summed over the blocks."""
    return config.depth * (sum(config.grid) if config.axial else tokens)


def _patch_values(config: ViTConfig) -> int:
    """Return the number of values that the patch embedding maps to tokens: pixels, or a hybrid's features."""
    channels = config.in_channels if config.stem is None else stem_channels(config.stem)
    return config.num_patches * channels * (config.patch_size // config.stem_stride) ** 2


def _convolution_macs(config: Architecture) -> int:
    """Return the MACs of the convolutions of a ResNet or a hybrid's stem."""
    if isinstance(config, ResNetConfig):
        stages, root = config.stages, 64 * config.width_factor
    else:
        stages, root = bottleneck_stages(config.stem or ()), 64 * (config.stem is not None)
    total = 7 * 7 * config.in_channels * root * math.prod(_strided(config.image_shape, 2))
    size = _strided(config.image_shape, 4)
    for stage in stages:
        before, size = math.prod(size), _strided(size, stage.stride)
        after = math.prod(size)
        # Each kernel is applied at all places of the output; the first 1x1 convolution comes before the stride.
        total += stage.kernel_parameters * after + stage.in_channels * stage.middle * (before - after)
    return total


def _strided(size: tuple[int, int], stride: int) -> tuple[int, int]:
    return -(-size[0] // stride), -(-size[1] // stride)
