"""Artifacts and their attempts: committing, replacing and reading them. Manifests are the only database."""

from __future__ import annotations

import hashlib
import heapq
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from pipelines.environment import environment
from pipelines.errors import StoreDamaged, StoreError, Superseded
from pipelines.store.catalog import Found, listed
from pipelines.store.objects import check_name, numbers, parse_record, read_record, warn
from pipelines.store.protocol import LARGEST_RECORD, Store, encode
from pipelines.store.records import (
    KEPT_WEIGHTS,
    Attempt,
    FileEntry,
    InputRef,
    Layout,
    Manifest,
    Replaced,
    now,
    who,
)
from pipelines.store.run_records import read_plan


def read_manifest(store: Store, job: str, key: str) -> Manifest | None:
    """Return an artifact's manifest; None if it is not committed. Raises StoreDamaged."""
    found = read_with_reference(store, job, key)
    return None if found is None else found[0]


def read_with_reference(store: Store, job: str, key: str) -> tuple[Manifest, InputRef] | None:
    """Return an artifact's manifest, and the reference to it as it is now; None if it is not committed.

    Raises:
        StoreDamaged: the manifest cannot be read.
    """
    name = Layout.manifest(job, key)
    data = store.read(name, LARGEST_RECORD)
    if data is None:
        return None
    manifest = _parse_manifest(store, name, data)
    return manifest, _reference(manifest, data)


def read_or_warn(store: Store, job: str, key: str) -> tuple[Manifest, InputRef] | None:
    """Do `read_with_reference`, but return None for a damaged manifest, with a warning."""
    try:
        return read_with_reference(store, job, key)
    except StoreDamaged as error:
        warn(f"{error}; ignoring it. Run `vitflow verify`")
        return None


def is_committed(store: Store, job: str, key: str) -> bool:
    """Whether an artifact has a manifest, which may be damaged."""
    return "manifest.json" in store.names(Layout.artifact(job, key))


def all_manifests(store: Store, *jobs: str) -> Iterator[Manifest]:
    """Yield the manifests of all committed artifacts, or of these jobs', oldest first; warn of damaged ones.

    Manifests that have not changed since they were last read come from the catalog; see `pipelines.store.catalog`.
    """
    folders = [f"artifacts/{job}" for job in jobs or store.names("artifacts")]
    with environment().pool(len(folders) or 1) as threads:
        versions = threads.map(lambda folder: store.versions(folder, ["manifest.json"], "attempts"), folders)
    of_jobs = map(partial(_manifests_in, store), folders, versions)
    yield from heapq.merge(*of_jobs, key=lambda manifest: manifest.finished)


def _manifests_in(store: Store, folder: str, versions: Mapping[str, str | None]) -> Iterator[Manifest]:
    committed = {key: version for key, version in versions.items() if version is not None}

    def read(keys: Sequence[str]) -> Iterator[Found[Manifest]]:
        names = [f"{folder}/{key}/manifest.json" for key in keys]
        for key, name, data in zip(keys, names, store.read_all(names, LARGEST_RECORD), strict=True):
            try:
                if data is not None:
                    manifest = _parse_manifest(store, name, data)
                    yield Found(manifest.finished, key, manifest)
            except StoreDamaged as error:
                warn(f"{error}; ignoring it. Run `vitflow verify`")

    return listed(store, folder, committed, Manifest, read)


def all_keys(store: Store) -> list[tuple[str, str]]:
    """Return (job, key) of all artifacts, committed or not."""
    return [(job, key) for job in store.names("artifacts") for key in store.names(f"artifacts/{job}")]


def commit(store: Store, manifest: Manifest) -> Manifest:
    """Commit an artifact atomically; return its manifest, which is another process's if that was first."""
    name = Layout.manifest(manifest.job, manifest.key)
    own = hashlib.sha256(encode(manifest.model_copy(update={"own_sha256": ""}))).hexdigest()
    manifest = manifest.model_copy(update={"own_sha256": own})
    if store.create(name, encode(manifest)):
        return manifest
    first = read_manifest(store, manifest.job, manifest.key)
    assert first is not None
    return first  # its nonce tells whether it is ours, if the response to our own write was lost


def input_ref(store: Store, manifest: Manifest) -> InputRef:
    """Return the reference to a committed artifact that a consumer records. Raises StoreError if it is gone."""
    data = store.read(Layout.manifest(manifest.job, manifest.key))
    if data is None:
        raise StoreError(
            f"{manifest.job} {manifest.key[:12]} is not in the store any more: `vitflow gc` has deleted it"
        )
    return _reference(manifest, data)


def _parse_manifest(store: Store, name: str, data: bytes | StoreDamaged) -> Manifest:
    """Parse the manifest in an object; check that it is unchanged and belongs to the artifact in the object's name."""
    manifest = parse_record(store, name, data, Manifest)
    check_name(store, name, Layout.manifest(manifest.job, manifest.key))
    if (own := manifest.own_sha256) is not None:
        assert isinstance(data, bytes)
        if hashlib.sha256(data.replace(own.encode(), b"")).hexdigest() != own:
            raise StoreDamaged(f"{store.uri}/{name} is damaged: it was changed after it was written")
    return manifest


def _reference(manifest: Manifest, data: bytes) -> InputRef:
    return InputRef(
        job=manifest.job,
        key=manifest.key,
        content_digest=manifest.content_digest,
        manifest_sha256=hashlib.sha256(data).hexdigest(),
    )


# ------------------------------------------------------------------------------------------------- replaced


