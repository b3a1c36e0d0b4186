"""The stage `segment`: how well a frozen model's features classify pixels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelines.spec.checkpoints import Backbone
from pipelines.spec.fields import Seed
from pipelines.spec.stages.base import BACKBONE, BaseStage, SeenInTraining, seen_in_training
from vit_model.fields import execution, takes


class Segment(BaseStage):
    """Linear segmentation of a frozen backbone's patch tokens, beside the pixels of patches and untrained weights."""

    VERSION = 3  # the class of most pixels is the most frequent class, as among images
    KIND = "evaluation"
    job: Literal["segment"]
    data: str = takes("dataset", description="a data set with masks: its source has `masks: true`, or `mask_classes`")
    backbone: Backbone = takes("model", description=BACKBONE)
    seen_in_training: SeenInTraining = seen_in_training()
    seed: Seed = Field(0, description="seed of the untrained weights")
    threads: int = execution(1, ge=1)

    def uses_labels(self) -> bool:
        return False
