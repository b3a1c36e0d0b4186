"""What a training will take, from its configuration alone: operations, memory of each worker or fit.

In: a configuration, an architecture, the number of workers. Out: numbers, lines for the log, or an error.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ray_jobs.process import devices
from ray_jobs.training import optim
from ray_jobs.training.engine import EngineBytes, plain_bytes, state_bytes
from ray_jobs.training.methods import Method
from ray_jobs.training.methods.base import activation_bytes
from ray_jobs.training.task import Task
from ray_jobs.training.workers import Worker, micro_batch_share
from vit_model import compute
from vit_model.build import build
from vit_model.config import ViTConfig
from vit_model.errors import UserError

_MIB, _GIB = 2**20, 2**30
_CERTAIN = 0.85  # of an estimate, which is within 15% of what is used (docs/zero.md)
_ADVICE = (
    "For fewer activations use more workers on other devices, activation_checkpointing, more"
    " gradient_accumulation_steps or a smaller batch_size; for the rest, a higher zero_stage with more workers, or a"
    " smaller model"
)
_ADVICE_FOR_FITS = (
    "For fewer activations use activation_checkpointing, more gradient_accumulation_steps, a smaller batch_size or a"
    " lower resolution; for the rest, a smaller model"
)


class Memory(NamedTuple):
    """What a worker needs, in bytes."""

    activations: int
    engine: EngineBytes
    frozen: int = 0
    """of the weights of a teacher or momentum encoder; their forward pass keeps nothing"""

    @property
    def most(self) -> int:
        """What it needs at a time, at most."""
        states, buffers, late = self.engine
        return self.frozen + sum(states) + buffers - late + max(self.activations, late)


def memory(method: Method, world: int) -> Memory:
    """Estimate the memory of each of `world` workers on devices like the method's.

    Raises:
        UserError: the workers cannot share a micro-batch evenly.
    """
    config, architecture = method.config, method.contract.architecture
    activations = method.activation_bytes(micro_batch_share(config, world))
    parameters = architecture.num_parameters + method.added_parameters
    matrices = compute.block_matrices(architecture) if isinstance(architecture, ViTConfig) else 0
    engine = state_bytes(parameters, config, world, method.dtype.itemsize, matrices)
    return Memory(activations, engine, method.frozen_bytes)


def fit_memory(task: Task, device: torch.device) -> Memory:
    """Estimate the memory of each worker of a fit of a fine-tuning on a device like this one.

    Frozen blocks keep nothing of their forward pass, so with `freeze: backbone` or N activations are left out.
    """
    config, architecture = task.config, task.contract.architecture
    dtype = devices.torch_dtype(config.dtype, device)
    images = math.ceil(config.batch_size / (config.workers * config.gradient_accumulation_steps))
    activations = 0
    if config.freeze in (None, "all_but_biases"):
        trained: compute.Trained = config.lora or ("all" if config.freeze is None else "biases")
        checkpointing = config.activation_checkpointing
        activations = activation_bytes(architecture, images, device, dtype, checkpointing, trained)
    parameters = trained_parameters(task)
    added = 0
    if config.lora is not None:
        assert isinstance(architecture, ViTConfig), "checked against the backbone"
        added = compute.lora_parameters(architecture, config.lora)
    frozen = architecture.num_parameters + added - parameters
    states = plain_bytes(parameters, config.optimizer, dtype.itemsize, frozen=frozen)
    return Memory(activations, states)


def trained_parameters(task: Task) -> int:
    """Return how many weights a fit trains, those of LoRA's matrices included."""
    config, architecture = task.config, task.contract.architecture
    if config.freeze is None and config.lora is None:
        return architecture.num_parameters
    with torch.device("meta"):
        model = build(architecture)
    optim.restrict(model, config)
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def fit_flops(task: Task) -> int:
    """Return the floating-point operations of a step of a fit per image; with `freeze: N` as if all were trained."""
    config, architecture = task.config, task.contract.architecture
    if config.lora is not None:
        return compute.restricted_train_flops(architecture, config.lora)
    if config.freeze == "backbone":
        return compute.restricted_train_flops(architecture, "head")
    if config.freeze == "all_but_biases":
        return compute.restricted_train_flops(architecture, "biases")
    return compute.train_flops(architecture)


