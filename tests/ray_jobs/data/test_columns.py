"""The columns of stored files: names, order, types and nulls are a format that stores are full of."""

import pyarrow as pa

from ray_jobs.data.columns import ENTRIES, FACTS, INDEX, LISTED, SHARD, large

IN_SHARDS = """
    sample_id string, key string, image binary, format string, width int32, height int32, channels int32, label int32
"""
IN_INDEX = """
    sample_id string, key string, label int32, labels list<item: int32>?, split string, group string?,
    format string, width int32, height int32, channels int32, content_id string,
    phash uint64, phash_mirrored uint64, phash_flipped uint64, phash_rotated uint64,
    phash_crop95 uint64, phash_crop82 uint64, phash_crop75 uint64, phash_inside uint64, phash_on_black uint64,
    shard int32, offset int64, length int32, checksum uint64
"""
ONLY_IN_FACTS = "decoding int32?, reason string?, file string, place int64, stored int64, digest string"


def spelled(schema: pa.Schema) -> list[str]:
    """name type, with "?" if it may be null."""
    assert schema.metadata is None and not any(field.metadata for field in schema)
    return [f"{field.name} {field.type}{'?' * field.nullable}" for field in schema]


def columns(text: str) -> list[str]:
    return [column.strip() for column in text.split(",")]


def test_stored_files_keep_their_columns() -> None:
    assert spelled(SHARD) == columns(IN_SHARDS)
    assert spelled(INDEX) == columns(IN_INDEX)
    found = [f"{column.removesuffix('?')}?" for column in columns(IN_INDEX)]
    assert spelled(FACTS) == found + columns(ONLY_IN_FACTS), "null where an image cannot be used"


def test_facts_take_over_what_the_source_lists() -> None:
    """Only the place in the source is called otherwise there: `offset` and `length` are the shard's in FACTS."""
    renamed = {name: entry for name, entry in LISTED.items() if name != entry}
    assert renamed == {"place": "offset", "stored": "length"}
    assert all(large(FACTS).field(name).type == ENTRIES.field(entry).type for name, entry in LISTED.items())
