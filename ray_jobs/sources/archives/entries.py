"""The listing of a source, before any image is read: a table with one row per image and the position of its bytes.

A source is a module of this package with

    listing(source, files) -> Listing           lists the images; reads directories of archives and lists of labels
    rows(source, files, numbers) -> Iterator    yields the images with these numbers: uint8 [h, w, c], a file's bytes,
                                                or the reason why it cannot be read. Only if the listing has entries
                                                with codec "row" (images in arrays or in packed records)
    processed(source, key, image) -> bytes      returns an image file as it is in the published copy of the dataset.
                                                Only if that differs from the authors' file. Raises UserError

`files` maps the names of `source_files(source)` to locations: a local path or s3://bucket/key. Entries with another
codec are byte ranges of these files, which `ray_jobs.sources.archives.containers` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import pyarrow as pa

from ray_jobs.data.columns import ENTRIES
from ray_jobs.data.shards import ImageSize

Files = Mapping[str, str]
_BATCH = 65_536


class Unusable(NamedTuple):
    """An entry of a source that cannot be used, and the reason (stored in the quarantine)."""

    key: str
    reason: str
    file: str = ""
    offset: int = 0


class Member(NamedTuple):
    """A regular file in an archive, and the position of its bytes, as in ENTRIES."""

    path: str
    """Its path in the archive, with "/"."""
    file: str
    offset: int
    length: int
    codec: str
    """"stored" or "deflate"."""
    size: int
    """The size of its content, according to the archive."""
    crc: int | None = None
    """CRC-32 of its content, if the archive has one."""


class Listing(NamedTuple):
    """The images of a source."""

    class_names: tuple[str, ...]
    entries: pa.Table
    """ENTRIES, in any order."""
    image: ImageSize | None = None
    """The size of all images if they are arrays of one size; None: image files, or arrays of several sizes."""
    unusable: tuple[Unusable, ...] = ()
    notes: tuple[str, ...] = ()
    """Stored in dataset.json: whether the splits are the published ones, whether pixels were changed."""


def place(member: Member) -> dict[str, object]:
    """Return the position of a member's bytes, as columns of an entry."""
    return {name: getattr(member, name) for name in ("file", "offset", "length", "codec", "crc")}


def of_rows(keys: Sequence[str], labels: Sequence[int], splits: Sequence[str], length: int) -> pa.Table:
    """Return ENTRIES of images in arrays, numbered in this order, each with `length` bytes."""
    rows = enumerate(zip(keys, labels, splits, strict=True))
    return table(
        {"key": key, "label": label, "split": split, "file": "", "offset": row, "length": length, "codec": "row"}
        for row, (key, label, split) in rows
    )


def table(rows: Iterable[Mapping[str, object]]) -> pa.Table:
    """Return ENTRIES from dicts; a missing column is null."""
    # in batches, because 14 million dicts would take 14 GB
    remaining = iter(rows)
    batches = iter(lambda: list(islice(remaining, _BATCH)), [])
    return pa.Table.from_batches([pa.RecordBatch.from_pylist(batch, ENTRIES) for batch in batches], ENTRIES)
