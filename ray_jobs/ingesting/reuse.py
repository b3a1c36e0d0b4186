"""Reuse of images that were read before, by an attempt that did not finish or for an earlier dataset of the source.

After each shard, ingest writes `facts/BB-NNNNN.parquet` beside it: FACTS of all entries of the part, usable or not,
with the digest of each image's source file, and in its metadata the shard's size and sha256. The file marks the part as
finished and lists the images that can be reused. BB is a number of bits: the hashes of the part's names begin with the
BB bits of NNNNN.

An image is reused if its name, file, position and the file's digest are unchanged. Its facts are copied, and its bytes
are read from the earlier shard and compared with their checksum. Reuse does not change the output.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from pipelines import identity
from pipelines.spec import Ingest
from pipelines.store import FileEntry, Layout, Manifest, Store, StoreDamaged, StoreError, all_manifests
from ray_jobs.data.cache import Descriptor
from ray_jobs.data.columns import FACTS, INDEX, LISTED
from ray_jobs.process.context import Context

_SAME = ("key", "file", "place", "stored", "digest")
# the columns that decoding yields: the index without the source's columns and the position in the shard
_DECODED = [*(name for name in INDEX.names if name not in (*LISTED, "shard", "offset")), "decoding"]


class Finished(NamedTuple):
    """The facts file of a finished part: its name in the store, and its sha256 if a manifest lists it."""

    name: str
    sha256: str | None


class Reusable(NamedTuple):
    """An image that was read before: its columns of FACTS, and the shard that contains its bytes."""

    facts: dict[str, Any]
    folder: str
    shard: FileEntry
    offset: int


def facts_file(bits: int, number: int) -> str:
    """Return the name of a part's facts, relative to the attempt's files."""
    return f"facts/{bits:02d}-{number:05d}.parquet"


def write_facts(
    context: Context[Ingest], bits: int, number: int, facts: pa.Table, shard: FileEntry | None
) -> tuple[FileEntry, ...]:
    """Write a part's facts into the attempt's files; this marks the part as finished."""
    metadata = {} if shard is None else {"shard": shard.model_dump_json()}
    with context.staging() as staging:
        path = staging.path / facts_file(bits, number)
        path.parent.mkdir(parents=True)
        pq.write_table(facts.replace_schema_metadata(metadata), path, compression="zstd")
    return staging.files


def finished_parts(context: Context[Ingest], digests: pa.ChunkedArray) -> list[Finished]:
    """Return the facts of all parts that may be reused, starting with the newest earlier attempt at this key.

    Args:
        digests: the digest of each image's source file.
    """
    attempt, store = context.attempt, context.open_store()
    folders = [Layout.files(attempt.job, attempt.key, number) for number in range(attempt.number - 1, 0, -1)]
    parts = [Finished(f"{folder}/facts/{name}", None) for folder in folders for name in store.names(f"{folder}/facts")]
    dataset = _of_same_source(context, digests)
    return parts if dataset is None else [*parts, *_committed_parts(dataset)]


def _committed_parts(dataset: Manifest) -> list[Finished]:
    return [
        Finished(f"{dataset.folder}/{file.path}", file.sha256)
        for file in dataset.files
        if file.path.startswith("facts/")
    ]


def _of_same_source(context: Context[Ingest], digests: pa.ChunkedArray) -> Manifest | None:
    """Return the newest dataset of a source with the same description and location.

    If there is none, the source may have moved: return the dataset with the same description that has the most images
    in common, because folders of unrelated images often have the same description.
    """
    attempt, config = context.attempt, context.config
    if _is_forced(context):
        return None  # --force: read everything again
    source, fields = attempt.config["source"], identity.identity_fields(config.source)
    places, store = source.keys() - fields.keys(), context.open_store()
    alike = [
        manifest
        for manifest in all_manifests(store, attempt.job)
        if manifest.code.get("version") == config.VERSION
        and _without(manifest.config["source"], places) == _without(source, places)
    ]
    if in_place := [manifest for manifest in alike if manifest.config["source"] == source]:
        return max(in_place, key=lambda manifest: manifest.finished)
    wanted = pc.unique(digests)
    return max(alike, key=lambda manifest: (_in_common(store, manifest, wanted), manifest.finished), default=None)


def _in_common(store: Store, manifest: Manifest, digests: pa.Array) -> int:
    """Return how many images of a dataset's first part (a random sample) come from files with these digests."""
    for name, _ in _committed_parts(manifest)[:1]:
        with suppress(pa.ArrowException, StoreError):  # find_reusable reports it, if the dataset is chosen
            facts = pq.read_table(pa.BufferReader(store.read(name) or b""), columns=["digest"])
            return pc.sum(pc.is_in(facts["digest"].cast(digests.type), digests)).as_py() or 0
    return 0


