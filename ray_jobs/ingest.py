"""Ingest: a source becomes validated Parquet shards with fixed splits, and a list of what could not be read.

In: a source (`pipelines.spec.Source`). Out: a dataset artifact, see `ray_jobs.shards`, with `quarantine.parquet`.
The source is listed first, down to the byte range of every image in every archive; then tasks read those ranges, one
shard a task, in an order that is a hash of the images' names. Every image is read and decoded once here, so that a
failure later means a fault of storage. What is written depends on the source alone, never on how many tasks write it.

    python -m ray_jobs.ingest --spec ATTEMPT.json
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from pipelines.spec import Source
from pipelines.store import FileEntry
from ray_jobs.images import Facts, examine, examine_pixels, sample_id
from ray_jobs.progress import Progress
from ray_jobs.shards import INDEX, SPLITS, Sample, Shard, shard_file, write_dataset, write_shard
from ray_jobs.sources import catalog
from ray_jobs.sources.entries import Bad, Files
from ray_jobs.splits import assign_splits
from ray_jobs.stage import Context, Result, run_stage

SHARD_BYTES = 256 * 2**20
SHARD_IMAGES = 8192  # small images: a shard is some seconds of rendering
FACTS = pa.schema(
    [
        *(field.with_nullable(True) for field in INDEX),
        pa.field("reason", pa.string()),  # why the image can't be used; its facts are null then
        pa.field("file", pa.string(), nullable=False),
        pa.field("place", pa.int64(), nullable=False),  # its offset in the file of the source
    ]
)


class Written(NamedTuple):
    """What a task made of its part: the shard (None: no image could be used), its file, and FACTS of every entry."""

    shard: Shard | None
    files: tuple[FileEntry, ...]
    facts: pa.Table


def main(context: Context) -> Result:
    """List the source, write shards, decide splits, write the index and the quarantine."""
    config = context.config
    context.check_source("before it was read")
    files = {name: str(path) for name, path in config.source.files()}
    listing = catalog.listing(config.source, files)
    parts = plan_parts(listing.entries)
    arguments = [(context, config.source, files, number, part) for number, part in enumerate(parts)]
    written = _in_tasks(_write_part, arguments, "shard")
    context.check_source("while it was read")

    facts = _numbered(written)
    bad = [*listing.bad, *_bad(facts)]
    _check_bad(bad, len(facts) + len(listing.bad), config.max_bad_fraction)
    good = facts.filter(pc.is_null(facts["reason"]))
    index = good.set_column(
        good.schema.get_field_index("split"), "split", pa.array(assign_splits(good, _salt(config.source)))
    )
    _check_trained(index, listing.class_names)
    with context.staging() as staging:
        info = write_dataset(
            staging.path,
            getattr(config.source, "name", config.source.kind),
            listing.class_names,
            listing.image,
            [part.shard for part in written if part.shard],
            index,
            listing.notes,
        )
        _write_quarantine(staging.path / "quarantine.parquet", bad)
    metrics: dict[str, float | int | str] = {
        "images": len(index),
        "classes": len(listing.class_names),
        "quarantined": len(bad),
        **{str(split): info.splits[split] for split in SPLITS},
    }
    return Result(
        info.content_digest, staging.files + tuple(file for part in written for file in part.files), metrics
    )


def _salt(source: Source) -> str:
    return getattr(source, "salt", "vitflow")


# ------------------------------------------------------------------------------------------------- planning


def plan_parts(entries: pa.Table) -> list[pa.Table]:
    """What each shard holds: entries by a hash of their keys, so that every shard has some of everything.

    A power of two of parts, each for one beginning of the hash: entries that arrive later change no other's part
    until there are twice as many. Entries of one unit, which is read as a whole, stay together.
    """
    size = max(pc.sum(entries["length"]).as_py() or 0, 1)
    number = max(size / SHARD_BYTES, len(entries) / SHARD_IMAGES, 1)
    bits = math.ceil(math.log2(number))
    units = pc.coalesce(entries["unit"], entries["key"])
    hashes = np.array([_order(unit) for unit in units.to_pylist()], np.uint64)
    within = np.array([_order(key) for key in entries["key"].to_pylist()], np.uint64)
    order = np.lexsort((within, hashes))
    parts = (hashes[order] >> np.uint64(63 - bits)) >> np.uint64(1)
    bounds = np.flatnonzero(np.diff(parts)) + 1
    ordered = entries.take(order)
    starts = [0, *bounds.tolist(), len(entries)]
    return [ordered.slice(start, end - start) for start, end in pairwise(starts) if end > start]


def _order(key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"shuffle/{key}".encode()).digest()[:8])


# ------------------------------------------------------------------------------------------------- tasks


def _write_part(context: Context, source: Source, files: Files, number: int, entries: pa.Table) -> Written:
    """Read, check and write one shard (in a Ray task)."""
    facts: list[dict[str, Any]] = []

    def samples() -> Iterator[Sample]:
        for entry, image in zip(entries.to_pylist(), catalog.images(source, files, entries), strict=True):
            row = {name: entry[name] for name in ("key", "label", "labels", "split", "group", "file")}
            facts.append(row | {"place": entry["offset"]})
            try:
                data, found = _examined(image)
            except ValueError as error:
                facts[-1]["reason"] = str(error)
                continue
            identity = sample_id(data, entry["key"])
            facts[-1] |= found._asdict() | {"sample_id": identity, "length": len(data)}
            facts[-1]["checksum"] = xxhash.xxh3_64_intdigest(data)
            yield Sample(
                identity,
                entry["key"],
                data,
                found.format,
                found.width,
                found.height,
                found.channels,
                entry["label"],
            )

    file = shard_file(number)
    with context.staging() as staging:
        offsets = write_shard(staging.path / file, samples())
        if not offsets:
            (staging.path / file).unlink()
        size = (staging.path / file).stat().st_size if offsets else 0
    good = (row for row in facts if "reason" not in row)
    for row, offset in zip(good, offsets, strict=True):
        row["offset"] = offset
    shard = Shard(file=file, rows=len(offsets), bytes=size) if offsets else None
    return Written(shard, staging.files, pa.Table.from_pylist(facts, schema=FACTS))


def _examined(image: bytes | NDArray[np.uint8] | ValueError) -> tuple[bytes, Facts]:
    """An image's bytes as they are stored, and its facts. Raises ValueError with the reason why it can't be used."""
    if isinstance(image, ValueError):
        raise image
    if isinstance(image, bytes):
        return image, examine(image)
    return image.tobytes(), examine_pixels(image)


def _in_tasks(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], noun: str) -> list[Any]:
    """function(*arguments) for each, in Ray tasks of one core, results in order."""
    import ray

    remote = ray.remote(num_cpus=1)(function)
    references = [remote.remote(*each) for each in arguments]
    progress = Progress(len(references), noun)
    pending = references
    while pending:
        _, pending = ray.wait(pending, timeout=1.0)
        done = len(references) - len(pending)
        if done and progress.due(done):
            progress.show(done)
    return list(ray.get(references))


# ------------------------------------------------------------------------------------------------- all together


def _numbered(written: Sequence[Written]) -> pa.Table:
    """The FACTS of all parts, with the number of each one's shard among those that were written."""
    tables, number = [], 0
    for part in written:
        column = pa.array([number] * len(part.facts), pa.int32())
        tables.append(part.facts.set_column(FACTS.get_field_index("shard"), FACTS.field("shard"), column))
        number += part.shard is not None
    return pa.concat_tables(tables) if tables else FACTS.empty_table()


