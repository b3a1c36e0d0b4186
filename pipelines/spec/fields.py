"""What the fields of all stages share: how they are marked, checked, and spoken of."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic.fields import FieldInfo

from vit_model.errors import UserError


class RecipeError(UserError):
    """A recipe, or a request about one, that can't be run; the message says what would be right."""


def execution(default: Any = ..., **constraints: Any) -> Any:
    """A field that never changes the result, so it stays out of the key: workers, threads, paths."""
    return Field(default, json_schema_extra={"execution": True}, **constraints)


def takes(*kinds: str, shows_names: bool = False, later: bool = False, **constraints: Any) -> Any:
    """A field that names one earlier stage (a tuple: several) whose artifact is of one of these kinds.

    What a stage is called does not enter a key, but where the result shows the names. `later`: as the marker of that
    name does (`vit_model.config`).
    """
    return Field(
        json_schema_extra={"input": list(kinds), "shows_names": shows_names, "later": later}, **constraints
    )


def marks(field: FieldInfo) -> dict[str, Any]:
    """What `execution`, `takes` and `later` say of a field."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"{list(values)} has a value twice")
    return values


def ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(values))


def absolute(folder: str) -> str:
    """A job runs in another working folder."""
    return str(Path(folder).expanduser().absolute())


def located(path: str) -> str:
    if path.startswith("s3://"):
        return path
    if "://" in path:
        raise ValueError(f"{path!r} is not a local file or folder, nor s3://bucket/key: fetch it first")
    return absolute(path)


# Text, not compiled patterns: few commands use them, and start-up stays fast.
HUB_PATH = r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]{1,100}))?"
COMMIT = r"[0-9a-f]{40}"


def checkpoint(path: str) -> str:
    """As `located`, or a model on the Hugging Face hub."""
    if not path.startswith("hf:"):
        return located(path)
    if not re.fullmatch(HUB_PATH, path, re.ASCII):
        raise ValueError(
            f"{path!r} is not a model on the Hugging Face hub; expected hf:ORG/NAME or hf:ORG/NAME@REVISION"
        )
    return path


def nearest(given: str, known: Any) -> str:
    """', did you mean ...?' for the nearest known name; otherwise the list of them."""
    found = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; there are: {', '.join(known)}"


Seed = Annotated[int, Field(ge=0)]
Root = Annotated[str, AfterValidator(located)]
"""A file or folder outside: a path, or s3://bucket/prefix."""
