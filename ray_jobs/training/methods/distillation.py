"""Objective distillation: a frozen model of the store, the teacher, is imitated beside the labels.

The teacher is in every worker. Checkpoints do not contain it, because the stage's key names it.
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
from vit_model.contract import ModelContract
from vit_model.errors import UserError
from vit_model.objectives.distillation import Student, Teacher, imitation
from vit_model.parts import ParameterGroups
from vit_model.weights import load_model, read_contract

_NAMED = 5  # classes in a message


class Distillation(Method):
    """Learns labels, and the teacher's answers to the same pixels."""

    def __init__(
        self, config: Pretrain, contract: ModelContract, device: torch.device, teacher: ModelRef
    ) -> None:
        super().__init__(config, contract, device)
        self._folder, self._theirs = teacher.folder, read_teacher(teacher, config, contract)
        is_by_class = config.distillation.kind != "features"
        self._classes = columns(teacher, contract, self._theirs) if is_by_class else None

    @property
    def teacher_flops(self) -> int:
        return compute.forward_flops(self._theirs.architecture)

    def module(self, model: Network) -> ParameterGroups:
        network, _ = load_model(self._folder)
        network.to(self.device, self.dtype)
        kind = self.config.distillation.kind
        self._teacher = Teacher(network, self._theirs.preprocessing, kind, self._classes)
        width = self._theirs.architecture.width if kind == "features" else None
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
        UserError: it takes images of another size or with other channels, or lacks the classifier or a class.
    """
    theirs = read_contract(teacher.folder)
    config.check_teacher(f"teacher {teacher.name}", theirs.preprocessing.resolution, bool(theirs.class_names))
    if theirs.preprocessing.channels != contract.preprocessing.channels:
        raise UserError(
            f"teacher {teacher.name} takes images with {theirs.preprocessing.channels} channels; those of"
            f" {config.data} have {contract.preprocessing.channels}"
        )
    if config.distillation.kind != "features" and theirs.problem_type != "single_label_classification":
        raise UserError(
            f"teacher {teacher.name} gives each class a probability of its own ({theirs.problem_type}); "
            f"distillation.kind {config.distillation.kind} imitates one of all classes. Use kind features, or"
            " fine-tune the teacher"
        )
    return theirs


def columns(teacher: ModelRef, ours: ModelContract, theirs: ModelContract) -> list[int]:
    """Return, for each class of the student, the number of the teacher's class with the same name.

    The teacher may know more classes. Their logits are left out, so its probabilities are those of an image that is
    known to be of one of the student's classes. Classes with one name are told apart by their order alone.

    Raises:
        UserError: the teacher does not know a class, or has several with one name.
    """
    if ours.class_names == theirs.class_names:
        return list(range(len(ours.class_names)))
    numbers = {name: number for number, name in enumerate(theirs.class_names)}
    if missing := sorted({*ours.class_names} - numbers.keys()):
        more = f" and {len(missing) - _NAMED:,} others" if missing[_NAMED:] else ""
        theirs_begin = ", ".join(map(repr, theirs.class_names[:_NAMED]))
        raise UserError(
            f"teacher {teacher.name} does not know the classes {', '.join(map(repr, missing[:_NAMED]))}{more} of the"
            f" data; its {len(theirs.class_names):,} classes begin with {theirs_begin}. Fine-tune it on this data, or"
            " use distillation.kind features"
        )
    if len(numbers) < len(theirs.class_names):
        raise UserError(
            f"teacher {teacher.name} has several classes with one name, and other classes than the data, so that they"
            " cannot be matched by name; rename them"
        )
    return [numbers[name] for name in ours.class_names]