def _bad(facts: pa.Table) -> list[Bad]:
    rows = facts.filter(pc.is_valid(facts["reason"])).select(["key", "reason", "file", "place"])
    return [Bad(*row.values()) for row in rows.to_pylist()]


def _check_bad(bad: Sequence[Bad], total: int, allowed: float) -> None:
    if len(bad) > allowed * total:
        listed = "".join(f"\n  {one.key}: {one.reason}" for one in sorted(bad)[:20])
        more = f"\n  and {len(bad) - 20} more" if len(bad) > 20 else ""
        raise ValueError(
            f"{len(bad)} of {total} images can't be used, more than max_bad_fraction {allowed}: "
            f"remove them or allow more{listed}{more}"
        )


def _check_trained(index: pa.Table, class_names: Sequence[str]) -> None:
    train = index.filter(pc.equal(index["split"], "train"))
    counts = np.bincount(train["label"].to_numpy(), minlength=len(class_names))
    if lost := [name for name, count in zip(class_names, counts, strict=True) if not count]:
        raise ValueError(
            f"class {lost[0]!r} has no image in train that can be used: add some, or remove the class"
        )


def _write_quarantine(path: Path, bad: Sequence[Bad]) -> None:
    rows = sorted(bad)
    schema = pa.schema(
        [("key", pa.string()), ("reason", pa.string()), ("file", pa.string()), ("offset", pa.int64())]
    )
    pq.write_table(pa.Table.from_pylist([one._asdict() for one in rows], schema=schema), path)
    for reason, count in Counter(one.reason for one in rows).most_common():
        print(f"quarantined {count}: {reason}", flush=True)


if __name__ == "__main__":
    run_stage("ingest")
