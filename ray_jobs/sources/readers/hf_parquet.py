"""Images in Parquet files, the format of Hugging Face's datasets.

In: <split>-00000-of-00005.parquet, ...: a column of struct<bytes, path> (or of bytes), a column of labels, and the
columns' features in the schema's metadata. Out: entries by file, row group and row.

Parquet is read by row group, so the entries of a row group are one unit, which one task reads once.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.spec import HfParquetSource
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Listing, table
from ray_jobs.sources.names import means_subjects, says_splits, split_in, splits_of_files, subject_note
from ray_jobs.sources.readers.features import UNLABELLED, choose_column, classes_of
from vit_model.errors import UserError

IN_MEMORY = 2**29  # bytes of images of a row group in memory; a larger row group is read several times
_BATCH = 64  # rows of images at most; fewer if they could have more than IN_MEMORY bytes
_TEXT = (pa.string(), pa.large_string(), pa.string_view())
_BINARY = (pa.binary(), pa.large_binary(), pa.binary_view())
_ROW_BITS, _GROUP_BITS = 24, 16  # of an entry's number, below that of its file
_FEW = 20  # cells of a column, in which splits are looked for
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})(-[0-9a-f]+)?")
_Bytes = bytes | UserError  # of an image; or why it cannot be read


class _Columns(NamedTuple):
    """Names of the columns, and of the classes if the file has them."""

    image: str
    label: str
    classes: tuple[str, ...] | None


def listing(source: HfParquetSource, files: Files) -> Listing:
    """List every image that has a label, with the split in its file's name."""
    names = sorted(files)
    _check_complete(names)
    splits, left_out = splits_of_files(names)
    groups: dict[str, list[tuple[int, int]]] = {}
    labels: list[int | str] = []
    split_groups: list[str | None] = []
    named: dict[tuple[str, str | None], set[str]] = defaultdict(set)  # cells by column, and by file if that has a split
    subjects: dict[str, list[Any]] = defaultdict(list)  # cells by column
    columns: _Columns | None = None
    for name in splits:
        with _opened(files, name) as file:
            before, columns = columns, _columns(source, name, file.schema_arrow)
            if before not in (None, columns):
                raise UserError(f"{name}: its columns or classes differ from those of the files before it")
            groups[name] = _groups(name, file, columns.image)
            values = _values(name, file, columns.label)
            labels += (UNLABELLED if label is None else label for label in values)
            split_groups += _split_groups(source, name, file)
            for field in file.schema_arrow:
                if _has_values(field.type) and field.name not in {columns.label, source.group}:
                    named[field.name, name if splits[name] else None] |= _few_cells(name, file, field.name)
                    if splits[name] is None and source.group is None and means_subjects(field.name):
                        subjects[field.name] += _values(name, file, field.name)
    for (column, _), cells in named.items():
        if says_splits(column, cells):
            raise UserError(
                f"column {column!r} names splits, but a file's split is in its name: write each split to a file of its "
                "own, such as train.parquet and test.parquet"
            )
    assert columns is not None, "the source has a file"
    classes = classes_of(labels, columns.classes, f"column {columns.label!r}")
    entries = (
        row | {"label": classes.numbers[label], "split": splits[row["file"]], "group": group}
        for row, label, group in zip(_rows(names, groups), labels, split_groups, strict=True)
        if label != UNLABELLED
    )
    about = (note for column, cells in subjects.items() for note in subject_note(column, cells))
    return Listing(classes.names, table(entries), notes=(*left_out, *classes.notes, *about))


def rows(source: HfParquetSource, files: Files, numbers: Sequence[int]) -> Iterator[_Bytes]:
    """Yield the image files with these numbers; consecutive rows of a row group are read together."""
    names = sorted(files)
    for group, wanted in groupby(numbers, lambda number: number >> _ROW_BITS):
        name = names[group >> _GROUP_BITS]
        with _opened(files, name) as file:
            column = _columns(source, name, file.schema_arrow).image
            within = [number % 2**_ROW_BITS for number in wanted]
            yield from _group(file, name, group % 2**_GROUP_BITS, column, within)


# ------------------------------------------------------------------------------------------------- names


