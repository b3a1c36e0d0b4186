"""Datasets from samples in memory, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import xxhash

from ray_jobs.data.columns import INDEX, Sample
from ray_jobs.data.images import Hashes
from ray_jobs.data.shards import DatasetInfo, ImageSize, Shard
from ray_jobs.data.writing import ROW_GROUP_BYTES, Description, shard_file, write_dataset, write_shard


def write_samples(
    folder: Path,
    name: str,
    class_names: Sequence[str],
    image: ImageSize | None,
    splits: Mapping[str, Sequence[Sample]],
    *,
    per_shard: int = 2**30,
    row_group_bytes: int = ROW_GROUP_BYTES,
    notes: Sequence[str] = (),
) -> DatasetInfo:
    """Write a dataset of these samples, as ingest would; each split starts a new shard.

    An image's checksum takes the place of its content_id and its perceptual hash, so different images are not copies.
    """
    rows: list[dict[str, object]] = []
    shards: list[Shard] = []
    parts = [
        (split, samples[start : start + per_shard])
        for split, samples in splits.items()
        for start in range(0, len(samples), per_shard)
    ]
    for split, part in parts:
        file = shard_file(len(shards))
        offsets = write_shard(folder / file, part, row_group_bytes)
        for sample, offset in zip(part, offsets, strict=True):
            fields = {field: getattr(sample, field) for field in Sample._fields if field != "image"}
            place = {"shard": len(shards), "offset": offset, "length": len(sample.image)}
            checksum = xxhash.xxh3_64_intdigest(sample.image)
            hashes = dict.fromkeys(Hashes._fields, 0) | {"phash": checksum}
            digests = {"content_id": f"{checksum:032x}", "checksum": checksum}
            rows.append(fields | place | hashes | digests | {"split": split})
        shards.append(Shard(file=file, rows=len(part), bytes=(folder / file).stat().st_size))
    folder.mkdir(parents=True, exist_ok=True)
    index = pa.Table.from_pylist(rows, schema=INDEX)
    return write_dataset(folder, Description(name, class_names, image, notes), shards, index)
