"""The base class of all configurations, the marks of their fields, and errors about one field."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError


class Frozen(BaseModel):
    """The base of all configurations: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_boolean_is_a_number(cls, data: Any) -> Any:
        """Refuse booleans for numbers, which pydantic takes for 0 and 1; its `strict` would refuse lists, too."""
        if not isinstance(data, dict):
            return data
        for name, has_dict in _numbers(cls):
            if isinstance(value := data.get(name), _MAY_HOLD):
                for place, boolean in _booleans((name,), value, has_dict):
                    reads = "YAML reads yes, no, on and off as true and false"
                    raise wrong_field(place, f"expected a number, not {str(boolean).lower()} ({reads})")
        return data


def wrong_field(place: tuple[str | int, ...], message: str) -> ValidationError:
    """Return an error for a model's validator to raise about one of its fields, or about a place inside the field."""
    problem = PydanticCustomError("value_error", "{message}", {"message": message})
    return ValidationError.from_exception_data("", [InitErrorDetails(type=problem, loc=place, input=None)])


@cache
def _numbers(model: type[BaseModel]) -> tuple[tuple[str, bool], ...]:
    """Return the fields that take numbers and no booleans, each with whether it takes mappings of them."""
    kinds = {name: set(_kinds(info.annotation)) for name, info in model.model_fields.items()}
    return tuple((name, dict in types) for name, types in kinds.items() if types & {int, float} and bool not in types)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation, including types of a `Literal`'s values, but not of other models' fields."""
    if get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
        return
    yield get_origin(annotation) or annotation
    for part in get_args(annotation):
        yield from _kinds(part)


_MAY_HOLD = (bool, list, tuple, dict)  # values that are booleans or may have them inside


def _booleans(place: tuple[str | int, ...], value: Any, has_dict: bool) -> Iterator[tuple[Any, bool]]:
    """Yield the place and value of each boolean in a value and its lists, and in its mappings if it may have any."""
    if isinstance(value, bool):
        yield place, value
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _booleans((*place, number), item, has_dict)
    elif isinstance(value, dict) and has_dict:
        for name, item in value.items():
            if isinstance(item, _MAY_HOLD):
                yield from _booleans((*place, name), item, has_dict)


def later(*default: Any, **constraints: Any) -> Any:
    """Declare a field that was added after configurations had been stored; those without it have its default.

    A stage's key therefore leaves the field out while it has its default (`pipelines.identity`).
    """
    return Field(*default, json_schema_extra={"later": True}, **constraints)


def execution(default: Any = ..., **constraints: Any) -> Any:
    """Declare a field that never changes the result, so it is not in the key: workers, threads, paths."""
    return Field(default, json_schema_extra={"execution": True}, **constraints)


def takes(*kinds: str, shows_names: bool = False, later: bool = False, **constraints: Any) -> Any:
    """Declare a field that names one other stage (a tuple: several) with an artifact of one of these kinds.

    The names of stages enter the key only if the result shows them (`shows_names`). For `later`, see that function.
    """
    return Field(json_schema_extra={"input": list(kinds), "shows_names": shows_names, "later": later}, **constraints)


def marks(field: FieldInfo) -> dict[str, Any]:
    """Return the marks that `execution`, `takes` and `later` put on a field."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
