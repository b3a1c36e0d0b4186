"""Tables of labels beside images: metadata.csv, .jsonl and .parquet, the formats of Hugging Face's imagefolder.

    file_name,label,split,patient          {"file_name": "1.jpg", "label": "cat"}
    1.jpg,cat,train,p7                     {"file_name": "2.jpg", "label": 3}

A file name is relative to the table's folder.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from vit_model.errors import UserError

METADATA = "metadata.csv"
TABLES = (METADATA, "metadata.jsonl", "metadata.parquet")


class Columns(NamedTuple):
    """The names of the columns that are read."""

    image: str = "file_name"
    label: str | None = "label"
    """None: the images have no labels."""
    group: str | None = None


IMAGEFOLDER = Columns()
OPTIONS = ("image_column", "label_column", "group")
"""The fields of a source that name the columns."""


class Row(NamedTuple):
    """A table's row about an image."""

    where: str
    """The table and the row, for messages."""
    key: str
    """The image's path, relative to the same folder as the table's path."""
    label: str
    split: str | None
    """As written; None: the table has no column `split`."""
    group: str | None


def check_tables(root: object, files: Iterable[str], images: tuple[str, ...]) -> list[str]:
    """Return the paths of the tables among these files, sorted. `images` are the endings of images.

    Raises:
        UserError: a file is called metadata but has another format; it could have the labels.
    """
    named = [path for path in files if path.lower().rpartition("/")[2].startswith("metadata.")]
    tables = sorted(path for path in named if path.rpartition("/")[2] in TABLES)
    if others := sorted(path for path in {*named} - {*tables} if not path.lower().endswith(images)):
        raise UserError(
            f"{root}: {others[0]} is not a table that can be read; expected {', '.join(TABLES[:-1])} or {TABLES[-1]}. "
            "Convert it, or, if it has no labels, rename or remove it"
        )
    return tables


def read_table(path: str, data: bytes, columns: Columns) -> Iterator[Row]:
    """Yield the rows of the table at `path`, without the white space around headers and values.

    Raises UserError, with the row, if it is not such a table, a file name leads outside its folder, or a value is
    missing.
    """
    read = {".csv": _csv, ".jsonl": _json_lines, ".parquet": _parquet}[PurePosixPath(path).suffix]
    header, rows = read(path, data)
    _check_columns(path, header, columns)
    folder = PurePosixPath(path).parent
    for where, row in rows:
        name = _text(where, columns.image, row.get(columns.image))
        key = (folder / _inside(where, columns.image, name)).as_posix()
        image = f"{where}: {key!r}"
        if columns.label is not None and _is_list(row.get(columns.label)):
            raise UserError(f"{image} has a list as its {columns.label}: multi-label is not supported yet")
        yield Row(
            where,
            key,
            "" if columns.label is None else _value(image, columns.label, row),
            _text(image, "split", row.get("split")) if "split" in header else None,
            None if columns.group is None else _value(image, columns.group, row),
        )


def _csv(path: str, data: bytes) -> tuple[list[str], list[tuple[str, dict[str, Any]]]]:
    """Return the header, and (position, cells) of each row."""
    try:
        reader = csv.reader(
            io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True, skipinitialspace=True
        )
        header, *rows = [[cell.strip() for cell in cells] for cells in reader if cells] or [[]]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not CSV in UTF-8: {error}") from error
    located = []
    for number, cells in enumerate(rows, start=2):
        if len(cells) != len(header):
            raise UserError(f"{path} row {number} has {len(cells)} fields, but the header {len(header)}")
        located.append((f"{path} row {number}", dict(zip(header, cells, strict=True))))
    return header, located


def _json_lines(path: str, data: bytes) -> tuple[list[str], list[tuple[str, dict[str, Any]]]]:
    """Return all keys that occur, and (position, values) of each line."""
    header: dict[str, None] = {}
    located = []
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} row {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path} row {number} is not a JSON object; expected one object per line")
        row = {name.strip(): value for name, value in row.items()}
        header |= dict.fromkeys(row)
        located.append((f"{path} row {number}", row))
    return list(header), located


def _parquet(path: str, data: bytes) -> tuple[list[str], list[tuple[str, dict[str, Any]]]]:
    """Return the names of the columns, and (position, values) of each row."""
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} is not a Parquet file, or damaged: {error}") from error
    header = [name.strip() for name in table.column_names]
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return header, [
        (f"{path} row {number}", dict(zip(header, row, strict=True)))
        for number, row in enumerate(rows, start=1)
    ]


def _check_columns(path: str, header: Sequence[str], columns: Columns) -> None:
    needed = [column for column in columns if column is not None]
    known = (*needed, "split")
    options = dict(zip(columns, OPTIONS, strict=True))
    for column in header:
        near = difflib.get_close_matches(column.lower(), known, n=1, cutoff=0.75)
        if near and column not in known and near[0] not in header:
            hint = f" If not, set source.{options[near[0]]}: {column}" if near[0] in options else ""
            raise UserError(f"{path} has an unknown column {column!r}: did you mean {near[0]!r}?{hint}")
    for column in needed:
        if header.count(column) != 1:
            raise UserError(
                f"{path} needs one column {column!r}; it has {', '.join(header) or 'none'}. "
                f"Add it, or name another one in source.{options[column]}"
            )


def _value(where: str, column: str, row: Mapping[str, Any]) -> str:
    if not (text := _text(where, column, row.get(column))):
        raise UserError(f"{where} has no {column}")
    return text


def _text(where: str, column: str, value: Any) -> str:
    """Return a cell as text: JSON strings, whole numbers and booleans; "" for null or a missing cell."""
    if isinstance(value, str):
        if not value.isascii() and value != value.encode("utf-8", "replace").decode():
            raise UserError(f"{where}: {column} is not text in UTF-8 ({json.dumps(value)})")
        return value.strip()
    if value is None:
        return ""
    if isinstance(value, int):  # includes booleans
        return json.dumps(value)
    raise UserError(
        f"{where}: {column} must be text or a whole number, not {json.dumps(value, default=str)[:60]}"
    )


def _is_list(cell: Any) -> bool:
    """Return whether a cell is a list: a JSON list, or text that JSON or Python writes for one (not "[x]")."""
    if not isinstance(cell, str):
        return isinstance(cell, list)
    try:
        return cell.startswith("[") and isinstance(json.loads(cell.replace("'", '"')), list)
    except (ValueError, RecursionError):
        return False


def _inside(where: str, column: str, name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name:
        raise UserError(f"{where}: {column} {name!r} must be a relative path inside the folder, with /")
    return path
