"""Objectives softmax and sigmoid: a classifier learns the labels."""

from __future__ import annotations

from torch import Tensor

from ray_jobs.training.engine import Engine
from ray_jobs.training.methods.base import Method
from ray_jobs.training.optim import MicroBatch
from vit_model.build import Network
from vit_model.parts import ParameterGroups


class Supervised(Method):
    """Trains the model itself."""

    def module(self, model: Network) -> ParameterGroups:
        return model

    def loss(self, engine: Engine, batch: MicroBatch) -> Tensor:
        (images,) = batch.views
        logits = engine(self.inputs(images), *self.drop_path_draws(batch))
        return self.cross_entropy(logits, batch.targets, self.config.label_smoothing)
