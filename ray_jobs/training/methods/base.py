"""What a pretraining method states of itself; its values here are those of one pass over the model and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.spec import Pretrain, objective_properties
from ray_jobs.augment import drop_path_draws
from ray_jobs.process import devices
from vit_model import compute
from vit_model.blocks import is_fused
from vit_model.build import Network
from vit_model.config import Architecture, ViTConfig
from vit_model.contract import ModelContract
from vit_model.objectives.losses import CROSS_ENTROPIES
from vit_model.parts import ParameterGroups
from vit_model.preprocessing import normalise


class Method(ABC):
    """An objective of a pretraining.

    First it is asked what it costs, before anything is allocated; then for the module to train (`module`, once) and for
    losses.
    """

    passes = 1
    """how often a step computes each image"""
    added_parameters = 0
    """trained weights beside the model's"""
    frozen_bytes = 0
    """of weights that are not trained; their forward pass keeps nothing"""
    frozen = ""
    """what these weights are, for the log"""
    teacher_flops = 0
    """of an image's forward pass through a teacher"""

    def __init__(self, config: Pretrain, contract: ModelContract, device: torch.device) -> None:
        self.config, self.contract, self.device = config, contract, device
        self.dtype = devices.torch_dtype(config.dtype, device)
        self.beside: dict[str, torch.nn.Module] = {}
        """{kind of its shards in a checkpoint: a module that the optimizer does not train}, made by `module`"""

    @abstractmethod
    def module(self, model: Network) -> ParameterGroups:
        """Return the module to train, which contains the model at its `model_prefix`."""

    @abstractmethod
    def loss(
        self,
        engine: Callable[..., Any],
        views: tuple[Tensor, ...],
        targets: Tensor,
        positions: NDArray[np.int64],
    ) -> Tensor:
        """Return the loss, a scalar, of a worker's share of a batch.

        Args:
            engine: calls the module.
            views: one or more batches of images from `TrainTransform`, uint8 [n, h, w, c].
            targets: labels or probabilities from `TrainTransform`.
            positions: [n], the numbers of the samples over the whole training; they decide which patches are corrupted
                or masked, and which blocks stochastic depth leaves out.
        """

    def cross_entropy(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return the loss that trains the classifier; only for objectives that use labels."""
        kind = objective_properties(self.config.objective).classifier
        assert kind is not None
        return CROSS_ENTROPIES[kind](logits, labels, label_smoothing)

    def after_step(self, module: Any, step: int) -> None:
        """Update what is `beside` the module after step number `step`, counted from 0."""
        return

    @property
    def forward_flops(self) -> int:
        """The operations of a step's forward passes per image."""
        return self.passes * compute.forward_flops(self.contract.architecture)

    @property
    def train_flops(self) -> int:
        """The operations of a step per image, those of weights that are not trained included."""
        return self.passes * compute.train_flops(self.contract.architecture)

    def activation_bytes(self, images: int) -> int:
        """Return the bytes that the forward passes of so many images keep for the backward pass."""
        checkpointing, architecture = self.config.activation_checkpointing, self.contract.architecture
        return self.passes * activation_bytes(architecture, images, self.device, self.dtype, checkpointing)

    @property
    def vit(self) -> ViTConfig:
        """The architecture, of an objective that uses patches."""
        architecture = self.contract.architecture
        assert isinstance(architecture, ViTConfig), "the configuration allows only ViTs here"
        return architecture

    def inputs(self, view: Tensor) -> Tensor:
        """Return uint8 images [n, h, w, c] as the model takes them."""
        return normalise(view, self.contract.preprocessing, self.dtype)

    def drop_path_draws(self, positions: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Return the draws of stochastic depth for each pass over the samples."""
        return drop_path_draws(
            self.contract.architecture, self.config.seed, positions, self.device, self.passes
        )


def activation_bytes(
    architecture: Architecture,
    images: int,
    device: torch.device,
    dtype: torch.dtype,
    checkpointing: bool,
    trained: compute.Trained = "all",
) -> int:
    """Return `compute.activation_bytes` on a device like this one."""
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
