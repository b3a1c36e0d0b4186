"""The stage `report`: one page with other stages' results."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelines.spec.stages.base import BaseStage
from vit_model.fields import later, takes


class Report(BaseStage):
    """One page of everything: a table, curves, sheets of images, and the rows behind them."""

    VERSION = 21  # what the answer, plots and notes say is true of several backbones, metrics and seeds
    KIND = "report"
    job: Literal["report"]
    title: str
    note: str = Field("", description="a note for readers, shown beside the verdict")
    of: tuple[str, ...] = takes(
        *("dataset", "model", "evaluation", "audit", "embedding", "inspection", "detector"),
        shows_names=True,
        min_length=1,
    )
    missing: tuple[str, ...] = later(
        (), description="set by a run: members of a matrix that could not be built and were removed from `of`"
    )
