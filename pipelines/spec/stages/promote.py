"""The stage `promote`: whether a model takes the place of the one that an alias names."""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipelines.spec.checkpoints import check_alias
from pipelines.spec.stages.base import WEIGHTS, BaseStage, cache_gib
from vit_model.fields import execution, takes


def _only_alias(name: str) -> str:
    if not name.startswith("@"):
        raise ValueError(f"{name!r} is not an alias; expected @NAME, such as @production")
    return check_alias(name)


Alias = Annotated[str, AfterValidator(_only_alias)]


class Promote(BaseStage):
    """A comparison of a candidate with the model that an alias names, on the same test images, and its decision.

    If the candidate is promoted, the run moves the alias.
    """

    KIND = "evaluation"
    job: Literal["promote"]
    data: str = takes(
        "dataset",
        description="its test images are scored, without those that a model or an ancestor was trained on, also as a"
        " near-copy; use a data set that does not change",
    )
    candidate: str = takes(*WEIGHTS, description='a stage\'s name, or "@NAME"; its last weights')
    against: Alias = takes(
        *WEIGHTS, shows_names=True, description='"@NAME": the model to replace, and the alias to move'
    )
    max_loss: float = Field(
        0.005,
        ge=0,
        lt=1,
        description="the loss of accuracy, or of a detector's AP, that is accepted: the lower end of the difference's"
        " 95% interval must be above -max_loss",
    )
    floor: float = Field(
        ge=0, le=1, description="the accuracy or AP that the candidate needs while the alias names no model"
    )
    anchor: Alias | None = takes(
        *WEIGHTS,
        default=None,
        shows_names=True,
        description='"@NAME": a model that stays, so that many accepted losses do not add up',
    )
    max_total_loss: float = Field(0.01, ge=0, lt=1, description="the same as max_loss, against the anchor")
    threads: int = execution(1, ge=1, description="CPU threads per task; each task has a GPU if there is one")
    cache_gib: float = cache_gib()

    def lacking(self, empty: Set[str]) -> Set[str]:
        # the first model has no rival, and no anchor
        return empty - {"against", "anchor"} if "against" in empty else empty

    def needs_one_label(self) -> str | None:
        return None  # images of detectors have several, and the stage refuses classifiers on them
