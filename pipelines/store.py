"""Where results live: a folder or s3://bucket/prefix with create-only commits. Layout in `Layout`.

Nothing is ever overwritten or written in place, so that any number of drivers and stages may work on one store and be
killed at any moment: an object is there completely or it is not there, and of two writers of one name the first wins.
Manifests are the only database.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol, TypeVar

from pydantic import ValidationError

from vit_model.config import Frozen

LAYOUT_VERSION = 1
S3_SETTINGS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")
Record = TypeVar("Record", bound=Frozen)


class StoreError(Exception):
    """A store that can't be used as asked; the message names it and says what would be right."""


class StoreUnreachable(StoreError):  # noqa: N818 (named for what it tells)
    """A store that does not answer: wait and ask again."""


class StoreAbsent(StoreError):  # noqa: N818 (named for what it tells)
    """There is no store at that address yet."""


class Layout:
    """The names of all objects in a store.

    store.json                                          {id, layout version}, created once
    artifacts/<job>/<key>/manifest.json                 the commit of an artifact
    artifacts/<job>/<key>/replaced.json                 --force: {successor key, who, why}
    artifacts/<job>/<key>/attempts/<n>/attempt.json     before the job is submitted: all it needs, and a nonce
    artifacts/<job>/<key>/attempts/<n>/files/...        the files of that attempt
    artifacts/<job>/<key>/attempts/<n>/log.txt          its job's log (a cluster's own logs die with it)
    runs/<run id>/plan.json  stop.json  events/<ulid>.json
    schedules/<name>/<n>.json                           numbered: the highest is the present, the rest is history
    schedules/<name>/ticks/<tick>.json                  what was decided of a tick, before anything is done
    """

    STORE = "store.json"

    @staticmethod
    def artifact(job: str, key: str) -> str:
        return f"artifacts/{job}/{key}"

    @classmethod
    def manifest(cls, job: str, key: str) -> str:
        return f"{cls.artifact(job, key)}/manifest.json"

    @classmethod
    def replaced(cls, job: str, key: str) -> str:
        return f"{cls.artifact(job, key)}/replaced.json"

    @classmethod
    def attempt(cls, job: str, key: str, number: int) -> str:
        return f"{cls.artifact(job, key)}/attempts/{number}"

    @classmethod
    def files(cls, job: str, key: str, number: int) -> str:
        return f"{cls.attempt(job, key, number)}/files"

    @staticmethod
    def run(run: str) -> str:
        return f"runs/{run}"

    @staticmethod
    def schedule(name: str) -> str:
        return f"schedules/{name}"


# ------------------------------------------------------------------------------------------------- records


class FileEntry(Frozen):
    """A file of an artifact; `path` is relative to its attempt."""

    path: str
    size: int
    sha256: str


class InputRef(Frozen):
    """An artifact that a stage takes, as it was when the stage began."""

    job: str
    key: str
    content_digest: str
    manifest_sha256: str


class Attempt(Frozen):
    """Everything that a job needs to know, written before it is submitted: `--spec` points to it."""

    job: str
    key: str
    number: int
    stage: str
    run: str
    nonce: str
    submission_id: str
    store_id: str
    store_uri: str
    cluster_address: str
    cluster_session: str
    config: dict[str, Any]
    inputs: dict[str, list[InputRef]]
    source: str | None
    code_digest: str
    created: str


class Manifest(Frozen):
    """The commit of an artifact: what it is, what it was made of, by what, when."""

    layout_version: int = LAYOUT_VERSION
    job: str
    kind: Literal["dataset", "model", "evaluation", "report"]
    key: str
    content_digest: str
    stage: str
    run: str
    attempt: int
    nonce: str
    files: tuple[FileEntry, ...]
    inputs: dict[str, list[InputRef]]
    config: dict[str, Any]
    source: str | None
    metrics: dict[str, float | int | str]
    timing_dependent: bool = False
    code: dict[str, Any]
    environment: dict[str, Any]
    started: str
    finished: str
    user: str

    @property
    def folder(self) -> str:
        """The prefix that the files' paths are relative to."""
        return Layout.files(self.job, self.key, self.attempt)


def now() -> str:
    """The time, UTC, ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat()


def who() -> str:
    """user@host, for people to read."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


# ------------------------------------------------------------------------------------------------- the store