def check(method: Method, worker: Worker) -> None:
    """Check that a worker's device can hold a pretraining; the first worker prints what it will take.

    Raises:
        UserError: it certainly cannot, or the workers cannot share a micro-batch evenly.
    """
    needed, is_shared = memory(method, worker.world), method.device.type != "cuda"
    if worker.rank == 0:
        print(*lines(method, worker.world, needed), sep="\n", flush=True)
    require(needed, devices.memory(method.device), worker.local_world if is_shared else 1)


def require(needed: Memory, there: int, workers: int) -> None:
    """Check that a device with `there` bytes of memory, shared by `workers` workers, can hold what each needs.

    Raises:
        UserError: it certainly cannot.
    """
    _require("each worker", needed, there, workers, _ADVICE)


def require_fit(task: Task, device: torch.device) -> None:
    """Check that a device can hold a fit of a fine-tuning.

    Raises:
        UserError: it certainly cannot.
    """
    _require("a fit", fit_memory(task, device), devices.memory(device), 1, _ADVICE_FOR_FITS)


def _require(who: str, needed: Memory, there: int, workers: int, advice: str) -> None:
    if _CERTAIN * needed.most * workers <= there:
        return
    states = needed.most - needed.activations
    raise UserError(
        f"memory: {who} needs about {needed.most / _GIB:,.1f} GiB ({needed.activations / _GIB:,.1f} for"
        f" activations, {states / _GIB:,.1f} for weights, gradients and optimizer states), but its"
        f" {'device' if workers == 1 else f'machine, which {workers} workers share,'} has {there / _GIB:,.1f} GiB."
        f" {advice}"
    )


def lines(method: Method, world: int, needed: Memory) -> tuple[str, str, str]:
    """Describe what the configuration implies in three lines: the batch, operations, and memory per worker."""
    config, flops = method.config, method.train_flops
    exaflops = flops * config.steps * config.batch_size / 1e18
    images, parts = micro_batch_share(config, world), config.gradient_accumulation_steps
    states, buffers, _ = needed.engine
    of_teacher = f", {method.teacher_flops / 1e9:.4g} of them the teacher's" if method.teacher_flops else ""
    return (
        f"batch: {config.batch_size:,} images = {world} {'worker' if world == 1 else 'workers'}"
        f" x {parts} {'micro-batch' if parts == 1 else 'micro-batches'} x {images:,} images",
        f"compute: {method.contract.architecture.num_parameters:,} parameters"
        f" · {method.forward_flops / 1e9:.4g} GFLOPs per image forward"
        f" · {flops / 1e9:.4g} GFLOPs per image in training{of_teacher}"
        f" · {exaflops:.4g} exaFLOPs in {config.steps:,} steps of {config.batch_size:,} images"
        f" · {compute.tpuv3_core_days(exaflops):.2g} TPUv3-core-days",
        f"estimated memory per worker (of {world}): {needed.most / _MIB:,.1f} MiB at most"
        f" · {needed.activations / _MIB:,.1f} MiB activations of {images:,} images"
        f" · {states.weights / _MIB:,.1f} MiB weights · {states.gradients / _MIB:,.1f} MiB gradients"
        f" · {states.optimizer / _MIB:,.1f} MiB optimizer states · {buffers / _MIB:,.1f} MiB buffers"
        f"{f' · {needed.frozen / _MIB:,.1f} MiB {method.frozen}' if needed.frozen else ''}"
        f" (ZeRO-{config.zero_stage})",
    )
