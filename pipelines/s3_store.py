"""A store at s3://bucket/prefix: create-only by `If-None-Match: *`, the one condition that every server gets right.

Where the server is and who asks is boto3's own business: AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_PROFILE, credentials
from the environment, ~/.aws or the machine's role. Nothing of that is ever written into a record.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)

from pipelines.identity import cache_folder
from pipelines.store import FileEntry, Layout, Staging, StoreError, StoreUnreachable, identify

CONNECT_SECONDS, READ_SECONDS = 3.0, 20.0  # without an answer, before the next try
TRIES = 4  # botocore waits between them, longer each time, with jitter
CONFLICT_SECONDS = 10.0  # 409: another conditional write of this name is under way
PART_BYTES = 16 * 2**20  # larger files go and come in parts of this size, several at once
THREADS = 8
# what a job elsewhere needs to find the same server, and is no secret
SETTINGS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ABSENT = {"NoSuchKey", "404", "NotFound"}
_EXPLAINED = {
    "NoSuchBucket": "there is no such bucket: make it first, or mend its name",
    "AccessDenied": "access is denied: these credentials may not do this (is it read-only to them?)",
    "InvalidAccessKeyId": "the server does not know this access key",
    "SignatureDoesNotMatch": "the secret key is not the access key's",
    "ExpiredToken": "the credentials have expired",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the server's: set it right",
    "403": "access is denied: these credentials may not do this",
}


class S3Store:
    """See `pipelines.store.Store`. Files are read through a cache in the user's cache folder, checked by sha256.

    Raises:
        StoreError: no such bucket, no access, no credentials; or a store of another layout.
        StoreUnreachable: no answer.
    """

    def __init__(self, uri: str, *, create: bool = True) -> None:
        self.bucket, self.prefix = parse(uri)
        self.uri = f"s3://{self.bucket}{self.prefix}".rstrip("/")
        self.prefix = self.prefix.strip("/") + "/" if self.prefix.strip("/") else ""
        self.settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
        self.id = identify(self, create)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a store is opened anew in each process: a client would carry its keys along")

    def read(self, name: str) -> bytes | None:
        data: bytes | None = None
        with self._told(f"read {name}"):
            try:
                data = client().get_object(Bucket=self.bucket, Key=self.prefix + name)["Body"].read()
            except ClientError as error:
                if _code(error) not in _ABSENT:
                    raise
        return data

    def read_all(self, names: Sequence[str]) -> list[bytes | None]:
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(self.read, names))

    def create(self, name: str, data: bytes) -> bool:
        deadline = time.monotonic() + CONFLICT_SECONDS
        while True:
            with self._told(f"write {name}"):
                try:
                    client().put_object(
                        Bucket=self.bucket, Key=self.prefix + name, Body=data, IfNoneMatch="*"
                    )
                    return True
                except ClientError as error:
                    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                    if status == 412:
                        # there already; by ourselves, if the answer to an earlier try was lost
                        return self.read(name) == data
                    if status != 409 or time.monotonic() > deadline:
                        raise
            time.sleep(random.uniform(0.05, 0.3))  # noqa: S311 (jitter)

    def names(self, folder: str) -> list[str]:
        prefix = f"{self.prefix}{folder}/" if folder else self.prefix
        pages = (
            client()
            .get_paginator("list_objects_v2")
            .paginate(Bucket=self.bucket, Prefix=prefix, Delimiter="/")
        )
        found = []
        with self._told(f"list {folder}"):
            for page in pages:
                found += [entry["Key"] for entry in page.get("Contents", ())]
                found += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
        return sorted({name for key in found if (name := key[len(prefix) :].rstrip("/"))})

    def local(self, folder: str, files: Iterable[FileEntry]) -> Path:
        root = cache_folder() / "objects" / self.id / folder
        missing = [entry for entry in files if _size(_inside(root, entry.path)) != entry.size]
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda entry: self._fetch(folder, root, entry), missing))
        root.mkdir(parents=True, exist_ok=True)
        return root

    def _fetch(self, folder: str, root: Path, entry: FileEntry) -> None:
        """Bring a file into the cache: visible there once it is complete and has the right sha256."""
        path = _inside(root, entry.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
        name = f"{folder}/{entry.path}"
        try:
            with self._told(f"read {name}"):
                client().download_file(self.bucket, self.prefix + name, str(temporary), Config=transfer())
            with temporary.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != entry.sha256:
                raise StoreError(
                    f"{self.uri}/{name} has sha256 {digest[:12]}, its manifest says {entry.sha256[:12]}: "
                    "it is damaged"
                )
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def staging(self, folder: str) -> Iterator[Staging]:
        with tempfile.TemporaryDirectory(prefix="vitflow-staging-") as temporary:
            staging = Staging(Path(temporary))
            yield staging
            paths = sorted(path for path in staging.path.rglob("*") if path.is_file())
            with ThreadPoolExecutor(THREADS) as threads:
                staging.files = tuple(threads.map(lambda path: self._put(folder, staging.path, path), paths))

    def _put(self, folder: str, root: Path, path: Path) -> FileEntry:
        relative = path.relative_to(root).as_posix()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        key = f"{self.prefix}{folder}/{relative}"
        with self._told(f"write {folder}/{relative}"):
            client().upload_file(str(path), self.bucket, key, Config=transfer())
        return FileEntry(path=relative, size=path.stat().st_size, sha256=digest)

    def server_date(self) -> str:
        """The server's clock, as HTTP spells it; empty where it does not tell."""
        answer: dict[str, Any] = {}
        with self._told("ask for the time"):
            answer = client().head_object(Bucket=self.bucket, Key=f"{self.prefix}{Layout.STORE}")
        return str(answer["ResponseMetadata"]["HTTPHeaders"].get("date", ""))

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """What boto3 raises, as a StoreError that says where, what, and what would be right."""
        try:
            yield
        except (NoCredentialsError, PartialCredentialsError, ProfileNotFound) as error:
            raise StoreError(
                f"{self.uri}: can't {what}: {str(error).rstrip('.')} (put them into ~/.aws/credentials or the "
                "environment; jobs on a cluster need them on its nodes)"
            ) from None
        except ClientError as error:
            code, status = _code(error), error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
            kind = StoreUnreachable if status >= 500 or code in {"SlowDown", "RequestTimeout"} else StoreError
            reason = _EXPLAINED.get(code) or f"{code} {error.response['Error'].get('Message', '')}".strip()
            raise kind(f"{self.uri}: can't {what}: {reason}{_at()}") from None
        except (HTTPClientError, Boto3Error) as error:
            raise StoreUnreachable(f"{self.uri}: can't {what}: {_last(error)}{_at()}") from None
        except BotoCoreError as error:
            raise StoreError(f"{self.uri}: can't {what}: {_last(error)}{_at()}") from None


