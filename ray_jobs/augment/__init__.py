"""Random changes of training images, drawn per sample: the same at any rank, thread count and restart.

`crops` says which part of an image is taken, before it is decoded; `augment` does the same to images [n, h, w, c] that
are already at the model's resolution; `randomise` is what follows on the device: RandAugment, mixup and CutMix.
The numbers come from `uniform`, a hash of (seed, position in the training stream), see `loader.sample_positions`.
"""

from ray_jobs.augment.batch import augment, randomise
from ray_jobs.augment.crops import CROPPING, Crops, crop_boxes, crops
from ray_jobs.augment.random import uniform

__all__ = ["CROPPING", "Crops", "augment", "crop_boxes", "crops", "randomise", "uniform"]
