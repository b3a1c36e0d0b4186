"""The training step, which pretraining and fine-tuning share, and the training curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.spec import Finetune, Pretrain
from pipelines.store import LogLine
from ray_jobs.augment import TrainTransform, dropout_seed
from ray_jobs.data.loader import Loader
from ray_jobs.training import optim
from ray_jobs.training.engine import Engine
from ray_jobs.training.guard import Guard
from ray_jobs.training.state import WorkerState
from ray_jobs.training.workers import Worker
from vit_model.errors import UserError

_NO_MEMORY_ON_CPU = "DefaultCPUAllocator: can't allocate memory"  # torch raises a plain RuntimeError


@dataclass(frozen=True)
class TrainSetup:
    """What the steps of a training share."""

    config: Pretrain | Finetune
    learning_rate: float
    seed: int
    engine: Engine
    transform: TrainTransform
    loss: Callable[[optim.MicroBatch], Tensor]
    guard: Guard
    device: torch.device
    worker: Worker


class Step(NamedTuple):
    """A step that was taken."""

    done: int
    """how many steps are done, including this one"""
    rate: float
    norm: Tensor | float | None
    """the norm of the gradients before clipping, see `Engine.step`"""
    losses: list[Tensor]
    """the loss of this worker's share of each micro-batch"""


def steps(setup: TrainSetup, batches: Loader, first: int, last: int) -> Iterator[Step]:
    """Take the steps from number `first` up to `last`, and yield each when it is done.

    Every step uses the same images at any world size that divides the batch.

    Raises:
        DivergenceError: a gradient is not finite.
    """
    config, device = setup.config, setup.device
    for step, (positions, images, labels) in zip(range(first, last), batches, strict=False):
        torch.manual_seed(dropout_seed(setup.seed, step, setup.worker.rank))
        views, targets = setup.transform(images.to(device), labels.to(device), positions, step)
        batch = optim.MicroBatch(views, targets, positions)
        rate, losses = optim.learning_rate(step, config.steps, setup.learning_rate, config.optimizer), []
        for part in optim.micro_batches(config.gradient_accumulation_steps, batch):
            loss = setup.loss(part)
            setup.engine.backward(loss)
            losses.append(loss.detach())
        norm = setup.engine.step(rate)
        setup.guard.watch(step, norm)
        yield Step(step + 1, rate, norm, losses)


@contextmanager
def advise_on_memory() -> Iterator[None]:
    """Say what to do if torch cannot allocate the memory that a training needs.

    Raises:
        UserError: a device or the machine does not have enough memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _NO_MEMORY_ON_CPU not in str(error):
            raise
        raise UserError(
            f"the training does not fit into memory: {str(error).splitlines()[0]}. For fewer activations use more"
            " gradient_accumulation_steps, activation_checkpointing, a smaller batch_size, a lower resolution or more"
            " workers; for the rest a smaller model or, in a pretraining with several workers, a higher zero_stage"
        ) from error


def evenly(steps: int, count: int) -> set[int]:
    """Return `count` steps at equal distances, the last of which is `steps`; fewer if there are fewer steps."""
    return {math.ceil(steps * part / count) for part in range(1, count + 1)}


class Curve:
    """The training curve: points {step, learning_rate, loss}; in a pretraining, also with dev_accuracy.

    `loss` is the mean over all images since the previous point; `dev_accuracy` is None if it was not measured there.

    Args:
        divides_first: whether each worker takes the mean of its losses, in float32, before they are summed, as in the
            curves of pretrainings; otherwise the sum over workers is divided in float64, as in the curves of fits.
    """

    def __init__(self, device: torch.device, worker: Worker, divides_first: bool) -> None:
        self.points: list[dict[str, Any]] = []
        self._worker, self._divides_first = worker, divides_first
        self._sum, self._summed = torch.zeros((), device=device), 0

    def add(self, losses: list[Tensor]) -> None:
        """Add the losses of this worker's shares of a step."""
        for loss in losses:
            self._sum += loss
            self._summed += 1

    def add_point(self, step: Step, **more: float | None) -> float:
        """Add a point after a step, and return its loss; all workers call this together.

        Raises:
            DivergenceError: the loss is not finite.
        """
        loss = self._mean()
        # Not at every step, because reading a number waits for the device.
        optim.check_finite(loss, step.done - 1)
        self.points.append({"step": step.done, "learning_rate": step.rate, "loss": loss, **more})
        return loss

    def _mean(self) -> float:
        total = self._sum / self._summed if self._divides_first else self._sum.clone()
        if self._worker.world > 1:
            dist.all_reduce(total)
        count = self._worker.world * (1 if self._divides_first else self._summed)
        self._sum.zero_()
        self._summed = 0
        return total.item() / count

    @property
    def best(self) -> int | None:
        """The first step with the highest dev accuracy; None if it was never measured."""
        measured = [point for point in self.points if point["dev_accuracy"] is not None]
        return max(measured, key=lambda point: point["dev_accuracy"])["step"] if measured else None

    def state(self, loader: Loader, log: tuple[LogLine, ...], **more: Any) -> WorkerState:
        """Return this worker's state for a checkpoint, including the loader's state and the unsaved log lines."""
        return WorkerState(
            loader=loader.state_dict(),
            points=tuple(self.points),
            loss_sum=self._sum.item(),
            summed=self._summed,
            log=log,
            **more,
        )

    def load(self, state: WorkerState) -> None:
        """Continue from the state of a checkpoint (`worker_state`)."""
        self.points, self._summed = list(state.points), state.summed
        self._sum.fill_(state.loss_sum)
