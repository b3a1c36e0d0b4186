"""Tables of labels beside images: metadata.csv, .jsonl and .parquet, the formats of Hugging Face's imagefolder.

    file_name,label,split,patient          {"file_name": "1.jpg", "label": "cat"}
    1.jpg,cat,train,p7                     {"file_name": "2.jpg", "label": 3}

A file name is relative to the table's folder. With several labels per image, a label is a list, in CSV as JSON or as
text with a separator:

    1.jpg,"[""cat"", ""dog""]"             {"file_name": "1.jpg", "label": ["cat", "dog"]}
    1.jpg,cat;dog                          {"file_name": "2.jpg", "label": []}
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
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
    multi_label: bool = False
    separator: str | None = None
    """With `multi_label`: what separates the labels in text; None: cells are lists."""


IMAGEFOLDER = Columns()
_BITS = (0, 1, "0", "1", "0.0", "1.0")
OPTIONS = ("image_column", "label_column", "group")
"""The fields of a source that name the columns."""


class Row(NamedTuple):
    """A table's row about an image."""

    where: str
    """The table and the row, for messages."""
    key: str
    """The image's path, relative to the same folder as the table's path."""
    labels: tuple[str, ...]
    """One label, unless the table is read as `multi_label`; none without labels."""
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


def read_table(path: str, data: bytes, columns: Columns, others: dict[str, list[Any]]) -> Iterator[Row]:
    """Yield the rows of the table at `path`, without the white space around headers and values.

    A header may differ from the name of its column in upper and lower case. Add the cells of the columns that are not
    read to `others`, unless a column says the split.

    Raises UserError, with the row, if it is not such a table, a file name leads outside its folder, or a value is
    missing.
    """
    read = {".csv": _csv, ".jsonl": _json_lines, ".parquet": _parquet}[PurePosixPath(path).suffix]
    raw, rows = read(path, data)
    header = _spelled(raw, columns)
    spelled = dict(zip(raw, header, strict=True))
    rows = [(where, {spelled[name]: value for name, value in row.items()}) for where, row in rows]
    _check_columns(path, header, rows, columns)
    for column in () if "split" in header else [name for name in header if name not in _expected(columns)]:
        others.setdefault(column, []).extend(row.get(column) for _, row in rows)
    folder = PurePosixPath(path).parent
    for where, row in rows:
        name = _text(where, columns.image, row.get(columns.image))
        key = (folder / _inside(where, columns.image, name)).as_posix()
        image = f"{where}: {key!r}"
        yield Row(
            where,
            key,
            _labels(image, columns, row),
            _text(image, "split", row.get("split")) if "split" in header else None,
            None if columns.group is None else _value(image, columns.group, row),
        )


_Located = tuple[str, dict[str, Any]]
"""Where a row is, for messages, and its cells by column."""


def _csv(path: str, data: bytes) -> tuple[list[str], list[_Located]]:
    """Return the header, and (position, cells) of each row."""
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True, skipinitialspace=True)
        header, *rows = [[cell.strip() for cell in cells] for cells in reader if cells] or [[]]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not CSV in UTF-8: {error}") from error
    if len(header) == 1 and (found := re.search(r"[;\t]", header[0])):
        raise UserError(f"{path} separates columns with {found[0]!r}; expected commas")
    located = []
    for number, cells in enumerate(rows, start=2):
        if len(cells) != len(header):
            raise UserError(f"{path} row {number} has {len(cells)} fields, but the header {len(header)}")
        located.append((f"{path} row {number}", dict(zip(header, cells, strict=True))))
    return header, located


def _json_lines(path: str, data: bytes) -> tuple[list[str], list[_Located]]:
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


def _parquet(path: str, data: bytes) -> tuple[list[str], list[_Located]]:
    """Return the names of the columns, and (position, values) of each row."""
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} is not a Parquet file, or damaged: {error}") from error
    header = table.column_names
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return header, [
        (f"{path} row {number}", dict(zip(header, row, strict=True))) for number, row in enumerate(rows, start=1)
    ]


def _expected(columns: Columns) -> dict[str, str]:
    """Return {column that the table needs: the field of a source that names it}."""
    named = zip((columns.image, columns.label, columns.group), OPTIONS, strict=True)
    return {column: option for column, option in named if column is not None}


