"""`vitflow verify`: compare every byte of the store's artifacts with their manifests, and every record with its schema.

A manifest contains its own sha256, which every reader checks. `verify` also compares it with the sha256 that later
stages recorded, and its key with the recorded configuration, inputs and version.

In: a store, and optionally a user's KEY. Out: a `Verified`. It reads everything again, even files that passed before,
and changes nothing except this machine's cache of checked files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from pipelines.identity import recorded_key
from pipelines.results.lookup import find_keys
from pipelines.spec import AnyStage, Stage
from pipelines.store import (
    Event,
    FileEntry,
    InputRef,
    Layout,
    Manifest,
    Over,
    Store,
    StoreAbsent,
    StoreDamaged,
    StoreError,
    StoreUnreachable,
    all_keys,
    is_committed,
    last_attempt,
    read_plan,
    read_record,
    read_with_reference,
    rebuild_command,
    successors,
)
from pipelines.store.file_checks import digest_fault, remember
from vit_model.errors import UserError

Value = TypeVar("Value")
READERS = 8  # files read at once


@dataclass(frozen=True)
class Damage:
    """A damaged object: its name in the store, what is wrong, its artifact and stage, and what to do."""

    name: str
    what: str
    artifact: str | None
    stage: str | None
    do: str


@dataclass(frozen=True)
class Unchecked:
    """An object that could not be checked, and why; it may be intact."""

    name: str
    why: str


@dataclass(frozen=True)
class Verified:
    """What the manifests list, the damage, the unreadable objects, and the manifests with unchecked keys."""

    artifacts: int
    files: int
    bytes: int
    damage: tuple[Damage, ...]
    unread: tuple[Unchecked, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()


def verify(store: Store, selector: str | None = None) -> Verified:
    """Read all artifacts and the records of all runs, or only the artifacts that a selector matches.

    Args:
        selector: a key, a unique key prefix, RUN/STAGE, RUN or @ALIAS; None: everything.

    Raises:
        RecipeError: `selector` matches nothing, or is ambiguous.
    """
    everything = all_keys(store)
    keys = everything if selector is None else find_keys(store, selector)
    wanted, unread = {key for _, key in keys}, list[Unchecked]()
    # All manifests, because the manifests of later stages also record an artifact.
    found, replaced, all_damage = _manifests(store, everything, unread)
    unread = [each for each in unread if each.name.split("/")[2] in wanted]
    manifests = [manifest for manifest, _ in found if manifest.key in wanted]
    damage = [each for each in all_damage if each.artifact in wanted]
    damage += _changed_manifests(store, found, wanted)
    more, unchecked = _wrong_keys(store, [manifest for manifest, _ in found], replaced, wanted)
    damage += more
    if selector is None:
        damage += _records(store, unread)
    files = [(manifest, file) for manifest in manifests for file in manifest.files]
    damage += _damaged_files(store, files, unread)
    size = sum(file.size for _, file in files)
    return Verified(len(manifests), len(files), size, tuple(damage), tuple(unread), tuple(unchecked))


def _read(
    name: str, unread: list[Unchecked], read: Callable[..., Value], *arguments: Any
) -> tuple[Value | None, StoreDamaged | None]:
    """Return what `read` returns, or the damage that it meets.

    An object that cannot be read here is noted in `unread`: it may be intact. Others are still read.
    """
    try:
        return read(*arguments), None
    except StoreDamaged as error:
        return None, error
    except (StoreUnreachable, StoreAbsent):
        raise
    except StoreError as error:
        unread.append(Unchecked(name, str(error)))
        return None, None


def _manifests(
    store: Store, keys: Sequence[tuple[str, str]], unread: list[Unchecked]
) -> tuple[list[tuple[Manifest, InputRef]], dict[str, str], list[Damage]]:
    """Return the manifests of the committed artifacts with the references to them, {successor: the key that it
    replaces}, and damage to the manifests and to the records of `--force`."""
    found, replaced, damage = [], dict[str, str](), []

    def follow(job: str, key: str) -> None:
        for following in successors(store, job, key):
            replaced[following], key = key, following

    for job, key in keys:
        name = Layout.manifest(job, key)
        artifact, error = _read(name, unread, read_with_reference, store, job, key)
        if artifact is not None:
            found.append(artifact)
        if error is not None:
            damage.append(Damage(name, error.problem, key, None, _rebuild(store, job, key)))
        name = Layout.replaced(job, key)
        _, error = _read(name, unread, follow, job, key)
        if error is not None:
            damage.append(Damage(name, error.problem, key, None, error.remedy))
    return found, replaced, damage


def _changed_manifests(store: Store, found: Sequence[tuple[Manifest, InputRef]], wanted: set[str]) -> Iterator[Damage]:
    """Yield one damage for each manifest that differs from the manifest that a later stage recorded."""
    now = {reference.key: (manifest, reference) for manifest, reference in found if reference.key in wanted}
    for consumer, _ in found:
        for then in (each for references in consumer.inputs.values() for each in references):
            if then.key in now and then.manifest_sha256 != now[then.key][1].manifest_sha256:
                manifest, _ = now.pop(then.key)
                recorded = f"sha256 {then.manifest_sha256[:12]} when {consumer.stage} ({consumer.key[:12]}) read it"
                yield _manifest_damage(store, manifest, f"it had {recorded}")


def _wrong_keys(
    store: Store, manifests: Sequence[Manifest], replaced: Mapping[str, str], wanted: set[str]
) -> tuple[list[Damage], list[Unchecked]]:
    """Return the manifests whose key does not match their configuration, inputs and version, and unchecked ones.

    Not checked: a configuration that this version cannot read, and a result of `--force` whose predecessor is gone.
    """
    damage, unchecked = [], []
    possible = {manifest.key: _possible_keys(manifest) for manifest in manifests}
    for manifest in manifests:
        keys, first = possible[manifest.key], _first(manifest.key, replaced)
        if manifest.key not in wanted or first in keys:
            continue
        name = Layout.manifest(manifest.job, manifest.key)
        if not keys:
            unchecked.append(Unchecked(name, "this version of vitflow cannot read its configuration"))
        elif first in possible.get(first, ()) or not _is_forced(store, manifest):
            made_from = "its configuration, inputs and version belong to another key"
            damage.append(_manifest_damage(store, manifest, made_from))
        else:
            unchecked.append(Unchecked(name, "the artifact that it replaced by --force is gone"))
    return damage, unchecked


def _possible_keys(manifest: Manifest) -> set[str]:
    """Return the keys of a manifest's configuration, inputs and version, without and with `--strict-code`.

    Empty if this version cannot read its configuration.
    """
    try:
        config: AnyStage = _stages().validate_python(manifest.config)
        inputs = {field: [each.content_digest for each in own] for field, own in manifest.inputs.items()}
        version, digest = manifest.code.get("version"), manifest.code.get("digest")
        of = (config, manifest.config, version, inputs, manifest.source)
        return {recorded_key(*of), recorded_key(*of, digest)}
    except (ValueError, TypeError, UserError):
        return set()


@cache
def _stages() -> TypeAdapter[AnyStage]:
    return TypeAdapter(Stage)  # takes 20 ms


def _first(key: str, replaced: Mapping[str, str]) -> str:
    """Return the first key in the chain of successors that leads to this key."""
    seen = {key}
    while (before := replaced.get(key)) is not None and before not in seen:
        seen.add(key := before)
    return key


def _is_forced(store: Store, manifest: Manifest) -> bool:
    """Whether an artifact's run may have used `--force` for it; True if its plan is gone."""
    try:
        plan = read_plan(store, manifest.run)
    except StoreError:
        return True
    return plan is None or manifest.stage in plan["force"]


