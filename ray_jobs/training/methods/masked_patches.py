"""Objective masked_patches, alone and as an auxiliary task beside labels."""

from __future__ import annotations

import torch
from torch import Tensor

from ray_jobs.augment import uniform
from ray_jobs.training.engine import Engine
from ray_jobs.training.methods.base import Method
from ray_jobs.training.optim import MicroBatch
from vit_model.build import Network
from vit_model.model import ViT
from vit_model.objectives.masked_patches import DRAWS, MaskedPatches, PatchesBesideLabels
from vit_model.parts import ParameterGroups


class Patches(Method):
    """Predicts corrupted patches."""

    def module(self, model: Network) -> ParameterGroups:
        assert isinstance(model, ViT)
        return MaskedPatches(model, self.config.patch_target)

    def loss(self, engine: Engine, batch: MicroBatch) -> Tensor:
        (images,) = batch.views
        draws = self.draws(batch)
        return engine(self.inputs(images), images, draws, *self.drop_path_draws(batch))

    def draws(self, batch: MicroBatch) -> Tensor:
        """Return the samples' draws, [n, patches, 2]."""
        draws = uniform(self.config.seed, batch.positions, self.vit.num_patches * DRAWS, "masked patches")
        return torch.from_numpy(draws).view(-1, self.vit.num_patches, DRAWS).to(self.device)


class LabelsAndPatches(Patches):
    """Learns labels on whole images and, in another pass, predicts corrupted patches."""

    passes = 2

    def module(self, model: Network) -> ParameterGroups:
        assert isinstance(model, ViT)
        return PatchesBesideLabels(model, self.config.patch_target)

    def loss(self, engine: Engine, batch: MicroBatch) -> Tensor:
        assert self.config.auxiliary is not None
        (images,) = batch.views
        draws = self.draws(batch)
        logits, patch_loss = engine(self.inputs(images), images, draws, *self.drop_path_draws(batch))
        supervised = self.cross_entropy(logits, batch.targets, self.config.label_smoothing)
        return supervised + self.config.auxiliary.masked_patches * patch_loss
