"""Objective contrastive: MoCo v3, with a projector, a predictor and a momentum encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.spec import Pretrain
from ray_jobs.training.methods.base import Method
from vit_model import compute
from vit_model.build import Network
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.objectives.contrastive import MoCo, MomentumEncoder, momentum
from vit_model.parts import ParameterGroups


class Contrastive(Method):
    """Recognises an image's other view among those of a batch."""

    passes = 2
    frozen = "momentum encoder"

    def __init__(self, config: Pretrain, contract: ModelContract, device: torch.device) -> None:
        super().__init__(config, contract, device)
        # the weights of the linear layers and of the norms
        hidden, output = config.contrastive.hidden_width, config.contrastive.output_width
        self._projector = hidden * (self.vit.width + hidden + output) + 2 * 2 * hidden
        self.added_parameters = self._projector + 2 * hidden * output + 2 * hidden
        self.frozen_bytes = 4 * (self.vit.num_parameters + self._projector)

    def module(self, model: Network) -> ParameterGroups:
        assert isinstance(model, ViT)
        settings, seed = self.config.contrastive, self.config.seed
        task = MoCo(model, settings.hidden_width, settings.output_width, settings.temperature, seed=seed)
        self._momentum_encoder = self.beside["momentum_encoder"] = MomentumEncoder(task)
        return task

    def loss(
        self,
        engine: Callable[..., Any],
        views: tuple[Tensor, ...],
        targets: Tensor,
        positions: NDArray[np.int64],
    ) -> Tensor:
        one, other = map(self.inputs, views)
        depth = self.drop_path_draws(positions)
        with torch.autocast(one.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            keys = self._momentum_encoder.keys(one, other, *depth)
        loss: Tensor = engine(one, other, *keys, *depth)
        return loss

    def after_step(self, module: Any, step: int) -> None:
        kept = momentum(step, self.config.steps, self.config.contrastive.momentum)
        self._momentum_encoder.update(module, kept)

    @property
    def train_flops(self) -> int:
        keys = compute.forward_flops(self.vit) + 2 * self._projector
        return super().train_flops + self.passes * (6 * self.added_parameters + keys)
