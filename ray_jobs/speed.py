"""How fast a model trains on this machine: measured with the very loop that will train it."""

from __future__ import annotations

import contextlib
import io
import time

import numpy as np

from pipelines.spec import Finetune, Model
from ray_jobs.finetune import Images, Task, fit
from ray_jobs.pretrain import model_contract
from ray_jobs.shards import DatasetInfo

STEPS = 4


def images_per_second(size: Model, resolution: int, batch_size: int) -> float:
    """Images a second of fine-tuning from scratch on random pixels: on one GPU, or on one core."""
    info = DatasetInfo(
        name="random",
        class_names=("a", "b"),
        image=None,
        splits={"train": 0, "dev": 0, "test": 0},
        shards=(),
        content_digest="random",
    )
    rng = np.random.default_rng(0)
    data = Images(
        rng.integers(0, 256, (batch_size, resolution, resolution, 3), dtype=np.uint8),
        rng.integers(0, 2, batch_size),
    )
    seconds = []
    for steps in (1, STEPS):  # the first warms up
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
        with contextlib.redirect_stdout(io.StringIO()):  # its progress is of no interest
            fit(Task(config, model_contract(size, resolution, info), None), data, 1e-4, seed=0)
        seconds.append(time.perf_counter() - began)
    return STEPS * batch_size / seconds[-1]
