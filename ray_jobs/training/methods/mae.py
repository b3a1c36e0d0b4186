"""Objective mae: a masked autoencoder; its decoder is discarded after training."""

from __future__ import annotations

import torch
from torch import Tensor

from ray_jobs.augment import uniform
from ray_jobs.training.engine import Engine
from ray_jobs.training.methods.base import Method
from ray_jobs.training.optim import MicroBatch
from vit_model import compute
from vit_model.build import Network
from vit_model.model import ViT
from vit_model.objectives.masked_autoencoder import MaskedAutoencoder
from vit_model.parts import ParameterGroups


class Autoencoder(Method):
    """Reconstructs the pixels of masked patches."""

    def module(self, model: Network) -> ParameterGroups:
        assert isinstance(model, ViT)
        return MaskedAutoencoder(model, self.config.mae, seed=self.config.seed)

    def loss(self, engine: Engine, batch: MicroBatch) -> Tensor:
        (images,) = batch.views
        drawn = uniform(self.config.seed, batch.positions, self.vit.num_patches, "masked autoencoder")
        draws = torch.from_numpy(drawn).to(self.device)
        return engine(self.inputs(images), images, draws, *self.drop_path_draws(batch))

    @property
    def forward_flops(self) -> int:
        return compute.forward_flops(self.vit, self.config.mae)

    @property
    def train_flops(self) -> int:
        return compute.train_flops(self.vit, self.config.mae)
