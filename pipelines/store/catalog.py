"""The catalog: records that were read earlier, in the user's cache folder, `catalog/<store id>.sqlite`.

A row is one record with the version of its objects. It counts only while the store lists objects of this version, so
it cannot be out of date; records that may still change have no rows. The catalog only saves time. If it is locked,
damaged, of an earlier version, or cannot be written, the store is read, and a damaged catalog is built anew.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote
from zlib import crc32

from pydantic import ValidationError

from pipelines.files.hashing import cache_folder
from pipelines.store.protocol import Store
from vit_model.fields import Frozen

VERSION = 1  # of the table and of the models in it
BUSY_SECONDS = 2.0  # another process writes for some 50 ms at a time
_BATCH = 1_000  # records that are read, or rows that are fetched, at once
_TABLE = (
    "DROP TABLE IF EXISTS records",
    """CREATE TABLE records (folder TEXT, name TEXT, version TEXT, position TEXT, record TEXT, checksum INTEGER,
        PRIMARY KEY (folder, name))""",
    "CREATE INDEX positions ON records (folder, position, name, version)",
    f"PRAGMA user_version = {VERSION}",
)
_PAGE = """SELECT position, name, version, record, checksum FROM records
    WHERE folder = ? AND (position, name) > (?, ?) ORDER BY position, name LIMIT ?"""
Record = TypeVar("Record", bound=Frozen)


class Found(NamedTuple, Generic[Record]):
    """A record as the store has it now."""

    position: str
    """By which records are sorted."""
    name: str
    record: Record
    is_final: bool = True
    """Whether it depends on the listed objects only, so that it stays true for these versions."""


Read = Callable[[Sequence[str]], Iterable[Found[Record]]]


def listed(
    store: Store, folder: str, versions: Mapping[str, str | None], model: type[Record], read: Read[Record]
) -> Iterator[Record]:
    """Yield the records of a folder, sorted by position and name; read those that the catalog does not have.

    Args:
        versions: the names of the records, and the version of each one's objects; without a version it is always read.
        read: returns the records of these names, fewer if some are damaged.
    """
    rest = dict(versions)
    try:
        with closing(_open(store)) as connection:
            unkept = _refresh(connection, folder, rest, read)
            kept = _rows(connection, folder, rest, model)
            for found in heapq.merge(kept, unkept, key=_order):
                del rest[found.name]
                yield found.record
    except (sqlite3.Error, OSError, ValidationError) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            with suppress(OSError):
                _path(store).unlink()
    for found in sorted((found for names in _batches(rest) for found in read(names)), key=_order):
        yield found.record


def _order(found: Found[Record]) -> tuple[str, str]:
    return found.position, found.name


def _path(store: Store) -> Path:
    return cache_folder() / "catalog" / f"{quote(store.id, safe='')}.sqlite"


def _open(store: Store) -> sqlite3.Connection:
    path = _path(store)
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")  # rows have checksums, and can be read again
    if _version(connection) != VERSION:
        connection.execute("BEGIN IMMEDIATE")
        if _version(connection) != VERSION:  # not in the meantime by another process
            for statement in _TABLE:
                connection.execute(statement)
        connection.execute("COMMIT")
    return connection


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _refresh(
    connection: sqlite3.Connection, folder: str, rest: dict[str, str | None], read: Read[Record]
) -> list[Found[Record]]:
    """Bring the rows of a folder up to the listed versions; return the records that have no row, sorted.

    Removes the names of damaged records from `rest`.
    """
    known = dict(connection.execute("SELECT name, version FROM records WHERE folder = ?", [folder]))
    gone = [(folder, name) for name in known if not rest.get(name)]
    changed = [name for name, version in rest.items() if not version or known.get(name) != version]
    del known
    unkept = []
    for names in _batches(changed):
        found = {each.name: each for each in read(names)}
        kept = {name: version for name in names if name in found and found[name].is_final and (version := rest[name])}
        rows = [_row(folder, found[name], version) for name, version in kept.items()]
        _write(connection, "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?)", rows)
        unkept += [each for name, each in found.items() if name not in kept]
        for name in names:
            if name not in found:
                del rest[name]
    if gone:
        _write(connection, "DELETE FROM records WHERE folder = ? AND name = ?", gone)
    return sorted(unkept, key=_order)


def _write(connection: sqlite3.Connection, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(statement, rows)
    connection.execute("COMMIT")


def _row(folder: str, found: Found[Record], version: str) -> tuple[Any, ...]:
    text = found.record.model_dump_json()
    return (
        folder,
        found.name,
        version,
        found.position,
        text,
        _checksum(found.position, found.name, version, text),
    )


def _checksum(*values: object) -> int:
    return crc32(" ".join(map(str, values)).encode())


def _rows(
    connection: sqlite3.Connection, folder: str, rest: Mapping[str, str | None], model: type[Record]
) -> Iterator[Found[Record]]:
    """Yield the rows of the listed versions, sorted. Raises sqlite3.DatabaseError if one is damaged."""
    after = ("", "")
    while rows := connection.execute(_PAGE, [folder, *after, _BATCH]).fetchall():
        for position, name, version, text, checksum in rows:
            if checksum != _checksum(position, name, version, text):
                raise sqlite3.DatabaseError(f"the row of {name} is damaged")
            if rest.get(name) == version:
                yield Found(position, name, model.model_validate_json(text))
        after = (position, name)


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(names)
    while batch := list(islice(remaining, _BATCH)):
        yield batch
