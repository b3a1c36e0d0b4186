"""Segmentation as a task of fine-tuning: the loss of a `Segmenter`, and the confusions of its pixels.

In: a `Task` with masks, and images with masks. Out: what `fit` and the fits of a sweep need in place of a classifier's
logits. Images and masks are squashed to the model's square; results are at the masks' own resolution.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ray_jobs.augment import TrainTransform, drop_path_draws
from ray_jobs.data.masks import IGNORED, Mask, decode_mask
from ray_jobs.data.shards import Images
from ray_jobs.evaluation.artifact import CONFUSIONS
from ray_jobs.evaluation.metrics import mean_iou
from ray_jobs.evaluation.rows import MEAN_IOU
from ray_jobs.evaluation.segmentation import confusion
from ray_jobs.training.detecting import crops_of
from ray_jobs.training.engine import Plain
from ray_jobs.training.evaluators import Evaluator, check_loss
from ray_jobs.training.optim import MicroBatch
from ray_jobs.training.task import Evaluation, Task
from vit_model.model import Segmenter
from vit_model.preprocessing import normalise


def make_loss(
    task: Task, engine: Plain, seed: int, data: Images, transform: TrainTransform, weights: Tensor | None
) -> Callable[[MicroBatch], Tensor]:
    """Return the loss of a fit, whose batches have row numbers of `data` as targets.

    It is the mean over images of the mean cross-entropy of their pixels with a class, so that the mean over
    micro-batches and workers is the loss of the batch; also if the classes have weights [classes].
    """
    preprocessing, masks = task.contract.preprocessing, data.dataset.masks_of(data.rows)
    side = preprocessing.resolution

    def loss(batch: MicroBatch) -> Tensor:
        (images,), rows = batch.views, batch.targets.tolist()
        depth = drop_path_draws(task.contract.architecture, seed, batch.positions, images.device)
        logits = engine.module(normalise(images, preprocessing, engine.dtype), *depth).float()
        whole = [decode_mask(masks[row]) for row in rows]
        sizes = np.array([mask.shape[::-1] for mask in whole])
        seen = zip(whole, *crops_of(transform, batch.positions, sizes, side), strict=True)
        targets = np.stack([in_crop(mask, crop, is_flipped, side) for mask, crop, is_flipped in seen])
        given = None if weights is None else weights.to(logits.device)
        return losses(logits, torch.from_numpy(targets).to(logits.device), given).mean()

    return loss


def in_crop(mask: Mask, crop: NDArray[np.float64], is_flipped: bool, side: int) -> Mask:
    """Return a mask in a crop (top, left, height, width), resized to side x side pixels: each takes the nearest.

    Pixels outside the image are ignored.
    """
    top, left, height, width = crop
    places = (np.arange(side) + 0.5) / side
    rows, columns = (np.floor(start + places * extent).astype(int) for start, extent in ((top, height), (left, width)))
    seen = mask[np.ix_(np.clip(rows, 0, mask.shape[0] - 1), np.clip(columns, 0, mask.shape[1] - 1))].copy()
    seen[(rows < 0) | (rows >= mask.shape[0])] = IGNORED
    seen[:, (columns < 0) | (columns >= mask.shape[1])] = IGNORED
    return seen[:, ::-1] if is_flipped else seen


def pixels(data: Images) -> Tensor:
    """Return how many pixels of the images' masks each class has, int64 [classes]."""
    counts = sum(np.bincount(decode_mask(mask).ravel(), minlength=256) for mask in data.dataset.masks_of(data.rows))
    return torch.from_numpy(np.asarray(counts)[: len(data.dataset.info.mask_classes)])


def losses(logits: Tensor, masks: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return each image's mean cross-entropy over its pixels with a class; 0 without any.

    Args:
        logits: of patches [b, k, rows, columns], which are resized to the masks.
        masks: uint8 [b, h, w].
        weights: of the classes [k].
    """
    large = functional.interpolate(logits, size=masks.shape[1:], mode="bilinear", align_corners=False)
    values = functional.cross_entropy(large, masks.long(), weights, ignore_index=IGNORED, reduction="none")
    known = (masks != IGNORED).sum(dim=(1, 2)).clamp(min=1)
    return values.sum(dim=(1, 2)) / known


def scored(step: int, model: Segmenter, images: Evaluator) -> tuple[Evaluation, pa.Table]:
    """Return the results after a step, and a table with CONFUSIONS of each image; all workers call this together.

    Raises:
        DivergenceError: the loss is not finite.
    """
    rows, classes = images.images.rows, model.config.num_classes
    masks = images.images.dataset.masks_of(rows)
    was_training = model.training

    def packed(chosen: Tensor, logits: Tensor) -> Tensor:
        """Return each image's loss and confusions, [b, 1 + classes * classes]; floats are exact below 16.7 million."""
        packs = []
        for row, image in zip((chosen % len(rows)).tolist(), logits.float().cpu(), strict=True):
            mask = decode_mask(masks[row])
            counts = confusion(np.moveaxis(image.numpy(), 0, -1)[None], mask)
            cost = losses(image[None], torch.from_numpy(np.array(mask))[None])
            packs.append(torch.cat([cost, torch.from_numpy(counts).flatten()]))
        return torch.stack(packs)

    values = images.gather(model.eval(), next(model.parameters()).device, packed)
    model.train(was_training)
    counts = values[:, 1:].numpy().astype(np.int64)
    value = mean_iou(counts.sum(axis=0).reshape(classes, classes))
    loss = check_loss(float(values[:, 0].double().mean()))
    return Evaluation(step, value, loss, {MEAN_IOU: value}), pa.table({CONFUSIONS: [*counts]})
