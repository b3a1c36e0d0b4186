"""What a source says it holds, before an image is read: a table with one row an image, and how to get at its bytes.

A source is a module of this package with

    listing(source, files) -> Listing           what there is; reads directories of archives and lists of labels
    rows(source, files, numbers) -> Iterator    the images of these numbers as arrays, uint8 [h, w, c], or files' bytes,
                                                or why one can't be had; only where the listing has entries with codec
                                                "row" (images that lie in arrays or in packed records)
    processed(source, key, image) -> bytes      an image file as a published recipe changes it, from its bytes; only
                                                where a data set is used in changed form. Raises ValueError

`files` maps the names that `source_files(source)` gives to where each lies: a local path or s3://bucket/key. All other
entries are byte ranges of those files, which `ray_jobs.sources.archives.containers` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from ray_jobs.data.columns import ENTRIES
from ray_jobs.data.shards import ImageSize

if TYPE_CHECKING:
    from ray_jobs.sources.archives.containers import Member

Files = Mapping[str, str]
_BATCH = 65_536


class Bad(NamedTuple):
    """Something in a source that can't be used, and why."""

    key: str
    reason: str
    file: str = ""
    offset: int = 0


class Listing(NamedTuple):
    """What a source holds."""

    class_names: tuple[str, ...]
    entries: pa.Table
    """ENTRIES, in any order."""
    image: ImageSize | None = None
    """The size of all images where they are arrays of one size; None: image files, or arrays of several sizes."""
    bad: tuple[Bad, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader of results must know: how far the membership of splits is confirmed, what pixels were changed."""


def place(member: Member) -> dict[str, object]:
    """Where a member's bytes are, as a part of an entry."""
    return {name: getattr(member, name) for name in ("file", "offset", "length", "codec", "crc")}


def table(rows: Iterable[Mapping[str, object]]) -> pa.Table:
    """ENTRIES of dicts; what a dict leaves out is null."""
    left = iter(rows)  # in batches: 14 million dicts would take as many KiB
    batches = iter(lambda: list(islice(left, _BATCH)), [])
    return pa.Table.from_batches([pa.RecordBatch.from_pylist(batch, ENTRIES) for batch in batches], ENTRIES)
