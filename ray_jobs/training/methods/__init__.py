"""Pretraining methods, one module per objective: the module to train around a model, the loss of a batch, their cost.

In: the stage's configuration and the contract of the model. Out: a `Method`, which the training loop calls.
docs/add-an-objective.md shows how to add one.
"""

from __future__ import annotations

from typing import assert_never

import torch

from pipelines.spec import Pretrain
from ray_jobs.training.methods.base import Method
from ray_jobs.training.methods.contrastive import Contrastive
from ray_jobs.training.methods.dino import SelfDistillation
from ray_jobs.training.methods.distillation import Distillation
from ray_jobs.training.methods.mae import Autoencoder
from ray_jobs.training.methods.masked_patches import LabelsAndPatches, Patches
from ray_jobs.training.methods.supervised import Supervised
from ray_jobs.training.model_ref import ModelRef
from vit_model.contract import ModelContract

__all__ = ["Method", "make_method"]


def make_method(
    config: Pretrain, contract: ModelContract, device: torch.device, teacher: ModelRef | None = None
) -> Method:
    """Return the method of a configuration's objective.

    Raises:
        UserError: the teacher does not fit the data.
    """
    match config.objective:
        case "softmax" | "sigmoid":
            kind = Supervised if config.auxiliary is None else LabelsAndPatches
            return kind(config, contract, device)
        case "masked_patches":
            return Patches(config, contract, device)
        case "contrastive":
            return Contrastive(config, contract, device)
        case "mae":
            return Autoencoder(config, contract, device)
        case "distillation":
            assert teacher is not None, "the configuration names one"
            return Distillation(config, contract, device, teacher)
        case "dino":
            return SelfDistillation(config, contract, device)
        case _:
            assert_never(config.objective)
