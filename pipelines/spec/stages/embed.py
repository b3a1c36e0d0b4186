"""The stages `embed` and `predict`: a model's features of all images of a data set, or its predictions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipelines.spec.checkpoints import Backbone
from pipelines.spec.fields import distinct
from pipelines.spec.stages.base import BACKBONE, BaseStage, cache_gib
from vit_model.fields import execution, takes


class _Inference(BaseStage):
    data: str = takes("dataset")
    backbone: Backbone = takes("model", description=BACKBONE)
    splits: Annotated[tuple[Literal["train", "dev", "test"], ...], Field(min_length=1), AfterValidator(distinct)] = (
        Field(("train", "dev", "test"), description="the splits whose images are computed")
    )
    threads: int = execution(1, ge=1, description="CPU threads per task; each task has a GPU if there is one")
    cache_gib: float = cache_gib()

    def uses_labels(self) -> bool:
        return False


class Embed(_Inference):
    """The features of a frozen model for every image, as Parquet."""

    KIND = "embedding"
    job: Literal["embed"]


class Predict(_Inference):
    """The predictions of a model with a classifier for every image, as Parquet: batch inference."""

    KIND = "prediction"
    job: Literal["predict"]
