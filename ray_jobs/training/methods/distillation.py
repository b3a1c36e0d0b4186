"""Objective distillation: the model learns the labels and imitates the teacher, a frozen model in the store.

Every worker loads the teacher. Checkpoints do not contain it, because the stage's key names it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipelines.spec import Pretrain
from ray_jobs.training.engine import Engine
from ray_jobs.training.methods.base import Method
from ray_jobs.training.model_ref import ModelRef
from ray_jobs.training.optim import MicroBatch
from vit_model import compute
from vit_model.build import Network
from vit_model.contract import ModelContract, read_contract
from vit_model.errors import UserError
from vit_model.objectives.distillation import Student, Teacher, imitation
from vit_model.parts import ParameterGroups
from vit_model.weights import load_model

_NAMED = 5  # classes in a message


class Distillation(Method):
    """Learns labels, and the teacher's outputs for the same pixels."""

    def __init__(self, config: Pretrain, contract: ModelContract, device: torch.device, teacher: ModelRef) -> None:
        super().__init__(config, contract, device)
        self._folder, self._teacher_contract = teacher.folder, read_teacher(teacher, config, contract)
        is_by_class = config.distillation.kind != "features"
        self._classes = columns(teacher, contract, self._teacher_contract) if is_by_class else None

    @property
    def teacher_flops(self) -> int:
        return compute.forward_flops(self._teacher_contract.architecture)

    def module(self, model: Network) -> ParameterGroups:
        network, _ = load_model(self._folder)
        network.to(self.device, self.dtype)
        kind = self.config.distillation.kind
        self._teacher = Teacher(network, self._teacher_contract.preprocessing, kind, self._classes)
        width = self._teacher_contract.architecture.width if kind == "features" else None
        return Student(model, width, seed=self.config.seed)

    def loss(self, engine: Engine, batch: MicroBatch) -> Tensor:
        (images,), settings = batch.views, self.config.distillation
        inputs, depth = self.inputs(images), self.drop_path_draws(batch)
        taught = self._teacher.answers(images)  # before the student's activations are kept
        logits, answers = engine(inputs, *depth)
        learned = imitation(settings.kind, answers, taught, settings.temperature)
        supervised = self.cross_entropy(logits, batch.targets, self.config.label_smoothing)
        return (1 - settings.weight) * supervised + settings.weight * learned

    @property
    def train_flops(self) -> int:
        return super().train_flops + self.teacher_flops


def read_teacher(teacher: ModelRef, config: Pretrain, contract: ModelContract) -> ModelContract:
    """Return the contract of a teacher that the model with this contract can imitate.

    Raises:
        UserError: it takes images of another size or with other channels, or does not have the needed classifier.
    """
    taught = read_contract(teacher.folder)
    config.check_teacher(f"teacher {teacher.name}", taught.preprocessing.resolution, bool(taught.class_names))
    if taught.preprocessing.channels != contract.preprocessing.channels:
        raise UserError(
            f"teacher {teacher.name} takes images with {taught.preprocessing.channels} channels, but the images of"
            f" {config.data} have {contract.preprocessing.channels}"
        )
    if config.distillation.kind != "features" and taught.problem_type != "single_label_classification":
        raise UserError(
            f"teacher {teacher.name} predicts each class independently ({taught.problem_type}); distillation.kind"
            f" {config.distillation.kind} needs one distribution over all classes. Use kind features, or fine-tune"
            " the teacher"
        )
    return taught


def columns(teacher: ModelRef, student: ModelContract, taught: ModelContract) -> list[int]:
    """Return, for each class of the student, the number of the teacher's class with the same name.

    The teacher may know more classes. Their logits are left out, so its probabilities are conditional on the image
    being in one of the student's classes. If classes share a name, only their order distinguishes them.

    Raises:
        UserError: the teacher does not know a class, or several of its classes have the same name.
    """
    names = student.class_names
    if names == taught.class_names:
        return list(range(len(names)))
    numbers = {name: number for number, name in enumerate(taught.class_names)}
    if missing := sorted({*names} - numbers.keys()):
        more = f" and {len(missing) - _NAMED:,} others" if missing[_NAMED:] else ""
        known = ", ".join(map(repr, taught.class_names[:_NAMED]))
        raise UserError(
            f"teacher {teacher.name} does not know the classes {', '.join(map(repr, missing[:_NAMED]))}{more} of the"
            f" data; its {len(taught.class_names):,} classes begin with {known}. Fine-tune it on this data, or use"
            " distillation.kind features"
        )
    if len(numbers) < len(taught.class_names):
        raise UserError(
            f"teacher {teacher.name} has several classes with the same name, and other classes than the data, so they"
            " cannot be matched by name; rename them"
        )
    return [numbers[name] for name in names]
