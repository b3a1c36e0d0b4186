"""What a fine-tuning's entry process and its Ray tasks exchange: tasks and results. Free of torch, as the entry process
is.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Finetune, check_optimizer, nearest
from pipelines.spec.search import Optuna, Point, Search
from pipelines.store import FileEntry
from ray_jobs.data.shards import Dataset, Images, Split
from ray_jobs.training.contract import continued_contract, model_contract
from ray_jobs.training.search import describe
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract
from vit_model.errors import UserError, reasons

Indices = NDArray[np.int64]
Folds = list[tuple[Indices, Indices]]
"""Rows to fit on and rows to score on, per fold."""
Place = tuple[int | str, ...]
"""A trial of a sweep: the key of its point (`point_key`), and the number of its fold."""
Evaluated = tuple[int, float, float]
"""An evaluation of a trial: (step, accuracy, loss)."""


class DivergenceError(UserError):
    """A training whose loss or gradient is no longer finite."""


def point_key(search: Search | None, number: int, point: Point) -> Place:
    """Return what the names of a point's fits begin with: its number; if Optuna proposed it, also a digest of it.

    Other points are known by their number. Of a proposed one, another attempt may have given the number to another, or
    its entry in the ledger may be lost.
    """
    if not isinstance(search, Optuna):
        return (number,)
    return number, f"p{sha256(canonical_json(point))[:8]}"


class Task(NamedTuple):
    """The parts that all fits of a stage share, or those of a point that it tries."""

    config: Finetune
    contract: ModelContract
    backbone: Path | None
    key: Place
    """Of the point whose values `config` has, see `point_key`; (0,) if it is of none."""
    point: Point
    """Empty if it is of none."""
    attempts: tuple[int, ...] = ()
    """Earlier ones, from whose checkpoints a fit continues."""
    last_step: int | None = None
    """Of a refit, whose trial was best there (`early_stopping`); None: the configuration's last."""
    temperature: float | None = None
    """Of a refit's calibrated probabilities, from images that the trials held out; None: there are none."""

    @property
    def number(self) -> int:
        """The number of the point, in the order in which they were tried; 0 if it is of none."""
        return int(self.key[0])

    def place(self, fold: int) -> Place:
        """Return the place of a trial of this task."""
        return *self.key, fold

    @property
    def learning_rate(self) -> float:
        """Of the point."""
        (rate,) = self.config.learning_rates
        return rate


def trial_name(place: Place) -> str:
    """Return the name of a trial: of its checkpoints, its log and its entry in the ledger."""
    return "-".join(("trial", *map(str, place)))


class Score(NamedTuple):
    """A model's results on n images.

    `predictions` [n] are labels, `probabilities` is a table of `ray_jobs.evaluation.rows.PROBABILITIES` [n], `loss` is
    the mean cross-entropy. `mean_ap` is the mean average precision of the classes (`ray_jobs.evaluation
    .average_precision.multi_label`) if images have several labels, otherwise None.
    """

    accuracy: float
    loss: float
    predictions: NDArray[np.int64]
    probabilities: pa.Table
    mean_ap: float | None = None


class Trial(NamedTuple):
    """The results of a trial on the images that it was not fitted on."""

    accuracy: float
    loss: float
    step: int
    """after which it had them: the best one with `early_stopping`, otherwise the last"""
    evaluations: tuple[Evaluated, ...] = ()
    """with ASHA, which decides by them"""
    is_pruned: bool = False
    """whether ASHA ended it there"""
    seconds: float = 0.0
    """that it took"""
    temperature: float | None = None
    """that minimises the loss on these images; None: it ended early, or its model is not the last one"""


class Refit(NamedTuple):
    """The results of one draw's model on test. `files` are the model's files; empty if it was not kept."""

    score: Score
    curve: list[dict[str, float | int]]
    substitutes: int
    files: tuple[FileEntry, ...]


