"""Records in a store's objects, validated when they are read, and numbered records."""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import TypeVar

from pydantic import ValidationError

from pipelines.errors import StoreDamaged
from pipelines.store.protocol import LARGEST_RECORD, Store
from vit_model.fields import Frozen

Record = TypeVar("Record", bound=Frozen)


def read_record(store: Store, name: str, model: type[Record]) -> Record | None:
    """Read the record in an object; None if there is no such object. Raises StoreDamaged."""
    data = store.read(name, LARGEST_RECORD)
    return None if data is None else parse_record(store, name, data, model)


def parse_record(store: Store, name: str, data: bytes | StoreDamaged, model: type[Record]) -> Record:
    if isinstance(data, StoreDamaged):
        raise data
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = "".join(f"{part}: " for part in first["loc"])
        raise StoreDamaged(f"{store.uri}/{name} is damaged or of another version: {field}{first['msg']}") from None


def check_name(store: Store, name: str, implied: str) -> None:
    """Check that an object has the name that its record implies; otherwise it is a copy of another object."""
    if name != implied:
        raise StoreDamaged(f"{store.uri}/{name} is damaged: it is a copy of {implied}")


def numbers(store: Store, folder: str, suffix: str = ".json") -> list[int]:
    """Return the numbers n, from 1, of a folder's <n>.json, ascending; the highest record is the current one."""
    name_of = re.compile("([1-9][0-9]{0,8})" + re.escape(suffix))
    return sorted(int(match[1]) for match in map(name_of.fullmatch, store.names(folder)) if match)


@cache
def warn(text: str) -> None:
    """Write a warning to stderr, once per process."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
