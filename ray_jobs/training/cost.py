"""Measure what a fine-tuning costs on this machine: a forward pass, a training step, and a whole fit."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from pipelines.scratch import scratch_folder
from pipelines.spec import Finetune, Model
from ray_jobs.augment import drop_path_draws
from ray_jobs.data.columns import Sample
from ray_jobs.data.samples import write_samples
from ray_jobs.data.shards import Dataset, Images, ImageSize, open_dataset
from ray_jobs.evaluation import measuring
from ray_jobs.evaluation.cost import Cost
from ray_jobs.process import devices
from ray_jobs.training.contract import model_contract
from ray_jobs.training.fit import classifier, fit, start
from ray_jobs.training.task import Task
from vit_model.objectives.losses import softmax_cross_entropy
from vit_model.preprocessing import normalise

STEPS = 4  # that a measured fit does
FITS, SECONDS = 3, 10.0  # that are measured; after these seconds no other one begins


def finetuning_cost(task: Task) -> Cost:
    """Measure a forward pass as for test images, and training steps with the task's batch, optimizer and frozen parts.

    The model has the weights that the task's fits start from.
    """
    config, contract = task.config, task.contract
    forward = measuring.forward_cost(
        lambda: classifier(task, config.seed), contract, torch.float32, config.threads or 1
    )
    on = devices.device()
    dtype = devices.torch_dtype(config.dtype, on)
    parts = config.gradient_accumulation_steps
    images = measuring.random_images(contract, config.batch_size // (parts * config.workers), on)
    labels = torch.arange(len(images), device=on) % len(contract.class_names)
    depth = drop_path_draws(contract.architecture, config.seed, np.arange(len(images)), on)

    def prepare() -> Callable[[], None]:
        _, engine, _ = start(task, task.learning_rate, config.seed)

        def run() -> None:
            for _ in range(parts):
                logits = engine(normalise(images, contract.preprocessing, dtype), *depth)
                engine.backward(softmax_cross_entropy(logits, labels, config.label_smoothing))
            engine.step(task.learning_rate)

        return run

    measured = measuring.measure(prepare, on)
    return forward.model_copy(update={"training": measuring.speed(measured, parts * len(images), dtype)})


def images_per_second(
    size: Model, resolution: int, batch_size: int, threads: int, dtype: Literal["bfloat16", "float32"]
) -> list[tuple[float, float]]:
    """Return speeds of fine-tunings from scratch on random pixels, on one GPU or these threads.

    Returns:
        (images per second of each, and how many they would be on a machine that does nothing else, by the CPU's time).
    """
    speeds: list[tuple[float, float]] = []
    first = time.perf_counter()
    with scratch_folder() as folder:
        data = _random_dataset(folder, resolution, batch_size)
        images = Images(data, data.index("train"))
        for steps in (1, *[STEPS] * FITS):  # the first run warms up
            began, busy = time.perf_counter(), time.process_time()
            if len(speeds) > 1 and began - first > SECONDS:
                break
            config = Finetune(
                job="finetune",
                data="random",
                model=size,
                resolution=resolution,
                learning_rates=(1e-4,),
                steps=steps,
                batch_size=batch_size,
                augment="crop_flip",
                threads=threads,
                dtype=dtype,
            )
            task = Task(config, model_contract(size, resolution, data.info), None)
            with contextlib.redirect_stdout(io.StringIO()):  # hide its progress
                fit(task, images, 1e-4, seed=0)
            seconds, cpu = time.perf_counter() - began, (time.process_time() - busy) / threads
            alone = min(seconds, cpu) if devices.device().type == "cpu" else seconds
            speeds.append((steps * batch_size / seconds, steps * batch_size / alone))
    return speeds[1:]


def _random_dataset(folder: Path, resolution: int, count: int) -> Dataset:
    rng = np.random.default_rng(0)
    samples = [
        Sample(str(number), str(number), pixels.tobytes(), "raw", resolution, resolution, 3, number % 2)
        for number, pixels in enumerate(rng.integers(0, 256, (count, resolution, resolution, 3), np.uint8))
    ]
    image = ImageSize(height=resolution, width=resolution, channels=3)
    write_samples(folder, "random", ("a", "b"), image, {"train": samples})
    return open_dataset(folder)
