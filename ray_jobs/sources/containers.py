"""Bytes of images out of files and archives: each entry's own range, nothing else is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from ray_jobs.sources.entries import Files


def read(files: Files, entries: pa.Table) -> Iterator[bytes | ValueError]:
    """The bytes of each entry, in their order, or why they can't be had."""
    for entry in entries.select(["file", "offset", "length"]).to_pylist():
        with Path(files[entry["file"]]).open("rb") as file:
            file.seek(entry["offset"])
            yield file.read(entry["length"])
