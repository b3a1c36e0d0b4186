"""A moving average of the trained model, from whose outputs it learns: MoCo's momentum encoder, DINO's teacher."""

import copy
import itertools
import math
from typing import Protocol

import torch
from torch import nn

from vit_model.model import ViT


class Task(Protocol):
    """A trained module: a ViT and the layers behind it."""

    @property
    def model(self) -> ViT: ...

    @property
    def projector(self) -> nn.Module: ...


def momentum(step: int, steps: int, base: float = 0.99) -> float:
    """Return the momentum at update `step` of `steps`: from `base` to 1 on half a cosine."""
    return 1 - (1 - base) * (1 + math.cos(math.pi * step / steps)) / 2


class MovingAverage(nn.Module):
    """A moving average of the trained ViT and projector (He et al. 2020).

    Keep it in float32, because bfloat16 rounds its small steps to nothing.
    """

    model_prefix = "encoder.0."
    """the prefix of the ViT's weights in `named_parameters`"""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(nn.Sequential(task.model, task.projector)).requires_grad_(False)

    @torch.no_grad()
    def update(self, task: Task, kept: float) -> None:
        """Move each weight towards the trained one: `kept` of itself plus 1 - `kept` of the trained weight."""
        trained_weights = itertools.chain(task.model.parameters(), task.projector.parameters())
        for weight, trained in zip(self.encoder.parameters(), trained_weights, strict=True):
            weight.lerp_(trained.to(weight.dtype), 1 - kept)