def _manifest_damage(store: Store, manifest: Manifest, what: str) -> Damage:
    name = Layout.manifest(manifest.job, manifest.key)
    what = f"{store.uri}/{name} is damaged: {what}"
    return Damage(name, what, manifest.key, manifest.stage, rebuild_command(store, manifest))


def _rebuild(store: Store, job: str, key: str) -> str:
    """Return the command that rebuilds an artifact with an unreadable manifest, from its last attempt if possible."""
    attempt = None
    with suppress(StoreError):
        attempt = last_attempt(store, job, key)
    if attempt is None:
        return "vitflow run PIPELINE --force STAGE, or remove its folder if it was copied there"
    return rebuild_command(store, attempt)


def _records(store: Store, unread: list[Unchecked]) -> Iterator[Damage]:
    """Yield damage to the records of runs, and to attempts that are not committed."""
    remove = "remove the file; results do not depend on it"
    for run in store.names("runs"):
        folder = f"{Layout.run(run)}/events"
        events = [f"{folder}/{event}" for event in store.names(folder)]
        _, error = _read(plan := f"{Layout.run(run)}/plan.json", unread, read_plan, store, run)
        records = dict.fromkeys(events, Event) | {f"{Layout.run(run)}/over.json": Over}
        found = {plan: error} | {
            name: _read(name, unread, read_record, store, name, model)[1] for name, model in records.items()
        }
        for name, error in found.items():
            if error is not None:
                yield Damage(name, error.problem, None, None, remove)
    for job, key in all_keys(store):
        name = Layout.artifact(job, key)
        _, error = _read(name, unread, lambda *of: is_committed(*of) or last_attempt(*of), store, job, key)
        if error is not None:
            yield Damage(name, error.problem, key, None, "remove this folder; nothing in it was committed")


def _damaged_files(store: Store, files: Sequence[tuple[Manifest, FileEntry]], unread: list[Unchecked]) -> list[Damage]:
    def check(manifest: Manifest, file: FileEntry) -> str | None:
        return _read(f"{manifest.folder}/{file.path}", unread, _file_fault, store, manifest, file)[0]

    with ThreadPoolExecutor(READERS) as threads:
        faults = list(threads.map(check, *zip(*files, strict=True)) if files else ())
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
