"""The objectives of a pretraining. What every objective must do is tested with each case of this table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipelines.spec import objective_properties
from pipelines.spec.stages.pretrain import ObjectiveProperties


class Case(NamedTuple):
    """A small pretraining with an objective."""

    fields: dict[str, Any]
    """of the stage"""
    zero_stage: int
    """with which it is killed and continued"""
    loss: Callable[[Any, tuple[Tensor, ...]], Tensor] | None = None
    """(module, views as the model takes them) -> the loss by hand; None: other tests have it"""

    @property
    def properties(self) -> ObjectiveProperties:
        return objective_properties(self.fields.get("objective", "softmax"))


def softmax(module: Any, views: tuple[Tensor, ...]) -> Tensor:
    """The cross-entropy of labels 0, 1, 2, 0, ..."""
    (images,) = views
    labels = torch.from_numpy(np.arange(len(images)) % 3)
    return -F.one_hot(labels).mul(module(images).log_softmax(1)).sum(1).mean()


MOCO = {
    "objective": "contrastive",
    "augment": "resized_crop_flip",
    "contrastive": {"hidden_width": 32, "output_width": 8},
}
DINO = {
    "objective": "dino",
    "augment": "resized_crop_flip",
    "dino": {
        "local_crops": 3,
        "local_size": 4,
        "hidden_width": 32,
        "bottleneck_width": 8,
        "output_width": 24,
        "freeze_last_layer": 0.05,
    },
}
MAE = {"objective": "mae", "mae": {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}}
SOFT = {"kind": "soft", "temperature": 3.0}
CASES: dict[str, Case] = {
    "softmax": Case({}, zero_stage=3, loss=softmax),
    "sigmoid": Case({"objective": "sigmoid"}, zero_stage=1),
    "masked_patches": Case({"objective": "masked_patches", "patch_target": "pixels"}, zero_stage=2),
    "labels and patches": Case({"auxiliary": {"masked_patches": 0.5}}, zero_stage=3),
    "contrastive": Case(MOCO, zero_stage=1),
    "mae": Case(MAE, zero_stage=3),
    "dino": Case(DINO, zero_stage=2),
    "distillation": Case({"objective": "distillation", "teacher": "first", "distillation": SOFT}, zero_stage=3),
}
