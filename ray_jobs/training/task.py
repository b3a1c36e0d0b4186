"""The tasks and results that a fine-tuning's entry process and its Ray tasks exchange. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Detect, EvalCrop, Finetune, check_optimizer, nearest
from pipelines.spec.search import Optuna, Point, Search
from pipelines.store import FitName
from ray_jobs.data.shards import Dataset, Images, Split
from ray_jobs.evaluation.rows import AP, MEAN_AP, MEAN_IOU
from ray_jobs.training.contract import Head, continued_contract, model_contract, num_outputs
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract, read_contract
from vit_model.errors import UserError, reasons

Indices = NDArray[np.int64]
Folds = list[tuple[Indices, Indices]]
"""Rows to fit on and rows to score on, per fold."""
Fraction = Annotated[float, Field(ge=0, le=1)]
DIVERGED = sys.float_info.max
"""The loss of a trial that diverged, because JSON has no infinity."""


class Evaluation(NamedTuple):
    """Results on dev, or on the validation part of a fold, after a step; in JSON a list."""

    step: Annotated[int, Field(ge=1)]
    accuracy: Fraction
    loss: float
    metrics: dict[str, Fraction] = {}  # noqa: RUF012 (never changed)
    """The value of the `select_by` metric, by name, unless that is accuracy."""


class Measured(Protocol):
    """What is ranked: an `Evaluation`, or the record of a trial."""

    @property
    def accuracy(self) -> float: ...
    @property
    def loss(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


def rank(folds: Sequence[Measured]) -> tuple[int, float, float]:
    """Return the sort key of one setting's results, one per fold; the best setting has the highest key.

    A setting that diverged in fewer folds ranks higher, then one with the higher mean of the `select_by` metric; the
    lower loss breaks ties. Settings that are compared by loss have the same number of losses, so sums rank as means do.
    """
    losses = [result.loss for result in folds if result.loss < DIVERGED]
    return len(losses), mean(folds), -sum(losses)


def selecting(result: Measured) -> float:
    """Return the value of the `select_by` metric."""
    return next(iter(result.metrics.values()), result.accuracy)


def mean(folds: Sequence[Measured]) -> float:
    """Return the mean over results of the `select_by` metric."""
    return float(np.mean([*map(selecting, folds)]))


class DivergenceError(UserError):
    """A training whose loss or gradient is no longer finite."""


def point_digest(search: Search | None, point: Point) -> str | None:
    """Return the digest of a point that Optuna proposed (`FitName`); None for points that their number identifies."""
    return sha256(canonical_json(point))[:8] if isinstance(search, Optuna) else None


class Task(NamedTuple):
    """What all fits of a stage share, or all fits of one point that it tries."""

    config: Finetune
    contract: ModelContract
    backbone: Path | None
    point: Point = {}  # noqa: RUF012 (never changed)
    """The point that `config` has the values of; empty without one."""
    number: int = 0
    """The point's number, in the order in which points were tried; 0 without one."""
    digest: str | None = None
    """The point's digest, see `point_digest`."""
    attempts: tuple[int, ...] = ()
    """Earlier attempts; a fit continues from their checkpoints."""
    last_step: int | None = None
    """A refit's last step, at which the trial was best (`early_stopping`); None: the configuration's last step."""
    temperature: float | None = None
    """Calibrates a refit's probabilities; fitted on the trials' held-out images. None: no calibrated probabilities."""
    thresholds: tuple[float, ...] = ()
    """With several labels per image: from which probability on a refit predicts each class; empty: 0.5."""
    objects: tuple[str, ...] = ()
    """The classes of a detection, whose model has no classifier of its own; empty otherwise."""

    @property
    def steps(self) -> int:
        """How many steps a fit does."""
        return self.last_step or self.config.steps

    def trial(self, fold: int) -> FitName:
        """Return the name of the point's trial on a fold."""
        return FitName("trial", self.number, fold, self.digest)

    def refit(self, draw: int) -> FitName:
        """Return the name of the point's refit of a draw."""
        return FitName("refit", self.number, draw, self.digest, self.last_step)

    @property
    def is_dense(self) -> bool:
        """Whether the targets are in the images, boxes or masks, and not labels of whole images."""
        return bool(self.objects or self.contract.mask_classes)

    @property
    def metric(self) -> str:
        """The metric on held-out images that ranks trials."""
        if self.is_dense:
            return AP if self.objects else MEAN_IOU
        return MEAN_AP if self.contract.is_multi_label else self.config.select_by

    @property
    def learning_rate(self) -> float:
        """The point's learning rate."""
        (rate,) = self.config.learning_rates
        return rate


