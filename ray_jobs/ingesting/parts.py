"""Parts of an ingest: a Ray task reads, checks and writes the entries of one shard."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from pipelines import identity
from pipelines.file_names import parts_of
from pipelines.files.digests import file_digests
from pipelines.spec import Ingest
from pipelines.store import FileEntry
from ray_jobs.data.boxes import Box, in_image
from ray_jobs.data.boxes import table as table_of
from ray_jobs.data.columns import FACTS, LISTED, Sample, large
from ray_jobs.data.images import Facts, content_id, examine, examine_pixels, sample_id, shrunk
from ray_jobs.data.masks import Mask, StoredMask, check_mask, mask_file, write_masks
from ray_jobs.data.shards import Shard
from ray_jobs.data.writing import shard_file, shuffle_key, write_shard
from ray_jobs.ingesting.reuse import EarlierShards, Finished, Reusable, find_reusable, write_facts
from ray_jobs.process.cluster import results_of
from ray_jobs.process.context import AT_REST, Context, SourceChangedError
from ray_jobs.sources import catalog
from ray_jobs.sources.archives.containers import outermost
from ray_jobs.sources.archives.entries import Files
from vit_model.errors import UserError

SHARD_BYTES = 256 * 2**20
SHARD_IMAGES = 8192  # limits shards of small images; rendering such a shard takes a few seconds
# name of a local file -> (size, modification time); objects on S3 are requested by their ETag
States = dict[str, tuple[int, int]]


class Part(NamedTuple):
    """The entries of one shard: the hashes of their keys begin with the `bits` bits of `number`."""

    bits: int
    number: int
    entries: pa.Table
    """ENTRIES, with the `digest` of each entry's source file."""


class Written(NamedTuple):
    """The output of a task: the shard (None: no image could be used), its files, FACTS of every entry."""

    shard: Shard | None
    files: tuple[FileEntry, ...]
    facts: pa.Table
    masks: dict[str, str]
    """sample_id -> the digest of the image's mask; empty without masks."""
    pixels: Counter[int]
    """The number of pixels of each value in these masks."""
    boxes: pa.Table
    """BOXES of the images; empty without boxes."""
    reused: int
    """The number of images that were not read again."""


# ------------------------------------------------------------------------------------------------- planning


def with_digests(context: Context[Ingest], files: Files, entries: pa.Table) -> pa.Table:
    """Return the entries with the digest of each entry's source file.

    Rows of arrays, and archives that are split into several files, get one digest of all files. `short_side` changes
    the digests, because facts of downsized images differ from the facts of the originals.
    """
    everything = identity.files_fingerprint(files.items())  # not the attempt's, which covers `exclude`
    size = [context.config.short_side] if context.config.short_side else []
    digests = {
        name: identity.sha256(identity.canonical_json([*facts, *size])) for name, *facts in file_digests(files.items())
    }
    if size:
        everything = identity.sha256(identity.canonical_json([everything, *size]))
    named = entries["file"].combine_chunks().dictionary_encode()
    tops = [outermost(digests, name) for name in named.dictionary.to_pylist()]
    of_tops = [everything if len(parts_of(top, digests)) > 1 else digests.get(top, everything) for top in tops]
    of_files = pa.array([digest[:32] for digest in of_tops], pa.large_string()).take(named.indices)
    of_rows = pa.array([everything[:32]] * len(entries), pa.large_string())
    return entries.append_column("digest", pc.if_else(pc.equal(entries["codec"], "row"), of_rows, of_files))


def file_states(files: Files) -> States:
    states: States = {}
    for name, location in files.items():
        if not location.startswith("s3://"):
            with suppress(FileNotFoundError):  # a missing file has no state, which counts as a change
                status = Path(location).stat()
                states[name] = (status.st_size, status.st_mtime_ns)
    return states


