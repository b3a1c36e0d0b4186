"""What a fine-tuning costs on this machine: its model's forward pass, and whole steps of its training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ray_jobs.augment import depth_draws
from ray_jobs.evaluation import measuring
from ray_jobs.evaluation.cost import Cost
from ray_jobs.process import devices
from ray_jobs.training.fit import start, start_model
from ray_jobs.training.task import Task
from vit_model.objectives.losses import softmax_cross_entropy
from vit_model.preprocessing import normalise


def finetuning_cost(task: Task) -> Cost:
    """Measure the forward pass as test images get it, and steps with the task's batch, optimizer and frozen parts.

    The weights are those that its fits start from.
    """
    config, contract = task.config, task.contract
    forward = measuring.forward_cost(
        lambda: start_model(task, config.seed), contract, torch.float32, config.threads
    )
    on = devices.device()
    dtype = devices.torch_dtype(config.dtype, on)
    parts = config.gradient_accumulation_steps
    images = measuring.random_images(contract, config.batch_size // (parts * config.workers), on)
    labels = torch.arange(len(images), device=on) % len(contract.class_names)
    depth = depth_draws(contract.architecture, config.seed, np.arange(len(images)), on)

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
