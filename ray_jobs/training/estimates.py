"""What a training will take, from its configuration alone: operations, memory of each worker or fit.

In: a configuration, an architecture, the number of workers. Out: numbers, lines for the log, or an error.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pipelines.spec import Pretrain
from ray_jobs.process import devices
from ray_jobs.training import optim
from ray_jobs.training.engine import EngineBytes, plain_bytes, state_bytes
from ray_jobs.training.task import Task
from vit_model import compute
from vit_model.build import build
from vit_model.config import Architecture, ViTConfig
from vit_model.errors import UserError
from vit_model.model import is_fused

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


def memory(
    config: Pretrain,
    architecture: Architecture,
    world: int,
    device: torch.device,
    teacher: Architecture | None = None,
) -> Memory:
    """Estimate the memory of each of `world` workers on devices like this one.

    Raises:
        UserError: the workers cannot share a micro-batch evenly.
    """
    dtype, images = devices.torch_dtype(config.dtype, device), optim.micro_batch_share(config, world)
    parameters = architecture.num_parameters
    if config.autoencoder is not None:
        assert isinstance(architecture, ViTConfig), "the configuration allows only ViTs here"
        parameters += compute.decoder_parameters(architecture, config.autoencoder)
        sequences = compute.seen_tokens(architecture, config.autoencoder), architecture.num_tokens
        encoder_is_fused, decoder_is_fused = (is_fused(device, dtype, tokens) for tokens in sequences)
        activations = compute.autoencoder_activation_bytes(
            architecture,
            config.autoencoder,
            images,
            value_bytes=dtype.itemsize,
            fused_attention=(encoder_is_fused, decoder_is_fused),
            checkpointing=config.activation_checkpointing,
        )
    else:
        activations = _activations(architecture, images, device, dtype, config.activation_checkpointing)
    activations *= config.passes
    matrices = 0
    if config.optimizer.name == "muon":
        assert isinstance(architecture, ViTConfig), "the configuration allows only ViTs here"
        matrices = compute.block_matrices(architecture)
    frozen = 0
    if teacher is not None:
        frozen = teacher.num_parameters * dtype.itemsize
        if config.distillation.kind == "features":
            parameters += (architecture.width + 1) * teacher.width
    if config.objective == "contrastive":
        projector, predictor = moco_parameters(config, architecture)
        frozen = 4 * (parameters + projector)
        parameters += projector + predictor
    return Memory(activations, state_bytes(parameters, config, world, dtype.itemsize, matrices), frozen)


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
        activations = _activations(architecture, images, device, dtype, checkpointing, trained)
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


def _activations(
    architecture: Architecture,
    images: int,
    device: torch.device,
    dtype: torch.dtype,
    checkpointing: bool,
    trained: compute.Trained = "all",
) -> int:
    is_vit_and_fused = isinstance(architecture, ViTConfig) and is_fused(
        device, dtype, architecture.num_tokens
    )
    return compute.activation_bytes(
        architecture,
        images,
        value_bytes=dtype.itemsize,
        fused_attention=is_vit_and_fused,
        checkpointing=checkpointing,
        trained=trained,
    )


def moco_parameters(config: Pretrain, architecture: Architecture) -> tuple[int, int]:
    """Return how many weights MoCo's projector and predictor have: those of their linear layers and of the norms."""
    hidden, output = config.contrastive.hidden_width, config.contrastive.output_width
    projector = hidden * (architecture.width + hidden + output) + 2 * 2 * hidden
    return projector, 2 * hidden * output + 2 * hidden


def train_flops(config: Pretrain, architecture: Architecture, teacher: Architecture | None = None) -> int:
    """Return the floating-point operations of a training step per image.

    They are those of all passes, and of the forward passes of a teacher or momentum encoder.
    """
    flops = config.passes * compute.train_flops(architecture, config.autoencoder)
    if config.objective == "contrastive":
        projector, predictor = moco_parameters(config, architecture)
        keys = compute.forward_flops(architecture) + 2 * projector
        flops += config.passes * (6 * (projector + predictor) + keys)
    return flops + (0 if teacher is None else compute.forward_flops(teacher))


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


def lines(
    config: Pretrain,
    architecture: Architecture,
    world: int,
    needed: Memory,
    teacher: Architecture | None = None,
) -> tuple[str, str, str]:
    """Describe what the configuration implies in three lines: the batch, operations, and memory per worker."""
    forward = config.passes * compute.forward_flops(architecture, config.autoencoder)
    flops = train_flops(config, architecture, teacher)
    exaflops = flops * config.steps * config.batch_size / 1e18
    images, parts = optim.micro_batch_share(config, world), config.gradient_accumulation_steps
    states, buffers, _ = needed.engine
    frozen = "momentum encoder" if teacher is None else "teacher"
    of_teacher = (
        "" if teacher is None else f", {compute.forward_flops(teacher) / 1e9:.4g} of them the teacher's"
    )
    return (
        f"batch: {config.batch_size:,} images = {world} {'worker' if world == 1 else 'workers'}"
        f" x {parts} {'micro-batch' if parts == 1 else 'micro-batches'} x {images:,} images",
        f"compute: {architecture.num_parameters:,} parameters"
        f" · {forward / 1e9:.4g} GFLOPs per image forward"
        f" · {flops / 1e9:.4g} GFLOPs per image in training{of_teacher}"
        f" · {exaflops:.4g} exaFLOPs in {config.steps:,} steps of {config.batch_size:,} images"
        f" · {compute.tpuv3_core_days(exaflops):.2g} TPUv3-core-days",
        f"estimated memory per worker (of {world}): {needed.most / _MIB:,.1f} MiB at most"
        f" · {needed.activations / _MIB:,.1f} MiB activations of {images:,} images"
        f" · {states.weights / _MIB:,.1f} MiB weights · {states.gradients / _MIB:,.1f} MiB gradients"
        f" · {states.optimizer / _MIB:,.1f} MiB optimizer states · {buffers / _MIB:,.1f} MiB buffers"
        f"{f' · {needed.frozen / _MIB:,.1f} MiB {frozen}' if needed.frozen else ''}"
        f" (ZeRO-{config.zero_stage})",
    )
