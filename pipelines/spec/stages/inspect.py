"""The stage `inspect`: what a ViT has learned."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelines.spec.checkpoints import Backbone
from pipelines.spec.fields import Seed
from pipelines.spec.stages.base import BACKBONE, BaseStage
from vit_model.fields import execution, takes


class Inspect(BaseStage):
    """A look inside a ViT: its filters, its positions, and where it attends (paper, section 4.5)."""

    KIND = "inspection"
    job: Literal["inspect"]
    data: str = takes("dataset")
    backbone: Backbone = takes("model", description=BACKBONE)
    split: Literal["train", "dev", "test"] = Field("test", description="the split whose images the model looks at")
    images: int = Field(128, ge=1, le=10_000, description="drawn from the split; the paper takes 128")
    seed: Seed = 0
    threads: int = execution(1, ge=1, description="CPU threads of the task, which has a GPU if there is one")

    def uses_labels(self) -> bool:
        return False