class Score(NamedTuple):
    """A model's results on n images.

    `predictions` [n] are labels, `probabilities` is a table of `ray_jobs.evaluation.rows.PROBABILITIES` [n], `loss` is
    the mean cross-entropy.
    """

    accuracy: float
    loss: float
    predictions: NDArray[np.int64]
    probabilities: pa.Table


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
        from ray_jobs.augment.vtab import augmentation  # its package imports torch

        config = config.model_copy(update={"augment": augmentation(dataset.info.name)})
    is_detection = isinstance(config, Detect)
    objects = dataset.info.class_names if is_detection else ()
    head: Head = None if is_detection else "pixels" if config.masks else "classes"
    crop = config.eval_crop if head == "classes" else EvalCrop(crop="squash")
    if config.masks and not dataset.info.mask_classes:
        raise UserError(f"masks true: data set {dataset.info.name} has no masks")
    if backbone is None:
        assert config.model is not None and config.resolution is not None
        contract = model_contract(config.model, config.resolution, dataset.info, crop, head)
        check_settings(config, contract)
        return Task(config, contract, None, objects=objects)
    source = read_contract(backbone)
    resolution = config.resolution or source.preprocessing.resolution
    try:
        architecture = source.architecture.for_finetuning(resolution, num_outputs(dataset.info, head))
        if config.stochastic_depth is not None:
            if not isinstance(architecture, ViTConfig):
                raise UserError("stochastic_depth needs the blocks of a ViT, but the backbone is a ResNet")
            changed = architecture.model_dump() | {"stochastic_depth": config.stochastic_depth}
            architecture = ViTConfig.model_validate(changed)
        contract = continued_contract(source, architecture, dataset.info, crop, head)
    except ValidationError as error:
        raise UserError(f"fine-tuning {config.backbone}: {reasons(error)}") from error
    check_settings(config, contract)
    return Task(config, contract, backbone, objects=objects)


def at_point(task: Task, number: int, point: Point, dataset: Dataset) -> Task:
    """Return the task of one point of the search, with the point's settings.

    Raises:
        UserError: the settings do not fit each other, the data or the backbone.
    """
    try:
        config = task.config.at(point)
    except ValueError as error:
        why = reasons(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(f"search: {describe(point)} cannot be combined: {why}") from error
    return make_task(config, dataset, task.backbone)._replace(
        attempts=task.attempts, point=point, number=number, digest=point_digest(task.config.search, point)
    )


def describe(point: Point) -> str:
    """Return a point in words: `learning rate 0.01, optimizer.weight decay 0.1`."""
    return ", ".join(
        f"{path.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}"
        for path, value in point.items()
    )


def check_settings(config: Finetune, contract: ModelContract) -> None:
    """Check the settings that depend on the model and the classes.

    Raises:
        UserError: a setting does not fit them.
    """
    architecture, names = contract.architecture, contract.class_names or contract.mask_classes
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
            raise UserError(f"lora.rank {config.lora.rank}: the backbone's matrices have {architecture.width} rows")
    if isinstance(config.freeze, int):
        if not isinstance(architecture, ViTConfig):
            raise UserError(
                f"freeze {config.freeze} needs the blocks of a ViT, but the backbone is a ResNet: use freeze: backbone"
            )
        if config.freeze > architecture.num_blocks:
            raise UserError(f"freeze {config.freeze}: the backbone has {architecture.num_blocks} blocks")
        if config.freeze == architecture.num_blocks and config.optimizer.name == "muon":
            raise UserError(
                f"optimizer.name muon steps the matrices of the blocks, but freeze {config.freeze} trains none of them;"
                " use adamw or sgd"
            )
    if config.activation_checkpointing and not isinstance(architecture, ViTConfig):
        raise UserError("activation_checkpointing needs the blocks of a ViT, but the backbone is a ResNet")
    for name in config.class_weights if isinstance(config.class_weights, dict) else ():
        if name not in names:
            raise UserError(f"class_weights: the data has no class {name!r}{nearest(name, names)}")
