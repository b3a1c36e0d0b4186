"""The cost of a model, from its configuration alone: operations, memory, device time. No model is built.

In: a `ViTConfig` or `ResNetConfig`. Out: numbers. The module imports neither torch nor numpy.
Use: `train_flops(ViTConfig.variant("B/16", image_size=224))`; `config.num_parameters` counts parameters.

Matrix products and convolutions are counted, a multiplication with its addition as one MAC or two FLOPs; softmax,
norms, GELU, biases and sums are not. The paper counts in the same way: this reproduces its table 6 for ViTs. All tokens
count in every block, even if the implementation skips some, so that figures are comparable.
Letters: N tokens, n patches, d width, m width of the MLP, p patch size, c channels, h heads.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from vit_model.config import Architecture, LoRAOptions, MaeOptions, ResNetConfig, ViTConfig
from vit_model.variants import BottleneckStage, bottleneck_stages, stem_channels, stem_parameters

Trained = Literal["all", "biases"] | LoRAOptions
"""Which weights a training changes: all, biases and the head, or LoRA's matrices and the head."""

TPUV3_CORE_FLOPS = 61.5e12
"""Peak of a TPUv3 core in bfloat16: half of a chip's 123 TFLOP/s (Google Cloud's documentation of TPU v3)."""
TPUV3_UTILISATION = 0.38
"""The mean of what the paper's table 2 implies: 0.32 for H/14 on JFT (2.5k core-days), 0.43 for L/16 on JFT (0.68k)
and 0.39 for L/16 on ImageNet-21k, 90 epochs (0.23k)."""


def forward_macs(config: Architecture, mae: MaeOptions | None = None) -> int:
    """Return the multiply-accumulates of one image's forward pass.

    For a ViT: n c p^2 d + blocks (N (4 d^2 + 2 d m) + 2 N^2 d) + d classes, plus a hybrid's stem, scores of relative
    positions, the tanh layer, a MAP head and DeiT's second classifier. In axial blocks a token attends to its row or
    column and not to all N. For a ResNet: its convolutions and its classifier.

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
        total += 2 * tokens * (width * width + width) + 2 * width * width + 2 * width * mlp
    total += width * width * config.representation_head
    return total + width * config.num_classes * (1 + config.distillation)


def _block_macs(config: ViTConfig, tokens: int) -> int:
    """Return what all blocks take with so many tokens, scores of relative positions apart."""
    width, mlp = config.width, config.mlp_dim
    total = config.num_blocks * tokens * (4 * width * width + 2 * width * mlp)
    return total + 2 * tokens * _keys(config, tokens) * width


def _autoencoder_macs(config: ViTConfig, mae: MaeOptions) -> int:
    """Return what a masked autoencoder takes after its patch embedding."""
    decoder, seen = mae.decoder(config), seen_tokens(config, mae)
    masked = config.num_tokens - seen
    total = _block_macs(config, seen) + _block_macs(decoder, config.num_tokens)
    pixels = config.in_channels * config.patch_size**2
    return total + decoder.width * (seen * config.width + masked * pixels)


def seen_tokens(config: ViTConfig, mae: MaeOptions) -> int:
    """Return the number of tokens that a masked autoencoder's encoder sees."""
    return config.num_prefix_tokens + mae.visible(config.num_patches)


def block_matrices(config: ViTConfig) -> int:
    """Return the number of weights in the matrices of a ViT's blocks: of attention, 4 w^2, and of the MLP, 2 w m."""
    return config.num_blocks * (4 * config.width**2 + 2 * config.width * config.mlp_dim)


def lora_parameters(config: ViTConfig, lora: LoRAOptions) -> int:
    """Return the number of weights in LoRA's matrices: A and B of each target in each block."""
    return config.num_blocks * len(lora.targets) * 2 * lora.rank * config.width


def decoder_parameters(config: ViTConfig, mae: MaeOptions) -> int:
    """Return the number of a masked autoencoder's weights outside its encoder."""
    decoder, pixels = mae.decoder(config), config.in_channels * config.patch_size**2
    # What its shape has as a patch embedding, [w, pixels] and [w], is its last layer's weights and its first's biases.
    return decoder.num_parameters + config.width * decoder.width + decoder.width + pixels


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
            total += 6 * config.num_tokens * lora_parameters(config, trained)
    return total


