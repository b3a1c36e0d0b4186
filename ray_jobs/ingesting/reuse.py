"""Rows that were read before: by an attempt that did not end, or for a dataset of the same source, made earlier.

Beside each shard lies `facts/BB-NNNNN.parquet`, written after it: FACTS of everything that the shard was made of, good
or bad, with the digest of the file that each image came from, and in its metadata the shard's own size and sha256. So
it says that the part is finished, and what of it can be used again. The part holds the images whose names' hash begins
with the BB bits NNNNN.

An image is known where its name, file, place and the file's digest are what they were. Its facts are taken over and
its bytes come from the shard that has them, compared with their checksum; what is written does not depend on it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from pipelines import identity
from pipelines.spec import Ingest
from pipelines.store import FileEntry, Layout, Manifest, Store, StoreDamaged, StoreError, all_manifests
from ray_jobs.data.columns import FACTS, INDEX, LISTED
from ray_jobs.process.stage import Context

_SAME = ("key", "file", "place", "stored", "digest")
# what decoding finds: all of the index but what the source lists and where the shard has the image
_FOUND = [name for name in INDEX.names if name not in (*LISTED, "shard", "offset")]


class Finished(NamedTuple):
    """The facts of a part that may be reused: their name in the store; their sha256 if a manifest states it."""

    name: str
    sha256: str | None


class Known(NamedTuple):
    """An image that was read before: its columns of FACTS, and the shard that has its bytes."""

    facts: dict[str, Any]
    folder: str
    shard: FileEntry
    offset: int


def facts_file(bits: int, number: int) -> str:
    """Name of a part's facts, relative to the attempt's files."""
    return f"facts/{bits:02d}-{number:05d}.parquet"


def write_facts(
    context: Context[Ingest], bits: int, number: int, facts: pa.Table, shard: FileEntry | None
) -> tuple[FileEntry, ...]:
    """Write a part's facts into the attempt: the part is finished then."""
    metadata = {} if shard is None else {"shard": shard.model_dump_json()}
    with context.staging() as staging:
        path = staging.path / facts_file(bits, number)
        path.parent.mkdir(parents=True)
        pq.write_table(facts.replace_schema_metadata(metadata), path, compression="zstd")
    return staging.files


def finished_parts(context: Context[Ingest], digests: pa.ChunkedArray) -> list[Finished]:
    """The facts of all parts that may be reused, those of this key first, newest first.

    `digests` are those of the files that the images come from.
    """
    attempt, store = context.attempt, context.open_store()
    folders = [Layout.files(attempt.job, attempt.key, number) for number in range(attempt.number - 1, 0, -1)]
    parts = [
        Finished(f"{folder}/facts/{name}", None)
        for folder in folders
        for name in store.names(f"{folder}/facts")
    ]
    dataset = _of_same_source(context, digests)
    return parts if dataset is None else [*parts, *_committed_parts(dataset)]


def _committed_parts(dataset: Manifest) -> list[Finished]:
    return [
        Finished(f"{dataset.folder}/{file.path}", file.sha256)
        for file in dataset.files
        if file.path.startswith("facts/")
    ]


def _of_same_source(context: Context[Ingest], digests: pa.ChunkedArray) -> Manifest | None:
    """The newest dataset of a source with the same description in the same place.

    If there is none, the source may have moved: then, of several such datasets (folders of other images often have the
    same description), the one with the most images in common.
    """
    attempt, config = context.attempt, context.config
    if _is_forced(context):
        return None  # somebody wants everything to be done again
    source, fields = attempt.config["source"], identity.identity_fields(config.source)
    places, store = source.keys() - fields.keys(), context.open_store()
    alike = [
        manifest
        for manifest in all_manifests(store)
        if manifest.job == attempt.job
        and manifest.code.get("version") == config.VERSION
        and _without(manifest.config["source"], places) == _without(source, places)
    ]
    if in_place := [manifest for manifest in alike if manifest.config["source"] == source]:
        return max(in_place, key=lambda manifest: manifest.finished)
    wanted = pc.unique(digests)
    return max(
        alike,
        key=lambda manifest: (_in_common(store, manifest, wanted), manifest.finished),
        default=None,
    )


