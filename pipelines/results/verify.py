"""`vitflow verify`: compare every byte of the store's artifacts with their manifests, and every record with its schema.

In: a store, and optionally a user's KEY. Out: a `Verified`. It reads everything again, even files that passed before,
and changes nothing except this machine's cache of checked files.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipelines.results.lookup import find_keys
from pipelines.store import (
    Attempt,
    Event,
    FileEntry,
    Layout,
    Manifest,
    Store,
    StoreDamaged,
    all_keys,
    is_committed,
    last_attempt,
    read_manifest,
    read_plan,
    read_record,
    rebuild_command,
    successors,
)
from pipelines.store.file_checks import digest_fault, remember

READERS = 8  # files read at once
SAMPLE_BYTES = 64 * 2**20  # `doctor` reads no larger file


@dataclass(frozen=True)
class Damage:
    """A damaged object: its name in the store, what is wrong, its artifact and stage, and what to do."""

    name: str
    what: str
    artifact: str | None
    stage: str | None
    do: str


@dataclass(frozen=True)
class Verified:
    """What was read, and the damage found."""

    artifacts: int
    files: int
    bytes: int
    damage: tuple[Damage, ...]


def verify(store: Store, selector: str | None = None) -> Verified:
    """Read all artifacts and the records of all runs, or only the artifacts that a selector matches.

    Args:
        selector: a key, a unique key prefix, RUN/STAGE or RUN; None: everything.

    Raises:
        RecipeError: `selector` matches nothing, or is ambiguous.
    """
    keys = all_keys(store) if selector is None else find_keys(store, selector)
    manifests, damage = _manifests(store, keys)
    if selector is None:
        damage += _records(store)
    files = [(manifest, file) for manifest in manifests for file in manifest.files]
    damage += _damaged_files(store, files)
    return Verified(len(manifests), len(files), sum(file.size for _, file in files), tuple(damage))


def sample(store: Store, count: int) -> Verified:
    """Read all manifests and a random sample of the small files, for `doctor`."""
    manifests, damage = _manifests(store, all_keys(store))
    small = [
        (manifest, file) for manifest in manifests for file in manifest.files if file.size <= SAMPLE_BYTES
    ]
    files = random.sample(small, min(count, len(small)))
    damage += _damaged_files(store, files)
    return Verified(len(manifests), len(files), sum(file.size for _, file in files), tuple(damage))


def _manifests(store: Store, keys: Sequence[tuple[str, str]]) -> tuple[list[Manifest], list[Damage]]:
    """Return the manifests of the committed artifacts, and damage to them and to the records of `--force`."""
    manifests, damage = [], []
    for job, key in keys:
        try:
            manifest = read_manifest(store, job, key)
            if manifest is not None:
                manifests.append(manifest)
        except StoreDamaged as error:
            do = _rebuild(store, _attempt(store, job, key))
            damage.append(Damage(Layout.manifest(job, key), error.problem, key, None, do))
        try:
            list(successors(store, job, key))
        except StoreDamaged as error:
            damage.append(Damage(Layout.replaced(job, key), error.problem, key, None, error.remedy))
    return manifests, damage


def _attempt(store: Store, job: str, key: str) -> Attempt | None:
    """Return the last attempt, which names an artifact's stage if its manifest cannot be read."""
    try:
        return last_attempt(store, job, key)
    except StoreDamaged:
        return None


def _rebuild(store: Store, record: Attempt | None) -> str:
    if record is None:
        return "vitflow run PIPELINE --force STAGE, or remove its folder if it was copied there"
    return rebuild_command(store, record)


def _records(store: Store) -> Iterator[Damage]:
    """Yield damage to the records of runs, and to attempts that are not committed."""
    for run in store.names("runs"):
        name, do = f"{Layout.run(run)}/plan.json", "remove the file; results do not depend on it"
        try:
            read_plan(store, run)
        except StoreDamaged as error:
            yield Damage(name, error.problem, None, None, do)
        folder = f"{Layout.run(run)}/events"
        for name in [f"{folder}/{event}" for event in store.names(folder)]:
            try:
                read_record(store, name, Event)
            except StoreDamaged as error:
                yield Damage(name, error.problem, None, None, do)
    for job, key in all_keys(store):
        if not is_committed(store, job, key):
            try:
                last_attempt(store, job, key)
            except StoreDamaged as error:
                yield Damage(
                    Layout.artifact(job, key),
                    error.problem,
                    key,
                    None,
                    "remove this folder; nothing in it was committed",
                )


def _damaged_files(store: Store, files: Sequence[tuple[Manifest, FileEntry]]) -> list[Damage]:
    with ThreadPoolExecutor(READERS) as threads:
        faults = list(threads.map(partial(_file_fault, store), *zip(*files, strict=True)) if files else ())
    return [
        Damage(
            f"{manifest.folder}/{file.path}",
            f"{store.uri}/{manifest.folder}/{file.path} is damaged: it {fault}",
            manifest.key,
            manifest.stage,
            rebuild_command(store, manifest),
        )
        for (manifest, file), fault in zip(files, faults, strict=True)
        if fault is not None
    ]


def _file_fault(store: Store, manifest: Manifest, file: FileEntry) -> str | None:
    """Return what is wrong with a file in the store; None if it matches its entry."""
    name = f"{manifest.folder}/{file.path}"
    try:
        size_and_digest = store.digest(name)
    except StoreDamaged as error:
        return f"cannot be read: {error.problem}"
    if size_and_digest is None:
        return "is missing"
    size, digest = size_and_digest
    fault = digest_fault(digest, file) if digest != file.sha256 else None
    if not store.uri.startswith("s3://"):
        remember(Path(store.uri) / name, file, fault is None)
    return f"has {size:,} bytes, its manifest says {file.size:,}" if size != file.size else fault