def plan_parts(entries: pa.Table) -> list[Part]:
    """Divide entries into parts, one per shard, by a hash of their keys, so that every shard is a random sample.

    The number of parts is a power of two, and a part has one prefix of the hash: later entries do not move others to
    another part until there are twice as many. Entries of one unit are read together and stay together.
    """
    size = max(pc.sum(entries["length"]).as_py() or 0, 1)
    number = max(size / SHARD_BYTES, len(entries) / SHARD_IMAGES, 1)
    bits = math.ceil(math.log2(number))
    units = pc.coalesce(entries["unit"], entries["key"])
    hashes = _hashes(units)
    within = hashes if units.equals(entries["key"]) else _hashes(entries["key"])
    order = np.lexsort((within, hashes))
    numbers = (hashes[order] >> np.uint64(63 - bits)) >> np.uint64(1)
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(entries)]
    ordered = entries.take(order)
    return [
        Part(bits, int(numbers[start]), ordered.slice(start, end - start))
        for start, end in pairwise(starts)
        if end > start
    ]


def _hashes(names: pa.ChunkedArray) -> NDArray[np.uint64]:
    return np.array([int.from_bytes(shuffle_key(name)[:8]) for name in names.to_pylist()], np.uint64)


# ------------------------------------------------------------------------------------------------- tasks


def write_part(context: Context[Ingest], files: Files, states: States, finished: list[Finished], part: Part) -> Written:
    """Read, check and write one shard (in a Ray task)."""
    facts: list[dict[str, Any]] = []
    file = shard_file(part.number)
    reusable = find_reusable(context, finished, part.bits, part.number, part.entries)
    masks, boxes = dict[str, StoredMask](), dict[str, list[Box]]()
    with context.staging() as staging:
        earlier = EarlierShards(context)
        samples = _samples(context.config, files, part.entries, reusable, earlier, facts, masks, boxes)
        offsets = write_shard(staging.path / file, samples)
        if not offsets:
            (staging.path / file).unlink()
        if masks:
            write_masks(staging.path / mask_file(file), masks)
    usable = [row for row in facts if "reason" not in row]
    for row, offset in zip(usable, offsets, strict=True):
        row["offset"] = offset
    reused = sum(row.pop("is_reused", False) for row in usable)
    table = pa.Table.from_pylist(facts, schema=FACTS)
    _check_unchanged(files, states, part.entries)
    written = next((entry for entry in staging.files if entry.path == file), None)
    facts_files = write_facts(context, part.bits, part.number, table, written)
    shard = Shard(file=file, rows=len(offsets), bytes=written.size) if written else None
    digests = {name: mask.digest for name, mask in masks.items()}
    pixels = sum((mask.pixels for mask in masks.values()), Counter[int]())
    return Written(shard, (*staging.files, *facts_files), table, digests, pixels, table_of(boxes), reused)


def _check_unchanged(files: Files, states: States, entries: pa.Table) -> None:
    """Raise SourceChangedError if a file changed after its digest was computed, because its facts would stay wrong."""
    names = {outermost(files, name) for name in pc.unique(entries["file"]).to_pylist()}
    if not names <= files.keys() or any(len(parts_of(name, files)) > 1 for name in names):
        names = set(files)  # rows of arrays, archives of several files
    now = file_states({name: files[name] for name in names})
    if changed := sorted(name for name in names if now.get(name) != states.get(name)):
        raise SourceChangedError(
            f"the source changed while it was read, after the run was planned ({files[changed[0]]}); {AT_REST}"
        )


