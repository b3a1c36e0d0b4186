"""Code shared by the model families: the check of the input, and the initialisation of kernels."""

import math

import torch
from torch import Tensor, nn

from vit_model.config import ResNetConfig, ViTConfig


def check_images(images: Tensor, config: ViTConfig | ResNetConfig, dtype: torch.dtype) -> None:
    """Raise ValueError unless images are [b, c, height, width] as configured, of the dtype of the weights.

    Under autocast any floating-point dtype is allowed.
    """
    expected = (config.in_channels, *config.image_shape)
    if tuple(images.shape[1:]) != expected:
        raise ValueError(
            f"images have shape {list(images.shape)}; this model needs [b, {', '.join(map(str, expected))}]"
        )
    if images.dtype == dtype:
        return  # first, because autocast cannot be queried on the meta device
    if not (images.is_floating_point() and torch.is_autocast_enabled(images.device.type)):
        raise ValueError(f"images are {images.dtype}, but the model's weights are {dtype}")


def lecun_normal_(drawn: Tensor, generator: torch.Generator) -> None:
    """Draw a kernel [out, in, ...] with variance 1 / fan-in, truncated at two standard deviations."""
    # Truncation there leaves 0.8796 of a normal's standard deviation.
    std = math.sqrt(1 / drawn[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std, generator=generator)
