"""How a training changes its images, as a recipe says it. What is done, and with which numbers: `ray_jobs.augment`."""

from __future__ import annotations

from typing import Literal

Augmentation = Literal[
    "none",
    "flip",
    "shift",
    "shift_flip",
    "crop_flip",
    "resized_crop_flip",
    "squash_crop",
    "squash_crop_flip",
]
"""What is done to each training image before anything else. Flips are left to right, of half of the images.

none               nothing
flip               a flip
shift              by one pixel at most in each direction, zeros coming in: for tiny images
shift_flip         the same and a flip
crop_flip          the Inception crop of ViT's pretraining (area 5-100 %, aspect 3/4-4/3, side lengths uniform), a flip
resized_crop_flip  torchvision's RandomResizedCrop (area 8-100 % uniform, aspect 3/4-4/3 log-uniform) and a flip
squash_crop        6/7 of each side, anywhere: squashed to 448, of that 384, as BiT fine-tunes
squash_crop_flip   the same and a flip
"""
