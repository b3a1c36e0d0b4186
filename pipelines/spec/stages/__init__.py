"""The stages of a pipeline, as recipes define them: one module each, and the list of them."""

from typing import Annotated

from pydantic import Field

from pipelines.spec.stages.audit import Audit
from pipelines.spec.stages.base import BaseStage
from pipelines.spec.stages.baselines import Baselines
from pipelines.spec.stages.evaluate import Evaluate
from pipelines.spec.stages.finetune import Finetune
from pipelines.spec.stages.import_model import Import
from pipelines.spec.stages.ingest import Ingest
from pipelines.spec.stages.pretrain import Pretrain
from pipelines.spec.stages.report import Report
from pipelines.spec.stages.segment import Segment

Stage = Annotated[
    Ingest | Import | Pretrain | Finetune | Evaluate | Segment | Baselines | Audit | Report,
    Field(discriminator="job"),
]
STAGE_TYPES: dict[str, type[BaseStage]] = {
    "ingest": Ingest,
    "import": Import,
    "pretrain": Pretrain,
    "finetune": Finetune,
    "evaluate": Evaluate,
    "segment": Segment,
    "baselines": Baselines,
    "audit": Audit,
    "report": Report,
}
AnyStage = Ingest | Import | Pretrain | Finetune | Evaluate | Segment | Baselines | Audit | Report


def module(job: str) -> str:
    """Return the name of the `ray_jobs` module for a job."""
    return "import_model" if job == "import" else job  # `import` is a keyword
