"""The interface of a store, and functions that both stores use.

Nothing is written in place, and nothing is overwritten except an attempt's heartbeat, `alive.json`. So any number of
drivers and stages may use one store and be killed at any moment: an object is either complete or absent, and the first
of two writers of one name wins.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from pipelines.environment import environment
from pipelines.errors import StoreAbsent, StoreDamaged, StoreError, StoreUnreachable
from pipelines.store.records import LAYOUT_VERSION, FileEntry, Layout
from vit_model.fields import Frozen

# Environment variables that jobs on other machines get: the addresses of S3 and of the Hugging Face hub.
SETTINGS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "HF_ENDPOINT")
UNREACHABLE_SECONDS = 1.0  # before the next request to a cluster or a store that did not answer
LARGEST_RECORD = 32 * 2**20  # bytes; the manifest of a dataset of 100,000 shards has 16 MB
Answer = TypeVar("Answer")


class Staging:
    """The folder into which a stage, or one of its tasks, writes; `files` is set when the block has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: tuple[FileEntry, ...] = ()


class Store(Protocol):
    """Objects by relative name, with slashes: in a folder (`pipelines.store.folder`) or on S3 (`pipelines.store.s3`).

    Every method raises StoreError if the store cannot do what is requested.
    """

    uri: str
    id: str
    settings: dict[str, str]
    """Environment variables with which a job on another machine finds the same store, and S3; no secrets."""

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        """Return an object's bytes; None if there is no such object. Raises StoreDamaged if it exceeds `limit`."""

    def read_all(self, names: Sequence[str], limit: int | None = None) -> list[bytes | StoreDamaged | None]:
        """Do the same for many objects, concurrently if that is faster; in the order of `names`.

        A damaged object does not prevent reading the others: its error takes its place.
        """

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes of an object, from `start` on. Raises StoreError also if it is too short."""

    def create(self, name: str, data: bytes) -> bool:
        """Write an object durably unless it exists; return False, with nothing changed, if it does.

        If the existing object has the same bytes, the result is True, because the response to our own write may have
        been lost. Writers that must be distinguished include a nonce.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Write an object, atomically over the one that has this name; readers see the old bytes or the new.

        Only for `Layout.heartbeat`: everything else is created once. A power cut may bring the old bytes back.
        """

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects one after the other, in this order, and skip those that do not exist.

        Give the record that makes the others valid first, so that an interruption leaves no record without its files.
        In a folder, folders that become empty are removed, too, including killed writers' temporary files.
        """

    def names(self, folder: str, prefix: str = "", after: str = "") -> list[str]:
        """Return the names of a folder's immediate children, sorted; empty if there is no such folder.

        With `prefix`, only names that begin with it; with `after`, only names that are greater. On S3 this takes a
        request per thousand names that are returned.
        """

    def versions(self, folder: str, names: Sequence[str], beside: str) -> dict[str, str | None]:
        """Return {child of a folder: version of its objects with these names}, which changes when one of them does.

        None if one of the objects is missing, "" if the version cannot be determined.

        Args:
            beside: the only folder in a child, which is not listed. So on S3 this takes a request per thousand other
                objects.
        """

    def sizes(self, folder: str) -> dict[str, int]:
        """Return {name: bytes} of all objects below a folder, including killed writers' temporary files."""

    def digest(self, name: str) -> tuple[int, str] | None:
        """Read an object and return its (size, sha256); None if there is no such object."""

    def check_sizes(self, folder: str, files: Iterable[FileEntry]) -> None:
        """Raise StoreDamaged if one of these files of `folder` is missing or has another size.

        On S3 this checks nothing, because it would need a request per file; `local` checks the sizes.
        """

    def local(self, folder: str, files: Iterable[FileEntry]) -> Path:
        """Return a local folder in which these files of `folder` can be read.

        Their sizes are checked each time, and their sha256 once per version of the file on this machine. In a folder,
        only the size of files that are `CHECKSUMMED` is checked.

        Raises:
            StoreDamaged: a file is missing or does not match its entry.
        """

    def staging(self, folder: str) -> AbstractContextManager[Staging]:
        """Yield an empty local folder; its files become objects under `folder` if the block succeeds.

        Several tasks may stage into one folder at once, each with its own file names.
        """