class Staging:
    """The folder that a stage, or one task of it, writes into; `files` is known when the block has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: tuple[FileEntry, ...] = ()


class Store(Protocol):
    """Objects by name, relative, with slashes: in a folder (`pipelines.folder_store`) or on S3 (`pipelines.s3_store`).

    Every method raises StoreError where the store can't be used as asked.
    """

    uri: str
    id: str
    settings: dict[
        str, str
    ]  # environment variables with which a job elsewhere finds the same store, and S3; no secrets

    def read(self, name: str) -> bytes | None:
        """The object's bytes, None where there is none."""

    def read_all(self, names: Sequence[str]) -> list[bytes | None]:
        """The same for many objects, several at once where that is faster; in the order of `names`."""

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """So many bytes of an object, from `start` on. Raises StoreError also where they are not there."""

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that is not there yet, durably; False (and nothing changed) where it is.

        True also where the object that is there has these very bytes, since the answer to our own write may have been
        lost: where two writers must be told apart, each puts a nonce in.
        """

    def names(self, folder: str) -> list[str]:
        """The immediate children of a folder, sorted; empty where there is none."""

    def local(self, folder: str, files: Iterable[FileEntry]) -> Path:
        """A local folder in which these files of `folder` can be read."""

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
        from pipelines.s3_store import S3Store

        return S3Store(uri, create=create)
    if "://" in uri:
        raise StoreError(f"{uri.partition('://')[0]}://...: a store is a folder or s3://bucket/prefix")
    from pipelines.folder_store import FolderStore

    return FolderStore(Path(uri).expanduser().resolve(), create=create)


def s3_settings() -> dict[str, str]:
    """What a job elsewhere needs to find the same S3 server; who asks there is that machine's business."""
    found = {name: os.environ[name] for name in S3_SETTINGS if name in os.environ}
    return {
        name: value for name, value in found.items() if "@" not in value
    }  # a password, which boto3 is not given


def identify(store: Store, create: bool) -> str:
    """The store's id, read from store.json, which is written first where there is none and `create` is true.

    Raises:
        StoreAbsent: there is none and `create` is false.
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
        raise StoreError(f"{store.uri}/{Layout.STORE} can't be read as a store's: {error!r}") from None
    if layout != LAYOUT_VERSION:
        raise StoreError(f"{store.uri} has layout {layout}, this vitflow reads layout {LAYOUT_VERSION}")
    return identity


def complete(name: str, data: bytes, start: int, length: int) -> bytes:
    """The bytes of a range. Raises StoreError where there are fewer than were asked for."""
    if len(data) != length:
        raise StoreError(f"{name} has {len(data)} of the {length} bytes from {start} on: it is damaged")
    return data


def encode(value: Mapping[str, Any] | Frozen) -> bytes:
    """A record as the bytes of an object."""
    text = value.model_dump_json(indent=1) if isinstance(value, Frozen) else json.dumps(value, indent=1)
    return text.encode() + b"\n"


def local_files(store: Store, manifest: Manifest) -> Path:
    """An artifact's files, as a local folder."""
    return store.local(manifest.folder, manifest.files)


@contextmanager
def fetched(path: str) -> Iterator[Path]:
    """A file or folder from outside on this machine: itself, or a copy of what is on S3, gone after the block.

    Raises:
        StoreError: it can't be fetched.
    """
    if not path.startswith("s3://"):
        yield Path(path)
        return
    from pipelines.s3_files import fetch

    with TemporaryDirectory(prefix="vitflow-") as folder:
        yield fetch(path, Path(folder))


def read_object(uri: str, start: int, length: int, etag: str | None = None) -> bytes:
    """A range, not empty, of an object s3://bucket/key from outside; less where it ends before.

    Raises StoreError: it has another ETag than this, or can't be read.
    """
    from pipelines.s3_files import read_range

    return read_range(uri, start, length, etag)


# ------------------------------------------------------------------------------------------------- artifacts


def successor(store: Store, job: str, key: str) -> str | None:
    """The key that `--force` put directly in the place of `key`."""
    data = store.read(Layout.replaced(job, key))
    return None if data is None else str(json.loads(data)["successor"])


def read_current(store: Store, job: str, key: str) -> tuple[Manifest, InputRef] | None:
    """The artifact that stands for `key` today, and what a consumer records of it: the last committed successor.

    A forced run that fails or is stopped hides nothing: what was there stands until its successor is. Only what is
    committed is ever replaced, so that one read tells that there is nothing.
    """
    if (data := store.read(Layout.manifest(job, key))) is None:
        return None
    name, following = Layout.manifest(job, key), successor(store, job, key)
    while following is not None:
        if (later := store.read(Layout.manifest(job, following))) is not None:
            name, data = Layout.manifest(job, following), later
        following = successor(store, job, following)
    manifest = _parse(Manifest, data, name)
    return manifest, _reference(manifest, data)


def replace_artifact(store: Store, job: str, key: str, successor: str, run: str, why: str) -> bool:
    """Say that `successor` stands for `key` from now on; False where somebody said so first."""
    record = {"successor": successor, "run": run, "who": who(), "why": why, "time": now()}
    return store.create(Layout.replaced(job, key), encode(record))


def read_manifest(store: Store, job: str, key: str) -> Manifest | None:
    """The artifact's manifest, None while it is not committed."""
    data = store.read(Layout.manifest(job, key))
    return None if data is None else _parse(Manifest, data, Layout.manifest(job, key))


