"""Objectives softmax and sigmoid: a classifier learns the labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ray_jobs.training.methods.base import Method
from vit_model.build import Network
from vit_model.parts import ParameterGroups


class Supervised(Method):
    """Trains the model itself."""

    def module(self, model: Network) -> ParameterGroups:
        return model

    def loss(
        self,
        engine: Callable[..., Any],
        views: tuple[Tensor, ...],
        targets: Tensor,
        positions: NDArray[np.int64],
    ) -> Tensor:
        (images,) = views
        logits = engine(self.inputs(images), *self.drop_path_draws(positions))
        return self.cross_entropy(logits, targets, self.config.label_smoothing)
