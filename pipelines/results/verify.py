"""`vitflow verify`: compare every byte of the store's artifacts with their manifests, and every record with its schema.

In: a store, and optionally the KEY that a user gave. Out: a `Verified`. It reads everything again, even files that
passed before, and changes nothing but this machine's memory of checked files.
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


def verify(store: Store, given: str | None = None) -> Verified:
    """Read all artifacts and runs' records, or only the artifacts that a unique key prefix, RUN/STAGE or RUN means.

    Raises:
        RecipeError: `given` matches nothing, or is ambiguous.
    """
    manifests, damage = _manifests(store, all_keys(store) if given is None else find_keys(store, given))
    if given is None:
        damage += _records(store)
    files = [(manifest, file) for manifest in manifests for file in manifest.files]
    damage += _damaged_files(store, files)
    return Verified(len(manifests), len(files), sum(file.size for _, file in files), tuple(damage))


def sample(store: Store, count: int) -> Verified:
    """Read all manifests and some of their small files, drawn anew each time, for `doctor`."""
    manifests, damage = _manifests(store, all_keys(store))
    small = [
        (manifest, file) for manifest in manifests for file in manifest.files if file.size <= SAMPLE_BYTES
    ]
    files = random.sample(small, min(count, len(small)))
    damage += _damaged_files(store, files)
    return Verified(len(manifests), len(files), sum(file.size for _, file in files), tuple(damage))


def _manifests(store: Store, keys: Sequence[tuple[str, str]]) -> tuple[list[Manifest], list[Damage]]:
    """The manifests of the committed artifacts; damage to them and to the records that `--force` wrote beside them."""
    found, damage = [], []
    for job, key in keys:
        try:
            manifest = read_manifest(store, job, key)
            if manifest is not None:
                found.append(manifest)
        except StoreDamaged as error:
            do = _rebuild(store, _attempt(store, job, key))
            damage.append(Damage(Layout.manifest(job, key), error.problem, key, None, do))
        try:
            list(successors(store, job, key))
        except StoreDamaged as error:
            damage.append(Damage(Layout.replaced(job, key), error.problem, key, None, error.remedy))
    return found, damage


def _attempt(store: Store, job: str, key: str) -> Attempt | None:
    """The record that names an artifact's stage if its manifest cannot be read."""
    try:
        return last_attempt(store, job, key)
    except StoreDamaged:
        return None


def _rebuild(store: Store, made: Manifest | Attempt | None) -> str:
    if made is None:
        return "vitflow run PIPELINE --force STAGE, or remove its folder if it was copied there"
    return rebuild_command(store, made)


def _records(store: Store) -> Iterator[Damage]:
    """Damage to the records of runs, and to attempts that are not committed."""
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
        wrong = list(threads.map(partial(_file_fault, store), *zip(*files, strict=True)) if files else ())
    return [
        Damage(
            f"{manifest.folder}/{file.path}",
            f"{store.uri}/{manifest.folder}/{file.path} is damaged: it {fault}",
            manifest.key,
            manifest.stage,
            rebuild_command(store, manifest),
        )
        for (manifest, file), fault in zip(files, wrong, strict=True)
        if fault is not None
    ]


def _file_fault(store: Store, manifest: Manifest, file: FileEntry) -> str | None:
    """What is wrong with a file as the store has it now."""
    name = f"{manifest.folder}/{file.path}"
    try:
        found = store.digest(name)
    except StoreDamaged as error:
        return f"cannot be read: {error.problem}"
    if found is None:
        return "is missing"
    size, digest = found
    fault = digest_fault(digest, file) if digest != file.sha256 else None
    if not store.uri.startswith("s3://"):
        remember(Path(store.uri) / name, file, fault is None)
    return f"has {size:,} bytes, its manifest says {file.size:,}" if size != file.size else fault
