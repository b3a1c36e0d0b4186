"""The search of a fine-tuning: which values of which fields its trials have (`search` in recipes)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, JsonValue, Tag, model_validator

from pipelines.spec.fields import Seed
from vit_model.fields import Frozen

Point = dict[str, Any]
"""The values of the searched fields in one trial, by the field's path: {"optimizer.weight_decay": 0.1}."""

# Fields that define the sweep's task, so all trials must share them.
FIXED = (
    *("job", "data", "backbone", "model", "labels", "seed"),
    *("seen_in_training", "search", "select_by", "early_stopping"),
    "optimizer.preset",  # a trial's optimizer has all settings already
)


class Range(Frozen):
    """All numbers from `low` to `high`; integers if both are written without a point."""

    low: int | float
    high: int | float
    scale: Literal["linear", "log"] = "linear"

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} is not less than high {self.high:g}")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"low {self.low:g}: a logarithmic range begins above 0")
        return self

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def samples(self) -> tuple[int | float, ...]:
        """Return values for a check of the range: its ends and, unless it is of integers, one fraction."""
        inside = () if self.is_whole else (self.low + (self.high - self.low) / math.pi,)
        return self.low, *inside, self.high


def _no_text_for_numbers(values: tuple[JsonValue, ...]) -> tuple[JsonValue, ...]:
    """Raise ValueError for text that pydantic would take for a number, because the key would have the text."""
    for value in _scalars(list(values)):
        if isinstance(value, str) and _is_number(value):
            raise ValueError(f"{value!r} is text; write the number without quotes")
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _scalars(value: JsonValue) -> Iterator[JsonValue]:
    """Yield the scalars in a value, at any depth of lists and mappings."""
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _scalars(item)
    else:
        yield value


Choices = Annotated[tuple[JsonValue, ...], Field(min_length=1), AfterValidator(_no_text_for_numbers)]
Values = Annotated[
    Annotated[Range, Tag("range")] | Annotated[Choices, Tag("values")],
    Discriminator(lambda value: "range" if isinstance(value, dict | Range) else "values"),
]
Space = Annotated[dict[str, Values], Field(min_length=1)]


def _trials() -> Any:
    return Field(ge=1, description="how many points are tried")


def _minutes() -> Any:
    return Field(
        None,
        gt=0,
        description="begin no more trials after this time, which makes the result depend on the machine",
    )


class Grid(Frozen):
    """Every combination of the values."""

    kind: Literal["grid"]
    over: Annotated[dict[str, Choices], Field(min_length=1)]
    minutes: float | None = _minutes()


class RandomSearch(Frozen):
    """Points drawn independently."""

    kind: Literal["random"]
    over: Space
    trials: int = _trials()
    seed: Seed = 0
    minutes: float | None = _minutes()


class ASHA(Frozen):
    """Random points, most of which end early (Li et al., arXiv 1810.05934).

    Each trial is evaluated at equal distances. After 1, r, r^2, ... times `grace` evaluations it continues only if it
    is among the best 1/r so far, so with several trials at once the result depends on their order.
    """

    kind: Literal["asha"]
    over: Space
    trials: int = _trials()
    seed: Seed = 0
    evaluations: int = Field(
        9, ge=2, description="evaluations of a trial that does not end early; the last is after its last step"
    )
    grace: int = Field(1, ge=1, description="evaluations before which no trial is ended")
    reduction_factor: int = Field(3, ge=2)
    minutes: float | None = _minutes()

    @model_validator(mode="after")
    def _ends_some(self) -> Self:
        if self.grace >= self.evaluations:
            raise ValueError(
                f"grace {self.grace} must be less than evaluations {self.evaluations}, or no trial is ended"
            )
        return self


class Optuna(Frozen):
    """Points that Optuna's TPE proposes from the results of earlier ones (Bergstra et al. 2011).

    With several trials at once, the proposals depend on the order in which trials end.
    """

    kind: Literal["optuna"]
    over: Space
    trials: int = _trials()
    seed: Seed = 0
    minutes: float | None = _minutes()


Search = Annotated[Grid | RandomSearch | ASHA | Optuna, Field(discriminator="kind")]


def placed(fields: dict[str, Any], point: Point) -> dict[str, Any]:
    """Return a stage's fields with the values of a point.

    Raises:
        ValueError: a path goes through a field without fields.
    """
    fields = dict(fields)
    for path, value in point.items():
        first, _, rest = path.partition(".")
        if not rest:
            fields[first] = value
            continue
        inner = fields.get(first)
        if not isinstance(inner, dict):
            raise ValueError(f"{path}: {first} is {inner!r}, which has no field {rest}")
        fields[first] = placed(inner, {rest: value})
    return fields
