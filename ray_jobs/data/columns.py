"""The columns of a dataset's tables, each declared once; the schemas follow from them.

    ENTRIES    what a source lists, before an image is read             in memory
    FACTS      what ingest found of each entry, usable or not           facts/*.parquet
    INDEX      the images of a dataset and where their bytes are        index.parquet
    SHARD      the bytes themselves, with what any reader needs         shards/*.parquet, rows of `Sample`

Stored files have these names, types and order: a change makes another format.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from ray_jobs.data.images import Hashes


class Sample(NamedTuple):
    """One row of a shard: `image` is a file's bytes, or with format "raw" its pixels, uint8 in [h, w, c] order."""

    sample_id: str
    key: str
    image: bytes
    format: str
    width: int
    height: int
    channels: int
    label: int


class Column(NamedTuple):
    """A column and the tables that have it, each with "?" if the column may be null there."""

    name: str
    type: pa.DataType
    tables: str
    meaning: str
    name_in_entries: str = ""
    """If ENTRIES calls it otherwise, because FACTS and INDEX use that name for the place in the shard."""


COLUMNS = (
    Column("sample_id", pa.string(), "facts? index shard", "a hash of the image's bytes and its key"),
    Column("key", pa.string(), "entries facts? index shard", "unique; never a path outside of the source"),
    Column("image", pa.binary(), "shard", "see `Sample`"),
    # a shard numbers all classes of the source, the index only those not set aside; the index takes precedence
    Column("label", pa.int32(), "entries facts? index shard", "the number of the class"),
    Column("labels", pa.list_(pa.int32()), "entries? facts? index?", "all correct labels, if several (ReaL)"),
    Column("split", pa.string(), "entries? facts? index", "train, dev or test; null: the authors give none"),
    Column("group", pa.string(), "entries? facts? index?", "images of one group (a patient) share a split"),
    Column("format", pa.string(), "facts? index shard", "jpeg, png, ...; raw for pixels"),
    Column("width", pa.int32(), "facts? index shard", "pixels, as EXIF's orientation shows them"),
    Column("height", pa.int32(), "facts? index shard", "as width"),
    Column("channels", pa.int32(), "facts? index shard", "1: grey, else 3"),
    Column("content_id", pa.string(), "facts? index", "a hash of the bytes alone: copies share it"),
    *(Column(name, pa.uint64(), "facts? index", "see `images.hashes`") for name in Hashes._fields),
    Column("shard", pa.int32(), "facts? index", "the number of the shard in dataset.json"),
    Column("offset", pa.int64(), "facts? index", "where the image's bytes begin in the shard"),
    Column("length", pa.int32(), "facts? index", "how many there are"),
    Column("checksum", pa.uint64(), "facts? index", "their xxh3_64"),
    Column("reason", pa.string(), "facts?", "why the image cannot be used; null: it can"),
    Column(
        "file", pa.string(), "entries facts", "of the source: a name or a chain of names, see `containers`"
    ),
    Column("place", pa.int64(), "entries facts", "offset in that file; codec row: a number", "offset"),
    Column("unit", pa.string(), "entries?", "what is read as a whole: kept in one shard, in order"),
    Column("stored", pa.int64(), "entries facts", "bytes in that file; codec row: about as many", "length"),
    Column("codec", pa.string(), "entries", "stored, deflate (a zip's), or row: part of an array or a table"),
    Column("crc", pa.uint32(), "entries?", "CRC-32 of the content, if its archive has one (a zip)"),
    Column("digest", pa.string(), "facts", "of that file's content, see `ingest`"),
)


def _fields(table: str) -> dict[str, pa.Field]:
    """Column -> its field in a table, in the order of COLUMNS."""
    fields = {}
    for column in COLUMNS:
        nullable = {name.rstrip("?"): name.endswith("?") for name in column.tables.split()}
        if table in nullable:
            name = column.name_in_entries if table == "entries" else ""
            fields[column.name] = pa.field(name or column.name, column.type, nullable[table])
    return fields


ENTRIES, FACTS, INDEX = (pa.schema(_fields(table).values()) for table in ("entries", "facts", "index"))
SHARD = pa.schema([_fields("shard")[name] for name in Sample._fields])
LISTED = {name: field.name for name, field in _fields("entries").items() if name in FACTS.names}
"""Columns of FACTS that repeat what the source lists -> their names in ENTRIES."""
