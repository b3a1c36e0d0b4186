"""The stages of a pipeline, as recipes define them: one module each, and the list of them."""

from typing import Annotated, get_args

from pydantic import Field

from pipelines.spec.stages.audit import Audit
from pipelines.spec.stages.base import BaseStage
from pipelines.spec.stages.baselines import Baselines
from pipelines.spec.stages.embed import Embed, Predict
from pipelines.spec.stages.evaluate import Evaluate
from pipelines.spec.stages.finetune import Detect, Finetune
from pipelines.spec.stages.import_model import Import
from pipelines.spec.stages.ingest import Ingest
from pipelines.spec.stages.inspect import Inspect
from pipelines.spec.stages.pretrain import Pretrain
from pipelines.spec.stages.promote import Promote
from pipelines.spec.stages.report import Report
from pipelines.spec.stages.segment import Segment

AnyStage = (
    Ingest
    | Import
    | Pretrain
    | Finetune
    | Detect
    | Evaluate
    | Segment
    | Baselines
    | Audit
    | Embed
    | Predict
    | Inspect
    | Promote
    | Report
)
"""All stages. Everything else that lists them is derived from this union."""
Stage = Annotated[AnyStage, Field(discriminator="job")]
STAGE_TYPES: dict[str, type[BaseStage]] = {
    job: stage for stage in get_args(AnyStage) for job in get_args(stage.model_fields["job"].annotation)
}
TRAINED = tuple(job for job, stage in STAGE_TYPES.items() if issubclass(stage, Pretrain | Finetune))
"""The jobs that train the model which they store."""

FINE_TUNED = tuple(job for job, stage in STAGE_TYPES.items() if issubclass(stage, Finetune))
"""The jobs that are fine-tunings: they have labels, folds and trials."""


def module(job: str) -> str:
    """Return the name of a job's module in `ray_jobs`, which is also the name of its stage's module here."""
    return STAGE_TYPES[job].__module__.rpartition(".")[2]