def _without(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _is_forced(context: Context[Ingest]) -> bool:
    """Return whether `--force` replaced the key of the attempt's configuration by a successor."""
    attempt = context.attempt
    inputs = {
        field: [reference.content_digest for reference in references] for field, references in attempt.inputs.items()
    }
    return attempt.key not in {
        identity.stage_key(context.config, inputs, attempt.source, code) for code in (None, attempt.code_digest)
    }


def find_reusable(
    context: Context[Ingest], parts: list[Finished], bits: int, number: int, entries: pa.Table
) -> list[Reusable | None]:
    """Return for each entry of a part the image that was read before, or None.

    Args:
        parts: as returned by `finished_parts`.
        bits, number: the part's numbers, see `facts_file`.
        entries: ENTRIES and a column `digest`.
    """
    listed = entries.select([LISTED.get(name, name) for name in _SAME])
    identities = [tuple(row.values()) for row in listed.to_pylist()]
    reusable: dict[tuple[Any, ...], Reusable | None] = dict.fromkeys(identities)
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
            print(f"{name} cannot be reused; its images are read from the source: {error}", flush=True)
            continue
        described = (facts.schema.metadata or {}).get(b"shard")
        if described is None or facts.schema.names != FACTS.names:
            continue
        shard, folder = FileEntry.model_validate_json(described), name.partition("/facts/")[0]
        for row in facts.filter(pc.is_null(facts["reason"])).to_pylist():
            identity_of_row = tuple(row[column] for column in _SAME)
            if identity_of_row in reusable and reusable[identity_of_row] is None:
                decoded = {column: row[column] for column in _DECODED}
                reusable[identity_of_row] = Reusable(decoded, folder, shard, row["offset"])
    return [reusable[entry_identity] for entry_identity in identities]


def _overlaps(name: str, bits: int, number: int) -> bool:
    """Return whether two parts may have images in common: the bits of one begin with the bits of the other."""
    other_bits, other_number = map(int, PurePosixPath(name).stem.split("-"))
    common = min(bits, other_bits)
    return number >> (bits - common) == other_number >> (other_bits - common)


class EarlierShards:
    """The shards of earlier attempts and datasets, opened on first use."""

    def __init__(self, context: Context[Ingest]) -> None:
        self._store = context.open_store()
        self._open: dict[str, Descriptor | None] = {}

    def read(self, image: Reusable) -> bytes | None:
        """Return the image's bytes; None, with a line in the log, if they have to be read from the source."""
        shard = f"{image.folder}/{image.shard.path}"
        try:
            if shard not in self._open:
                self._open[shard] = None
                self._open[shard] = Descriptor(self._store.local(image.folder, [image.shard]) / image.shard.path)
            if (file := self._open[shard]) is None:
                return None
            data = os.pread(file.number, image.facts["length"], image.offset)
        except (OSError, StoreError) as error:
            print(f"{shard} cannot be reused; its images are read from the source: {error}", flush=True)
            return None
        if xxhash.xxh3_64_intdigest(data) != image.facts["checksum"]:
            print(f"{shard} is damaged at {image.offset}; the image is read from the source", flush=True)
            return None
        return data
