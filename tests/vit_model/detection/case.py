"""Maps, weights and boxes on which FCOS is compared with torchvision's."""

import zlib

import numpy as np
import torch
from torch import Tensor

SIDE, CLASSES, CHANNELS, STRIDES = 64, 3, 32, (4, 8, 16)
BOXES = (
    ((3, 5, 30, 28), (8, 8, 20, 22), (40, 2, 62, 60), (10, 40, 22, 50), (10, 40, 22, 50)),
    ((1, 1, 63, 63), (20, 20, 29, 33), (50, 50, 55, 55)),
)
MEANS = {"classification_head.cls_logits.bias": -2, "regression_head.bbox_reg.bias": 3}
LABELS = ((0, 2, 1, 1, 2), (2, 0, 1))


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return numbers that the name decides, from a normal distribution."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return torch.from_numpy(rng.standard_normal(shape)).float()


def maps() -> list[Tensor]:
    """Return the maps of two images."""
    return [drawn(f"map {stride}", (2, CHANNELS, SIDE // stride, SIDE // stride)) for stride in STRIDES]


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a weight of torchvision's head by its name there: small kernels, rare classes, and boxes that overlap."""
    if len(shape) == 4:
        return 0.05 * drawn(name, shape)
    if name in MEANS:
        return drawn(name, shape) + MEANS[name]
    return 1 + 0.1 * drawn(name, shape) if name.endswith("weight") else 0.1 * drawn(name, shape)