def _spelled(header: Sequence[str], columns: Columns) -> list[str]:
    """Return a header as the columns are spelled, if only case, white space or a byte order mark differ."""
    stripped = [name.replace("\ufeff", "").strip() for name in header]
    lower = {name.lower(): name for name in (*_expected(columns), "split") if name not in stripped}
    return [lower.get(name.lower(), name) for name in stripped]


def _check_columns(path: str, header: Sequence[str], rows: Sequence[_Located], columns: Columns) -> None:
    options = _expected(columns)
    known = [name for name in (*options, "split") if name not in header]
    likely = {  # a column that is missing -> one that may be meant
        near[0]: column
        for column in header
        if column not in (*options, "split")
        and (near := difflib.get_close_matches(column.lower(), known, n=1, cutoff=0.75))
    }
    problems = [f"has an unknown column {column!r}: did you mean {name!r}?" for name, column in likely.items()]
    missing = [column for column in options if header.count(column) != 1]
    if needed := [f"one column {column!r}" for column in missing if column not in likely]:
        problems.append(f"needs {' and '.join(needed)}; it has {', '.join(header) or 'none'}.")
    if not problems:
        return
    if columns.image in missing and rows:
        first = {column: str(cell) for column, cell in rows[0][1].items() if column not in likely.values()}
        files = [column for column, cell in first.items() if re.search(r"\.[A-Za-z]{3,4}$", cell)]
        likely = dict(zip([columns.image], files, strict=False)) | likely
    settings = [f"source.{options[name]}: {repr(likely[name]) if name in likely else 'NAME'}" for name in missing]
    advice = f" Rename or add it, or set {' and '.join(settings)}" if settings else ""
    one_hot = [name for name in header if rows and all(row.get(name) in _BITS for _, row in rows)]
    if columns.label in missing and len(one_hot) > 1:
        advice += (
            f". {', '.join(one_hot)} contain only 0 and 1: if these are the classes, write the names of each"
            f" image's classes into one column, as a list, and set source.multi_label: true"
        )
    raise UserError(f"{path} {' It '.join(problems)}{advice}")


def _labels(where: str, columns: Columns, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return an image's labels: one, unless the table is read as `multi_label`; none without labels."""
    if (column := columns.label) is None:
        return ()
    cell = row.get(column)
    items = _items(cell)
    if not columns.multi_label:
        if items is not None:
            raise UserError(
                f"{where} has a list as its {column}; if images have several labels, set source.multi_label: true"
            )
        return (_one(where, column, _value(where, column, row)),)
    if cell is None:
        raise UserError(f"{where} has no {column}; for an image without labels, write an empty list")
    if items is None and columns.separator is not None:
        items = [part for part in _text(where, column, cell).split(columns.separator) if part.strip()]
    elif items is None:
        items = [_one(where, column, text)] if (text := _text(where, column, cell)) else []
    labels = [_text(where, column, item) for item in items]
    if not all(labels):
        raise UserError(f"{where} has an empty label in its {column}: {json.dumps(items, default=str)[:60]}")
    return tuple(dict.fromkeys(labels))


def _one(where: str, column: str, text: str) -> str:
    """Return the text of one label. Raises UserError for a list as NumPy or a person writes it, such as [cat, dog]."""
    if re.fullmatch(r"\[.*[\s,;].*\]", text):
        raise UserError(
            f"{where}: {column} {text[:60]!r} looks like a list; expected one label, or a list as JSON has it"
        )
    return text


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
    raise UserError(f"{where}: {column} must be text or a whole number, not {json.dumps(value, default=str)[:60]}")


def _items(cell: Any) -> list[Any] | None:
    """Return the items of a list: a JSON list, or text that JSON or Python writes for one (not "[x]"); else None."""
    if isinstance(cell, str) and cell.startswith("["):
        for text in (cell, cell.replace("'", '"')):
            try:
                cell = json.loads(text)
                break
            except (ValueError, RecursionError):
                continue
    return cell if isinstance(cell, list) else None


def _inside(where: str, column: str, name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name:
        raise UserError(f"{where}: {column} {name!r} must be a relative path inside the folder, with /")
    return path
