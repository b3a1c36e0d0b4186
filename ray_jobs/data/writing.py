"""Write a dataset: its shards, its index and its card (`ray_jobs.data.shards`).

Every row group of a shard is one uncompressed page of about 16 MB with a checksum, so that each image's bytes are at a
known position of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_jobs.data.boxes import BOXES, Box, of_rows
from ray_jobs.data.columns import INDEX, SHARD, Sample
from ray_jobs.data.shards import SPLITS, DatasetInfo, ImageSize, Shard
from vit_model.errors import UserError

ROW_GROUP_BYTES = 16 * 2**20  # bytes of images: a good size for a ranged read from S3
_ROW_GROUP = 2**20  # rows of an index: pyarrow's default
_ONE_PAGE = 2**30  # bytes or rows per page: more than a row group has, so that it is one page


def content_digest(
    name: str,
    samples: Iterable[tuple[str, int, str, list[int] | None]],
    class_names: Sequence[str],
    short_side: int | None = None,
    mask_classes: Sequence[str] = (),
    masks: Mapping[str, str] | None = None,
    decoding: Mapping[str, int] | None = None,
    boxes: Mapping[str, list[Box]] | None = None,
) -> str:
    """Return the identity of a dataset's name and content; it does not depend on the layout of the files.

    Args:
        samples: (sample_id, label, split, labels), in any order.
        masks: with `mask_classes`, sample_id -> the digest of the image's mask.
        decoding: sample_id -> `images.DECODING`, for images that earlier decoders read differently.
        boxes: sample_id -> the image's boxes; None: the source has no boxes.
    """
    digest = hashlib.sha256(json.dumps([name, *class_names]).encode())
    if short_side is not None:
        digest.update(json.dumps({"short_side": short_side}).encode())
    if mask_classes:
        digest.update(json.dumps({"mask_classes": list(mask_classes)}).encode())
    for sample_id, label, split, labels in sorted(samples, key=lambda sample: sample[0]):
        several: list[Any] = [] if labels is None else [labels]
        mask = [] if masks is None else [{"mask": masks[sample_id]}]
        mark = [{"decoding": decoding[sample_id]}] if decoding and sample_id in decoding else []
        objects = [] if boxes is None else [{"boxes": boxes[sample_id]}]
        digest.update(json.dumps([sample_id, int(label), split, *several, *mask, *mark, *objects]).encode())
    return digest.hexdigest()


def shuffle_key(sample_id: str) -> bytes:
    """Return the sort key of the rows of a split. Draws of labels and batches depend on this order."""
    return hashlib.sha256(f"shuffle/{sample_id}".encode()).digest()


def shard_file(number: int) -> str:
    """Return the name of a shard, relative to the dataset's folder."""
    return f"shards/{number:05d}.parquet"


def write_shard(path: Path, samples: Iterable[Sample], row_group_bytes: int = ROW_GROUP_BYTES) -> list[int]:
    """Write one shard, with one row group in memory at a time; return where each image's bytes begin in the file.

    The same samples give the same bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lengths: list[list[int]] = []
    # reused by all row groups, because the kernel would have to map fresh memory page by page for each
    memory = np.empty(0, np.uint8)
    with pq.ParquetWriter(
        path,
        SHARD,
        compression="NONE",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        data_page_size=_ONE_PAGE,
        max_rows_per_page=_ONE_PAGE,
    ) as writer:
        for group in _row_groups(samples, row_group_bytes):
            if (size := sum(len(sample.image) for sample in group)) > len(memory):
                memory = np.empty(size * 5 // 4, np.uint8)
            columns = [
                _binary(values, memory) if field.name == "image" else pa.array(values, field.type)
                for values, field in zip(zip(*group, strict=True), SHARD, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=SHARD), row_group_size=len(group))
            lengths.append([len(sample.image) for sample in group])
    return _offsets(path, lengths)


def _binary(values: Sequence[bytes], memory: NDArray[np.uint8]) -> pa.Array:
    """Return `pa.array(values)` in a fifth of the time: copy the values once, into `memory`, which is large enough."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    for value, (start, end) in zip(values, pairwise(offsets.tolist()), strict=True):
        memory[start:end] = np.frombuffer(value, np.uint8)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(memory[: offsets[-1]])]
    return pa.Array.from_buffers(pa.binary(), len(values), buffers)


