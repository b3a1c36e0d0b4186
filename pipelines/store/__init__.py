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
import re
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from vit_model.config import Frozen

LAYOUT_VERSION = 1
LARGEST_RECORD = 32 * 2**20  # bytes; the manifest of a dataset of 100,000 shards has 16 MB
CHECKSUMMED = "shards/"  # each image in these files has a checksum of its own, compared whenever it is read
# Passed to jobs on other machines: the addresses of S3 and of the Hugging Face hub.
SETTINGS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "HF_ENDPOINT")
UNREACHABLE_SECONDS = 1.0  # before a cluster or a store that did not answer is asked again
Record = TypeVar("Record", bound=Frozen)
Answer = TypeVar("Answer")


class StoreError(Exception):
    """A store that can't be used as asked; the message names it and says what would be right."""


class StoreUnreachable(StoreError):  # noqa: N818 (named for what it tells)
    """A store that does not answer: wait and ask again."""


class StoreAbsent(StoreError):  # noqa: N818 (named for what it tells)
    """There is no store at that address."""


class StoreDamaged(StoreError):  # noqa: N818 (named for what it tells)
    """A damaged object, which the message names; only what needs it is affected.

    `what` is the message without `remedy`, which says what to do.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what, self.remedy = what, remedy


def wait_for_store(ask: Callable[[], Answer], say: Callable[[str], None]) -> Answer:
    """Return what `ask` returns; while the store does not answer, say so once and retry."""
    waiting = False
    while True:
        try:
            return ask()
        except StoreUnreachable as error:
            if not waiting:
                say(f"waiting for the store: {error}")
            waiting = True
            time.sleep(UNREACHABLE_SECONDS)


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


def _iso_time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


Name = Annotated[str, Field(pattern=r"^[\w-]+$")]
"""A part of an object's name, which leads nowhere else."""
Time = Annotated[str, AfterValidator(_iso_time)]
"""As `now` writes it."""


class FileEntry(Frozen):
    """A file of an artifact; `path` is relative to its attempt."""

    path: str
    size: int
    sha256: str


class InputRef(Frozen):
    """An artifact that a stage takes, as it was when the stage began."""

    job: Name
    key: Name
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
    started: Time
    finished: Time
    user: str

    @property
    def folder(self) -> str:
        """The prefix that the files' paths are relative to."""
        return Layout.files(self.job, self.key, self.attempt)


class Replaced(Frozen):
    """The record that `--force` writes beside an artifact: the key that replaces it."""

    successor: Name
    run: str
    who: str
    why: str
    time: str


