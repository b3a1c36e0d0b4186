"""S3: the client, its errors in words, and the files of sources.

boto3 finds the server and the credentials: AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_PROFILE, keys from the environment,
~/.aws or the machine's role. None of these is written into a record.

A source is one object, s3://bucket/key, or the objects below s3://bucket/prefix, which are treated as a folder. Objects
are identified by ETag and size, and read when they are needed.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from posixpath import commonpath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import boto3
from boto3.exceptions import RetriesExceededError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 (as boto3 names it)
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)

from pipelines.errors import StoreDamaged, StoreError, StoreUnreachable
from pipelines.spec import ONE_FILE

CONNECT_SECONDS, READ_SECONDS = 2.0, 20.0  # timeouts, before the next try
TRIES = 4  # botocore waits up to 1, 2, 4 s between them, with jitter
PART_BYTES = 16 * 2**20  # larger files are transferred in parts of this size, several at once
THREADS = 8
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_DAMAGED = {"NoSuchKey", "InvalidRange"}
_RETRIED = {409, 429, 500, 502, 503, 504}
_EXPLAINED = {
    "NoSuchBucket": "there is no such bucket; create it, or correct the name",
    "NoSuchKey": "the object is missing, though its manifest names it: the store is damaged",
    "InvalidRange": "the object is shorter than its manifest says: it is damaged",
    "AccessDenied": "access is denied: a store needs s3:GetObject, PutObject, DeleteObject and ListBucket",
    "InvalidAccessKeyId": "the server does not know this access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the credentials have expired",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the server's; correct it",
}


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


@cache
def client() -> Any:
    """Return the process's S3 client, which several threads may use. Raises StoreError."""
    if "@" in _endpoint():
        raise StoreError(
            "AWS_ENDPOINT_URL_S3 contains a user or a password; put credentials into ~/.aws/credentials"
        )
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": TRIES},
        max_pool_connections=2 * THREADS,
        # Servers other than AWS's reject or corrupt uploads with trailing checksums. Without them, the signature
        # protects uploads, and downloads are compared with their manifests.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return boto3.session.Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise StoreError(f"cannot use S3: {error}") from None


def transfer() -> TransferConfig:
    return TransferConfig(
        multipart_threshold=PART_BYTES + 1,
        multipart_chunksize=PART_BYTES,
        max_concurrency=THREADS,
        preferred_transfer_client="classic",  # the other ignores the client's settings
    )


@contextmanager
def translate_errors(uri: str, operation: str) -> Iterator[None]:
    """Turn boto3's errors into a StoreError that names the address and the operation, and says what to do."""
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreError(
            f"{uri}: cannot {operation}: {str(error).rstrip('.').lower()}; put them into ~/.aws/credentials or the "
            f"environment, also on the cluster's nodes if this message is from a job{_at_endpoint()}"
        ) from None
    except ClientError as error:
        code = error_code(error)
        # NoSuchUpload: most likely the answer to the end of a multipart upload was lost, so its outcome is unknown
        retry = error_status(error) in _RETRIED or code in {"SlowDown", "RequestTimeout", "NoSuchUpload"}
        reason = _EXPLAINED.get(code) or f"{code} {error.response['Error'].get('Message', '')}".strip()
        kind = StoreUnreachable if retry else StoreDamaged if code in _DAMAGED else StoreError
        raise kind(f"{uri}: cannot {operation}: {reason}{_at_endpoint()}") from None
    except (HTTPClientError, ConnectionError, IncompleteReadError, RetriesExceededError) as error:
        raise StoreUnreachable(f"{uri}: cannot {operation}: {_last_line(error)}{_at_endpoint()}") from None
    except BotoCoreError as error:
        raise StoreError(f"{uri}: cannot {operation}: {_last_line(error)}{_at_endpoint()}") from None


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def error_status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _at_endpoint() -> str:
    return f" (at {_endpoint()})" if _endpoint() else ""


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__


# ------------------------------------------------------------------------------------------------- files of sources


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
    with translate_errors(uri, f"read bytes {start} to {start + length}"):
        byte_range = f"bytes={start}-{start + length - 1}"
        condition = {} if etag is None else {"IfMatch": etag}
        response = client().get_object(Bucket=bucket, Key=key, Range=byte_range, **condition)
        return bytes(response["Body"].read())


def fetch(uri: str, folder: Path) -> Path:
    """Copy an object, or all directly below it, into `folder`; return the file or the folder. Raises StoreError."""
    bucket, _ = parse(uri)
    files = listing(uri)
    for file in files:
        with translate_errors(uri, f"read {file.name}"):
            client().download_file(bucket, file.key, str(folder / file.name), Config=transfer())
    return folder / ONE_FILE if [file.name for file in files] == [ONE_FILE] else folder


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
    with translate_errors(f"s3://{bucket}/{prefix}", "list it"):
        options = {"Delimiter": delimiter} if delimiter else {}
        pages = client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, **options)
        for page in pages:
            for entry in page.get("Contents", ()):
                yield Remote(entry["Key"], entry["Key"], entry["ETag"], entry["Size"])
