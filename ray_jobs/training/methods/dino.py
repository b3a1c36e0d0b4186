"""Objective dino: the model predicts what its moving average, the teacher, outputs for other views of an image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipelines.spec import Pretrain
from pipelines.store import warn
from ray_jobs.training.engine import Engine
from ray_jobs.training.methods.base import Method
from ray_jobs.training.optim import MicroBatch, warmup_steps
from vit_model import compute
from vit_model.build import Network
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.objectives.dino import Dino, Teacher, alarms, measures
from vit_model.objectives.momentum import momentum
from vit_model.objectives.workers import mean_over_workers, rank
from vit_model.parts import ParameterGroups

ALARMED = 3  # measures in a row, because sound trainings pass through such states


class SelfDistillation(Method):
    """Learns the teacher's outputs for two global views from all other views. The result is the teacher."""

    result = "teacher"

    def __init__(self, config: Pretrain, contract: ModelContract, device: torch.device) -> None:
        super().__init__(config, contract, device)
        self.passes = len(config.view_sides)
        self._means: list[Tensor] = []  # of the teacher's outputs in this step's micro-batches
        self._seen: tuple[Tensor, Tensor] | None = None  # the last features and probabilities of the teacher
        self._in_a_row: Counter[str] = Counter()  # measures that showed a collapse, by its kind

    def module(self, model: Network) -> ParameterGroups:
        assert isinstance(model, ViT)
        settings, config = self.config.dino, self.config
        task = Dino(
            model,
            settings.hidden_width,
            settings.bottleneck_width,
            settings.output_width,
            settings.student_temperature,
            round(settings.freeze_last_layer * config.steps),
            config.seed,
        )
        self._teacher = self.beside[self.result] = Teacher(task)
        return task

    def loss(self, engine: Engine, batch: MicroBatch) -> Tensor:
        views = [*map(self.inputs, batch.views)]
        step = int(batch.positions[0]) // self.config.batch_size
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            features, outputs = self._teacher(torch.cat(views[:2]))
        taught = self._teacher.targets(outputs, self.config.dino.temperature(step, self.config.steps))
        self._means.append(outputs.float().mean(dim=0))
        self._seen = features, taught
        return engine(taught, *views, *self.drop_path_draws(batch))

    def after_step(self, module: Any, step: int) -> None:
        settings = self.config.dino
        self._teacher.update(module, momentum(step, self.config.steps, settings.momentum))
        self._teacher.recentre(mean_over_workers(torch.stack(self._means).mean(dim=0)), settings.centre_momentum)
        self._means.clear()

    def measures(self, step: int) -> dict[str, float]:
        assert self._seen is not None
        measured = measures(*self._seen)
        # Untrained features are alike, so at first the centred outputs of a sound training are nearly uniform, too.
        found = alarms(measured) if step > warmup_steps(self.config.optimizer, self.config.steps) else {}
        for kind, sentence in found.items():
            self._in_a_row[kind] += 1
            if self._in_a_row[kind] == ALARMED and rank() == 0:
                warn(f"step {step}: {sentence}")
        for kind, times in self._in_a_row.items():
            if kind not in found and times < ALARMED:  # each kind is warned of once
                self._in_a_row[kind] = 0
        return measured

    @property
    def forward_flops(self) -> int:
        return self._flops(compute.forward_flops)

    @property
    def train_flops(self) -> int:
        settings = self.config.dino
        hidden, bottleneck = settings.hidden_width, settings.bottleneck_width
        head = hidden * (self.vit.width + hidden + bottleneck) + bottleneck * settings.output_width  # weights
        taught = 2 * (compute.forward_flops(self.vit) + 2 * head)
        return self._flops(compute.train_flops) + self.passes * 6 * head + taught

    def _flops(self, of_model: Callable[[ViTConfig], int]) -> int:
        """Return the sum over an image's views."""
        return sum(of_model(self.vit.model_copy(update={"image_size": side})) for side in self.config.view_sides)
