"""The base of the stages, and fields that several stages have."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pipelines.spec.augmentation import RandAugment, mixing
from pipelines.spec.checkpoints import LATEST, NamedCheckpoint
from pipelines.spec.fields import Seed
from pipelines.spec.optimizer import Optimizer
from vit_model.fields import Frozen, execution, later, marks
from vit_model.sizes import Model, ModelSize

Shots = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
WEIGHTS = ("model", "detector")  # the kinds with weights that can be used and named
Kind = Literal["dataset", "model", "evaluation", "audit", "embedding", "prediction", "inspection", "report", "detector"]
"""The kinds of artifact that stages make."""
SeenInTraining = Literal["fail", "report"]
BACKBONE = (
    'a stage\'s name; for a pretraining, {stage: NAME, checkpoint: last | best | step:N}; or "@NAME", the model that an'
    " alias of the store names when the run is planned"
)


def seen_in_training() -> Any:
    """Declare the field of stages that score a model on test images."""
    return later(
        "fail",
        description="what to do if the backbone or one of its ancestors was trained on test images: fail and say how"
        " many, or report: score them separately, in rows that verdicts and lists of best results leave out",
    )


def cache_gib() -> Any:
    """Declare the field of stages that read a data set's images many times."""
    return execution(64, gt=0, description="GiB of images from S3 that a machine keeps in its cache folder")


def threads(of: str) -> Any:
    """Declare the field of stages that train."""
    return execution(
        None,
        ge=1,
        description=f"CPU threads per {of}; null: 1, or with GPUs 3/4 of the cores per GPU, at most 12, for decoding",
    )


class BaseStage(Frozen):
    """The base of all stages. `VERSION` increases when the same configuration gives another result.

    `CONCERNS` maps a version that changed only some configurations' results to a function that tells which.
    """

    VERSION: ClassVar[int] = 1
    CONCERNS: ClassVar[dict[int, Callable[[Any], bool]]] = {}
    KIND: ClassVar[Kind]
    job: str

    @property
    def version(self) -> int:
        """The last version that changed this configuration's results; it enters the key."""
        return next(
            version
            for version in range(self.VERSION, 0, -1)
            if version not in self.CONCERNS or self.CONCERNS[version](self)
        )

    def uses_labels(self) -> bool:
        """Return whether the stage needs the labels of its `data`."""
        return True

    def needs_one_label(self) -> str | None:
        """Return why the images of `data` must have one label each; None if they can have several."""
        return f"{self.job} takes one label per image" if self.uses_labels() else None

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Return {field: the stages it names} for every field that takes artifacts and names at least one."""
        inputs, stored = {}, self.from_store()
        for field in input_fields(type(self)):
            if field not in stored and (value := getattr(self, field)):
                one = value.stage if isinstance(value, NamedCheckpoint) else value
                inputs[field] = (one,) if isinstance(one, str) else tuple(one)
        return inputs

    def from_store(self) -> dict[str, str]:
        """Return {field: latest or @alias} for every field that names a model of the store, and not a stage."""
        return {
            field: value
            for field, kinds in input_fields(type(self)).items()
            if "model" in kinds
            and isinstance(value := getattr(self, field), str)
            and (value.startswith("@") or (field, value) == ("init_from", LATEST))
        }

    def lacking(self, empty: Set[str]) -> Set[str]:
        """Return which of the fields whose alias names nothing need a model."""
        return empty - {"init_from"}

    def checkpoints(self) -> dict[str, str]:
        """Return {field: best or step:N} for every field that names a checkpoint of its input other than the last."""
        return {
            field: value.checkpoint
            for field in input_fields(type(self))
            if isinstance(value := getattr(self, field), NamedCheckpoint)
        }


class Fit(Frozen):
    """The settings of gradient descent that pretraining, fine-tuning and an audit's cross-validation share."""

    steps: Steps
    optimizer: Optimizer = Optimizer()
    randaugment: RandAugment | None = later(None)
    color_jitter: float = later(
        0.0,
        ge=0,
        le=1,
        description="brightness, contrast and saturation of each image change, in random order, by random factors"
        " between 1 - this and 1 + this, as timm's; 0: none",
    )
    mixup: float = mixing("mixup")
    cutmix: float = mixing("cutmix")
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class TrainingStage(Fit, BaseStage):
    """The base of the stages that train a model."""

    seed: Seed = 0
    activation_checkpointing: bool = execution(
        False,
        description="for ViTs: keep only each block's input for the backward pass, and compute the rest again, which"
        " takes less memory and more time",
    )
    cache_gib: float = cache_gib()


@cache
def input_fields(stage: type[BaseStage]) -> dict[str, tuple[str, ...]]:
    """Return {field: the kinds of artifact it takes} for every field of a stage that names other stages."""
    return {field: tuple(kinds) for field, info in stage.model_fields.items() if (kinds := marks(info).get("input"))}


def has_stochastic_depth(model: Model | None) -> bool:
    return isinstance(model, ModelSize) and model.stochastic_depth > 0