def _check_complete(names: Sequence[str]) -> None:
    """Raise UserError if files are in several folders (other than one per split), or a part is missing."""
    parts = defaultdict(set)
    folders = set()
    for name in names:
        path = PurePosixPath(name)
        folders.add(path.parent.parent if split_in(path.parent.name) else path.parent)
        if numbered := _NUMBERED.fullmatch(path.stem):
            parts[path.parent, numbered[1], int(numbered[3])].add(int(numbered[2]))
    if len(folders) > 1:
        listed = ", ".join(sorted(map(str, folders)))
        raise UserError(f"files are in several folders ({listed}); set source.root to one of them")
    for (_, word, total), numbers in parts.items():
        if missing := sorted(set(range(total)) - numbers):
            raise UserError(f"{word}-{missing[0]:05d}-of-{total:05d}.parquet is missing")


# ------------------------------------------------------------------------------------------------- files


def _opened(files: Files, name: str) -> pq.ParquetFile:
    path = containers.local(files, name)
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        # a row takes at least one byte
        if file.metadata.num_rows > path.stat().st_size:
            raise UserError("it claims more rows than it has bytes")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{name} is not a Parquet file, or damaged: {error}") from error
    return file


def _columns(source: HfParquetSource, name: str, schema: pa.Schema) -> _Columns:
    features = _features(name, schema)
    fitting = [field.name for field in schema if _is_image(field.type)]
    declared = [column for column in fitting if features.get(column, {}).get("_type") == "Image"]
    if source.image and source.image not in fitting:
        raise UserError(
            f"source.image: {name} has no column {source.image!r} of images; columns of images: "
            f"{', '.join(fitting) or 'none'}"
        )
    image = choose_column("image", source.image, declared or fitting, fitting)
    others = [column for column in schema.names if column != image]
    labels = [column for column in others if features.get(column, {}).get("_type") == "ClassLabel"]
    fallback = [column for column in others if column == "label"]
    label = choose_column("label", source.label, labels or fallback, others)
    _check_values("label", label, name, schema.field(label).type)
    names = features.get(label, {}).get("names")
    is_named = isinstance(names, list) and all(isinstance(class_name, str) for class_name in names)
    return _Columns(image, label, tuple(names) if is_named and names else None)