def parse(uri: str) -> tuple[str, str]:
    """(bucket, prefix with a slash before it, or empty) of s3://bucket/prefix. Raises StoreError."""
    parts = urlsplit(uri)
    if "@" in uri:
        raise StoreError(
            f"s3://...@{uri.rpartition('@')[2]}: no keys in an address, they would end up in logs and records; "
            "put them into ~/.aws/credentials or the environment"
        )
    if parts.query or parts.fragment:
        raise StoreError(f"{uri}: write s3://bucket/prefix; the endpoint is taken from AWS_ENDPOINT_URL_S3")
    if not _BUCKET.fullmatch(parts.netloc):
        raise StoreError(f"{uri}: {parts.netloc!r} is no bucket's name")
    if any(part in {"", ".", ".."} for part in parts.path.strip("/").split("/")) and parts.path.strip("/"):
        raise StoreError(f"{uri}: write the prefix without empty parts, '.' and '..'")
    return parts.netloc, parts.path.rstrip("/")


@cache
def client() -> Any:
    """The process's S3 client; safe to use from several threads."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if "@" in endpoint:
        raise StoreError(
            "AWS_ENDPOINT_URL_S3 has a user or a password in it: put keys into ~/.aws/credentials"
        )
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": TRIES},
        max_pool_connections=4 * THREADS,
        # other servers than AWS's refuse or corrupt what is sent with trailing checksums
        request_checksum_calculation="when_required" if endpoint else "when_supported",
        response_checksum_validation="when_required" if endpoint else "when_supported",
    )
    try:
        return boto3.session.Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise StoreError(f"S3 can't be used: {error}") from None


def transfer() -> TransferConfig:
    """How large files go and come: in parts, by ranges, several at once."""
    return TransferConfig(
        multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=THREADS
    )


def _inside(root: Path, relative: str) -> Path:
    """The path of a file of an artifact, which must lie below its folder."""
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise StoreError(f"a manifest names the file {relative!r}, which lies outside its artifact")
    return root / path


def _size(path: Path) -> int | None:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return None


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _at() -> str:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return f" (at {endpoint})" if endpoint else ""


def _last(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__
