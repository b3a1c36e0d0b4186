"""The exception for problems that the user can fix. This module imports nothing, so every package can import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """A problem with a request, a file or a machine; the message says what is wrong and what to do.

    A stage that ends with it exits with code 2 and is not retried. Any other exception is a bug or temporary: the stage
    exits with code 1 and is attempted again. Raise it only for what the user can change, not for a mistake in our own
    code. A reader of files converts a library's exception about the bytes where it calls the library.
    """


def reason(problem: Mapping[str, Any]) -> str:
    """Return the message of one of pydantic's errors, with YAML's lists and mappings, not tuples and dictionaries."""
    kind, value = problem["type"], problem["input"]
    if kind == "tuple_type":
        return f"expected a list, such as [{value}]" if isinstance(value, str | int | float) else "expected a list"
    if kind in {"dict_type", "model_type", "model_attributes_type"}:
        return "expected a mapping, {field: value}"
    if kind in {"too_short", "too_long"}:
        word, limit = ("least", "min_length") if kind == "too_short" else ("most", "max_length")
        return f"expected at {word} {(count := problem['ctx'][limit])} item{'s' * (count != 1)}"
    message: str = problem["msg"]
    return message.removeprefix("Value error, ")


def reasons(error: ValidationError) -> str:
    """Return pydantic's error messages in one line."""
    return "; ".join(
        f"{'.'.join(map(str, (*problem['loc'], '')))[:-1]} {reason(problem)}".strip() for problem in error.errors()
    )
