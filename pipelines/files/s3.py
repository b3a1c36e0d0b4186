"""Files on S3 that others put there and a stage reads: known by ETag and size, read when they are needed.

In: s3://bucket/key of one object, or s3://bucket/prefix of those below it, which are taken for a folder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from posixpath import commonpath
from typing import NamedTuple

from pipelines.spec import ONE_FILE
from pipelines.store import StoreError
from pipelines.store.s3 import client, parse, told, transfer


class Remote(NamedTuple):
    """An object; `name` is its place in the folder."""

    name: str
    key: str
    etag: str
    size: int


def listing(uri: str) -> list[Remote]:
    """The object there, or those directly below it; empty where there is nothing. Raises StoreError."""
    alone, below = _at(uri, "/")
    return [file._replace(name=ONE_FILE) for file in alone] or [
        file for file in below if file.name and not file.name.startswith(".")
    ]


def tree(uri: str) -> list[Remote]:
    """The object there, or all below it at any depth; empty where there is nothing. Raises StoreError."""
    alone, below = _at(uri, "")
    return alone or below


def facts(uris: Iterable[str]) -> dict[str, tuple[str, int]]:
    """(ETag, size) of each object s3://bucket/key. Raises StoreError: one is not there."""
    keys: dict[str, list[str]] = defaultdict(list)
    for uri in uris:
        bucket, key = _split(uri)
        keys[bucket].append(key)
    found = {}
    for bucket, wanted in keys.items():
        # what a source asks for lies below one root: hardly more is listed
        common = commonpath(wanted)
        known = {file.key: (file.etag, file.size) for file in _objects(bucket, common)}
        if lost := [key for key in wanted if key not in known]:
            raise StoreError(f"s3://{bucket}/{lost[0]}: there is no such object")
        found.update({f"s3://{bucket}/{key}": known[key] for key in wanted})
    return found


def read_range(uri: str, start: int, length: int, etag: str | None) -> bytes:
    """A range, not empty, of an object; less where it ends before.

    Raises StoreError: it has another ETag than this, or can't be read.
    """
    bucket, key = _split(uri)
    with told(uri, f"read bytes {start} to {start + length}"):
        wanted = f"bytes={start}-{start + length - 1}"
        given = {} if etag is None else {"IfMatch": etag}
        answer = client().get_object(Bucket=bucket, Key=key, Range=wanted, **given)
        return bytes(answer["Body"].read())


def fetch(uri: str, folder: Path) -> Path:
    """Copy what is there into `folder`: the copy of the file, or the folder. Raises StoreError."""
    bucket, _ = parse(uri)
    files = listing(uri)
    for file in files:
        with told(uri, f"read {file.name}"):
            client().download_file(bucket, file.key, str(folder / file.name), Config=transfer())
    return folder / ONE_FILE if [file.name for file in files] == [ONE_FILE] else folder


def _split(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def _at(uri: str, delimiter: str) -> tuple[list[Remote], list[Remote]]:
    """The one object of this address, and, where there is none, those below it."""
    bucket, prefix = parse(uri)
    key = prefix.removeprefix("/")
    if alone := [file for file in _objects(bucket, key, "/") if file.key == key]:
        return [alone[0]._replace(name=key.rpartition("/")[2])], []
    folder = f"{key}/" if key else ""
    below = _objects(bucket, folder, delimiter)
    return [], [file._replace(name=file.key.removeprefix(folder)) for file in below]


def _objects(bucket: str, prefix: str, delimiter: str = "") -> Iterator[Remote]:
    """The objects whose keys begin so; with "/" without those in folders below."""
    with told(f"s3://{bucket}/{prefix}", "list it"):
        given = {"Delimiter": delimiter} if delimiter else {}
        pages = client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, **given)
        for page in pages:
            for entry in page.get("Contents", ()):
                yield Remote(entry["Key"], entry["Key"], entry["ETag"], entry["Size"])