def _samples(
    config: Ingest,
    files: Files,
    entries: pa.Table,
    reusable: Sequence[Reusable | None],
    earlier: EarlierShards,
    facts: list[dict[str, Any]],
    masks: dict[str, StoredMask],
    boxes: dict[str, list[Box]],
) -> Iterator[Sample]:
    """Yield the usable images of a part, in order.

    Append a row of FACTS to `facts` for every entry, and fill `masks` and `boxes` by sample_id if the source has them.
    """
    is_new = pa.array([earlier_image is None for earlier_image in reusable], pa.bool_())
    source = config.source
    new_images = catalog.images(source, files, entries.filter(is_new))
    mask_classes = catalog.mask_classes(source)
    # masks of reused images are read again, because their file may have changed
    entry_masks = catalog.masks(source, files, entries) if mask_classes else repeat(None, len(entries))
    for number, (entry, before, mask) in enumerate(zip(entries.to_pylist(), reusable, entry_masks, strict=True)):
        listed = {column: entry[name] for column, name in LISTED.items()} | {"digest": entry["digest"]}
        row = dict(listed)
        facts.append(row)
        data = None if before is None else earlier.read(before)
        if before is not None and data is not None:
            row |= before.facts
            row["is_reused"] = True
        else:
            image = next(new_images if before is None else catalog.images(source, files, entries.slice(number, 1)))
            try:
                data, examined = _examined(image)
                # of the original bytes, even if the image is downsized
                digest = hashlib.sha256(data).digest()
                if config.short_side is not None:
                    data, examined = shrunk(data, examined, config.short_side)
            except UserError as error:
                row["reason"] = str(error)
                continue
            row |= examined.columns()
            row |= {"content_id": content_id(digest), "sample_id": sample_id(digest, entry["key"])}
            row |= {"length": len(data), "checksum": xxhash.xxh3_64_intdigest(data)}
        try:
            if mask is not None:
                masks[row["sample_id"]] = _stored_mask(mask, row, len(mask_classes))
            if entry["boxes"] is not None:
                boxes[row["sample_id"]] = _boxes_in(row, entry)
        except UserError as error:
            facts[-1] = listed | {"reason": str(error)}
            continue
        yield Sample._make((row | {"image": data})[name] for name in Sample._fields)


def _examined(image: bytes | NDArray[np.uint8] | UserError) -> tuple[bytes, Facts]:
    """Return an image's bytes to store, and its facts.

    Raises:
        UserError: the reason why the image cannot be used.
    """
    if isinstance(image, UserError):
        raise image
    if isinstance(image, bytes):
        return image, examine(image)
    return image.tobytes(), examine_pixels(image)


def _stored_mask(mask: Mask | UserError, row: dict[str, Any], num_classes: int) -> StoredMask:
    """Return the mask of the image of `row`. Raises UserError with the reason if it cannot be used."""
    try:
        if isinstance(mask, UserError):
            raise mask
        check_mask(mask, row["width"], row["height"], num_classes)
    except UserError as error:
        raise UserError(f"mask: {error}") from None
    return StoredMask.of(mask)


def _boxes_in(row: dict[str, Any], entry: dict[str, Any]) -> list[Box]:
    """Return the boxes of the image of `row`, in its pixels. Raises UserError with the reason if one cannot be used."""
    given = [Box(**box) for box in entry["boxes"]]
    of = None if entry["boxes_width"] is None else (entry["boxes_width"], entry["boxes_height"])
    try:
        return in_image(given, of, row["width"], row["height"])
    except UserError as error:
        raise UserError(f"boxes: {error}") from None


def in_tasks(function: Callable[..., Any], shared: Sequence[Any], items: Sequence[Any], unit: str) -> list[Any]:
    """Return function(*shared, item) for each item, in order, computed in Ray tasks on one core each."""
    import ray  # not at the top: the stage's process checks its --spec without it

    remote = ray.remote(num_cpus=1)(function)
    shared_references = [ray.put(value) for value in shared]  # sent once: there may be a million file names
    return results_of([remote.remote(*shared_references, item) for item in items], unit)


def numbered(written: Sequence[Written]) -> pa.Table:
    """Return the `large` FACTS of all parts, with the number of each part's shard."""
    tables, number = [], 0
    for part in written:
        column = pa.array([number] * len(part.facts), pa.int32())
        tables.append(part.facts.set_column(FACTS.get_field_index("shard"), FACTS.field("shard"), column))
        number += part.shard is not None
    return pa.concat_tables([FACTS.empty_table(), *tables]).cast(large(FACTS))