def successor(store: Store, job: str, key: str) -> str | None:
    """Return the key that directly replaced `key`; None if there is none. Raises StoreDamaged."""
    name = Layout.replaced(job, key)
    try:
        record = read_record(store, name, Replaced)
    except StoreDamaged as error:
        raise StoreDamaged(error.problem, _REMOVE_REPLACED) from None
    return None if record is None else record.successor


_REMOVE_REPLACED = "remove this file to make the artifact beside it current again"


def successors(store: Store, job: str, key: str) -> Iterator[str]:
    """Yield the keys that replaced `key`, the direct successor first.

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
    """Return the artifact that `current` finds, without its key. Raises StoreDamaged."""
    return current(store, job, key)[1]


def current(store: Store, job: str, key: str) -> tuple[str, tuple[Manifest, InputRef] | None]:
    """Return the key of the current artifact of `key`, and its manifest with the reference to it.

    The current artifact is the last committed one among `key` and its successors: after a forced run that fails or is
    stopped, the artifact before it stays current. If none is committed, return the key under which it is to be made,
    the last one: the names of an artifact that `gc` deleted are not used again.

    Raises:
        StoreDamaged: its manifest, or a replaced.json on the way to it, cannot be read.
    """
    found = _committed(store, job, key)
    for following in successors(store, job, key):
        made = _committed(store, job, following)
        if made is not None or found is None:
            found, key = made, following
    if isinstance(found, StoreDamaged):
        raise found
    return key, found


def _committed(store: Store, job: str, key: str) -> tuple[Manifest, InputRef] | StoreDamaged | None:
    try:
        return read_with_reference(store, job, key)
    except StoreDamaged as error:
        return error


def replace_artifact(store: Store, job: str, key: str, successor: str, run: str, why: str) -> bool:
    """Record that `successor` replaces `key`; return False if a successor is already recorded."""
    record = {"successor": successor, "run": run, "who": who(), "why": why, "time": now()}
    return store.create(Layout.replaced(job, key), encode(record))


# ------------------------------------------------------------------------------------------------- files


def local_files(store: Store, manifest: Manifest, files: Iterable[FileEntry] | None = None) -> Path:
    """Return a local folder with `files` of an artifact; by default with all except the weights of earlier steps.

    Raises:
        StoreDamaged: as `Store.local`, with the command that rebuilds the artifact.
    """
    try:
        if files is None:
            files = [file for file in manifest.files if not file.path.startswith(KEPT_WEIGHTS)]
        return store.local(manifest.folder, files)
    except StoreDamaged as error:
        raise StoreDamaged(error.problem, f"`{rebuild_command(store, manifest)}` rebuilds it") from None


def local_file(store: Store, manifest: Manifest, path: str) -> Path | None:
    """Return one local file of an artifact, and fetch only that; None if the artifact does not list it.

    Raises:
        StoreDamaged: as `local_files`.
    """
    files = [file for file in manifest.files if file.path == path]
    return local_files(store, manifest, files) / path if files else None


def rebuild_command(store: Store, record: Manifest | Attempt) -> str:
    """Return the command that rebuilds an artifact."""
    if record.job == "import":
        path = shlex.quote(str(record.config.get("path", "CHECKPOINT")))
        return f"vitflow import {path} --name {shlex.quote(record.stage)} --force --store {store.uri}"
    try:
        plan = read_plan(store, record.run)
    except StoreError:
        plan = None
    pipeline = "PIPELINE" if plan is None else shlex.quote(plan["pipeline"]["name"])
    return f"vitflow run {pipeline} --force {shlex.quote(record.stage)} --store {shlex.quote(store.uri)}"


# ------------------------------------------------------------------------------------------------- attempts


def read_attempt(store: Store, name: str) -> Attempt | None:
    """Read the attempt in `<attempt folder>/attempt.json`; None if there is none. Raises StoreDamaged."""
    attempt = read_record(store, f"{name}/attempt.json", Attempt)
    if attempt is not None:
        own = Layout.attempt(attempt.job, attempt.key, attempt.number)
        check_name(store, f"{name}/attempt.json", f"{own}/attempt.json")
    return attempt


def last_attempt(store: Store, job: str, key: str) -> Attempt | None:
    """Return the attempt with the highest number. Raises StoreDamaged if its record is damaged."""
    for number in reversed(numbers(store, Layout.attempts(job, key), suffix="")):
        if (attempt := read_attempt(store, Layout.attempt(job, key, number))) is not None:
            return attempt
    return None


def create_attempt(store: Store, attempt: Attempt) -> Attempt:
    """Write an attempt and return it; if another attempt has this number already, return that."""
    folder = Layout.attempt(attempt.job, attempt.key, attempt.number)
    if store.create(f"{folder}/attempt.json", encode(attempt)):
        return attempt
    existing = read_attempt(store, folder)
    assert existing is not None
    return existing


def check_newest(store: Store, attempt: Attempt) -> None:
    """Raise Superseded if there is a later attempt; call it just before each commit.

    The driver gave up this attempt when it wrote the next one, but the attempt's process may still run: its machine was
    suspended, or its cluster lost contact. Numbers are consecutive, so one request finds a successor; a damaged record
    also counts.
    """
    following = attempt.number + 1
    if store.read(f"{Layout.attempt(attempt.job, attempt.key, following)}/attempt.json") is not None:
        raise Superseded(
            f"attempt {following} of {attempt.job}/{attempt.key[:12]} has taken over from attempt {attempt.number}, "
            "which ends and commits nothing more"
        )
