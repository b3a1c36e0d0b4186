"""Measure how fast a model trains on this machine, with the loop that the finetune stage runs."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from pipelines.spec import Finetune, Model
from ray_jobs.data.columns import INDEX, Sample
from ray_jobs.data.images import examine_pixels
from ray_jobs.data.shards import (
    Dataset,
    Images,
    ImageSize,
    Shard,
    open_dataset,
    shard_file,
    write_dataset,
    write_shard,
)
from ray_jobs.training.contract import model_contract
from ray_jobs.training.fit import fit
from ray_jobs.training.task import Task

STEPS = 4


def images_per_second(size: Model, resolution: int, batch_size: int) -> float:
    """Return the images per second of fine-tuning from scratch on random pixels, on one GPU or one core."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="vitflow-speed-") as folder:
        data = _random_dataset(Path(folder), resolution, batch_size)
        images = Images(data, data.index("train"))
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
            with contextlib.redirect_stdout(io.StringIO()):  # hide its progress
                fit(Task(config, model_contract(size, resolution, data.info), None), images, 1e-4, seed=0)
            seconds.append(time.perf_counter() - began)
    return STEPS * batch_size / seconds[-1]


def _random_dataset(folder: Path, resolution: int, count: int) -> Dataset:
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    rows: list[dict[str, Any]] = []
    for number in range(count):
        pixels = rng.integers(0, 256, (resolution, resolution, 3), dtype=np.uint8)
        facts, data = examine_pixels(pixels), pixels.tobytes()
        sample = Sample(str(number), str(number), data, "raw", resolution, resolution, 3, number % 2)
        samples.append(sample)
        checksum = xxhash.xxh3_64_intdigest(data)
        stored = {"content_id": str(number), "length": len(data), "checksum": checksum}
        rows.append(sample._asdict() | facts.columns() | stored)
    offsets = write_shard(folder / shard_file(0), samples)
    for row, offset in zip(rows, offsets, strict=True):
        row.pop("image")
        row |= {"split": "train", "shard": 0, "offset": offset}
    shard = Shard(file=shard_file(0), rows=count, bytes=(folder / shard_file(0)).stat().st_size)
    index = pa.Table.from_pylist(rows, schema=INDEX)
    image = ImageSize(height=resolution, width=resolution, channels=3)
    write_dataset(folder, "random", ("a", "b"), image, [shard], index)
    return open_dataset(folder)
