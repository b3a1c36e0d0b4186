"""What the families of models share: the check of their input, and how kernels are drawn."""

import math

import torch
from torch import Tensor, nn

from vit_model.config import ResNetConfig, ViTConfig


def check_images(images: Tensor, config: ViTConfig | ResNetConfig, dtype: torch.dtype) -> None:
    """Raise ValueError unless images are [b, c, height, width] as configured, of the dtype of the weights.

    Under autocast every floating dtype is right.
    """
    expected = (config.in_channels, *config.image_shape)
    if tuple(images.shape[1:]) != expected:
        raise ValueError(
            f"images have shape {list(images.shape)}; this model needs [b, {', '.join(map(str, expected))}]"
        )
    if images.dtype == dtype:
        return  # before autocast is asked about: the meta device has none
    if not (images.is_floating_point() and torch.is_autocast_enabled(images.device.type)):
        raise ValueError(f"images are {images.dtype}, the model's weights {dtype}")


def lecun_normal_(drawn: Tensor, generator: torch.Generator) -> None:
    """Variance 1 / fan-in for a kernel [out, in, ...], cut at two standard deviations."""
    # Cutting a normal there leaves 0.8796 of its spread.
    std = math.sqrt(1 / drawn[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std, generator=generator)
