"""The columns of a dataset's tables, each declared once; the schemas are derived from them.

    ENTRIES    the entries of a source, before any image is read        in memory (`large`)
    FACTS      ingest's results for each entry, usable or not           facts/*.parquet
    INDEX      the images of a dataset and where their bytes are        index.parquet
    SHARD      the bytes of the images, and what readers need           shards/*.parquet, rows of `Sample`

Stored files use these names, types and order: changing any of them changes the file format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ray_jobs.data.boxes import BOXES
from ray_jobs.data.images import Hashes

CONFLICT = "conflicting labels"  # the kind of a copy: the same bytes as an image of another class
SEVERAL = -1  # the label of every image of a set with several labels per image; its column `labels` has them


class Sample(NamedTuple):
    """One row of a shard. `image` is a file's bytes; with format "raw" it is pixels, uint8 in [h, w, c] order."""

    sample_id: str
    key: str
    image: bytes
    format: str
    width: int
    height: int
    channels: int
    label: int


class Column(NamedTuple):
    """A column and the tables that contain it. "?" after a table: the column may be null there."""

    name: str
    type: pa.DataType
    tables: str
    meaning: str
    name_in_entries: str = ""
    """Its name in ENTRIES, if FACTS and INDEX use that name for the position in the shard."""


_PLACE = pa.struct(
    [
        ("file", pa.string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("codec", pa.string()),
        ("crc", pa.uint32()),
    ]
)
COLUMNS = (
    Column("sample_id", pa.string(), "facts? index shard", "a hash of the image's bytes and its key"),
    Column("key", pa.string(), "entries facts? index shard", "unique; never a path outside the source"),
    Column("image", pa.binary(), "shard", "see `Sample`"),
    # Shards number all classes of the source, the index only the classes that are not set aside. The index counts.
    Column("label", pa.int32(), "entries facts? index shard", "the number of the class, or SEVERAL"),
    Column(
        "labels",
        pa.list_(pa.int32()),
        "entries? facts? index?",
        "all labels, if several: multi-label, or ReaL",
    ),
    Column("split", pa.string(), "entries? facts? index", "train, dev or test; null: not given, to be drawn"),
    Column("group", pa.string(), "entries? facts? index?", "images of one group (a patient) share a split"),
    Column("format", pa.string(), "facts? index shard", "jpeg, png, ...; raw for pixels"),
    Column("width", pa.int32(), "facts? index shard", "pixels, after rotation by EXIF's orientation"),
    Column("height", pa.int32(), "facts? index shard", "as width"),
    Column("channels", pa.int32(), "facts? index shard", "1: grey, else 3"),
    Column("content_id", pa.string(), "facts? index", "a hash of the bytes alone: copies share it"),
    *(Column(name, pa.uint64(), "facts? index", "see `images.hashes`") for name in Hashes._fields),
    Column("shard", pa.int32(), "facts? index", "the number of the shard in dataset.json"),
    Column("offset", pa.int64(), "facts? index", "where the image's bytes begin in the shard"),
    Column("length", pa.int32(), "facts? index", "number of the image's bytes in the shard"),
    Column("checksum", pa.uint64(), "facts? index", "xxh3_64 of these bytes"),
    Column("decoding", pa.int32(), "facts?", "see `images.Facts`; null: every decoder reads the same pixels"),
    Column("reason", pa.string(), "facts?", "why the image cannot be used; null: it can"),
    Column("file", pa.string(), "entries facts", "source file: a name or a chain of names, see `containers`"),
    Column("place", pa.int64(), "entries facts", "offset in that file; codec row: a row number", "offset"),
    Column("unit", pa.string(), "entries?", "entries that are read together: kept in one shard, in order"),
    Column("stored", pa.int64(), "entries facts", "bytes in that file; codec row: an estimate", "length"),
    Column("codec", pa.string(), "entries", "stored, deflate (a zip's), or row: part of an array or a table"),
    Column("crc", pa.uint32(), "entries?", "CRC-32 of the content, if its archive has one (a zip)"),
    Column("digest", pa.string(), "facts", "digest of that file's content, see `ingest`"),
    # the index has them only if the source has boxes: `data.boxes.BOXES`
    Column("boxes", BOXES.field("boxes").type, "entries?", "the boxes of objects, as they are annotated"),
    Column("boxes_width", pa.int32(), "entries?", "the size that they are of, see `boxes.in_image`"),
    Column("boxes_height", pa.int32(), "entries?", "as boxes_width"),
    Column("objects", pa.string(), "entries?", "the outlines that its mask is drawn from, see `sources.folder_masks`"),
    Column("mask", _PLACE, "entries?", "where the bytes of its mask are; null: it has none, or its reader finds it"),
)


def _fields(table: str) -> dict[str, pa.Field]:
    """Return column -> its field in a table, in the order of COLUMNS."""
    fields = {}
    for column in COLUMNS:
        nullable = {name.rstrip("?"): name.endswith("?") for name in column.tables.split()}
        if table in nullable:
            name = column.name_in_entries if table == "entries" else ""
            fields[column.name] = pa.field(name or column.name, column.type, nullable[table])
    return fields


def large(schema: pa.Schema) -> pa.Schema:
    """Return the schema for use in memory: its strings have 64-bit offsets.

    To take or sort rows, pyarrow joins a column's chunks. With 32-bit offsets this fails for more than 2 GiB, such as
    27 million names of 80 bytes.
    """
    text = pa.large_string()
    return pa.schema([field.with_type(text) if field.type == pa.string() else field for field in schema])


FACTS, INDEX = (pa.schema(_fields(table).values()) for table in ("facts", "index"))
ENTRIES = large(pa.schema(_fields("entries").values()))
SHARD = pa.schema([_fields("shard")[name] for name in Sample._fields])
LISTED = {name: field.name for name, field in _fields("entries").items() if name in FACTS.names}
"""Columns of FACTS that repeat what the source lists -> their names in ENTRIES."""


def each_label(images: pa.Table) -> pa.Array:
    """Return the label of each image; with several labels per image, those of all images, one after the other.

    Args:
        images: columns label and labels, of one data set.
    """
    label = images["label"].combine_chunks()
    return images["labels"].combine_chunks().flatten() if pc.any(pc.equal(label, SEVERAL)).as_py() else label


def with_combinations(images: pa.Table, class_names: Sequence[str]) -> tuple[pa.Table, Sequence[str]]:
    """Return images with several labels as if each combination, such as "cat; dog", were a class; else as they are."""
    if not pc.any(pc.equal(images["label"], SEVERAL)).as_py():
        return images, class_names
    combined = ["; ".join(class_names[label] for label in labels) for labels in images["labels"].to_pylist()]
    names = sorted(set(combined))
    numbers = pc.index_in(pa.array(combined), pa.array(names))
    field = INDEX.field("label")
    return images.set_column(images.schema.get_field_index("label"), field, numbers.cast(field.type)), names
