"""Published accuracies and their protocols, from `published.yaml` beside this file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter

from pipelines.spec.augmentation import EvalCrop
from pipelines.spec.optimizer import Optimizer
from pipelines.spec.stages.finetune import Finetune
from pipelines.spec.stages.import_model import Import
from pipelines.spec.stages.ingest import Ingest
from vit_model.fields import Frozen


class Published(Frozen):
    """A published accuracy, its protocol, and the stage of a shipped recipe that repeats it."""

    name: str
    accuracy: Annotated[float, Field(ge=0, le=100)]
    """% of the test images"""
    source: str
    weights: str
    """The name that the source gives to the file."""
    recipe: str
    stage: str
    data: dict[str, Any]
    """The fields of an ingest's source. Its dev is not trained on."""
    test_images: int
    resolution: int
    augment: str
    eval_crop: EvalCrop
    steps: int
    optimizer: Optimizer
    batch_size: int
    learning_rate: float

    def stages(self) -> tuple[Finetune, Ingest, Import]:
        """Return the stages of its protocol; what the protocol does not name has its default, or no meaning (paths)."""
        shared = Published.model_fields.keys() & Finetune.model_fields.keys() - {"data"}
        tuned = {"data": "data", "backbone": "backbone", "labels": {"use_dev": False}}
        tuned |= {name: getattr(self, name) for name in shared} | {"learning_rates": (self.learning_rate,)}
        return (
            Finetune.model_validate({"job": "finetune"} | tuned),
            Ingest.model_validate({"job": "ingest", "source": {"root": "archives"} | self.data}),
            Import(job="import", path=self.weights),
        )


@cache
def published() -> dict[str, Published]:
    """Return the table of published accuracies by name."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return {row.name: row for row in TypeAdapter(list[Published]).validate_python(rows)}
