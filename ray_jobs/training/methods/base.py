"""The base class of pretraining methods, with the costs of a method that only runs the model once per step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from pipelines.spec import Pretrain, objective_properties
from ray_jobs.augment import drop_path_draws
from ray_jobs.process import devices
from ray_jobs.training.engine import Engine
from ray_jobs.training.optim import MicroBatch
from vit_model import compute
from vit_model.build import Network
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract
from vit_model.objectives.losses import CROSS_ENTROPIES
from vit_model.parts import ParameterGroups
from vit_model.preprocessing import normalise


class Method(ABC):
    """An objective of a pretraining.

    The loop calls it for the module to train (`module`, once), for losses, and for their cost.
    """

    passes = 1
    """how often a step runs the model on each image"""
    result: str | None = None
    """the key in `beside` of the moving average whose model is the result; None: the trained model is the result"""

    def __init__(self, config: Pretrain, contract: ModelContract, device: torch.device) -> None:
        self.config, self.contract, self.device = config, contract, device
        self.dtype = devices.torch_dtype(config.dtype, device)
        self.beside: dict[str, torch.nn.Module] = {}
        """{kind of its shards in a checkpoint: a module that the optimizer does not train}, filled by `module`"""

    @abstractmethod
    def module(self, model: Network) -> ParameterGroups:
        """Return the module to train, which contains the model at its `model_prefix`."""

    @abstractmethod
    def loss(self, engine: Engine, batch: MicroBatch) -> Tensor:
        """Return the loss, a scalar, of a worker's share of a batch; `engine` calls the module."""

    def cross_entropy(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return the loss that trains the classifier; only for objectives that use labels."""
        kind = objective_properties(self.config.objective).classifier
        assert kind is not None
        return CROSS_ENTROPIES[kind](logits, labels, label_smoothing)

    def after_step(self, module: Any, step: int) -> None:
        """Update the modules in `beside` after step number `step`, counted from 0."""
        return

    def measures(self, step: int) -> dict[str, float]:
        """Measure the last of `step` steps for the log, and warn of what is wrong; all workers call this together."""
        return {}

    @property
    def teacher_flops(self) -> int:
        """The FLOPs of an image's forward pass through a teacher."""
        return 0

    @property
    def forward_flops(self) -> int:
        """The FLOPs of a step's forward passes per image."""
        return self.passes * compute.forward_flops(self.contract.architecture)

    @property
    def train_flops(self) -> int:
        """The FLOPs of a step per image, including weights that are not trained."""
        return self.passes * compute.train_flops(self.contract.architecture)

    @property
    def vit(self) -> ViTConfig:
        """The architecture, for objectives that use patches."""
        architecture = self.contract.architecture
        assert isinstance(architecture, ViTConfig), "the configuration allows only ViTs here"
        return architecture

    def inputs(self, view: Tensor) -> Tensor:
        """Return uint8 images [n, h, w, c] normalised for the model."""
        return normalise(view, self.contract.preprocessing, self.dtype)

    def drop_path_draws(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the draws of stochastic depth for each pass over the samples."""
        return drop_path_draws(self.contract.architecture, self.config.seed, batch.positions, self.device, self.passes)
