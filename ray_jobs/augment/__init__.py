"""Augmentation of training images, drawn per sample: the same at any rank and thread count, and after a restart.

A training uses `TrainTransform`. Its `crop` says which part of an image the loader decodes. The loop applies the rest
to a batch: the same crops if the loader took none (`augment`), RandAugment, mixup, CutMix, an objective's views. All
random numbers, including the draws of stochastic depth (`drop_path_draws`), come from `uniform`, a hash of (seed,
position in the training stream).

`mixing` imports scipy inside a function: that takes half a second, which only a training with mixup or CutMix needs.
"""

from ray_jobs.augment.batch import augment
from ray_jobs.augment.crops import CROPPING, RandomCrop, crop_boxes, crops
from ray_jobs.augment.random import drop_path_draws, dropout_seed, uniform
from ray_jobs.augment.transform import TrainTransform

__all__ = [
    "CROPPING",
    "RandomCrop",
    "TrainTransform",
    "augment",
    "crop_boxes",
    "crops",
    "drop_path_draws",
    "dropout_seed",
    "uniform",
]
