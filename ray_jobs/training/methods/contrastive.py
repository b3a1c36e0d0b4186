"""Objective contrastive: MoCo v3, with a projector, a predictor and a momentum encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ray_jobs.training.engine import Engine
from ray_jobs.training.methods.base import Method
from ray_jobs.training.optim import MicroBatch
from vit_model import compute
from vit_model.build import Network
from vit_model.model import ViT
from vit_model.objectives.contrastive import MoCo, MomentumEncoder
from vit_model.objectives.momentum import momentum
from vit_model.parts import ParameterGroups


class Contrastive(Method):
    """Recognises an image's other view among the other views of the batch."""

    passes = 2

    def module(self, model: Network) -> ParameterGroups:
        assert isinstance(model, ViT)
        settings, seed = self.config.contrastive, self.config.seed
        task = MoCo(model, settings.hidden_width, settings.output_width, settings.temperature, seed=seed)
        self._momentum_encoder = self.beside["momentum_encoder"] = MomentumEncoder(task)
        return task

    def loss(self, engine: Engine, batch: MicroBatch) -> Tensor:
        first, second = map(self.inputs, batch.views)
        depth = self.drop_path_draws(batch)
        with torch.autocast(first.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            keys = self._momentum_encoder.keys(first, second, *depth)
        return engine(first, second, *keys, *depth)

    def after_step(self, module: Any, step: int) -> None:
        share = momentum(step, self.config.steps, self.config.contrastive.momentum)
        self._momentum_encoder.update(module, share)

    @property
    def train_flops(self) -> int:
        hidden, output = self.config.contrastive.hidden_width, self.config.contrastive.output_width
        projector = hidden * (self.vit.width + hidden + output) + 2 * 2 * hidden  # weights, including norms
        predictor = 2 * hidden * output + 2 * hidden
        keys = compute.forward_flops(self.vit) + 2 * projector
        return super().train_flops + self.passes * (6 * (projector + predictor) + keys)
