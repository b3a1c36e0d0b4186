"""A store at s3://bucket/prefix: create-only by `If-None-Match: *`, the only condition that all servers support."""

from __future__ import annotations

import hashlib
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from boto3.s3.transfer import create_transfer_manager
from botocore.exceptions import (
    ClientError,
    IncompleteReadError,
    PaginationError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from pipelines.environment import environment
from pipelines.errors import StoreDamaged
from pipelines.files import s3_client
from pipelines.files.hashing import cache_folder
from pipelines.files.s3 import parse
from pipelines.scratch import named_if_full, scratch_folder
from pipelines.store import protocol
from pipelines.store.file_checks import digest_fault, fault, remember
from pipelines.store.records import FileEntry

CONFLICT_SECONDS = 10.0  # 409: another conditional write of this name is under way
_ABSENT = {"NoSuchKey", "404", "NotFound"}
_CUT = (ReadTimeoutError, IncompleteReadError, ResponseStreamingError)


class S3Store:
    """A store on S3; see `pipelines.store.Store`. Files are cached in the user's cache folder, checked by sha256.

    Raises:
        StoreError: there is no such bucket, no access or no credentials; or the store has another layout.
        StoreUnreachable: S3 does not answer.
    """

    def __init__(self, uri: str, *, create: bool = True) -> None:
        self.bucket, prefix = parse(uri)
        self.uri = f"s3://{self.bucket}{prefix}"
        self.prefix = f"{prefix[1:]}/" if prefix else ""
        self.settings = protocol.job_settings()
        self.id = protocol.identify(self, create)

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        with self._translate_errors(f"read {name}"):
            try:
                return self._get(name, limit)
            except ClientError as error:
                if s3_client.error_code(error) not in _ABSENT:
                    raise
        return None

    def read_all(self, names: Sequence[str], limit: int | None = None) -> list[bytes | StoreDamaged | None]:
        with environment().pool(s3_client.THREADS) as threads:
            return list(threads.map(lambda name: protocol.read_or_damage(self, name, limit), names))

    def read_range(self, name: str, start: int, length: int) -> bytes:
        with self._translate_errors(f"read {name}"):
            data = self._get(name, Range=f"bytes={start}-{start + length - 1}")
        return protocol.complete(f"{self.uri}/{name}", data, start, length)

    def create(self, name: str, data: bytes) -> bool:
        deadline = environment().monotonic() + CONFLICT_SECONDS
        while True:
            with self._translate_errors(f"write {name}"):
                try:
                    s3_client.client().put_object(
                        Bucket=self.bucket, Key=self.prefix + name, Body=data, IfNoneMatch="*"
                    )
                    return True
                except ClientError as error:
                    if s3_client.error_status(error) == 412:
                        # it exists; we wrote it ourselves if the answer to an earlier try was lost
                        return self.read(name) == data
                    if s3_client.error_status(error) != 409 or environment().monotonic() > deadline:
                        raise
            _pause()

    def replace(self, name: str, data: bytes) -> None:
        with self._translate_errors(f"write {name}"):
            s3_client.client().put_object(Bucket=self.bucket, Key=self.prefix + name, Body=data)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:  # one request for many objects would not keep their order
            with self._translate_errors(f"remove {name}"):
                s3_client.client().delete_object(Bucket=self.bucket, Key=self.prefix + name)

    def names(self, folder: str, prefix: str = "", after: str = "") -> list[str]:
        root = f"{self.prefix}{folder}/" if folder else self.prefix
        start = {"StartAfter": root + after} if after else {}
        keys = []
        with self._translate_errors(f"list {folder}"):
            lister = s3_client.client().get_paginator("list_objects_v2")
            for page in lister.paginate(Bucket=self.bucket, Prefix=root + prefix, Delimiter="/", **start):
                keys += [entry["Key"] for entry in page.get("Contents", ())]
                keys += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
        names = {key[len(root) :].rstrip("/") for key in keys}
        return sorted(name for name in names if name > after)  # a folder of this name is listed, too

    def versions(self, folder: str, names: Sequence[str], beside: str) -> dict[str, str | None]:
        with self._translate_errors(f"list {folder}"):
            try:
                etags = self._etags(f"{self.prefix}{folder}/", beside)
            except (ClientError, PaginationError):
                # MinIO repeats pages (minio#20682), and others refuse delimiters other than "/"
                return dict.fromkeys(self.names(folder), "")
        return {
            child: " ".join(of[name] for name in names) if of.keys() >= {*names} else None
            for child, of in sorted(etags.items())
        }

    def _etags(self, root: str, beside: str) -> dict[str, dict[str, str]]:
        """Return {child of a folder: {name: ETag}}, without the objects in the folder `beside` of each child."""
        etags = defaultdict[str, dict[str, str]](dict)
        lister = s3_client.client().get_paginator("list_objects_v2")
        for page in lister.paginate(Bucket=self.bucket, Prefix=root, Delimiter=f"/{beside}/"):
            for entry in page.get("Contents", ()):
                child, _, name = entry["Key"][len(root) :].partition("/")
                etags[child][name] = entry["ETag"]
            for entry in page.get("CommonPrefixes", ()):
                etags[entry["Prefix"][len(root) :].partition("/")[0]].setdefault(beside, "")
        return etags

    def sizes(self, folder: str) -> dict[str, int]:
        with self._translate_errors(f"list {folder}"):
            lister = s3_client.client().get_paginator("list_objects_v2")
            pages = lister.paginate(Bucket=self.bucket, Prefix=f"{self.prefix}{folder}/")
            entries = [entry for page in pages for entry in page.get("Contents", ())]
        return {entry["Key"].removeprefix(self.prefix): entry["Size"] for entry in entries}

    def digest(self, name: str) -> tuple[int, str] | None:
        size, digest = 0, hashlib.sha256()
        with self._translate_errors(f"read {name}"):
            try:
                total = s3_client.client().head_object(Bucket=self.bucket, Key=self.prefix + name)["ContentLength"]
            except ClientError as error:
                if s3_client.error_code(error) in _ABSENT:
                    return None
                raise
            for start in range(0, total, s3_client.PART_BYTES):
                data = self._get(name, Range=f"bytes={start}-{start + s3_client.PART_BYTES - 1}")
                digest.update(data)
                size += len(data)
        return size, digest.hexdigest()

    def check_sizes(self, folder: str, files: Iterable[FileEntry]) -> None:
        """Do nothing; see `Store.check_sizes`."""

    def local(self, folder: str, files: Iterable[FileEntry]) -> Path:
        root = protocol.inside(cache_folder() / "objects", f"{self.id}/{folder}")
        missing = [entry for entry in files if not _is_cached(protocol.inside(root, entry.path), entry)]
        root.mkdir(parents=True, exist_ok=True)
        if missing:
            self._fetch(folder, missing, root)
        return root

    def _fetch(self, folder: str, files: list[FileEntry], root: Path) -> None:
        """Fetch files into the cache; each appears there when it is complete and its sha256 is checked."""
        with scratch_folder(root.parent) as temporary, ThreadPoolExecutor(s3_client.THREADS) as threads:
            parts = [
                (entry, temporary / str(number), start)
                for number, entry in enumerate(files)
                for start in range(0, max(entry.size, 1), s3_client.PART_BYTES)
            ]
            done = threads.map(lambda part: self._fetch_part(folder, *part), parts)
            try:
                for (entry, path, start), _ in zip(parts, done, strict=True):
                    # the last part, because results come in order
                    if start + s3_client.PART_BYTES >= entry.size:
                        self._check(f"{folder}/{entry.path}", path, entry)
                        protocol.inside(root, entry.path).parent.mkdir(parents=True, exist_ok=True)
                        path.replace(protocol.inside(root, entry.path))
                        remember(protocol.inside(root, entry.path), entry, True)
            finally:
                threads.shutdown(cancel_futures=True)  # if a file is damaged, do not fetch the rest

    def _fetch_part(self, folder: str, entry: FileEntry, path: Path, start: int) -> None:
        name = f"{folder}/{entry.path}"
        part: dict[str, Any] = {}
        if entry.size > s3_client.PART_BYTES:
            part["Range"] = f"bytes={start}-{start + s3_client.PART_BYTES - 1}"
        with self._translate_errors(f"read {name}"):
            data = self._get(name, **part)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:  # noqa: PTH123 (not emptied)
            file.seek(start)
            file.write(data)

    def _check(self, name: str, path: Path, entry: FileEntry) -> None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            raise StoreDamaged(f"{self.uri}/{name} is damaged: it {digest_fault(digest, entry)}")

    def _get(self, name: str, limit: int | None = None, **parameters: Any) -> bytes:
        """Return an object's bytes; retry if the response is cut off, because botocore does not."""
        for retries in reversed(range(s3_client.TRIES)):
            response = s3_client.client().get_object(Bucket=self.bucket, Key=self.prefix + name, **parameters)
            if limit is not None and response["ContentLength"] > limit:
                response["Body"].close()
                raise protocol.too_large(f"{self.uri}/{name}", response["ContentLength"], limit)
            try:
                return bytes(response["Body"].read())
            except _CUT:
                if not retries:
                    raise
            _pause()
        raise AssertionError

    @contextmanager
    def staging(self, folder: str) -> Iterator[protocol.Staging]:
        with scratch_folder() as temporary:
            staging = protocol.Staging(temporary)
            with named_if_full(temporary):
                yield staging
            paths = sorted(path for path in staging.path.rglob("*") if path.is_file())
            staging.files = self._put(folder, staging.path, paths)

    def _put(self, folder: str, root: Path, paths: list[Path]) -> tuple[FileEntry, ...]:
        with create_transfer_manager(s3_client.client(), s3_client.transfer()) as manager:
            uploads = []
            for path in paths:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                relative = path.relative_to(root).as_posix()
                entry = FileEntry(path=relative, size=path.stat().st_size, sha256=digest)
                key = f"{self.prefix}{folder}/{relative}"
                uploads.append((entry, manager.upload(str(path), self.bucket, key)))
            for entry, future in uploads:
                with self._translate_errors(f"write {folder}/{entry.path}"):
                    future.result()
        return tuple(entry for entry, _ in uploads)

    def _translate_errors(self, operation: str) -> AbstractContextManager[None]:
        return s3_client.translate_errors(self.uri, operation)


def _is_cached(path: Path, entry: FileEntry) -> bool:
    with suppress(OSError):  # unreadable files are fetched again
        return fault(path, entry) is None
    return False


def _pause() -> None:
    environment().sleep(random.uniform(0.05, 0.3))  # noqa: S311 (jitter)
