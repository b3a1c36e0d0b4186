"""What a pretraining minimises: the module that is trained, and the loss of a batch.

In: the stage's configuration and a model; uint8 views of a worker's share of a batch. Out: a scalar.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.spec import Pretrain
from ray_jobs.augment import uniform
from vit_model.build import Network
from vit_model.config import ModelContract, ViTConfig
from vit_model.contrastive import MoCo, MomentumEncoder
from vit_model.masked_patches import DRAWS, MaskedPatches
from vit_model.model import ViT
from vit_model.objectives import sigmoid_cross_entropy, softmax_cross_entropy
from vit_model.preprocessing import normalise


def make_task(config: Pretrain, model: Network) -> tuple[torch.nn.Module, MomentumEncoder | None]:
    """What is trained: the model, or what an objective without labels adds to it, which calls it `model`; and MoCo's
    momentum encoder, which follows that."""
    if config.objective in ("softmax", "sigmoid"):
        return model, None
    assert isinstance(model, ViT), "the configuration allows no other"
    if config.objective == "masked_patches":
        return MaskedPatches(model, config.patch_target), None
    settings = config.contrastive
    task = MoCo(model, settings.hidden_width, settings.output_width, settings.temperature, seed=config.seed)
    return task, MomentumEncoder(task)


def batch_loss(
    engine: Any,
    config: Pretrain,
    contract: ModelContract,
    views: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    positions: NDArray[np.int64],
    dtype: torch.dtype,
    follower: MomentumEncoder | None,
) -> torch.Tensor:
    """The loss, a scalar, of a worker's share of a batch by the configuration's objective.

    `views` and `targets` are of `TrainTransform`. `positions` [n] number the samples over the whole training: they
    decide which patches are corrupted.
    """
    if follower is not None:
        one, other = (normalise(view, contract.preprocessing, dtype) for view in views)
        with torch.autocast(one.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            keys = follower.keys(one, other)
        contrastive: torch.Tensor = engine(one, other, *keys)
        return contrastive
    (images,) = views
    inputs = normalise(images, contract.preprocessing, dtype)
    if config.objective == "masked_patches":
        assert isinstance(contract.architecture, ViTConfig), "the configuration allows no other"
        patches = contract.architecture.num_patches
        draws = torch.from_numpy(uniform(config.seed, positions, patches * DRAWS, "masked patches"))
        loss: torch.Tensor = engine(inputs, images, draws.view(-1, patches, DRAWS).to(images.device))
        return loss
    cross_entropy = sigmoid_cross_entropy if config.objective == "sigmoid" else softmax_cross_entropy
    return cross_entropy(engine(inputs), targets, config.label_smoothing)
