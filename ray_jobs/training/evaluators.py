"""Evaluate a model on images: dev of a pretraining, a trial's held-out images, test, and the images of few-shot probes.

In: images, and a network. Out: the network's outputs per image. All workers call an evaluator together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ray_jobs.data.loader import MEMORY_BYTES
from ray_jobs.data.shards import Images
from ray_jobs.evaluation.calibration import probability_table
from ray_jobs.evaluation.metrics import computed, value
from ray_jobs.evaluation.multi_label import THRESHOLD, mean_ap
from ray_jobs.evaluation.rows import ACCURACY, MEAN_AP
from ray_jobs.training.task import DivergenceError, Evaluation, Score
from ray_jobs.training.workers import ALONE, Worker
from vit_model.build import Network
from vit_model.contract import ModelContract, Preprocessing
from vit_model.objectives.losses import sigmoid_cross_entropy
from vit_model.preprocessing import normalise

BATCH = 512  # images per worker
NOT_FINITE = "loss is {} after training: lower learning_rate, or use a longer warm-up"


class Evaluator:
    """Labelled images, of which each worker evaluates an equal share.

    A worker decodes its share once and keeps the pixels if they fit into 1 GiB (`MEMORY_BYTES`).

    Args:
        batch: images per forward pass of a worker.
        is_kept: whether to keep the pixels; False for images that are used once.
    """

    def __init__(
        self,
        images: Images,
        preprocessing: Preprocessing,
        worker: Worker = ALONE,
        batch: int = BATCH,
        is_kept: bool = True,
    ) -> None:
        self.images, self.labels = images, torch.from_numpy(images.labels)
        self._preprocessing, self._worker, self._batch = preprocessing, worker, batch
        self._share = math.ceil(len(self.labels) / worker.world)
        side, channels = preprocessing.resolution, preprocessing.channels
        self._is_kept = is_kept and self._share * side * side * channels <= MEMORY_BYTES
        self._kept: dict[int, Tensor] = {}

    def outputs(
        self, network: Callable[[Tensor], Any], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[Tensor, Any]]:
        """Yield (rows, outputs) of this worker's share, in batches.

        All workers have the same number of batches of the same sizes, because ZeRO-3 gathers the weights for each. Rows
        past the last image wrap around and do not count.
        """
        rows = torch.arange(self._worker.rank * self._share, (self._worker.rank + 1) * self._share)
        for number, chosen in enumerate(rows.split(self._batch) if len(rows) else ()):
            pixels = self._pixels(number, chosen % len(self.labels)).to(device)
            with torch.no_grad():
                outputs = network(normalise(pixels, self._preprocessing, dtype))
            yield chosen, outputs

    def gather(
        self,
        network: Callable[[Tensor], Any],
        device: torch.device,
        packed: Callable[[Tensor, Any], Tensor] = lambda rows, outputs: outputs,
    ) -> Tensor:
        """Return the outputs of a float32 network for all images, [n, width] on the CPU of every worker.

        Args:
            packed: makes a tensor [b, width] of a batch's rows and outputs, if these are none.
        """
        found = self.outputs(network, device)
        gathered = torch.cat([packed(rows, outputs).float().cpu() for rows, outputs in found])
        if self._worker.world > 1:
            share = gathered.to(device)
            shares = [torch.empty_like(share) for _ in range(self._worker.world)]
            dist.all_gather(shares, share)
            gathered = torch.cat(shares)
        return gathered[: len(self.labels)].cpu()

    def logits(self, model: Network) -> Tensor:
        """Return a model's logits of all images in evaluation mode, float32 [n, classes]."""
        if not len(self.labels):
            return torch.empty(0, model.config.num_classes)
        was_training = model.training
        logits = self.gather(model.eval(), next(model.parameters()).device)
        model.train(was_training)
        return logits

    def _pixels(self, number: int, rows: Tensor) -> Tensor:
        """Return the pixels of one of this worker's batches, uint8 [b, h, w, c]."""
        if (pixels := self._kept.get(number)) is None:
            images = self.images.take(rows.numpy())
            pixels = torch.from_numpy(images.dataset.load(images.rows, self._preprocessing))
            if self._is_kept:
                self._kept[number] = pixels
        return pixels


def predict(model: Network, contract: ModelContract, images: Images) -> Tensor:
    """Return a model's logits of every image, float32 [n, classes], in one process that uses the images once."""
    return Evaluator(images, contract.preprocessing, is_kept=False).logits(model)


def accuracy_and_loss(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the fraction of images whose label has the highest logit, and the mean cross-entropy.

    Raises:
        DivergenceError: the loss is not finite, because the last steps made the weights too large.
    """
    loss = check_loss(functional.cross_entropy(logits, labels).item())
    return (logits.argmax(dim=1) == labels).double().mean().item(), loss


def check_loss(loss: float) -> float:
    """Return the loss of a model after its last step. Raises DivergenceError if it is not finite."""
    if not math.isfinite(loss):
        raise DivergenceError(NOT_FINITE.format(loss))
    return loss


def evaluation(step: int, logits: Tensor, labels: Tensor, select_by: str = ACCURACY) -> Evaluation:
    """Return the results after a step, from logits [n, classes] and labels [n], including the `select_by` metric.

    With several labels per image, bool [n, classes], the metric is mAP, and the accuracy is the fraction of images with
    all labels right at a probability of 0.5.

    Raises:
        DivergenceError: see `accuracy_and_loss`.
    """
    if labels.ndim == 2:
        probabilities = logits.float().sigmoid()
        loss = check_loss(sigmoid_cross_entropy(logits, labels.float()).item())
        exact = ((probabilities >= THRESHOLD) == labels).all(dim=1).double().mean().item()
        return Evaluation(step, exact, loss, {MEAN_AP: mean_ap(labels.numpy(), probabilities.numpy())})
    results = Evaluation(step, *accuracy_and_loss(logits, labels))
    if select_by == ACCURACY:
        return results
    return results._replace(
        metrics={select_by: value(computed(select_by), labels.numpy(), logits.argmax(dim=1).numpy())}
    )


def score(logits: Tensor, labels: NDArray[Any], temperature: float | None = None) -> Score:
    """Compare logits [n, classes] with the labels [n].

    Args:
        temperature: calibrates the probabilities; None: no calibrated probabilities are returned.

    Raises:
        DivergenceError: see `accuracy_and_loss`.
    """
    accuracy, loss = accuracy_and_loss(logits, torch.from_numpy(np.asarray(labels, np.int64)))
    table = probability_table(logits.numpy(), labels, temperature)
    return Score(accuracy, loss, logits.argmax(dim=1).numpy(), table)
