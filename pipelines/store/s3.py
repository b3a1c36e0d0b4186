"""A store at s3://bucket/prefix: create-only by `If-None-Match: *`, the one condition that every server gets right.

Where the server is and who asks is boto3's own business: AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_PROFILE, credentials
from the environment, ~/.aws or the machine's role. Nothing of that is ever written into a record.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.exceptions import RetriesExceededError
from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 (as boto3 names it)
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from pipelines.identity import cache_folder
from pipelines.store import (
    FileEntry,
    Layout,
    Staging,
    StoreDamaged,
    StoreError,
    StoreUnreachable,
    complete,
    identify,
    inside,
    job_settings,
    read_or_damage,
    too_large,
)
from pipelines.store.file_checks import digest_fault, fault, remember

CONNECT_SECONDS, READ_SECONDS = 2.0, 20.0  # without an answer, before the next try
TRIES = 4  # botocore waits up to 1, 2, 4 s between them, with jitter
CONFLICT_SECONDS = 10.0  # 409: another conditional write of this name is under way
PART_BYTES = 16 * 2**20  # larger files go and come in parts of this size, several at once
THREADS = 8
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ABSENT = {"NoSuchKey", "404", "NotFound"}
_CUT = (ReadTimeoutError, IncompleteReadError, ResponseStreamingError)
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


class S3Store:
    """See `pipelines.store.Store`. Files are read through a cache in the user's cache folder, checked by sha256.

    Raises:
        StoreError: no such bucket, no access, no credentials; or a store of another layout.
        StoreUnreachable: no answer.
    """

    def __init__(self, uri: str, *, create: bool = True) -> None:
        self.bucket, prefix = parse(uri)
        self.uri = f"s3://{self.bucket}{prefix}"
        self.prefix = f"{prefix[1:]}/" if prefix else ""
        self.settings = job_settings()
        self.id = identify(self, create)

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        with self._told(f"read {name}"):
            try:
                return self._get(name, limit)
            except ClientError as error:
                if _code(error) not in _ABSENT:
                    raise
        return None

    def read_all(self, names: Sequence[str], limit: int | None = None) -> list[bytes | StoreDamaged | None]:
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(lambda name: read_or_damage(self, name, limit), names))

    def read_range(self, name: str, start: int, length: int) -> bytes:
        with self._told(f"read {name}"):
            data = self._get(name, Range=f"bytes={start}-{start + length - 1}")
        return complete(f"{self.uri}/{name}", data, start, length)

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
                    if _status(error) == 412:
                        # there already; by ourselves, if the answer to an earlier try was lost
                        return self.read(name) == data
                    if _status(error) != 409 or time.monotonic() > deadline:
                        raise
            _pause()

    def names(self, folder: str) -> list[str]:
        prefix = f"{self.prefix}{folder}/" if folder else self.prefix
        found = []
        with self._told(f"list {folder}"):
            lister = client().get_paginator("list_objects_v2")
            for page in lister.paginate(Bucket=self.bucket, Prefix=prefix, Delimiter="/"):
                found += [entry["Key"] for entry in page.get("Contents", ())]
                found += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
        return sorted({name for key in found if (name := key[len(prefix) :].rstrip("/"))})

    def digest(self, name: str) -> tuple[int, str] | None:
        size, digest = 0, hashlib.sha256()
        with self._told(f"read {name}"):
            try:
                total = client().head_object(Bucket=self.bucket, Key=self.prefix + name)["ContentLength"]
            except ClientError as error:
                if _code(error) in _ABSENT:
                    return None
                raise
            for start in range(0, total, PART_BYTES):
                data = self._get(name, Range=f"bytes={start}-{start + PART_BYTES - 1}")
                digest.update(data)
                size += len(data)
        return size, digest.hexdigest()

    def check_sizes(self, folder: str, files: Iterable[FileEntry]) -> None:
        """Nothing."""

    def local(self, folder: str, files: Iterable[FileEntry]) -> Path:
        root = inside(cache_folder() / "objects", f"{self.id}/{folder}")
        missing = [entry for entry in files if fault(inside(root, entry.path), entry) is not None]
        root.mkdir(parents=True, exist_ok=True)
        if missing:
            self._fetch(folder, missing, root)
        return root

    def _fetch(self, folder: str, files: list[FileEntry], root: Path) -> None:
        """Bring files into the cache: each is visible there once it is complete and has the right sha256."""
        with (
            tempfile.TemporaryDirectory(prefix=".fetching-", dir=root.parent) as temporary,
            ThreadPoolExecutor(THREADS) as threads,
        ):
            parts = [
                (entry, Path(temporary, str(number)), start)
                for number, entry in enumerate(files)
                for start in range(0, max(entry.size, 1), PART_BYTES)
            ]
            done = threads.map(lambda part: self._fetch_part(folder, *part), parts)
            try:
                for (entry, path, start), _ in zip(parts, done, strict=True):
                    if start + PART_BYTES >= entry.size:  # the last one: they come in order
                        self._check(f"{folder}/{entry.path}", path, entry)
                        inside(root, entry.path).parent.mkdir(parents=True, exist_ok=True)
                        path.replace(inside(root, entry.path))
                        remember(inside(root, entry.path), entry, True)
            finally:
                threads.shutdown(cancel_futures=True)  # where one is damaged, the rest is not waited for

    def _fetch_part(self, folder: str, entry: FileEntry, path: Path, start: int) -> None:
        name = f"{folder}/{entry.path}"
        asked: dict[str, Any] = (
            {"Range": f"bytes={start}-{start + PART_BYTES - 1}"} if entry.size > PART_BYTES else {}
        )
        with self._told(f"read {name}"):
            data = self._get(name, **asked)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:  # noqa: PTH123 (not emptied)
            file.seek(start)
            file.write(data)

    def _check(self, name: str, path: Path, entry: FileEntry) -> None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            raise StoreDamaged(f"{self.uri}/{name} is damaged: it {digest_fault(digest, entry)}")

    def _get(self, name: str, limit: int | None = None, **asked: Any) -> bytes:
        """An object's bytes; asked for again when an answer is cut off, which botocore leaves to its callers."""
        for left in reversed(range(TRIES)):
            answer = client().get_object(Bucket=self.bucket, Key=self.prefix + name, **asked)
            if limit is not None and answer["ContentLength"] > limit:
                answer["Body"].close()
                raise too_large(f"{self.uri}/{name}", answer["ContentLength"], limit)
            try:
                return bytes(answer["Body"].read())
            except _CUT:
                if not left:
                    raise
            _pause()
        raise AssertionError

    @contextmanager
    def staging(self, folder: str) -> Iterator[Staging]:
        with tempfile.TemporaryDirectory(prefix="vitflow-staging-") as temporary:
            staging = Staging(Path(temporary))
            yield staging
            paths = sorted(path for path in staging.path.rglob("*") if path.is_file())
            staging.files = self._put(folder, staging.path, paths)

    def _put(self, folder: str, root: Path, paths: list[Path]) -> tuple[FileEntry, ...]:
        with create_transfer_manager(client(), transfer()) as manager:
            going = []
            for path in paths:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                relative = path.relative_to(root).as_posix()
                entry = FileEntry(path=relative, size=path.stat().st_size, sha256=digest)
                key = f"{self.prefix}{folder}/{relative}"
                going.append((entry, manager.upload(str(path), self.bucket, key)))
            for entry, future in going:
                with self._told(f"write {folder}/{entry.path}"):
                    future.result()
        return tuple(entry for entry, _ in going)

    def server_date(self) -> str:
        """The server's clock, as HTTP spells it; empty where it does not tell."""
        answer: dict[str, Any] = {}
        with self._told("ask for the time"):
            answer = client().head_object(Bucket=self.bucket, Key=f"{self.prefix}{Layout.STORE}")
        return str(answer["ResponseMetadata"]["HTTPHeaders"].get("date", ""))

    def _told(self, what: str) -> AbstractContextManager[None]:
        return told(self.uri, what)


