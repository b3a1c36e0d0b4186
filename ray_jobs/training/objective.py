"""Pretraining objectives: the module to train, and the loss of a batch.

In: the stage's configuration and a model; uint8 views of a worker's share of a batch. Out: a scalar.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.spec import WITHOUT_LABELS, Pretrain
from ray_jobs.augment import depth_draws, uniform
from vit_model.build import Network
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.objectives.contrastive import MoCo, MomentumEncoder
from vit_model.objectives.distillation import Student, Teacher, imitation
from vit_model.objectives.losses import sigmoid_cross_entropy, softmax_cross_entropy
from vit_model.objectives.masked_autoencoder import MaskedAutoencoder
from vit_model.objectives.masked_patches import DRAWS, MaskedPatches, PatchesBesideLabels
from vit_model.preprocessing import normalise


def make_task(
    config: Pretrain, model: Network, teacher: Teacher | None = None
) -> tuple[torch.nn.Module, MomentumEncoder | None]:
    """Return the module to train, and MoCo's momentum encoder of it (None for other objectives).

    `model_prefix` says where the module has the model. `teacher` is that of distillation.
    """
    if config.objective == "distillation":
        assert teacher is not None
        width = teacher.model.config.width if config.distillation.kind == "features" else None
        return Student(model, width, seed=config.seed), None
    if config.objective in ("softmax", "sigmoid") and config.auxiliary is None:
        return model, None
    assert isinstance(model, ViT), "the configuration allows only ViTs here"
    if config.auxiliary is not None:
        return PatchesBesideLabels(model, config.patch_target), None
    if config.objective == "masked_patches":
        return MaskedPatches(model, config.patch_target), None
    if config.objective == "mae":
        return MaskedAutoencoder(model, config.mae, seed=config.seed), None
    settings = config.contrastive
    task = MoCo(model, settings.hidden_width, settings.output_width, settings.temperature, seed=config.seed)
    return task, MomentumEncoder(task)


def model_prefix(config: Pretrain) -> str:
    """Return what the names of the model's weights begin with in the module of `make_task`."""
    if config.auxiliary is not None:
        return "patches.model."
    return "model." if config.objective in (*WITHOUT_LABELS, "distillation") else ""


def batch_loss(
    engine: Any,
    config: Pretrain,
    contract: ModelContract,
    views: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    positions: NDArray[np.int64],
    dtype: torch.dtype,
    momentum_encoder: MomentumEncoder | None,
    teacher: Teacher | None = None,
) -> torch.Tensor:
    """Return the loss, a scalar, of a worker's share of a batch under the configuration's objective.

    Args:
        views: one or two batches of images from `TrainTransform`, uint8 [n, h, w, c].
        targets: labels or probabilities from `TrainTransform`.
        positions: [n], the numbers of the samples over the whole training; they decide which patches are corrupted or
            masked, and which blocks stochastic depth leaves out.
    """
    depth = depth_draws(contract.architecture, config.seed, positions, views[0].device, config.passes)
    if momentum_encoder is not None:
        one, other = (normalise(view, contract.preprocessing, dtype) for view in views)
        with torch.autocast(one.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            keys = momentum_encoder.keys(one, other, *depth)
        contrastive: torch.Tensor = engine(one, other, *keys, *depth)
        return contrastive
    (images,) = views
    inputs = normalise(images, contract.preprocessing, dtype)
    if config.objective in ("masked_patches", "mae"):
        draws = mask_draws(config, contract, positions).to(images.device)
        loss: torch.Tensor = engine(inputs, images, draws, *depth)
        return loss
    if teacher is not None:
        settings = config.distillation
        taught = teacher.answers(images)  # before the student's activations are kept
        logits, answers = engine(inputs, *depth)
        learned = imitation(settings.kind, answers, taught, settings.temperature)
        supervised = softmax_cross_entropy(logits, targets, config.label_smoothing)
        return (1 - settings.weight) * supervised + settings.weight * learned
    cross_entropy = sigmoid_cross_entropy if config.objective == "sigmoid" else softmax_cross_entropy
    if config.auxiliary is None:
        return cross_entropy(engine(inputs, *depth), targets, config.label_smoothing)
    draws = mask_draws(config, contract, positions).to(images.device)
    logits, of_patches = engine(inputs, images, draws, *depth)
    supervised = cross_entropy(logits, targets, config.label_smoothing)
    return supervised + config.auxiliary.masked_patches * of_patches


def mask_draws(config: Pretrain, contract: ModelContract, positions: NDArray[np.int64]) -> torch.Tensor:
    """Return the samples' draws for masked patches, [n, patches, 2], or a masked autoencoder, [n, patches]."""
    assert isinstance(contract.architecture, ViTConfig), "the configuration allows only ViTs here"
    patches = contract.architecture.num_patches
    if config.objective == "mae":
        return torch.from_numpy(uniform(config.seed, positions, patches, "masked autoencoder"))
    draws = torch.from_numpy(uniform(config.seed, positions, patches * DRAWS, "masked patches"))
    return draws.view(-1, patches, DRAWS)
