"""Objective masked_patches, and the same as an auxiliary task beside labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.spec import Pretrain
from ray_jobs.augment import uniform
from ray_jobs.training.methods.base import Method
from vit_model.build import Network
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.objectives.masked_patches import DRAWS, MaskedPatches, PatchesBesideLabels, outputs
from vit_model.parts import ParameterGroups


class Patches(Method):
    """Predicts corrupted patches."""

    def __init__(self, config: Pretrain, contract: ModelContract, device: torch.device) -> None:
        super().__init__(config, contract, device)
        # the mask vector, and a linear layer
        self.added_parameters = self.vit.width + (self.vit.width + 1) * outputs(self.vit, config.patch_target)

    def module(self, model: Network) -> ParameterGroups:
        assert isinstance(model, ViT)
        return MaskedPatches(model, self.config.patch_target)

    def loss(
        self,
        engine: Callable[..., Any],
        views: tuple[Tensor, ...],
        targets: Tensor,
        positions: NDArray[np.int64],
    ) -> Tensor:
        (images,) = views
        draws = self.draws(positions)
        loss: Tensor = engine(self.inputs(images), images, draws, *self.drop_path_draws(positions))
        return loss

    def draws(self, positions: NDArray[np.int64]) -> Tensor:
        """Return the samples' draws, [n, patches, 2]."""
        draws = uniform(self.config.seed, positions, self.vit.num_patches * DRAWS, "masked patches")
        return torch.from_numpy(draws).view(-1, self.vit.num_patches, DRAWS).to(self.device)


class LabelsAndPatches(Patches):
    """Learns labels on whole images and, in another pass, predicts corrupted patches."""

    passes = 2

    def module(self, model: Network) -> ParameterGroups:
        assert isinstance(model, ViT)
        return PatchesBesideLabels(model, self.config.patch_target)

    def loss(
        self,
        engine: Callable[..., Any],
        views: tuple[Tensor, ...],
        targets: Tensor,
        positions: NDArray[np.int64],
    ) -> Tensor:
        assert self.config.auxiliary is not None
        (images,) = views
        draws = self.draws(positions)
        logits, of_patches = engine(self.inputs(images), images, draws, *self.drop_path_draws(positions))
        supervised = self.cross_entropy(logits, targets, self.config.label_smoothing)
        return supervised + self.config.auxiliary.masked_patches * of_patches
