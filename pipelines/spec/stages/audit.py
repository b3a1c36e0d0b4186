"""The stage `audit`: which labels are likely wrong."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from pipelines.spec.augmentation import Augmentation, RandAugment
from pipelines.spec.checkpoints import Backbone
from pipelines.spec.fields import Seed
from pipelines.spec.stages.base import BACKBONE, BaseStage, Fit, Rate, cache_gib, threads
from pipelines.spec.stages.finetune import Finetune
from vit_model.errors import reasons
from vit_model.fields import takes
from vit_model.sizes import Model


class CrossValidation(Fit):
    """The training that an audit repeats on all folds but one, to judge the labels of the remaining fold."""

    folds: int = Field(5, ge=2, description="parts of train and dev; copies and groups stay together")
    model: Model | None = Field(None, description="instead of a backbone: the model to train from scratch")
    resolution: int | None = Field(None, ge=4, le=8192, description="with a backbone: null keeps the backbone's")
    learning_rate: Rate
    steps: int = Field(ge=1, description="training steps per fold")
    batch_size: int = Field(ge=1)
    augment: Augmentation = "none"
    randaugment: RandAugment | None = None


class Audit(BaseStage):
    """A list of likely wrong labels in train and dev, by confident learning on out-of-sample probabilities."""

    KIND = "audit"
    job: Literal["audit"]
    data: str = takes("dataset")
    backbone: Backbone | None = takes("model", default=None, description=BACKBONE)
    cross_validation: CrossValidation | None = Field(
        None,
        description="probabilities of each fold from a training on the others, from the backbone's weights or from"
        " scratch, which is better and takes longer; null: leave-one-out least squares on the backbone's frozen"
        " features",
    )
    seed: Seed = 0
    threads: int | None = threads("fold, or per task that computes features")
    cache_gib: float = cache_gib()

    @model_validator(mode="after")
    def _source_is_whole(self) -> Self:
        if self.cross_validation is not None:
            try:
                self.fine_tuning()
            except ValidationError as error:
                raise ValueError(f"cross_validation: {reasons(error)}") from None
        elif self.backbone is None:
            raise ValueError(
                "backbone is missing; give a model stage whose features are used, or cross_validation with a model to"
                " train from scratch"
            )
        return self

    def fine_tuning(self) -> Finetune:
        """Return the fine-tuning that has the settings of the cross-validation's fits."""
        assert self.cross_validation is not None
        fields = self.cross_validation.model_dump(exclude={"folds", "learning_rate"})
        own = self.model_dump(include={"data", "backbone", "seed", "threads", "cache_gib"})
        rates = {"learning_rates": (self.cross_validation.learning_rate,)}
        return Finetune.model_validate({"job": "finetune"} | fields | own | rates)
