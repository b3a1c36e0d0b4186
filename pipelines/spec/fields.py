"""Markers and validators that the fields of all stages share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from vit_model.errors import UserError


class RecipeError(UserError):
    """A recipe, or a request about one, is invalid; the message says what is expected."""


def distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"{list(values)} contains duplicates")
    return values


def ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(values))


def absolute(folder: str) -> str:
    """Return an absolute path, because jobs run in another working folder."""
    return str(Path(folder).expanduser().absolute())


def located(path: str) -> str:
    if path.startswith("s3://"):
        return path
    if "://" in path:
        raise ValueError(f"{path!r} is not a local file or folder, or s3://bucket/key; download it first")
    return absolute(path)


# Text, not compiled patterns: few commands use them, and start-up stays fast.
HUB_PATH = r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]{1,100}))?"
COMMIT = r"[0-9a-f]{40}"
GIVEN_NAME = r"[a-z][a-z0-9_-]{0,40}"  # of an alias, without the @, or of a schedule
MOST_NAMES = 20  # in a list of all possible names


def checkpoint(path: str) -> str:
    """Validate a path as `located` does, or a model on the Hugging Face hub."""
    if not path.startswith("hf:"):
        return located(path)
    if not re.fullmatch(HUB_PATH, path, re.ASCII):
        raise ValueError(
            f"{path!r} is not a model on the Hugging Face hub; expected hf:ORG/NAME or hf:ORG/NAME@REVISION"
        )
    return path


def check_given_name(name: str, of: str) -> str:
    """Return the name that a person gave to `of`, such as "alias", if it is valid. Raises RecipeError."""
    if not re.fullmatch(GIVEN_NAME, name):
        raise RecipeError(
            f"{name!r} is not a valid {of}; expected a lowercase letter, then at most 40 lowercase letters, digits, "
            "'-' or '_'"
        )
    return name


def nearest(name: str, names: Iterable[str]) -> str:
    """Return '; did you mean ...?' with the nearest of these names; if none is near, the list of them.

    A list of more than MOST_NAMES is shortened to the five nearest.
    """
    known = list(names)
    lower = {each.lower(): each for each in reversed(known)}
    if matches := difflib.get_close_matches(name.lower(), lower, n=1):
        return f"; did you mean {lower[matches[0]]!r}?"
    if len(known) > MOST_NAMES:
        few = difflib.get_close_matches(name, known, n=5, cutoff=0)
        return f"; the nearest of {len(known)} names: {', '.join(few)}"
    return f"; there are: {', '.join(known) or 'none'}"


def quantity(number: int, unit: str, plural: str | None = None) -> str:
    """Return '1 image' or '2 images'; `plural` is needed if it is not the unit with an s."""
    return f"{number:,} {unit if number == 1 else plural or f'{unit}s'}"


Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""A seed is below 2**32 because numpy's `RandomState` needs that, which scikit-learn and Optuna use."""
Root = Annotated[str, AfterValidator(located)]
"""A file or folder outside the store: a path, or s3://bucket/prefix."""