def is_at(store: Store, uri: str) -> bool:
    """Whether an address names this store. A copy of a store has the same id and records, but is another store."""
    if uri == store.uri or "://" in f"{uri} {store.uri}":
        return uri == store.uri
    with suppress(OSError):
        return Path(uri).samefile(store.uri)
    return False


def wait_for_store(ask: Callable[[], Answer], say: Callable[[str], None], seconds: float = math.inf) -> Answer:
    """Return the result of `ask`; while the store does not answer, print one message and retry.

    Raises:
        StoreUnreachable: it has not answered for so long.
    """
    waiting, deadline = False, environment().monotonic() + seconds
    while True:
        try:
            return ask()
        except StoreUnreachable as error:
            if environment().monotonic() >= deadline:
                raise
            if not waiting:
                say(f"waiting for the store: {error}")
            waiting = True
            environment().sleep(UNREACHABLE_SECONDS)


def job_settings() -> dict[str, str]:
    """Return the settings with which a job elsewhere finds the same servers; that machine has its own credentials."""
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    return {name: value for name, value in settings.items() if "@" not in value}  # no passwords in URLs


def identify(store: Store, create: bool) -> str:
    """Return the store's id from its store.json; if there is none and `create` is true, write one first.

    Raises:
        StoreAbsent: there is no store.json, and `create` is false.
        StoreDamaged: the store.json is damaged.
        StoreError: the store has another layout.
    """
    data = store.read(Layout.STORE)
    if data is None:
        if not create:
            raise StoreAbsent(f"{store.uri} is not a store: there is no {Layout.STORE} in it")
        store.create(Layout.STORE, encode({"id": secrets.token_hex(16), "layout": LAYOUT_VERSION}))
        if store.create(Layout.STORE, b"{}"):
            raise StoreError(
                f"{store.uri}: the server ignores If-None-Match and overwrites objects, so two drivers would destroy "
                "each other's results; use AWS S3, Ceph, MinIO or another server that honours it"
            )
        data = store.read(Layout.STORE) or b""
    try:
        record = json.loads(data)
        layout, identity = record["layout"], str(record["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{store.uri}/{Layout.STORE} cannot be read as a store's record: {error!r}") from None
    if layout != LAYOUT_VERSION:
        raise StoreError(f"{store.uri} has layout {layout}; this version of vitflow reads layout {LAYOUT_VERSION}")
    return identity


def encode(value: Mapping[str, Any] | Frozen) -> bytes:
    """Encode a record as the bytes of an object."""
    text = value.model_dump_json(indent=1) if isinstance(value, Frozen) else json.dumps(value, indent=1)
    return text.encode() + b"\n"


def complete(name: str, data: bytes, start: int, length: int) -> bytes:
    """Return the bytes of a range. Raises StoreError if there are fewer than requested."""
    if len(data) != length:
        raise StoreError(f"{name} is damaged: it has {len(data)} of the {length} bytes from {start} on")
    return data


def read_or_damage(store: Store, name: str, limit: int | None) -> bytes | StoreDamaged | None:
    """Do `Store.read`, but return the error of a damaged object, so that `Store.read_all` reads the others."""
    try:
        return store.read(name, limit)
    except StoreDamaged as error:
        return error


def too_large(name: str, size: int, limit: int) -> StoreDamaged:
    """Return the error for an object that is larger than any record."""
    return StoreDamaged(f"{name} is damaged: it has {size:,} bytes, a record has at most {limit:,}")


def inside(root: Path, relative: str) -> Path:
    """Return the path of an artifact's file. Raises StoreDamaged if it is not below the artifact's folder."""
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in relative:
        raise StoreDamaged(f"a manifest names the file {relative!r}, which is outside its artifact")
    return root / path
