"""The augmentation of a training as one object: the loader's crop, and what the loop applies to a batch.

Use:

    transform = TrainTransform(config, seed, len(class_names), from_files=dataset.info.image is None)
    with Loader(images, sampler, preprocessing, crop=transform.crop) as batches:
        for step, (positions, images, labels) in enumerate(batches):
            views, targets = transform(images, labels, positions, step)

All random numbers are functions of the seed and of positions or steps (`uniform`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipelines.spec import Finetune, Pretrain, objective_properties
from ray_jobs.augment import mixing
from ray_jobs.augment.batch import augment
from ray_jobs.augment.colour import JITTER_DRAWS, jitter
from ray_jobs.augment.crops import CROPPING, RandomCrop
from ray_jobs.augment.randaugment import randaugment
from ray_jobs.augment.random import uniform
from ray_jobs.augment.views import View, make_views, views_of


@dataclass(frozen=True)
class TrainTransform:
    """The configured augmentation: random crop and flip, changes of colour, RandAugment, then mixup or CutMix; or an
    objective's views.

    `from_files` says that the dataset stores image files, not pixels. Files are cropped while they are decoded, at full
    resolution. Stored pixels are cropped on the device, and so are several views, because they need the whole image.
    """

    config: Pretrain | Finetune
    seed: int
    num_classes: int
    from_files: bool

    @property
    def views(self) -> tuple[View, ...]:
        """The views that each image becomes; () if the objective compares none."""
        if isinstance(self.config, Pretrain) and objective_properties(self.config.objective).views > 1:
            return views_of(self.config)
        return ()

    @property
    def crop(self) -> RandomCrop | None:
        """The loader's crop; None if it delivers whole images."""
        policy = self.config.augment
        # A flip alone does not need the original image.
        if not self.from_files or self.views or policy not in CROPPING or policy == "flip":
            return None
        return RandomCrop(policy, self.seed)

    def __call__(
        self, images: Tensor, labels: Tensor, positions: NDArray[np.int64], step: int
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Augment a worker's share of the global batch of `step`; all workers call this together.

        Args:
            images: uint8 [n, h, w, c] from the loader, on any device.
            labels: int64 [n], or bool [n, num_classes].
            positions: [n], the numbers of the samples over the whole training.

        Returns:
            One or more views, uint8 [n, h, w, c]; and the targets: the labels, or probabilities [n, num_classes] of
            mixed images.
        """
        config, seed = self.config, self.seed
        if self.views:
            return make_views(images, self.views, config.augment, seed, positions), labels
        if self.crop is None:
            images = augment(images, config.augment, seed, positions)
        if config.color_jitter:
            strengths = dict.fromkeys(("brightness", "contrast", "saturation"), config.color_jitter)
            images = jitter(images, uniform(seed, positions, JITTER_DRAWS, "color_jitter"), strengths)
        if config.randaugment is not None:
            layers, magnitude = config.randaugment.layers, config.randaugment.magnitude
            images = randaugment(images, layers, magnitude, seed, positions)
        mix = mixing.plan(config.mixup, config.cutmix, seed, step, *images.shape[1:3])
        if mix is not None:
            images, labels = mixing.mix(images, labels, self.num_classes, mix)
        return (images,), labels
