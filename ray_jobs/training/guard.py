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

_EVERY = 10  # steps between two looks, because reading a number waits for the device
_NAMED = 5  # images in the message; all are in the log


class Guard:
    """Looks at the norms of a training's gradients.

    The engines apply no update with gradients that are not finite, so the weights are those of the step before.
    """

    def __init__(
        self, images: Images, sampler: Sampler, steps: int, manager: CheckpointManager | None
    ) -> None:
        self._images, self._sampler, self._steps, self._manager = images, sampler, steps, manager
        self._norms: dict[int, torch.Tensor | float] = {}

    def watch(self, step: int, norm: torch.Tensor | float | None) -> None:
        """Take the norm of a step's gradients; None if it was not computed. Every ten steps, `check`."""
        if norm is not None:
            self._norms[step] = norm
        if (step + 1) % _EVERY == 0 or step + 1 == self._steps:
            self.check()

    def check(self) -> None:
        """Look at the norms since the last look. Called before a checkpoint, so that none is later than a bad step.

        Raises:
            DivergenceError: one of them was not finite, or was -1, which is what DeepSpeed gives then.
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
        more = f" and {batch - _NAMED} more, all of them in the log" if batch > _NAMED else ""
        saved = None if self._manager is None else self._manager.newest
        return (
            f"gradient norm is {norm} at step {step}, and this update was not applied: lower learning_rate, use a"
            f" longer warm-up, or look at the images of this step: {', '.join(names[:_NAMED])}{more}"
            + ("" if saved is None else f"; the last checkpoint is of step {saved}")
        )
