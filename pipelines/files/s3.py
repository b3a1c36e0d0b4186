"""S3: the client, its errors in words, and files that others put there and a stage reads.

Where the server is and who asks is boto3's own business: AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_PROFILE, credentials
from the environment, ~/.aws or the machine's role. Nothing of that is ever written into a record.

A source is s3://bucket/key of one object, or s3://bucket/prefix of those below it, which are taken for a folder. It is
known by ETag and size, and read when it is needed.
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

CONNECT_SECONDS, READ_SECONDS = 2.0, 20.0  # without an answer, before the next try
TRIES = 4  # botocore waits up to 1, 2, 4 s between them, with jitter
PART_BYTES = 16 * 2**20  # larger files go and come in parts of this size, several at once
THREADS = 8
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_DAMAGED = {"NoSuchKey", "InvalidRange"}
_AGAIN = {409, 429, 500, 502, 503, 504}
_EXPLAINED = {
    "NoSuchBucket": "there is no such bucket: make it first, or mend its name",
    "NoSuchKey": "it is not there, though its manifest names it: the store is damaged",
    "InvalidRange": "it is shorter than its manifest says: it is damaged",
    "AccessDenied": "access is denied: a store needs s3:GetObject, PutObject and ListBucket",
    "InvalidAccessKeyId": "the server does not know this access key",
    "SignatureDoesNotMatch": "the secret key is not the access key's",
    "ExpiredToken": "the credentials have expired",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the server's: set it right",
}


def parse(uri: str) -> tuple[str, str]:
    """(bucket, prefix with a slash before it, or empty) of s3://bucket/prefix. Raises StoreError."""
    parts = urlsplit(uri)
    if "@" in uri or ":" in parts.netloc or parts.query or parts.fragment:
        raise StoreError(
            "a store's address is s3://bucket/prefix and nothing more: keys would end up in logs and records, put them "
            "into ~/.aws/credentials or the environment; the endpoint is taken from AWS_ENDPOINT_URL_S3"
        )
    if not _BUCKET.fullmatch(parts.netloc):
        raise StoreError(f"{uri}: {parts.netloc!r} is no bucket's name")
    if parts.path.strip("/") and any(part in {"", ".", ".."} for part in parts.path.strip("/").split("/")):
        raise StoreError(f"{uri}: write the prefix without empty parts, '.' and '..'")
    return parts.netloc, parts.path.rstrip("/")


@cache
def client() -> Any:
    """The process's S3 client; safe to use from several threads. Raises StoreError."""
    if "@" in _endpoint():
        raise StoreError(
            "AWS_ENDPOINT_URL_S3 has a user or a password in it: put keys into ~/.aws/credentials"
        )
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": TRIES},
        max_pool_connections=2 * THREADS,
        # Other servers than AWS's refuse or corrupt what is sent with trailing checksums. Without these the signature
        # covers what is sent, and what is read is compared with its manifest.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return boto3.session.Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise StoreError(f"S3 can't be used: {error}") from None


def transfer() -> TransferConfig:
    return TransferConfig(
        multipart_threshold=PART_BYTES + 1,
        multipart_chunksize=PART_BYTES,
        max_concurrency=THREADS,
        preferred_transfer_client="classic",  # another would not heed the client's settings
    )


@contextmanager
def translate_errors(uri: str, what: str) -> Iterator[None]:
    """What boto3 raises, as a StoreError that says where, what, and what would be right."""
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreError(
            f"{uri}: can't {what}: {str(error).rstrip('.').lower()}: put them into ~/.aws/credentials or "
            f"the environment, also on the cluster's nodes if this was said by a job{_at_endpoint()}"
        ) from None
    except ClientError as error:
        code = error_code(error)
        # of a multipart upload that is gone the answer was lost, most likely: what comes of it is unknown
        again = error_status(error) in _AGAIN or code in {"SlowDown", "RequestTimeout", "NoSuchUpload"}
        reason = _EXPLAINED.get(code) or f"{code} {error.response['Error'].get('Message', '')}".strip()
        kind = StoreUnreachable if again else StoreDamaged if code in _DAMAGED else StoreError
        raise kind(f"{uri}: can't {what}: {reason}{_at_endpoint()}") from None
    except (HTTPClientError, ConnectionError, IncompleteReadError, RetriesExceededError) as error:
        raise StoreUnreachable(f"{uri}: can't {what}: {_last(error)}{_at_endpoint()}") from None
    except BotoCoreError as error:
        raise StoreError(f"{uri}: can't {what}: {_last(error)}{_at_endpoint()}") from None


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def error_status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _at_endpoint() -> str:
    return f" (at {_endpoint()})" if _endpoint() else ""


def _last(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__


# ------------------------------------------------------------------------------------------------- files of others


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


def read_range(uri: str, start: int, length: int, etag: str | None = None) -> bytes:
    """A range, not empty, of an object; less where it ends before.

    Raises StoreError: it has another ETag than this, or can't be read.
    """
    bucket, key = _split(uri)
    with translate_errors(uri, f"read bytes {start} to {start + length}"):
        wanted = f"bytes={start}-{start + length - 1}"
        given = {} if etag is None else {"IfMatch": etag}
        answer = client().get_object(Bucket=bucket, Key=key, Range=wanted, **given)
        return bytes(answer["Body"].read())


def fetch(uri: str, folder: Path) -> Path:
    """Copy what is there into `folder`: the copy of the file, or the folder. Raises StoreError."""
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
    with translate_errors(f"s3://{bucket}/{prefix}", "list it"):
        given = {"Delimiter": delimiter} if delimiter else {}
        pages = client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, **given)
        for page in pages:
            for entry in page.get("Contents", ()):
                yield Remote(entry["Key"], entry["Key"], entry["ETag"], entry["Size"])