def _in_common(store: Store, manifest: Manifest, digests: pa.Array) -> int:
    """How many images of a dataset's first part, which are drawn by a hash, come from files of these digests."""
    for name, _ in _committed_parts(manifest)[:1]:
        with suppress(pa.ArrowException, StoreError):  # find_known says so, if the dataset is chosen
            facts = pq.read_table(pa.BufferReader(store.read(name) or b""), columns=["digest"])
            return pc.sum(pc.is_in(facts["digest"], digests)).as_py() or 0
    return 0


def _without(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _is_forced(context: Context[Ingest]) -> bool:
    """Whether the attempt's key is not that of its configuration, but a successor's that `--force` made."""
    attempt = context.attempt
    inputs = {field: [one.content_digest for one in given] for field, given in attempt.inputs.items()}
    return attempt.key not in {
        identity.stage_key(context.config, inputs, attempt.source, code)
        for code in (None, attempt.code_digest)
    }


def find_known(
    context: Context[Ingest], parts: list[Finished], bits: int, number: int, entries: pa.Table
) -> list[Known | None]:
    """What is known of each entry of a part (ENTRIES and `digest`). `parts`: as `finished_parts` has them."""
    listed = entries.select([LISTED.get(name, name) for name in _SAME])
    wanted = [tuple(row.values()) for row in listed.to_pylist()]
    found: dict[tuple[Any, ...], Known | None] = dict.fromkeys(wanted)
    store = context.open_store()
    for name, digest in parts:
        if not _overlaps(name, bits, number):
            continue
        try:
            data = store.read(name) or b""
            if digest not in {None, sha256(data).hexdigest()}:
                raise StoreDamaged(f"{store.uri}/{name} is damaged")
            facts = pq.read_table(pa.BufferReader(data))
        except (pa.ArrowException, StoreError) as error:
            print(f"{name} can't be used again, its images are read from the source: {error}", flush=True)
            continue
        described = (facts.schema.metadata or {}).get(b"shard")
        if described is None or facts.schema.names != FACTS.names:
            continue
        shard, folder = FileEntry.model_validate_json(described), name.partition("/facts/")[0]
        for row in facts.filter(pc.is_null(facts["reason"])).to_pylist():
            same = tuple(row[column] for column in _SAME)
            if same in found and found[same] is None:
                kept = {column: row[column] for column in _FOUND}
                found[same] = Known(kept, folder, shard, row["offset"])
    return [found[what] for what in wanted]


def _overlaps(name: str, bits: int, number: int) -> bool:
    """Whether a part may have images that this one has: one's bits begin with the other's."""
    theirs, their_number = map(int, PurePosixPath(name).stem.split("-"))
    common = min(bits, theirs)
    return number >> (bits - common) == their_number >> (theirs - common)


class EarlierShards:
    """The shards that have what is known, opened when they are first read."""

    def __init__(self, context: Context[Ingest]) -> None:
        self._store = context.open_store()
        self._open: dict[str, int | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            if descriptor is not None:
                os.close(descriptor)

    def read(self, known: Known) -> bytes | None:
        """The image's bytes, as they were; None, and a line in the log, where they must be read from the source."""
        shard = f"{known.folder}/{known.shard.path}"
        try:
            if shard not in self._open:
                self._open[shard] = None
                path = self._store.local(known.folder, [known.shard]) / known.shard.path
                self._open[shard] = os.open(path, os.O_RDONLY)
            if (descriptor := self._open[shard]) is None:
                return None
            image = os.pread(descriptor, known.facts["length"], known.offset)
        except (OSError, StoreError) as error:
            print(f"{shard} can't be used again, its images are read from the source: {error}", flush=True)
            return None
        if xxhash.xxh3_64_intdigest(image) != known.facts["checksum"]:
            print(f"{shard} is damaged at {known.offset}: the image is read from the source", flush=True)
            return None
        return image
