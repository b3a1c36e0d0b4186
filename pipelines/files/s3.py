"""Objects on S3 as the files of sources, which are listed, identified and read, and as the files of a site.

A source is one object, s3://bucket/key, or the objects below s3://bucket/prefix, which are treated as a folder. Objects
are identified by ETag and size, and read when they are needed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from posixpath import commonpath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pipelines.errors import StoreError
from pipelines.spec import ONE_FILE

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def parse(uri: str) -> tuple[str, str]:
    """Return (bucket, prefix with a leading slash, or empty) of s3://bucket/prefix. Raises StoreError."""
    parts = urlsplit(uri)
    if "@" in uri or ":" in parts.netloc or parts.query or parts.fragment:
        raise StoreError(
            "an S3 address is s3://bucket/prefix without credentials, which would end up in logs and records; put them "
            "into ~/.aws/credentials or the environment, and the endpoint into AWS_ENDPOINT_URL_S3"
        )
    if not _BUCKET.fullmatch(parts.netloc):
        raise StoreError(f"{uri}: {parts.netloc!r} is not a valid bucket name")
    if parts.path.strip("/") and any(part in {"", ".", ".."} for part in parts.path.strip("/").split("/")):
        raise StoreError(f"{uri}: the prefix must not have empty parts, '.' or '..'")
    return parts.netloc, parts.path.rstrip("/")


class Remote(NamedTuple):
    """An object; `name` is its path relative to the folder."""

    name: str
    key: str
    etag: str
    size: int


def listing(uri: str) -> list[Remote]:
    """Return the object at an address, or those directly below it; empty if there are none. Raises StoreError."""
    single, below = _at(uri, "/")
    return [file._replace(name=ONE_FILE) for file in single] or [
        # a name becomes a file's, so a server that sends one with a slash must not choose the folder
        file
        for file in below
        if file.name and not file.name.startswith(".") and "/" not in file.name
    ]


def tree(uri: str) -> list[Remote]:
    """Return the object at an address, or all below it at any depth; empty if there are none. Raises StoreError."""
    single, below = _at(uri, "")
    return single or below


def facts(uris: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Return the (ETag, size) of each object s3://bucket/key. Raises StoreError if one does not exist."""
    keys: dict[str, list[str]] = defaultdict(list)
    for uri in uris:
        bucket, key = _split(uri)
        keys[bucket].append(key)
    versions = {}
    for bucket, wanted in keys.items():
        # the objects of a source are below one root, so this lists few others
        listed = {file.key: (file.etag, file.size) for file in _objects(bucket, commonpath(wanted))}
        if missing := [key for key in wanted if key not in listed]:
            raise StoreError(f"s3://{bucket}/{missing[0]}: there is no such object")
        versions.update({f"s3://{bucket}/{key}": listed[key] for key in wanted})
    return versions


def read_range(uri: str, start: int, length: int, etag: str | None = None) -> bytes:
    """Read a non-empty range of an object; the result is shorter if the object ends earlier.

    Raises:
        StoreError: the object has another ETag, or cannot be read.
    """
    bucket, key = _split(uri)
    with _requests(uri, f"read bytes {start} to {start + length}") as s3:
        byte_range = f"bytes={start}-{start + length - 1}"
        condition = {} if etag is None else {"IfMatch": etag}
        response = s3.client().get_object(Bucket=bucket, Key=key, Range=byte_range, **condition)
        return bytes(response["Body"].read())


def fetch(uri: str, folder: Path) -> Path:
    """Copy an object, or all directly below it, into `folder`; return the file or the folder. Raises StoreError."""
    bucket, _ = parse(uri)
    files = listing(uri)
    for file in files:
        with _requests(uri, f"read {file.name}") as s3:
            s3.client().download_file(bucket, file.key, str(folder / file.name), Config=s3.transfer())
    return folder / ONE_FILE if [file.name for file in files] == [ONE_FILE] else folder


def put(uri: str, data: bytes, content_type: str) -> None:
    """Write an object, over the one that has this address. Raises StoreError."""
    parse(uri)
    bucket, key = _split(uri)
    with _requests(uri, "write it") as s3:
        s3.client().put_object(Bucket=bucket, Key=key, Body=data, ContentType=content_type)


@contextmanager
def _requests(uri: str, operation: str) -> Iterator[Any]:
    """Yield the module `s3_client`, for requests whose errors name the address and the operation."""
    from pipelines.files import s3_client  # with boto3, which takes longer than planning without it

    with s3_client.translate_errors(uri, operation):
        yield s3_client


def _split(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def _at(uri: str, delimiter: str) -> tuple[list[Remote], list[Remote]]:
    """Return the one object at this address; if there is none, the objects below it."""
    bucket, prefix = parse(uri)
    key = prefix.removeprefix("/")
    if single := [file for file in _objects(bucket, key, "/") if file.key == key]:
        return [single[0]._replace(name=key.rpartition("/")[2])], []
    folder = f"{key}/" if key else ""
    below = _objects(bucket, folder, delimiter)
    return [], [file._replace(name=file.key.removeprefix(folder)) for file in below]


def _objects(bucket: str, prefix: str, delimiter: str = "") -> Iterator[Remote]:
    """Yield the objects with a prefix; with the delimiter "/", without those in folders below."""
    with _requests(f"s3://{bucket}/{prefix}", "list it") as s3:
        options = {"Delimiter": delimiter} if delimiter else {}
        pages = s3.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, **options)
        for page in pages:
            for entry in page.get("Contents", ()):
                yield Remote(entry["Key"], entry["Key"], entry["ETag"], entry["Size"])