@contextmanager
def told(uri: str, what: str) -> Iterator[None]:
    """What boto3 raises, as a StoreError that says where, what, and what would be right."""
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreError(
            f"{uri}: can't {what}: {str(error).rstrip('.').lower()}: put them into ~/.aws/credentials or "
            f"the environment, also on the cluster's nodes if this was said by a job{_at()}"
        ) from None
    except ClientError as error:
        code = _code(error)
        # of a multipart upload that is gone the answer was lost, most likely: what comes of it is unknown
        again = _status(error) in _AGAIN or code in {"SlowDown", "RequestTimeout", "NoSuchUpload"}
        reason = _EXPLAINED.get(code) or f"{code} {error.response['Error'].get('Message', '')}".strip()
        kind = StoreUnreachable if again else StoreDamaged if code in _DAMAGED else StoreError
        raise kind(f"{uri}: can't {what}: {reason}{_at()}") from None
    except (HTTPClientError, ConnectionError, IncompleteReadError, RetriesExceededError) as error:
        raise StoreUnreachable(f"{uri}: can't {what}: {_last(error)}{_at()}") from None
    except BotoCoreError as error:
        raise StoreError(f"{uri}: can't {what}: {_last(error)}{_at()}") from None


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


def _pause() -> None:
    time.sleep(random.uniform(0.05, 0.3))  # noqa: S311 (jitter)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _at() -> str:
    return f" (at {_endpoint()})" if _endpoint() else ""


def _last(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__
