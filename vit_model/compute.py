"""What a model costs, from its configuration alone: operations, memory, device time. Nothing is built.

In: a `ViTConfig`. Out: numbers; importing this imports neither torch nor numpy.
Use: `train_flops(ViTConfig.variant("B/16", image_size=224))`; `config.num_parameters` counts parameters.

Counted are matrix products and convolutions, a multiplication with its addition as one MAC or two FLOPs; softmax,
norms, GELU, biases and sums are not, as in the paper's own figures (table 6, which this reproduces).
Letters: N tokens, n patches, d width, m width of the MLP, p patch size, c channels, h heads.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from vit_model.config import ViTConfig, stem_channels, stem_parameters

TPUV3_CORE_FLOPS = 61.5e12
"""Peak of a TPUv3 core in bfloat16: half of a chip's 123 TFLOP/s (Google Cloud's documentation of TPU v3)."""
TPUV3_UTILISATION = 0.38
"""The mean of what the paper's table 2 implies: 0.32 for H/14 on JFT (2.5k core-days), 0.43 for L/16 on JFT (0.68k)
and 0.39 for L/16 on ImageNet-21k, 90 epochs (0.23k)."""


def forward_macs(config: ViTConfig) -> int:
    """Multiply-accumulates of one image's forward pass, n c p^2 d + blocks (N (4 d^2 + 2 d m) + 2 N^2 d) + d classes.

    To these come a hybrid's stem, scores of relative positions, the tanh layer, a MAP head and DeiT's second
    classifier; in axial blocks a token meets its row or its column and not all N.
    """
    width, mlp, tokens = config.width, config.mlp_dim, config.num_tokens
    total = _patch_values(config) * width + _stem_macs(config)
    total += config.num_blocks * tokens * (4 * width * width + 2 * width * mlp)
    total += 2 * tokens * _keys(config) * width
    total += config.num_blocks * tokens * (2 * tokens - 1) * width * (config.position == "relative")
    if config.pooling == "map":
        total += 2 * tokens * (width * width + width) + 2 * width * width + 2 * width * mlp
    total += width * width * config.representation_head
    return total + width * config.num_classes * (1 + config.distillation)


def forward_flops(config: ViTConfig) -> int:
    """Floating-point operations of one image's forward pass: two for each MAC."""
    return 2 * forward_macs(config)


def train_flops(config: ViTConfig) -> int:
    """Floating-point operations of a training step, by image: the backward pass takes twice the forward's.

    What gradient checkpointing computes again is not counted.
    """
    return 3 * forward_flops(config)


def exaflops(config: ViTConfig, images: float) -> float:
    """10^18 floating-point operations of training on this many images, each counted as often as it is seen."""
    return train_flops(config) * images / 1e18


def device_hours(exaflops: float, peak_flops: float, utilisation: float) -> float:
    """Hours on one device of `peak_flops` operations a second, of which training reaches the part `utilisation`.

    Raises ValueError for a peak that is not positive or a utilisation that is not in (0, 1].
    """
    if not (peak_flops > 0 and 0 < utilisation <= 1):
        raise ValueError(f"peak_flops {peak_flops} must be > 0 and utilisation {utilisation} in (0, 1]")
    return exaflops * 1e18 / (peak_flops * utilisation) / 3600


def tpuv3_core_days(exaflops: float, utilisation: float = TPUV3_UTILISATION) -> float:
    """The unit of the paper's table 2; two cores are a chip."""
    return device_hours(exaflops, TPUV3_CORE_FLOPS, utilisation) / 24


class ModelStates(NamedTuple):
    """Bytes of a model's states on one worker."""

    weights: int
    gradients: int
    optimizer: int


