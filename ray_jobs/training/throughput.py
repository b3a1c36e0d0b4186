"""Measure how fast a model trains on this machine, with the loop that the finetune stage runs."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

import numpy as np

from pipelines.scratch import scratch_folder
from pipelines.spec import Finetune, Model
from ray_jobs.data.columns import Sample
from ray_jobs.data.samples import write_samples
from ray_jobs.data.shards import Dataset, Images, ImageSize, open_dataset
from ray_jobs.training.contract import model_contract
from ray_jobs.training.fit import fit
from ray_jobs.training.task import Task

STEPS = 4


def images_per_second(size: Model, resolution: int, batch_size: int) -> float:
    """Return the images per second of fine-tuning from scratch on random pixels, on one GPU or one core."""
    seconds = []
    with scratch_folder() as folder:
        data = _random_dataset(folder, resolution, batch_size)
        images = Images(data, data.index("train"))
        for steps in (1, STEPS):  # the first run warms up
            config = Finetune(
                job="finetune",
                data="random",
                model=size,
                resolution=resolution,
                learning_rates=(1e-4,),
                steps=steps,
                batch_size=batch_size,
                augment="crop_flip",
            )
            began = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):  # hide its progress
                fit(
                    Task(config, model_contract(size, resolution, data.info), None),
                    images,
                    1e-4,
                    seed=0,
                )
            seconds.append(time.perf_counter() - began)
    return STEPS * batch_size / seconds[-1]


def _random_dataset(folder: Path, resolution: int, count: int) -> Dataset:
    rng = np.random.default_rng(0)
    samples = [
        Sample(str(number), str(number), pixels.tobytes(), "raw", resolution, resolution, 3, number % 2)
        for number, pixels in enumerate(rng.integers(0, 256, (count, resolution, resolution, 3), np.uint8))
    ]
    image = ImageSize(height=resolution, width=resolution, channels=3)
    write_samples(folder, "random", ("a", "b"), image, {"train": samples})
    return open_dataset(folder)
