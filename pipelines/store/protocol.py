"""What every store can do, and how one is opened.

Nothing is ever overwritten or written in place, so that any number of drivers and stages may work on one store and be
killed at any moment: an object is there completely or it is not there, and of two writers of one name the first wins.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from pipelines.errors import StoreAbsent, StoreDamaged, StoreError, StoreUnreachable
from pipelines.store.records import LAYOUT_VERSION, FileEntry, Layout
from vit_model.config import Frozen

# Passed to jobs on other machines: the addresses of S3 and of the Hugging Face hub.
SETTINGS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "HF_ENDPOINT")
UNREACHABLE_SECONDS = 1.0  # before a cluster or a store that did not answer is asked again
LARGEST_RECORD = 32 * 2**20  # bytes; the manifest of a dataset of 100,000 shards has 16 MB
Answer = TypeVar("Answer")


class Staging:
    """The folder that a stage, or one task of it, writes into; `files` is known when the block has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: tuple[FileEntry, ...] = ()


class Store(Protocol):
    """Objects by name, relative, with slashes: in a folder (`pipelines.store.folder`) or on S3 (`pipelines.store.s3`).

    Every method raises StoreError where the store can't be used as asked.
    """

    uri: str
    id: str
    settings: dict[
        str, str
    ]  # environment variables with which a job elsewhere finds the same store, and S3; no secrets

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        """The object's bytes, None if there is none. Raises StoreDamaged if they are more than `limit`."""

    def read_all(self, names: Sequence[str], limit: int | None = None) -> list[bytes | StoreDamaged | None]:
        """The same for many objects, several at once if that is faster; in the order of `names`.

        A damaged object does not hide the others: its error takes its place.
        """

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """So many bytes of an object, from `start` on. Raises StoreError also where they are not there."""

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that is not there yet, durably; False (and nothing changed) where it is.

        True also where the object that is there has these very bytes, since the answer to our own write may have been
        lost: where two writers must be told apart, each puts a nonce in.
        """

    def names(self, folder: str) -> list[str]:
        """The immediate children of a folder, sorted; empty where there is none."""

    def digest(self, name: str) -> tuple[int, str] | None:
        """(size, sha256) of an object as the store has it now, read anew; None if there is none."""

    def check_sizes(self, folder: str, files: Iterable[FileEntry]) -> None:
        """Raise StoreDamaged if one of these files of `folder` is missing or has another size.

        On S3 this checks nothing, because it would take a request per file: `local` finds out.
        """

    def local(self, folder: str, files: Iterable[FileEntry]) -> Path:
        """A local folder in which these files of `folder` can be read.

        Their sizes are checked each time, their sha256 once for each version of the file on this machine; files that
        are `CHECKSUMMED` in a folder by their size only.

        Raises:
            StoreDamaged: a file is missing or does not match its entry.
        """

    def staging(self, folder: str) -> AbstractContextManager[Staging]:
        """A fresh local folder; the files written into it become objects under `folder` when the block ends well.

        Several tasks may stage into one folder at once, each with its own file names.
        """


def open_store(uri: str, *, create: bool = True) -> Store:
    """The store at a folder or at s3://bucket/prefix.

    Raises:
        StoreAbsent: there is none and `create` is false.
        StoreError: it can't be used.
    """
    if uri.startswith("s3://"):
        from pipelines.store.s3 import S3Store

        return S3Store(uri, create=create)
    if "://" in uri:
        raise StoreError(f"{uri.partition('://')[0]}://...: a store is a folder or s3://bucket/prefix")
    from pipelines.store.folder import FolderStore

    return FolderStore(Path(uri).expanduser().resolve(), create=create)


def wait_for_store(
    ask: Callable[[], Answer], say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> Answer:
    """Return what `ask` returns; while the store does not answer, say so once and retry."""
    waiting = False
    while True:
        try:
            return ask()
        except StoreUnreachable as error:
            if not waiting:
                say(f"waiting for the store: {error}")
            waiting = True
            sleep(UNREACHABLE_SECONDS)


# What the stores have in common.


def job_settings() -> dict[str, str]:
    """The settings with which a job elsewhere finds the same servers; credentials are that machine's own."""
    found = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    return {
        name: value for name, value in found.items() if "@" not in value
    }  # a password, which boto3 is not given


def identify(store: Store, create: bool) -> str:
    """The store's id, read from store.json, which is written first where there is none and `create` is true.

    Raises:
        StoreAbsent: there is none and `create` is false.
        StoreDamaged: its store.json is damaged.
        StoreError: one of another layout.
    """
    data = store.read(Layout.STORE)
    if data is None:
        if not create:
            raise StoreAbsent(f"{store.uri} is not a store: there is no {Layout.STORE} in it")
        store.create(Layout.STORE, encode({"id": secrets.token_hex(16), "layout": LAYOUT_VERSION}))
        if store.create(Layout.STORE, b"{}"):
            raise StoreError(
                f"{store.uri}: its server ignores If-None-Match and overwrites, so that two drivers would destroy each "
                "other's results: use AWS S3, Ceph, MinIO or another that honours it"
            )
        data = store.read(Layout.STORE) or b""
    try:
        found = json.loads(data)
        layout, identity = found["layout"], str(found["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(
            f"{store.uri}/{Layout.STORE} cannot be read as a store's record: {error!r}"
        ) from None
    if layout != LAYOUT_VERSION:
        raise StoreError(f"{store.uri} has layout {layout}, this vitflow reads layout {LAYOUT_VERSION}")
    return identity


def encode(value: Mapping[str, Any] | Frozen) -> bytes:
    """A record as the bytes of an object."""
    text = value.model_dump_json(indent=1) if isinstance(value, Frozen) else json.dumps(value, indent=1)
    return text.encode() + b"\n"


def complete(name: str, data: bytes, start: int, length: int) -> bytes:
    """The bytes of a range. Raises StoreError where there are fewer than were asked for."""
    if len(data) != length:
        raise StoreError(f"{name} has {len(data)} of the {length} bytes from {start} on: it is damaged")
    return data


def read_or_damage(store: Store, name: str, limit: int | None) -> bytes | StoreDamaged | None:
    """`Store.read`, with damage as an answer: one damaged object does not hide the others of `Store.read_all`."""
    try:
        return store.read(name, limit)
    except StoreDamaged as error:
        return error


def too_large(name: str, size: int, limit: int) -> StoreDamaged:
    """Return the error for an object that is larger than any record."""
    return StoreDamaged(f"{name} is damaged: it has {size:,} bytes, a record has at most {limit:,}")


def inside(root: Path, relative: str) -> Path:
    """The path of a file of an artifact, which must lie below its folder. Raises StoreDamaged."""
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in relative:
        raise StoreDamaged(f"a manifest names the file {relative!r}, which lies outside its artifact")
    return root / path