def model_state_bytes(parameters: int, zero_stage: int, workers: int, value_bytes: int = 2) -> ModelStates:
    """What one worker holds under ZeRO (Rajbhandari et al. 2020, section 3): 16 bytes a parameter with stage 0.

    Weights and gradients have `value_bytes` each: 2 in bfloat16, 4 in float32. The optimizer has 12: a float32 copy
    of the weights (DeepSpeed makes one in float32 too) and Adam's two moments. Stage 1 divides the optimizer's
    states among the workers, 2 the gradients too, 3 the weights too. Communication buffers are not counted.

    Raises ValueError for a stage that is not 0 to 3, or no workers.
    """
    if zero_stage not in (0, 1, 2, 3) or workers < 1:
        raise ValueError(f"zero_stage {zero_stage} must be 0, 1, 2 or 3, and workers {workers} at least 1")
    weights, gradients, optimizer = (
        size * -(-parameters // (workers if zero_stage >= first else 1))
        for size, first in ((value_bytes, 3), (value_bytes, 2), (12, 1))
    )
    return ModelStates(weights, gradients, optimizer)


def activation_bytes(
    config: ViTConfig,
    images: int,
    *,
    value_bytes: int = 2,
    fused_attention: bool = True,
    checkpointing: bool = False,
) -> int:
    """Bytes that the forward pass of a training step keeps for the backward pass, from the images to the logits.

    All in one dtype of `value_bytes` (2: bfloat16, 4: float32), without compilation. A block keeps of each token
    its own input (d), what the first norm gives (d), queries, keys and values (3d), the mixed values (d), the sum
    (d), what the second norm gives (d), and the MLP before and after its GELU (2m): 8d + 2m; and float32 mean and
    deviation of both norms. Fused attention keeps a float32 sum for each query and head; plain attention the float32
    weights, N h for each query, and their copy in a smaller dtype. LayerScale keeps 2d more, quick GELU m,
    dropout a byte for each value that it may drop (2d + m). With checkpointing each block keeps its input and one
    block at a time is computed again.

    Not in it: the loss, what operators need while they run, fragmentation, weights and their gradients.
    """
    width, mlp, tokens = config.width, config.mlp_dim, config.num_tokens
    values = tokens * (8 * width + (2 + (config.gelu == "quick")) * mlp)
    values += 2 * tokens * width * (config.layer_scale is not None)
    block = values * value_bytes + 4 * 4 * tokens
    block += tokens * (2 * width + mlp) * (config.dropout > 0)
    weights = tokens * config.num_heads * _keys(config) // config.num_blocks
    relative = config.position == "relative"
    if relative:
        block += (tokens * width + tokens * config.num_heads * (2 * tokens - 1)) * value_bytes
    if fused_attention and not relative:
        block += 4 * tokens * config.num_heads
    else:
        block += weights * (4 if value_bytes == 4 else 4 + value_bytes)
    total = config.num_blocks * block
    if checkpointing:
        total = config.num_blocks * tokens * width * value_bytes + block

    outside = _patch_values(config) + tokens * width * config.norm_first
    outside += width if config.norm_after_pooling else tokens * width  # the last norm's input
    if config.pooling == "map":
        outside += 3 * tokens * width + 4 * width + 2 * mlp
    else:
        outside += tokens * width if config.pooling == "cls" else width
    outside += 2 * width * config.representation_head
    kept = images * (total + outside * value_bytes + _stem_kept(config, value_bytes))
    # A hybrid's standardised kernels, before and after they are divided by their deviation.
    return kept + (
        0 if config.stem is None else 2 * stem_parameters(config.stem, config.in_channels) * value_bytes
    )


def _keys(config: ViTConfig) -> int:
    """Tokens that a token attends to, summed over the blocks."""
    return config.depth * (sum(config.grid) if config.axial else config.num_tokens)


def _patch_values(config: ViTConfig) -> int:
    """Numbers that the patch embedding maps to tokens: pixels, or a hybrid's features."""
    channels = config.in_channels if config.stem is None else stem_channels(config.stem)
    return config.num_patches * channels * (config.patch_size // config.stem_stride) ** 2


class _Unit(NamedTuple):
    """A bottleneck of a hybrid's stem (`vit_model.resnet.StemUnit`)."""

    channels: int
    middle: int
    before: tuple[int, int]
    """(height, width) of its input; its 3x3 convolution has the stride."""
    after: tuple[int, int]
    shortcut: bool

    @property
    def macs(self) -> int:
        before, after = math.prod(self.before), math.prod(self.after)
        out = 4 * self.middle
        around = self.channels * out * after * self.shortcut
        return self.channels * self.middle * before + (9 * self.middle + out) * self.middle * after + around

    @property
    def kept(self) -> int:
        """Values for the backward pass: the input of each norm, each relu's output, the padded 3x3 input."""
        before, after = math.prod(self.before), math.prod(self.after)
        border = 2 if self.before == self.after else 1
        padded = (self.before[0] + border) * (self.before[1] + border)
        return self.middle * (2 * before + padded + 2 * after) + 4 * self.middle * after * (2 + self.shortcut)


def _stem_units(config: ViTConfig) -> Iterator[_Unit]:
    channels, size = 64, (config.image_shape[0] // 4, config.image_shape[1] // 4)
    for stage, units in enumerate(config.stem or ()):
        middle = 64 * 2**stage
        for unit in range(units):
            after = (size[0] // 2, size[1] // 2) if stage and not unit else size
            yield _Unit(channels, middle, size, after, shortcut=not unit)
            channels, size = 4 * middle, after


def _stem_macs(config: ViTConfig) -> int:
    if config.stem is None:
        return 0
    height, width = config.image_shape
    root = 7 * 7 * config.in_channels * 64 * (height // 2) * (width // 2)
    return root + sum(unit.macs for unit in _stem_units(config))


def _stem_kept(config: ViTConfig, value_bytes: int) -> int:
    """Bytes by image: in the root the padded image, the norm's input, relu's output, the pooling's and its indices."""
    if config.stem is None:
        return 0
    height, width = config.image_shape
    values = config.in_channels * (height + 5) * (width + 5) + 64 * (height // 2) * (width // 2) * 2
    values += 64 * (height // 2 + 1) * (width // 2 + 1)
    values += 64 * (height // 4) * (width // 4) * (len(config.stem) > 0)  # else the patches are its only copy
    values += sum(unit.kept for unit in _stem_units(config))
    return values * value_bytes + 8 * 64 * (height // 4) * (width // 4)
