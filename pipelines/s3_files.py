"""Files on S3 that others put there and a stage reads: known by ETag and size, fetched when they are needed.

In: s3://bucket/key of one object, or s3://bucket/prefix of those directly below it, which are taken for a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipelines.s3_store import client, parse, told, transfer
from pipelines.spec import ONE_FILE


class Remote(NamedTuple):
    """An object; `name` is its place in the folder."""

    name: str
    key: str
    etag: str
    size: int


def listing(uri: str) -> list[Remote]:
    """What is there; empty where there is nothing. Raises StoreError."""
    bucket, prefix = parse(uri)
    key = prefix.removeprefix("/")
    alone = [Remote(ONE_FILE, *found) for found in _objects(uri, bucket, key) if found[0] == key]
    below = [] if alone else _objects(uri, bucket, f"{key}/" if key else "")
    files = [Remote(found[0].rpartition("/")[2], *found) for found in below]
    return alone or [file for file in files if file.name and not file.name.startswith(".")]


def fetch(uri: str, folder: Path) -> Path:
    """Copy what is there into `folder`: the copy of the file, or the folder. Raises StoreError."""
    bucket, _ = parse(uri)
    files = listing(uri)
    for file in files:
        with told(uri, f"read {file.name}"):
            client().download_file(bucket, file.key, str(folder / file.name), Config=transfer())
    return folder / ONE_FILE if [file.name for file in files] == [ONE_FILE] else folder


def _objects(uri: str, bucket: str, prefix: str) -> list[tuple[str, str, int]]:
    """(key, ETag, size) of the objects whose keys begin so, without those in folders below."""
    with told(uri, "list it"):
        pages = (
            client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, Delimiter="/")
        )
        return [
            (entry["Key"], entry["ETag"], entry["Size"])
            for page in pages
            for entry in page.get("Contents", ())
        ]
