"""End a training at a gradient that is not finite, and name the images of that step."""

from __future__ import annotations

import numpy as np
import torch

from pipelines.errors import StoreError
from pipelines.store import warn
from ray_jobs.data.sampler import Sampler
from ray_jobs.data.shards import Images
from ray_jobs.training import optim
from ray_jobs.training.checkpoint import CheckpointManager
from ray_jobs.training.task import DivergenceError

_EVERY = 10  # steps between two checks, because reading a number waits for the device
_NAMED = 5  # images in the message; the log has all of them


class Guard:
    """Checks the norms of a training's gradients.

    The engines skip an update if a gradient is not finite, so the weights stay as they were before that step.
    """

    def __init__(self, images: Images, sampler: Sampler, steps: int, manager: CheckpointManager | None) -> None:
        self._images, self._sampler, self._steps, self._manager = images, sampler, steps, manager
        self._norms: dict[int, torch.Tensor | float] = {}

    def watch(self, step: int, norm: torch.Tensor | float | None) -> None:
        """Add the norm of a step's gradients (None if it was not computed). Every ten steps, `check`."""
        if norm is not None:
            self._norms[step] = norm
        if (step + 1) % _EVERY == 0 or step + 1 == self._steps:
            self.check()

    def check(self) -> None:
        """Check the norms since the last check. Called before a checkpoint, so that none is saved after a bad step.

        Raises:
            DivergenceError: a norm is not finite, or -1, which is DeepSpeed's value for one that is not.
        """
        norms = [torch.as_tensor(norm) for norm in self._norms.values()]
        values = torch.stack(norms).tolist() if norms else []
        for step, value in zip(self._norms, values, strict=True):
            if not optim.is_finite_norm(value):
                if self._manager is not None:
                    try:
                        self._manager.wait()
                    except StoreError as error:
                        warn(f"{error}")
                raise DivergenceError(self._describe(step, value))
        self._norms.clear()

    def _describe(self, step: int, norm: float) -> str:
        batch = self._sampler.batch_size
        rows = self._sampler.order.rows(np.arange(step * batch, (step + 1) * batch))
        names = self._images.rows["key"].take(rows).to_pylist()
        print(f"images of step {step}: {' '.join(names)}", flush=True)
        more = f" and {batch - _NAMED} more, which the log lists" if batch > _NAMED else ""
        saved = None if self._manager is None else self._manager.newest
        return (
            f"gradient norm is {norm} at step {step}, and this update was not applied: lower learning_rate, use a"
            f" longer warm-up, or look at the images of this step: {', '.join(names[:_NAMED])}{more}"
            + ("" if saved is None else f"; the last checkpoint is of step {saved}")
        )
