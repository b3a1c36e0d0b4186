"""What is trained: three sizes of model, on random pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.spec import Pretrain
from ray_jobs.data.columns import Sample
from ray_jobs.data.samples import write_samples
from ray_jobs.data.shards import ImageSize


class Size(NamedTuple):
    """A pretraining; `batch` are the images of a step of all workers together."""

    fields: dict[str, Any]
    image: ImageSize
    classes: int
    images: int
    batch: int
    warm: int
    """steps before the clock starts"""
    steps: int
    """steps in all"""
    saved_every: int
    """steps between checkpoints, in the arm that often writes one"""

    def config(self, **fields: Any) -> Pretrain:
        """Return the configuration of the pretraining."""
        given = {"job": "pretrain", "data": "noise", "steps": self.steps, "batch_size": self.batch}
        return Pretrain.model_validate(given | {"learning_rate": 1e-3} | self.fields | fields)


def _at_224(variant: str, batch: int, steps: int, saved_every: int) -> Size:
    fields = {"model": variant, "resolution": 224, "augment": "crop_flip"}
    return Size(fields, ImageSize(height=256, width=256, channels=3), 1000, 128, batch, 2, steps, saved_every)


SIZES = {
    "quickstart": Size(
        {
            "model": {"patch_size": 2, "width": 64, "depth": 4, "num_heads": 4, "gelu": "exact"},
            "resolution": 8,
            "augment": "shift",
        },
        ImageSize(height=8, width=8, channels=1),
        classes=648,  # as the glyphs
        images=20_480,
        batch=256,
        warm=30,
        steps=180,
        saved_every=15,
    ),
    "Ti/16": _at_224("Ti/16", 32, 10, 4),
    "S/16": _at_224("S/16", 32, 8, 3),
}


def write_noise(folder: Path, size: Size) -> None:
    """Write the dataset of a size: raw random pixels, all for training."""
    rng, image = np.random.default_rng(0), size.image
    shape = (image.height, image.width, image.channels)
    samples = [
        Sample(str(number), str(number), rng.bytes(int(np.prod(shape))), "raw", *shape, number % size.classes)
        for number in range(size.images)
    ]
    names = [str(label) for label in range(size.classes)]
    write_samples(folder, "noise", names, image, {"train": samples})