def tpuv3_core_days(exaflops: float, utilisation: float = TPUV3_UTILISATION) -> float:
    """Return TPUv3-core-days, the unit of the paper's table 2; a chip has two cores."""
    return exaflops * 1e18 / (TPUV3_CORE_FLOPS * utilisation) / 3600 / 24


class ModelStates(NamedTuple):
    """Bytes of a model's states on one worker."""

    weights: int
    gradients: int
    optimizer: int


def model_state_bytes(
    parameters: int, zero_stage: int, workers: int, value_bytes: int = 2, optimizer_bytes: int = 12
) -> ModelStates:
    """Return what one worker holds under ZeRO (Rajbhandari et al. 2020, section 3): 16 bytes per parameter at stage 0.

    Weights and gradients have `value_bytes` each: 2 in bfloat16, 4 in float32. The optimizer has `optimizer_bytes`: a
    float32 copy of the weights (DeepSpeed makes it even for float32) and, with 12, Adam's two moments. Stage 1 divides
    the optimizer's states among the workers, stage 2 also the gradients, stage 3 also the weights. Buffers are not
    counted; `ray_jobs.training.engine.state_bytes` has what pretraining really holds.
    """
    weights, gradients, optimizer = (
        size * -(-parameters // (workers if zero_stage >= first else 1))
        for size, first in ((value_bytes, 3), (value_bytes, 2), (optimizer_bytes, 1))
    )
    return ModelStates(weights, gradients, optimizer)


def activation_bytes(
    config: Architecture,
    images: int,
    *,
    value_bytes: int = 2,
    fused_attention: bool = True,
    checkpointing: bool = False,
    trained: Trained = "all",
) -> int:
    """Return the bytes that a training step's forward pass keeps for the backward pass, from the images to the logits.

    Everything has one dtype of `value_bytes` (2: bfloat16, 4: float32), without compilation. Per token, a block keeps
    its input (d), the output of the first norm (d), queries, keys and values (3d), the mixed values (d), the sum (d),
    the output of the second norm (d), and the MLP before and after its GELU (2m): 8d + 2m; also the float32 mean and
    deviation of both norms. Fused attention keeps a float32 sum per query and head. Plain attention, which relative
    positions always use here, keeps float32 weights, N h per query, and their copy in a smaller dtype. LayerScale keeps
    2d more, quick GELU m, dropout one byte per value that it may drop (2d + m; `value_bytes` on a CPU). With
    checkpointing each block only keeps its input, and one block at a time is recomputed. A convolution keeps its input,
    its norm's input, the output of ReLU and a padded copy if there is one.

    A matrix that is not `trained` does not keep its input, and LayerScale then keeps nothing. In a ViT that leaves 6d +
    m of a block, and with plain attention 5d + m. LoRA keeps its inputs (d; with dropout d per target, and masks), the
    rank's values, and with fused attention its sums with queries, keys or values; nothing before the first block.

    Not included: the loss, temporary memory of operators, fragmentation, weights and their gradients. The result is
    within 1% of what autograd keeps in float32 and bfloat16 on a CPU, and within 15% if only biases are trained, or
    LoRA of queries and values (`tests/vit_model/test_compute.py`).
    """
    convolutions = images * _convolution_bytes(config, value_bytes)
    if isinstance(config, ResNetConfig):
        # Standardised kernels, before and after division by their deviation.
        return convolutions + 2 * config.num_parameters * value_bytes
    block = _block_bytes(config, config.num_tokens, value_bytes, fused_attention)
    if trained != "all":
        block -= value_bytes * config.num_tokens * _inputs_not_kept(config, fused_attention)
    if isinstance(trained, LoRAOptions):
        block += config.num_tokens * _lora_bytes(config, trained, value_bytes, fused_attention)
    if checkpointing:
        blocks = config.num_blocks * config.num_tokens * config.width * value_bytes + block
    else:
        blocks = config.num_blocks * block
    kernels = 0 if config.stem is None else 2 * stem_parameters(config.stem, config.in_channels)
    kept = blocks + (_values_outside(config) - (trained != "all") * _patch_values(config)) * value_bytes
    kept += config.num_tokens * config.width * (config.dropout > 0)  # after the positions
    if isinstance(trained, LoRAOptions):  # the first block's input has no gradient, so its norm keeps nothing
        return images * (kept - config.num_tokens * config.width * value_bytes)
    return images * kept + convolutions + kernels * value_bytes


def autoencoder_activation_bytes(
    config: ViTConfig,
    mae: MaeOptions,
    images: int,
    *,
    value_bytes: int = 2,
    fused_attention: tuple[bool, bool] = (True, True),
    checkpointing: bool = False,
) -> int:
    """Return `activation_bytes` of a masked autoencoder, from the images to the predicted pixels.

    Its encoder sees the visible patches and its decoder all tokens; `fused_attention` is for the two of them.
    """
    decoder, seen = mae.decoder(config), seen_tokens(config, mae)
    masked, everything = config.num_tokens - seen, config.num_tokens
    parts = ((config, seen), (decoder, everything))
    blocks = [
        _block_bytes(part, tokens, value_bytes, fused)
        for (part, tokens), fused in zip(parts, fused_attention, strict=True)
    ]
    if checkpointing:
        inputs = sum(part.num_blocks * tokens * part.width for part, tokens in parts)
        kept = inputs * value_bytes + max(blocks)
    else:
        kept = sum(part.num_blocks * block for (part, _), block in zip(parts, blocks, strict=True))
    # Patches; all tokens, of which some are gathered, and which; norms' inputs and outputs.
    values = _patch_values(config) + (1 + config.norm_first) * everything * config.width
    values += 2 * seen * config.width
    values += (everything + masked) * decoder.width
    kept += values * value_bytes + 8 * config.num_patches
    return images * (kept + everything * config.width * (config.dropout > 0))


def _block_bytes(config: ViTConfig, tokens: int, value_bytes: int, fused_attention: bool) -> int:
    """Return the bytes that one block keeps per image of so many tokens."""
    width, mlp, heads = config.width, config.mlp_dim, config.num_heads
    values = tokens * (8 * width + (2 + (config.gelu == "quick")) * mlp)
    values += 2 * tokens * width * (config.layer_scale is not None)
    relative = config.position == "relative"
    if relative:  # scaled queries, and their products with the embeddings of all distances
        values += tokens * width + tokens * heads * (2 * tokens - 1)
    kept = values * value_bytes + 4 * 4 * tokens + tokens * (2 * width + mlp) * (config.dropout > 0)
    if fused_attention and not relative:
        return kept + 4 * tokens * heads
    weights = tokens * heads * _keys(config, tokens) // config.num_blocks
    return kept + weights * (4 if value_bytes == 4 else 4 + value_bytes)


def _inputs_not_kept(config: ViTConfig, fused_attention: bool) -> int:
    """Return the values per token that a block keeps only because its matrices are trained: some of their inputs."""
    is_fused = fused_attention and config.position != "relative"  # then attention itself keeps what it mixed
    scaled = 2 * (config.layer_scale is not None)
    return (scaled + (2 if is_fused else 3)) * config.width + config.mlp_dim


def _lora_bytes(config: ViTConfig, lora: LoRAOptions, value_bytes: int, fused_attention: bool) -> int:
    """Return the bytes that LoRA keeps per token of a block."""
    width, inner = config.width, [target for target in lora.targets if target != "proj"]
    values = len(lora.targets) * lora.rank
    if (
        fused_attention and len(inner) < 3
    ):  # their sums, beside the stacked projections, of which some are kept
        values += len(inner) * width
    inputs = len(lora.targets) if lora.dropout else bool(inner) + ("proj" in lora.targets)
    masks = len(lora.targets) * width if lora.dropout else 0
    return (values + inputs * width) * value_bytes + masks


def _values_outside(config: ViTConfig) -> int:
    """Return the values kept per image outside a ViT's blocks: patches, first and last norm, pooling, tanh layer."""
    width, sequence = config.width, config.num_tokens * config.width
    values = _patch_values(config) + sequence * config.norm_first
    values += width if config.norm_after_pooling else sequence
    if config.pooling == "map":
        values += 3 * sequence + 4 * width + 2 * config.mlp_dim
    else:
        values += sequence if config.pooling == "cls" else width
    return values + 2 * width * config.representation_head


def _keys(config: ViTConfig, tokens: int) -> int:
    """Return the number of tokens that each of so many tokens attends to, summed over the blocks."""
    return config.depth * (sum(config.grid) if config.axial else tokens)


def _patch_values(config: ViTConfig) -> int:
    """Return the number of values that the patch embedding maps to tokens: pixels, or a hybrid's features."""
    channels = config.in_channels if config.stem is None else stem_channels(config.stem)
    return config.num_patches * channels * (config.patch_size // config.stem_stride) ** 2


# ---------------------------------------------------------------------------- convolutions: ResNets and stems


class _Unit(NamedTuple):
    """A bottleneck of `vit_model.resnet`."""

    channels: int
    middle: int
    before: tuple[int, int]
    """(height, width) of its input; its 3x3 convolution has the stride."""
    after: tuple[int, int]
    shortcut: bool


def _units(stages: list[BottleneckStage], size: tuple[int, int]) -> Iterator[_Unit]:
    """Yield all bottlenecks in order; `size` is the size of the first one's input."""
    for stage in stages:
        channels, stride = stage.in_channels, stage.stride
        for unit in range(stage.units):
            after = _strided(size, stride)
            yield _Unit(channels, stage.middle, size, after, shortcut=not unit)
            channels, stride, size = stage.out_channels, 1, after


def _strided(size: tuple[int, int], stride: int) -> tuple[int, int]:
    return -(-size[0] // stride), -(-size[1] // stride)


def _stages(config: Architecture) -> tuple[list[BottleneckStage], int]:
    """Return the convolutional stages, and the channels of the 7x7 convolution and pooling before them (0: none)."""
    if isinstance(config, ResNetConfig):
        return config.stages, 64 * config.width_factor
    return bottleneck_stages(config.stem or ()), 64 * (config.stem is not None)


def _convolution_macs(config: Architecture) -> int:
    stages, root = _stages(config)
    total = 7 * 7 * config.in_channels * root * math.prod(_strided(config.image_shape, 2))
    for channels, middle, size, size_after, shortcut in _units(stages, _strided(config.image_shape, 4)):
        before, after = math.prod(size), math.prod(size_after)
        total += channels * middle * before + (9 * middle + 4 * middle) * middle * after
        total += channels * 4 * middle * after * shortcut
    return total


def _convolution_bytes(config: Architecture, value_bytes: int) -> int:
    """Return the bytes that convolutions, their norms and ReLUs, and the pooling keep per image."""
    stages, root = _stages(config)
    if not root:
        return 0
    (height, width), half, pooled = (_strided(config.image_shape, stride) for stride in (1, 2, 4))
    indices = 8 * root * math.prod(pooled)
    if isinstance(config, ResNetConfig):
        # The norm comes first: of each unit its input and relu's output, and the same before its later convolutions.
        values = config.in_channels * height * width + root * (half[0] + 2) * (half[1] + 2)
        for unit in _units(stages, pooled):
            values += 2 * (unit.channels + unit.middle) * math.prod(unit.before)
            values += 2 * unit.middle * math.prod(unit.after)
        values += 2 * config.width * math.prod(config.grid) + config.width
        return values * value_bytes + indices
    # Each norm's input and relu's output, and the padded copies of what 7x7, pooling and 3x3 take.
    values = config.in_channels * (height + 5) * (width + 5) + root * 2 * math.prod(half)
    values += root * (half[0] + 1) * (half[1] + 1)
    values += root * math.prod(pooled) * bool(stages)  # else the patches are its only copy
    for unit in _units(stages, pooled):
        border = 2 if unit.before == unit.after else 1
        values += unit.middle * (unit.before[0] + border) * (unit.before[1] + border)
        values += 2 * unit.middle * (math.prod(unit.before) + math.prod(unit.after))
        values += 4 * unit.middle * math.prod(unit.after) * (2 + unit.shortcut)
    return values * value_bytes + indices
