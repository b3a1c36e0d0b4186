"""Random changes of training images, drawn per sample: the same at any rank, thread count and restart.

`TrainTransform` is what a training uses: its `crop` says which part of an image the loader takes, before it is decoded;
the loop applies the rest to a batch: the same crops where the loader took none (`augment`), RandAugment, mixup, CutMix,
MoCo's views.
The numbers come from `uniform`, a hash of (seed, position in the training stream), see `order.sample_positions`.
"""

from ray_jobs.augment.batch import augment
from ray_jobs.augment.crops import CROPPING, Crops, RandomCrop, crop_boxes, crops
from ray_jobs.augment.random import uniform
from ray_jobs.augment.transform import TrainTransform

__all__ = ["CROPPING", "Crops", "RandomCrop", "TrainTransform", "augment", "crop_boxes", "crops", "uniform"]
