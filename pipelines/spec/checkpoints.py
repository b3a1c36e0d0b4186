"""Checkpoints of a training: when they are written, and how other stages name a pretraining's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from pipelines.spec.fields import GIVEN_NAME
from vit_model.fields import Frozen

LAST, BEST = "last", "best"
LATEST = "latest"
"""The value of init_from for the newest model of the stage itself (`pipelines.engine.latest`)."""
_STEP = "step:"


class CheckpointEvery(Frozen):
    """How often training writes a checkpoint; with both intervals, whichever has passed first."""

    steps: int | None = Field(None, ge=1, description="null: not by steps")
    minutes: float | None = Field(None, gt=0, description="since the last checkpoint; null: not by time")

    @model_validator(mode="after")
    def _some_interval(self) -> Self:
        if self.steps is None and self.minutes is None:
            raise ValueError("give steps, minutes or both")
        return self


def step_of(checkpoint: str) -> int | None:
    """Return N of step:N; None for last and best."""
    return int(checkpoint.removeprefix(_STEP)) if checkpoint.startswith(_STEP) else None


def check_checkpoint(checkpoint: Any) -> str:
    """Return the name of a checkpoint. Raises ValueError if it is not last, best or step:N."""
    known = rf"{LAST}|{BEST}|{_STEP}[1-9][0-9]{{0,17}}"
    if not isinstance(checkpoint, str) or not re.fullmatch(known, checkpoint):
        raise ValueError(f"{checkpoint!r} is not a checkpoint; expected last, best or step:N, such as step:1000")
    return checkpoint


Checkpoint = Annotated[str, BeforeValidator(check_checkpoint)]
"""last, best (by accuracy on the pretraining's own dev split) or step:N."""


def recorded_checkpoint(config: Mapping[str, Any], field: str) -> str:
    """Return the checkpoint that a field names in a stage's recorded configuration."""
    value = config.get(field)
    return str(value.get("checkpoint", LAST)) if isinstance(value, Mapping) else LAST


class NamedCheckpoint(Frozen):
    """The weights of a pretraining at one of its checkpoints."""

    stage: str
    checkpoint: Checkpoint = Field(
        LAST, description="last, best (on the pretraining's dev split) or step:N, one of its keep_steps"
    )

    def __str__(self) -> str:
        return f"{self.stage} ({self.checkpoint})"


FORMS = ("stage name", "stage and checkpoint")
"""pydantic's names of the two forms of a `Backbone`, in the path of an error."""


def check_alias(name: str) -> str:
    """Return the name of a stage, or of an alias if it begins with @. Raises ValueError for what cannot be an alias."""
    if name.startswith("@") and not re.fullmatch(GIVEN_NAME, name[1:]):
        raise ValueError(f"{name!r} is not a valid alias; expected @NAME, such as @production")
    return name


def _name_if_last(value: str | NamedCheckpoint) -> str | NamedCheckpoint:
    if isinstance(value, NamedCheckpoint) and value.stage.startswith("@"):
        raise ValueError(f"{value}: an alias names a model with its last weights; write {value.stage!r}")
    if isinstance(value, str):
        return check_alias(value)
    return value.stage if value.checkpoint == LAST else value


Backbone = Annotated[
    Annotated[str, Tag(FORMS[0])] | Annotated[NamedCheckpoint, Tag(FORMS[1])],
    Discriminator(lambda value: FORMS[isinstance(value, dict | NamedCheckpoint)]),
    AfterValidator(_name_if_last),
]
"""A stage's name, which means its last weights, {stage, checkpoint}, or "@alias", the model that an alias of the store
names. The last checkpoint becomes the name alone."""
BACKBONE_FIELDS = ("backbone", "init_from", "teacher")
"""The names of the fields of this type."""
