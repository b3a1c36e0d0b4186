"""Distillation's teacher: a model of the store that a pretraining imitates, frozen, in every worker.

In: an artifact's model, and the contract of the model to train. Out: the teacher's contract, or the loaded teacher; an
error if the two cannot answer to the same images. Checkpoints do not contain the teacher, which the stage's key names.
"""

from __future__ import annotations

import torch

from pipelines.spec import Pretrain
from ray_jobs.process import devices
from ray_jobs.training.ancestor import Ancestor
from vit_model.contract import ModelContract
from vit_model.errors import UserError
from vit_model.objectives.distillation import Teacher
from vit_model.weights import load_model, read_contract

_NAMED = 5  # classes in a message


def read_teacher(teacher: Ancestor, config: Pretrain, contract: ModelContract) -> ModelContract:
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
    if config.distillation.kind != "features":
        if theirs.problem_type != "single_label_classification":
            raise UserError(
                f"teacher {teacher.name} gives each class a probability of its own ({theirs.problem_type}); "
                f"distillation.kind {config.distillation.kind} imitates one of all classes. Use kind features, or"
                " fine-tune the teacher"
            )
        columns(teacher, contract, theirs)
    return theirs


def load_teacher(
    teacher: Ancestor, config: Pretrain, contract: ModelContract, device: torch.device
) -> Teacher:
    """Load a teacher that `read_teacher` has accepted, in the dtype of the training's matrix products."""
    network, theirs = load_model(teacher.folder)
    kind = config.distillation.kind
    classes = None if kind == "features" else columns(teacher, contract, theirs)
    network.to(device, devices.torch_dtype(config.dtype, device))
    return Teacher(network, theirs.preprocessing, kind, classes)


def columns(teacher: Ancestor, ours: ModelContract, theirs: ModelContract) -> list[int]:
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