def _offsets(path: Path, lengths: list[list[int]]) -> list[int]:
    """Return where each image begins. A page is a header, and for each image its length in four bytes and its bytes."""
    metadata = pq.read_metadata(path)
    offsets = []
    for group, lengths_in_group in enumerate(lengths):
        column = metadata.row_group(group).column(SHARD.get_field_index("image"))
        header = column.total_compressed_size - sum(lengths_in_group) - 4 * len(lengths_in_group)
        start = column.data_page_offset + header
        for length in lengths_in_group:
            offsets.append(start + 4)
            start += 4 + length
    return offsets


class Description(NamedTuple):
    """The description of a dataset, without its images; see `DatasetInfo`."""

    name: str
    class_names: Sequence[str]
    image: ImageSize | None
    notes: Sequence[str] = ()
    short_side: int | None = None
    mask_classes: Sequence[str] = ()
    multi_label: bool = False


def write_dataset(
    folder: Path,
    description: Description,
    shards: Sequence[Shard],
    index: pa.Table,
    masks: Mapping[str, str] | None = None,
    decoding: Mapping[str, int] | None = None,
    boxes: pa.Table | None = None,
) -> DatasetInfo:
    """Write dataset.json and index.parquet beside the shards. `index` is a table of `large` INDEX.

    Args:
        masks: with `mask_classes`, as in `content_digest`; None: the images have no masks.
        decoding: as in `content_digest`.
        boxes: BOXES of the images; None: the source has none.

    Raises:
        UserError: two images have the same sample_id.
    """
    name, class_names, image, notes, short_side, mask_classes, multi_label = description
    index = _shuffled(index).select(INDEX.names)
    ids = index["sample_id"]
    if len(pc.unique(ids)) < len(ids):
        raise UserError(f"{name}: two images have the same key and the same bytes")
    of_images, schema = None, INDEX
    if boxes is not None:
        index, schema = _with_boxes(index, boxes), INDEX.append(BOXES.field("boxes"))
        of_images = dict(zip(ids.to_pylist(), of_rows(index), strict=True))
    write_rows(folder / "index.parquet", index, schema)
    splits = index["split"].to_pylist()
    info = DatasetInfo(
        name=name,
        class_names=tuple(class_names),
        image=image,
        splits={split: splits.count(split) for split in SPLITS},
        shards=tuple(shards),
        content_digest=content_digest(
            name,
            zip(ids.to_pylist(), index["label"].to_pylist(), splits, index["labels"].to_pylist(), strict=True),
            class_names,
            short_side,
            mask_classes,
            masks,
            decoding,
            of_images,
        ),
        notes=tuple(notes),
        short_side=short_side,
        mask_classes=tuple(mask_classes),
        multi_label=multi_label,
        has_boxes=boxes is not None,
    )
    # without masks and boxes and with one label per image, dataset.json is as in versions before these fields
    without = {name for name in ("mask_classes", "multi_label", "has_boxes") if not getattr(info, name)}
    text = json.dumps(info.model_dump(mode="json", exclude=without), indent=1, ensure_ascii=False)
    (folder / "dataset.json").write_text(text + "\n", encoding="utf-8")
    return info


def _shuffled(index: pa.Table) -> pa.Table:
    """Return the index with each split in the order of `shuffle_key`."""
    shuffled = pa.array([shuffle_key(sample_id) for sample_id in index["sample_id"].to_pylist()], pa.binary())
    table = pa.table({"split": index["split"], "key": shuffled})
    return index.take(pc.sort_indices(table, sort_keys=[("split", "ascending"), ("key", "ascending")]))


def _with_boxes(index: pa.Table, boxes: pa.Table) -> pa.Table:
    """Return the index with the column `boxes`, from BOXES in any order."""
    places = pc.index_in(index["sample_id"], boxes["sample_id"].cast(index["sample_id"].type))
    return index.append_column(BOXES.field("boxes"), boxes["boxes"].take(places))


def write_rows(path: Path, table: pa.Table, schema: pa.Schema) -> None:
    """Write a table of `large` schema as Parquet of `schema`; the same rows give the same bytes."""
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, max(len(table), 1), _ROW_GROUP):
            # not a slice, whose offsets may be too large for the schema's strings
            rows = table.take(np.arange(start, min(start + _ROW_GROUP, len(table))))
            writer.write_table(rows.cast(schema))


def _row_groups(samples: Iterable[Sample], row_group_bytes: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    size = 0
    for sample in samples:
        group.append(sample)
        size += len(sample.image)
        if size >= row_group_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group