def _features(name: str, schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Return the columns' features as Hugging Face's library writes them; none if another program wrote the file."""
    text = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(text)["info"]["features"] if text else {}
        return {column: feature for column, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{name}: its metadata is not in the format of Hugging Face's datasets: {error}") from error


def _is_image(kind: pa.DataType) -> bool:
    fields = list(kind) if pa.types.is_struct(kind) else [pa.field("bytes", kind)]
    return any(field.name == "bytes" and _plain(field.type) in _BINARY for field in fields)


def _check_values(field: str, column: str, name: str, kind: pa.DataType) -> None:
    """Raise UserError if the column of labels or groups is neither whole numbers nor text (nor booleans)."""
    if _has_values(kind):
        return
    more = ": multi-label is not supported yet" if field == "label" and pa.types.is_nested(kind) else ""
    raise UserError(f"source.{field}: column {column!r} of {name} is {kind}, not whole numbers or text{more}")


def _has_values(kind: pa.DataType) -> bool:
    value = _plain(kind)
    return pa.types.is_integer(value) or pa.types.is_boolean(value) or value in _TEXT


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _groups(name: str, file: pq.ParquetFile, image: str) -> list[tuple[int, int]]:
    """Return (number of rows, approximate bytes of an image) of each row group."""
    lengths = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    if len(lengths) > 2**_GROUP_BITS or max(lengths, default=0) > 2**_ROW_BITS:
        raise UserError(f"{name} has {len(lengths)} row groups of up to {max(lengths)} rows: too many")
    try:
        return [(rows, _bytes(file, group, image) // max(rows, 1)) for group, rows in enumerate(lengths)]
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is damaged: a row group names a column that is not text: {error}") from error


def _rows(names: Sequence[str], groups: Mapping[str, list[tuple[int, int]]]) -> Iterator[dict[str, Any]]:
    for number, name in enumerate(names):
        row = 0
        for group, (length, size) in enumerate(groups.get(name, ())):
            for within in range(length):
                yield {
                    "key": f"{name.removesuffix('.parquet')}/{row:07d}",
                    "file": name,
                    "offset": ((number << _GROUP_BITS) + group << _ROW_BITS) + within,
                    "length": size,
                    "codec": "row",
                    "unit": f"{name}/{group}",
                }
                row += 1


def _bytes(file: pq.ParquetFile, group: int, image: str) -> int:
    """Return the bytes of a row group's images, according to its metadata."""
    metadata = file.metadata.row_group(group)
    columns = [metadata.column(number) for number in range(metadata.num_columns)]
    of_image = [column for column in columns if column.path_in_schema.partition(".")[0] == image]
    return sum(column.total_uncompressed_size for column in of_image)


def _split_groups(source: HfParquetSource, name: str, file: pq.ParquetFile) -> list[str | None]:
    """Return the group of each row, which stays in one split; None if no group is configured."""
    schema, column = file.schema_arrow, source.group
    if column is None:
        return [None] * file.metadata.num_rows
    if column not in schema.names:
        raise UserError(f"source.group: {name} has no column {column!r}; columns: {', '.join(schema.names)}")
    _check_values("group", column, name, schema.field(column).type)
    groups = [*_values(name, file, column)]
    if None in groups:
        raise UserError(f"source.group: row {groups.index(None)} of {name} has no {column}")
    return [str(group) for group in groups]


def _few_cells(name: str, file: pq.ParquetFile, column: str) -> set[Any]:
    """Return the different cells of a column; none if they are as many as captions are."""
    cells: set[Any] = set()
    for cell in _values(name, file, column):
        cells.add(cell)
        if len(cells) > _FEW and split_in(str(cell)) is None:
            return set()
    return cells


def _values(name: str, file: pq.ParquetFile, column: str) -> Iterator[Any]:
    """Yield whole numbers, text, or None; booleans as the text that they have in tables of labels."""
    try:
        for batch in file.iter_batches(2**13, columns=[column]):
            values = batch.column(0).to_pylist()
            yield from (json.dumps(value) if isinstance(value, bool) else value for value in values)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{name}: cannot read column {column!r}: {error}") from error


def _group(file: pq.ParquetFile, name: str, group: int, column: str, wanted: list[int]) -> Iterator[_Bytes]:
    """Yield rows of a row group, in the order of `wanted`, with at most about IN_MEMORY bytes in memory."""
    done = 0
    while done < len(wanted):
        images = _read(file, f"{name}, row group {group}", group, column, wanted[done:])
        yield from images
        done += len(images)


def _read(file: pq.ParquetFile, where: str, group: int, column: str, wanted: list[int]) -> list[_Bytes]:
    """Return the first images of `wanted`: one or more, as many as fit into IN_MEMORY; or why they cannot be read.

    Raises:
        UserError: pyarrow does not support the row group. OSError, MemoryError: the machine failed. The images are not
            damaged, so these errors end the stage.
    """
    position = {row: number for number, row in enumerate(wanted)}
    results: dict[int, _Bytes] = {}
    latest: list[int] = []  # a heap of negative positions in `results`
    end, start, held, reason = len(wanted), 0, 0, "its row group is shorter than it says"
    # a value is stored at least once, so no value has more bytes than the column
    rows = max(1, min(_BATCH, IN_MEMORY // max(_bytes(file, group, column), 1)))
    try:
        for batch in file.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False):
            images = batch.column(0)
            for row in range(len(batch)):
                if (number := position.get(start + row, end)) < end:
                    results[number] = image = _image(images[row].as_py())
                    heapq.heappush(latest, -number)
                    held += len(image) if isinstance(image, bytes) else 0
                while held > IN_MEMORY and len(results) > 1:
                    end = -heapq.heappop(latest)
                    dropped = results.pop(end)
                    held -= len(dropped) if isinstance(dropped, bytes) else 0
            start += len(batch)
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
            raise
        if isinstance(error, NotImplementedError | pa.ArrowCapacityError):
            raise UserError(f"{where}: pyarrow cannot read it: {error}. Write smaller row groups") from error
        reason = f"its row group can't be read: {error}"
    return [results.get(number, UserError(reason)) for number in range(end)]


def _image(cell: Any) -> _Bytes:
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    if data is None:
        path = cell.get("path") if isinstance(cell, dict) else None
        return UserError("not in the file, which only names its path" if path else "no image in its row")
    return bytes(data)
