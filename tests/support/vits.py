"""Small ViTs with weights that no test can overlook, and transformers to compare them with."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vit_model.build import build
from vit_model.config import Architecture
from vit_model.contract import ModelContract, Preprocessing

TINY: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "width": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_dim": 32,
}
SMALL: dict[str, Any] = {
    "image_size": 12,
    "patch_size": 4,
    "width": 32,
    "depth": 3,
    "num_heads": 4,
    "mlp_dim": 48,
    "num_classes": 7,
}

OPTIONS: list[dict[str, Any]] = [
    {"pooling": "gap"},
    {"pooling": "gap", "class_token": True},
    {"pooling": "gap", "class_token": True, "class_position": False, "norm_after_pooling": True},
    {"pooling": "map"},
    {"pooling": "map", "class_token": True, "registers": 2},
    {"distillation": True},
    {"registers": 3, "class_position": False},
    {"position": "none"},
    {"position": "learned2d"},
    {"position": "sincos2d", "pooling": "gap"},
    {"position": "sincos2d_moco"},
    {"position": "relative"},
    {"position": "rope", "registers": 1, "image_size": (12, 20), "gelu": "swiglu"},
    {"gelu": "swiglu", "pooling": "map"},
    {"position_at": "every_layer"},
    {"position_at": "every_layer", "position": "learned2d", "image_size": (12, 20)},
    {"position_at": "shared"},
    {"axial": True, "pooling": "gap"},
    {"axial": True, "pooling": "gap", "position_at": "every_layer", "image_size": (8, 12)},
    {"norm_first": True, "patch_bias": False, "gelu": "quick"},
    {"layer_scale": 0.1, "stochastic_depth": 0.3},
    {"residual": False, "in_channels": 1},
    {"representation_head": True},
    {"image_size": (8, 20)},
    {"stem": (1, 2), "patch_size": 8, "image_size": (32, 48)},
    {"stem": (), "patch_size": 8, "image_size": (16, 32)},
]
"""What can be chosen beside sizes, for `SMALL`."""


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of a normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_images(config: Architecture, count: int = 3, seed: int = 1) -> Tensor:
    """Noise that a model of this configuration takes for images."""
    return noise(count, config.in_channels, *config.image_shape, seed=seed)


def randomised(of: Any, seed: int = 0) -> Any:
    """A model, or that of a configuration: every weight away from zero and one, so that none can be forgotten."""
    model = of if isinstance(of, nn.Module) else build(of)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1)
    return model


def contract_for(
    config: Architecture, names: Sequence[str] | None = None, license_name: str | None = None, **pixels: Any
) -> ModelContract:
    """A contract: classes are called 0, 1, ..., pixels go from -1 to 1, unless something else is given."""
    half = (0.5,) * config.in_channels
    pixels = {"mean": half, "std": half, "resolution": config.image_shape[0]} | pixels
    # not validated, because images of a network need not be square
    return ModelContract.model_construct(
        architecture=config,
        class_names=tuple(map(str, range(config.num_classes)) if names is None else names),
        preprocessing=Preprocessing.model_validate({"channels": config.in_channels} | pixels),
        training_data="sha256:" + "0" * 64,
        license=license_name,
    )


@cache
def transformers() -> Any:
    """The package, which takes 3 s to import its models; without it, the test is skipped."""
    package = pytest.importorskip("transformers")
    package.logging.set_verbosity_error()
    package.logging.disable_progress_bar()
    return package
