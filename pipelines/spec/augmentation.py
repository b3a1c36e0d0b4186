"""The augmentation fields of recipes. `ray_jobs.augment` implements them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vit_model.fields import Frozen, later

Augmentation = Literal[
    "none",
    "flip",
    "shift",
    "shift_flip",
    "crop_flip",
    "resized_crop_flip",
    "scale_jitter_flip",
    "squash_crop",
    "squash_crop_flip",
]
"""The first augmentation of each training image. Flips are left to right, with probability 1/2.

none               nothing
flip               a flip
shift              by one pixel at most in each direction, zeros coming in: for tiny images
shift_flip         the same and a flip
crop_flip          the Inception crop of ViT's pretraining (area 5-100 %, aspect 3/4-4/3, side lengths uniform), a flip
resized_crop_flip  torchvision's RandomResizedCrop (area 8-100 % uniform, aspect 3/4-4/3 log-uniform) and a flip
scale_jitter_flip  large-scale jitter (Ghiasi et al. 2021): 0.1 to 2 times as large; then a part of the model's size, or
                   the whole image somewhere among zeros; and a flip
squash_crop        6/7 of each side, anywhere: squashed to 448, of that 384, as BiT fine-tunes
squash_crop_flip   the same and a flip
"""


class RandAugment(Frozen):
    """`layers` random operations out of 16 on each image, always applied (Cubuk et al., arXiv 1909.13719)."""

    layers: int = Field(2, ge=1, le=16)
    magnitude: float = Field(
        ge=0,
        le=30,
        description="10 is the maximum of the original; AugReg uses 0, which still changes images, to 20",
    )


def mixing(name: str) -> Any:
    """Declare a field for the alpha of mixup or cutmix."""
    return later(
        0.0,
        ge=0,
        le=1000,
        description=f"{name} of each image with the one before it in the global batch, the weight of each step drawn"
        " from Beta(alpha, alpha); 0: none. With both mixup and cutmix each step is one or the other",
    )


class EvalCrop(Frozen):
    """How evaluation and prediction make an image square, without augmentation.

    The authors squash after fine-tuning; big_vision takes the middle, of 256 for 224 pixels (crop_fraction 0.875) after
    pretraining and of 448 for 384 (0.857143) after fine-tuning. Its few-shot evaluation squashes to 256, and then takes
    the middle.
    """

    crop: Literal["squash", "center"] = Field(
        description="squash: resize to a square; center: resize the shorter side; then crop the center"
    )
    crop_fraction: float = Field(1.0, gt=0, le=1, description="the fraction of the shorter side that is kept")
    interpolation: Literal["bilinear", "bicubic", "bilinear_aliased"] | None = later(
        None,
        description="bilinear_aliased: without antialiasing, as TensorFlow; null: as the model's contract says",
    )
