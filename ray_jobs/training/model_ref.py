"""Continued pretraining: the model in the store that a pretraining starts from (`init_from`).

In: an artifact's model. Out: the contract of the model to train, its weights before the first step, and what was kept,
resized, dropped or newly initialised. Everything else starts anew: the optimizer, the schedule, the order of the
images, and the parts that an objective adds to the model and that artifacts do not contain (a mask vector, MoCo's
projector).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from pipelines.spec import Objective, Pretrain, objective_properties
from ray_jobs.data.shards import DatasetInfo
from ray_jobs.process.context import Context
from ray_jobs.training.contract import continued_contract, model_contract
from vit_model.build import Network
from vit_model.contract import ModelContract, read_contract
from vit_model.errors import UserError, reasons
from vit_model.weights import load_model, transfer_backbone


class ModelRef(NamedTuple):
    """The model that a pretraining starts from, or the teacher that it imitates."""

    folder: Path
    name: str
    """for the log: stage, job and key"""
    objective: Objective = "softmax"
    """the objective that trained its classifier, if it has one; for imported weights, assumed"""


def find_model(context: Context[Pretrain], field: Literal["init_from", "teacher"] = "init_from") -> ModelRef | None:
    """Return the model that a field of the stage names, with its files on this machine; None if it is empty."""
    if field not in context.inputs:  # null, or latest without an earlier model
        return None
    (manifest,) = context.inputs[field]
    checkpoint = context.config.checkpoints().get(field)
    name = f"{manifest.stage} ({manifest.job} {manifest.key[:12]}{f', {checkpoint}' if checkpoint else ''})"
    return ModelRef(context.input(field), name, manifest.config.get("objective", "softmax"))


def make_contract(config: Pretrain, info: DatasetInfo, init_from: ModelRef | None = None) -> ModelContract:
    """Return the contract of a pretraining's model, which may start from another model.

    Raises:
        UserError: the configured model has another encoder than `init_from`; or no model is configured, and the
            configuration does not fit `init_from`.
    """
    labelled = objective_properties(config.objective).classifier is not None
    if init_from is None:
        assert config.model is not None
        return model_contract(config.model, config.resolution, info, config.eval_crop, "classes" if labelled else None)
    source, where = read_contract(init_from.folder), f"init_from {init_from.name}"
    classes = len(info.class_names) if labelled else 0
    architecture = config.check_start(where, source.architecture, classes)
    try:
        return continued_contract(source, architecture, info, config.eval_crop)
    except ValidationError as error:
        raise UserError(f"{where}: {reasons(error)}") from error


def take_over(model: Network, contract: ModelContract, init_from: ModelRef, objective: Objective) -> list[str]:
    """Copy the weights of `init_from` to a new model; return a line for each part that is not just copied.

    Raises:
        UserError: the weights are damaged, or their positions have no counterpart at the new resolution.
    """
    source, source_contract = load_model(init_from.folder)
    classes = None
    # The logits of another cross-entropy have another scale.
    if objective_properties(objective).classifier == objective_properties(init_from.objective).classifier:
        classes = same_classes(contract, source_contract)
    return [f"starting from the weights of {init_from.name}", *transfer_backbone(model, source, classes)]


def same_classes(target: ModelContract, source: ModelContract) -> list[int] | None:
    """Return the number in `source` of each class of `target`; None if the classifier cannot be kept.

    It can be kept if both have the same classes, in any order, the same layers in the head and the same kind of logits.
    """
    if not target.class_names or has_tanh(target) != has_tanh(source) or target.problem_type != source.problem_type:
        return None
    if target.class_names == source.class_names:
        return list(range(len(target.class_names)))
    numbers = {name: number for number, name in enumerate(source.class_names)}
    if len(numbers) < len(source.class_names) or sorted(target.class_names) != sorted(numbers):
        return None
    return [numbers[name] for name in target.class_names]


def has_tanh(contract: ModelContract) -> bool:
    """Return whether a model has the tanh layer before its classifier."""
    return getattr(contract.architecture, "representation_head", False)
