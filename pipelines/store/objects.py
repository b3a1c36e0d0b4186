"""Records in a store's objects, each checked when it is read; and those that are numbered."""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import TypeVar

from pydantic import ValidationError

from pipelines.errors import StoreDamaged
from pipelines.store.protocol import LARGEST_RECORD, Store
from vit_model.config import Frozen

Record = TypeVar("Record", bound=Frozen)


def read_record(store: Store, name: str, model: type[Record]) -> Record | None:
    """The record in an object, None where there is none. Raises StoreDamaged."""
    data = store.read(name, LARGEST_RECORD)
    return None if data is None else parse_record(store, name, data, model)


def parse_record(store: Store, name: str, data: bytes | StoreDamaged, model: type[Record]) -> Record:
    if isinstance(data, StoreDamaged):
        raise data
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise StoreDamaged(
            f"{store.uri}/{name} is damaged or of another version: {where}{first['msg']}"
        ) from None


def check_name(store: Store, name: str, own: str) -> None:
    """Check that a record's name follows from its content: under another name it is a copy."""
    if name != own:
        raise StoreDamaged(f"{store.uri}/{name} is damaged: it is {own}")


def numbers(store: Store, folder: str) -> list[int]:
    """The numbers of the records <folder>/<n>.json, in order: the highest is the present, the rest is history."""
    found = (name.removesuffix(".json") for name in store.names(folder) if name.endswith(".json"))
    return sorted(filter(None, map(record_number, found)))


def record_number(name: str) -> int | None:
    """The number, from 1, that a name stands for; None for any other name."""
    return int(name) if re.fullmatch(r"[1-9][0-9]{0,8}", name) else None


@cache
def warn(text: str) -> None:
    """Write a warning to stderr, once in this process."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