def _named(pipeline: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(pipeline.get("name"), str):
        raise ValueError("a pipeline has a name")
    return pipeline


class _Plan(Frozen):
    """The fields of a run's plan.json that are read; a later version may write more."""

    model_config = ConfigDict(extra="ignore")

    run: str
    pipeline: Annotated[dict[str, Any], AfterValidator(_named)]
    targets: list[str]
    stages: list[str]
    digest: str
    force: dict[str, str]
    created: Time
    strict_code: bool = False


class Event(Frozen):
    """The fields of a run's event that are read; it may have more."""

    model_config = ConfigDict(extra="allow")

    event: str
    time: Time
    stage: str | None = None
    status: str | None = None
    key: Name | None = None
    submission_id: str | None = None
    cluster_address: str | None = None
    cluster_session: str | None = None
    host: str | None = None
    pid: int | None = None
    process_created: float | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if missing := _NEEDED.get(self.event, set()) - self.model_fields_set:
            raise ValueError(f"an event {self.event!r} without {', '.join(sorted(missing))}")
        return self


_NEEDED = {
    "stage": {"stage", "status"},
    "attempt ended": {"stage", "status"},
    "finished": {"status"},
    "driver": {"host", "pid", "process_created"},
    "driver submitted": {"submission_id", "cluster_address", "cluster_session"},
}  # of what an event of this kind is useless without


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


def encode(value: Mapping[str, Any] | Frozen) -> bytes:
    """A record as the bytes of an object."""
    text = value.model_dump_json(indent=1) if isinstance(value, Frozen) else json.dumps(value, indent=1)
    return text.encode() + b"\n"


def local_files(store: Store, manifest: Manifest, files: Iterable[FileEntry] | None = None) -> Path:
    """An artifact's files, or these of them, as a local folder.

    Raises:
        StoreDamaged: as `Store.local`, with the command that rebuilds the artifact.
    """
    try:
        return store.local(manifest.folder, manifest.files if files is None else files)
    except StoreDamaged as error:
        raise StoreDamaged(error.what, f"`{rebuild_command(store, manifest)}` rebuilds it") from None


def rebuild_command(store: Store, made: Manifest | Attempt) -> str:
    """Return the command that rebuilds an artifact."""
    if made.job == "import":
        path = shlex.quote(str(made.config.get("path", "CHECKPOINT")))
        return f"vitflow import {path} --name {shlex.quote(made.stage)} --force --store {store.uri}"
    try:
        plan = read_plan(store, made.run)
    except StoreDamaged:
        plan = None
    pipeline = "PIPELINE" if plan is None else shlex.quote(plan["pipeline"]["name"])
    return f"vitflow run {pipeline} --force {shlex.quote(made.stage)} --store {shlex.quote(store.uri)}"


def inside(root: Path, relative: str) -> Path:
    """The path of a file of an artifact, which must lie below its folder. Raises StoreDamaged."""
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in relative:
        raise StoreDamaged(f"a manifest names the file {relative!r}, which lies outside its artifact")
    return root / path


@cache
def warn(text: str) -> None:
    """Write a warning to stderr, once in this process."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def fetched(path: str) -> Iterator[Path]:
    """A file or folder from outside on this machine: itself, or a copy of what is on S3, gone after the block.

    A model on the Hugging Face hub stays in the hub's own cache; the folder has links to its files.

    Raises:
        StoreError: it can't be fetched.
    """
    if not path.startswith(("hf:", "s3://")):
        yield Path(path)
        return
    with TemporaryDirectory(prefix="vitflow-") as folder:
        if path.startswith("hf:"):
            from pipelines.files import hub

            yield hub.fetch(hub.pinned(path), Path(folder))
        else:
            from pipelines.files.s3 import fetch

            yield fetch(path, Path(folder))


def read_object(uri: str, start: int, length: int, etag: str | None = None) -> bytes:
    """A range, not empty, of an object s3://bucket/key from outside; less where it ends before.

    Raises StoreError: it has another ETag than this, or can't be read.
    """
    from pipelines.files.s3 import read_range

    return read_range(uri, start, length, etag)


# ------------------------------------------------------------------------------------------------- artifacts


def successor(store: Store, job: str, key: str) -> str | None:
    """The key that `--force` put directly in the place of `key`. Raises StoreDamaged."""
    name = Layout.replaced(job, key)
    try:
        record = read_record(store, name, Replaced)
    except StoreDamaged as error:
        raise StoreDamaged(error.what, _REMOVE_REPLACED) from None
    return None if record is None else record.successor


_REMOVE_REPLACED = "remove this file to make the artifact beside it current again"


def successors(store: Store, job: str, key: str) -> Iterator[str]:
    """The keys that `--force` put in the place of `key`, the next one first.

    Raises:
        StoreDamaged: a replaced.json cannot be read, or forms a cycle.
    """
    seen = {key}
    while (following := successor(store, job, key)) is not None:
        if following in seen:
            raise StoreDamaged(
                f"{store.uri}/{Layout.replaced(job, key)} is damaged: it refers back to {following}",
                _REMOVE_REPLACED,
            )
        seen.add(following)
        yield following
        key = following


def read_current(store: Store, job: str, key: str) -> tuple[Manifest, InputRef] | None:
    """The artifact that stands for `key` today, and what a consumer records of it: the last committed successor.

    A forced run that fails or is stopped hides nothing: what was there stands until its successor is. Only what is
    committed is ever replaced, so that one read tells that there is nothing.

    Raises:
        StoreDamaged: its manifest, or a replaced.json on the way to it, cannot be read.
    """
    if (current := _committed(store, job, key)) is None:
        return None
    for following in successors(store, job, key):
        current = _committed(store, job, following) or current
    if isinstance(current, StoreDamaged):
        raise current
    return current


def _committed(store: Store, job: str, key: str) -> tuple[Manifest, InputRef] | StoreDamaged | None:
    name = Layout.manifest(job, key)
    try:
        data = store.read(name, LARGEST_RECORD)
        if data is None:
            return None
        manifest = _parse_manifest(store, name, data)
    except StoreDamaged as error:
        return error
    return manifest, _reference(manifest, data)


def replace_artifact(store: Store, job: str, key: str, successor: str, run: str, why: str) -> bool:
    """Say that `successor` stands for `key` from now on; False where somebody said so first."""
    record = {"successor": successor, "run": run, "who": who(), "why": why, "time": now()}
    return store.create(Layout.replaced(job, key), encode(record))


def read_manifest(store: Store, job: str, key: str) -> Manifest | None:
    """The artifact's manifest, None while it is not committed. Raises StoreDamaged."""
    name = Layout.manifest(job, key)
    data = store.read(name, LARGEST_RECORD)
    return None if data is None else _parse_manifest(store, name, data)


def is_committed(store: Store, job: str, key: str) -> bool:
    """Whether an artifact has a manifest, which may be damaged."""
    return "manifest.json" in store.names(Layout.artifact(job, key))


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
    """The attempt in `<attempt folder>/attempt.json`. Raises StoreDamaged."""
    attempt = read_record(store, f"{name}/attempt.json", Attempt)
    if attempt is not None:
        own = Layout.attempt(attempt.job, attempt.key, attempt.number)
        _check_name(store, f"{name}/attempt.json", f"{own}/attempt.json")
    return attempt


def last_attempt(store: Store, job: str, key: str) -> Attempt | None:
    """The attempt with the highest number. Raises StoreDamaged where its record is damaged."""
    names = store.names(f"{Layout.artifact(job, key)}/attempts")
    for number in sorted(filter(None, map(_number, names)), reverse=True):
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
    """Every committed artifact, oldest first; one whose manifest is damaged is left out with a warning."""
    names = [Layout.manifest(job, key) for job, key in all_keys(store)]
    found = []
    for name, data in zip(names, store.read_all(names, LARGEST_RECORD), strict=True):
        if data is None:
            continue
        try:
            found.append(_parse_manifest(store, name, data))
        except StoreDamaged as error:
            warn(f"{error}; it is left out, `vitflow verify` says what to do")
    yield from sorted(found, key=lambda manifest: manifest.finished)


def all_keys(store: Store) -> list[tuple[str, str]]:
    """(job, key) of every artifact, committed or not."""
    return [(job, key) for job in store.names("artifacts") for key in store.names(f"artifacts/{job}")]


def _parse_manifest(store: Store, name: str, data: bytes | StoreDamaged) -> Manifest:
    """The manifest in an object, which must be that of the artifact that the object's name says."""
    manifest = _parse(store, name, data, Manifest)
    _check_name(store, name, Layout.manifest(manifest.job, manifest.key))
    return manifest


def _check_name(store: Store, name: str, own: str) -> None:
    """Check that a record's name follows from its content: under another name it is a copy."""
    if name != own:
        raise StoreDamaged(f"{store.uri}/{name} is damaged: it is {own}")


def _parse(store: Store, name: str, data: bytes | StoreDamaged, model: type[Record]) -> Record:
    if isinstance(data, StoreDamaged):
        raise data
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise StoreDamaged(
            f"{store.uri}/{name} is damaged or of another version: {where}{first['msg']}"
        ) from None


# ------------------------------------------------------------------------------------------------- numbered records


def _number(name: str) -> int | None:
    """The number, from 1, that a name stands for; None for any other name."""
    return int(name) if re.fullmatch(r"[1-9][0-9]{0,8}", name) else None


def numbers(store: Store, folder: str) -> list[int]:
    """The numbers of the records <folder>/<n>.json, in order: the highest is the present, the rest is history."""
    found = (name.removesuffix(".json") for name in store.names(folder) if name.endswith(".json"))
    return sorted(filter(None, map(_number, found)))


def read_record(store: Store, name: str, model: type[Record]) -> Record | None:
    """The record in an object, None where there is none. Raises StoreDamaged."""
    data = store.read(name, LARGEST_RECORD)
    return None if data is None else _parse(store, name, data, model)


# ------------------------------------------------------------------------------------------------- runs


def create_run(store: Store, run: str, plan: Mapping[str, Any]) -> bool:
    """Write a run's plan; False where a run of that id exists."""
    return store.create(f"{Layout.run(run)}/plan.json", encode(plan))


def read_plan(store: Store, run: str) -> dict[str, Any] | None:
    """A run's plan. Raises StoreDamaged."""
    name = f"{Layout.run(run)}/plan.json"
    plan = read_record(store, name, _Plan)
    if plan is None:
        return None
    _check_name(store, name, f"{Layout.run(plan.run)}/plan.json")
    return plan.model_dump()


def add_event(store: Store, run: str, event: str, **fields: Any) -> None:
    """Append to a run's history: one small object an event."""
    from ulid import ULID

    record = {"event": event, "time": now(), **fields}
    store.create(f"{Layout.run(run)}/events/{ULID()}.json", encode(record))


def read_events(store: Store, run: str) -> list[dict[str, Any]]:
    """A run's history, oldest first; an event that is damaged is left out with a warning."""
    folder = f"{Layout.run(run)}/events"
    names = [f"{folder}/{name}" for name in store.names(folder)]
    found = []
    for name, data in zip(names, store.read_all(names, LARGEST_RECORD), strict=True):
        if data is None:
            continue
        try:
            found.append(_parse(store, name, data, Event).model_dump(exclude_unset=True))
        except StoreDamaged as error:
            warn(f"{error}; it is left out, `vitflow verify` says what to do")
    return sorted(found, key=lambda record: record["time"])  # ulids of one millisecond are in no order


def wish_stop(store: Store, run: str) -> None:
    """Write the wish that a run stops; whoever drives it, or finds a job of it dead, obeys."""
    store.create(f"{Layout.run(run)}/stop.json", encode({"who": who(), "time": now()}))


def stop_wished(store: Store, run: str) -> bool:
    """Whether somebody wishes the run to stop."""
    return store.read(f"{Layout.run(run)}/stop.json") is not None
