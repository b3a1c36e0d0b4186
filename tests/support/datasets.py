"""Datasets for tests, written as ingest writes them, from samples that the test makes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from ray_jobs.data.images import Hashes, examine_pixels
from ray_jobs.data.shards import (
    INDEX,
    ROW_GROUP_BYTES,
    DatasetInfo,
    ImageSize,
    Sample,
    Shard,
    shard_file,
    shuffle_key,
    write_dataset,
    write_shard,
)


def put(
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
    """A dataset of these samples in shards of so many; each split begins a new one, so that a test can remove it."""
    rows, shards = [], []
    parts = [
        (split, samples[start : start + per_shard])
        for split, samples in splits.items()
        for start in range(0, len(samples), per_shard)
    ]
    for split, part in parts:
        file = shard_file(len(shards))
        offsets = write_shard(folder / file, part, row_group_bytes)
        for sample, offset in zip(part, offsets, strict=True):
            known = {field: getattr(sample, field) for field in Sample._fields if field != "image"}
            place = {"shard": len(shards), "offset": offset, "length": len(sample.image)}
            checksum = xxhash.xxh3_64_intdigest(sample.image)
            hashes = dict.fromkeys(Hashes._fields, 0) | {"phash": checksum}
            found = {"content_id": f"{checksum:032x}", "checksum": checksum}
            rows.append(known | place | hashes | found | {"split": split})
        shards.append(Shard(file=file, rows=len(part), bytes=(folder / file).stat().st_size))
    folder.mkdir(parents=True, exist_ok=True)
    index = pa.Table.from_pylist(rows, schema=INDEX)
    return write_dataset(folder, name, class_names, image, shards, index, notes)


def identities(count: int) -> list[str]:
    """So many sample ids in the order in which a dataset numbers them."""
    return sorted((f"id{number:03d}" for number in range(count)), key=shuffle_key)


def raw(identity: str, pixels: np.ndarray, label: int) -> Sample:
    """A sample of pixels, uint8 [h, w, c]; its key is its identity."""
    facts = examine_pixels(pixels)
    return Sample(
        identity, identity, pixels.tobytes(), "raw", facts.width, facts.height, facts.channels, label
    )