def read_split(dataset: Dataset, split: Split) -> Images:
    """Return the images of a split. Raises UserError if it is empty."""
    dataset.require(split)
    return Images(dataset, dataset.index(split))


def make_task(config: Finetune, dataset: Dataset, backbone: Path | None) -> Task:
    """Return the task with its model's contract: the backbone's with a new head and resolution, or a new model's.

    Raises:
        UserError: a setting does not fit the data, the model or the classes.
    """
    if config.augment == "vtab":
        from ray_jobs.augment.vtab import augmentation  # a room that imports torch

        config = config.model_copy(update={"augment": augmentation(dataset.info.name)})
    if backbone is None:
        assert config.model is not None and config.resolution is not None
        contract = model_contract(config.model, config.resolution, dataset.info, config.eval_crop)
        check_settings(config, contract)
        return Task(config, contract, None, (0,), {})
    from vit_model.weights import read_contract

    source = read_contract(backbone)
    resolution = config.resolution or source.preprocessing.resolution
    try:
        architecture = source.architecture.for_finetuning(resolution, len(dataset.info.class_names))
        if config.stochastic_depth is not None:
            if not isinstance(architecture, ViTConfig):
                raise UserError("stochastic_depth needs the blocks of a ViT, but the backbone is a ResNet")
            changed = architecture.model_dump() | {"stochastic_depth": config.stochastic_depth}
            architecture = ViTConfig.model_validate(changed)
        contract = continued_contract(source, architecture, dataset.info, config.eval_crop)
    except ValidationError as error:
        raise UserError(f"fine-tuning {config.backbone}: {reasons(error)}") from error
    check_settings(config, contract)
    return Task(config, contract, backbone, (0,), {})


def at_point(task: Task, number: int, point: Point, dataset: Dataset) -> Task:
    """Return the task of one point of the search, with its own settings and perhaps its own resolution.

    Raises:
        UserError: the settings do not fit each other, the data or the backbone.
    """
    try:
        config = task.config.at(point)
    except ValueError as error:
        why = reasons(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(f"search: {describe(point)} do not go together: {why}") from error
    return make_task(config, dataset, task.backbone)._replace(
        attempts=task.attempts, key=point_key(task.config.search, number, point), point=point
    )


def check_settings(config: Finetune, contract: ModelContract) -> None:
    """Check what depends on the model and the classes, which the configuration alone does not tell.

    Raises:
        UserError: a setting does not fit them.
    """
    architecture, names = contract.architecture, contract.class_names
    try:
        check_optimizer(config.optimizer, config.steps, architecture.family)
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.lora is not None:
        if not isinstance(architecture, ViTConfig):
            raise UserError(
                "lora needs the attention of a ViT, but the backbone is a ResNet: use freeze: backbone or"
                " all_but_biases"
            )
        if config.lora.rank > architecture.width:
            raise UserError(
                f"lora.rank {config.lora.rank}: the backbone's matrices have {architecture.width} rows"
            )
    if isinstance(config.freeze, int):
        if not isinstance(architecture, ViTConfig):
            raise UserError(
                f"freeze {config.freeze} needs the blocks of a ViT, but the backbone is a ResNet: use freeze: backbone"
            )
        if config.freeze > architecture.num_blocks:
            raise UserError(f"freeze {config.freeze}: the backbone has {architecture.num_blocks} blocks")
        if config.freeze == architecture.num_blocks and config.optimizer.name == "muon":
            raise UserError(
                f"optimizer.name muon is for the matrices of the blocks, and freeze {config.freeze} trains none of"
                " them; use adamw or sgd"
            )
    if config.activation_checkpointing and not isinstance(architecture, ViTConfig):
        raise UserError("activation_checkpointing needs the blocks of a ViT, but the backbone is a ResNet")
    for name in config.class_weights if isinstance(config.class_weights, dict) else ():
        if name not in names:
            raise UserError(f"class_weights: the data has no class {name!r}{nearest(name, names)}")