def input_ref(store: Store, manifest: Manifest) -> InputRef:
    """What a consumer records of a committed artifact."""
    data = store.read(Layout.manifest(manifest.job, manifest.key))
    assert data is not None, f"{manifest.job}/{manifest.key} is not committed"
    return _reference(manifest, data)


def _reference(manifest: Manifest, data: bytes) -> InputRef:
    return InputRef(
        job=manifest.job,
        key=manifest.key,
        content_digest=manifest.content_digest,
        manifest_sha256=hashlib.sha256(data).hexdigest(),
    )


def commit(store: Store, manifest: Manifest) -> Manifest:
    """Make an artifact visible, in one step. The first wins: what comes back is the manifest that counts."""
    name = Layout.manifest(manifest.job, manifest.key)
    if store.create(name, encode(manifest)):
        return manifest
    first = read_manifest(store, manifest.job, manifest.key)
    assert first is not None
    return first  # its nonce says whether it was ours after all (an answer that got lost)


def read_attempt(store: Store, name: str) -> Attempt | None:
    """The attempt in `<attempt folder>/attempt.json`."""
    data = store.read(f"{name}/attempt.json")
    return None if data is None else _parse(Attempt, data, name)


def last_attempt(store: Store, job: str, key: str) -> Attempt | None:
    """The attempt with the highest number."""
    numbers = [int(name) for name in store.names(f"{Layout.artifact(job, key)}/attempts") if name.isdigit()]
    for number in sorted(numbers, reverse=True):
        if (attempt := read_attempt(store, Layout.attempt(job, key, number))) is not None:
            return attempt
    return None


def create_attempt(store: Store, attempt: Attempt) -> Attempt:
    """Write an attempt; where the number is taken, the attempt that took it comes back."""
    folder = Layout.attempt(attempt.job, attempt.key, attempt.number)
    if store.create(f"{folder}/attempt.json", encode(attempt)):
        return attempt
    taken = read_attempt(store, folder)
    assert taken is not None
    return taken


def all_manifests(store: Store) -> Iterator[Manifest]:
    """Every committed artifact, oldest first."""
    found = [_parse(Manifest, data, name) for name, data in manifest_bytes(store)]
    yield from sorted(found, key=lambda manifest: manifest.finished)


def manifest_bytes(store: Store) -> list[tuple[str, bytes]]:
    """(name, bytes) of every manifest, in no order."""
    names = [
        Layout.manifest(job, key)
        for job in store.names("artifacts")
        for key in store.names(f"artifacts/{job}")
    ]
    found = zip(names, store.read_all(names), strict=True)
    return [(name, data) for name, data in found if data is not None]


def _parse(model: type[Record], data: bytes, name: str) -> Record:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise StoreError(f"{name} is damaged or of another version: {error.errors()[0]['msg']}") from None


# ------------------------------------------------------------------------------------------------- numbered records


def numbers(store: Store, folder: str) -> list[int]:
    """The numbers of the records <folder>/<n>.json, in order: the highest is the present, the rest is history."""
    found = (name.removesuffix(".json") for name in store.names(folder) if name.endswith(".json"))
    return sorted(int(name) for name in found if name.isdigit())


def read_record(store: Store, name: str, model: type[Record]) -> Record | None:
    """The record in an object, None where there is none."""
    data = store.read(name)
    return None if data is None else _parse(model, data, name)


# ------------------------------------------------------------------------------------------------- runs


def create_run(store: Store, run: str, plan: Mapping[str, Any]) -> bool:
    """Write a run's plan; False where a run of that id exists."""
    return store.create(f"{Layout.run(run)}/plan.json", encode(plan))


def read_plan(store: Store, run: str) -> dict[str, Any] | None:
    """A run's plan."""
    data = store.read(f"{Layout.run(run)}/plan.json")
    return None if data is None else dict(json.loads(data))


def add_event(store: Store, run: str, event: str, **fields: Any) -> None:
    """Append to a run's history: one small object an event."""
    from ulid import ULID

    record = {"event": event, "time": now(), **fields}
    store.create(f"{Layout.run(run)}/events/{ULID()}.json", encode(record))


def read_events(store: Store, run: str) -> list[dict[str, Any]]:
    """A run's history, oldest first."""
    folder = f"{Layout.run(run)}/events"
    names = [f"{folder}/{name}" for name in store.names(folder)]
    found = [json.loads(data) for data in store.read_all(names) if data is not None]
    return sorted(found, key=lambda record: record["time"])  # ulids of one millisecond are in no order


def wish_stop(store: Store, run: str) -> None:
    """Write the wish that a run stops; whoever drives it, or finds a job of it dead, obeys."""
    store.create(f"{Layout.run(run)}/stop.json", encode({"who": who(), "time": now()}))


def stop_wished(store: Store, run: str) -> bool:
    """Whether somebody wishes the run to stop."""
    return store.read(f"{Layout.run(run)}/stop.json") is not None
