"""Dataset artifacts: Parquet shards that any Parquet reader opens, and `index.parquet`, which lists the rows to use.

In: samples. Out, in one folder:

    dataset.json              the dataset's name, classes, splits and shards
    index.parquet             one row per image: identity, label, split, position of its bytes
    shards/00000.parquet ...  the images, ordered by a hash of their names
    masks/00000.parquet ...   of some sources, the masks of each shard's images (`ray_jobs.data.masks`)

Shards do not contain splits. Splits depend on copies and groups and can only be decided after all images were read,
while each image is read, decoded and written once. Rows of a split are ordered by a hash of their sample_id, which does
not depend on the shards.

Every row group is one uncompressed page of about 16 MB with a checksum. So an image's bytes are also at
[offset, offset + length) of the shard file; `index.parquet` has these positions and the bytes' xxh3_64.

    dataset = open_dataset(folder)
    dataset.labels("train"), dataset.images("train", preprocessing, indices=[3, 5])
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from pipelines.store import Manifest, Store, local_files
from ray_jobs.data.cache import Cache
from ray_jobs.data.columns import INDEX, SHARD, Sample
from ray_jobs.data.decode import square
from ray_jobs.data.masks import Mask, decode_mask, mask_file, read_masks
from ray_jobs.data.reading import LocalShards, Reader, RemoteShards, Shards
from vit_model.contract import Preprocessing
from vit_model.errors import UserError

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
ROW_GROUP_BYTES = 16 * 2**20  # of images: a good size for one ranged read from S3
_ONE_PAGE = 2**30  # bytes or rows of a page: more than a row group has, so that it is one page
CACHE_BYTES = 64 * 2**30
_AHEAD = 1024  # images whose bytes are fetched from S3 while others are decoded
_DECODE_CHUNK = (
    16  # images per task of the thread pool: with fewer, the overhead of a task outweighs its parallelism
)

# columns that every index has; an index written by ingest version 4 or earlier does not have hashes of views
_READ = [name for name in INDEX.names if not name.startswith("phash_")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ImageSize(_Frozen):
    """The common size of all images, if they are stored as raw pixels."""

    height: PositiveInt
    width: PositiveInt
    channels: Literal[1, 3]


class Shard(_Frozen):
    """One Parquet file, relative to the dataset's folder."""

    file: Annotated[str, Field(pattern=r"^shards/[0-9]+\.parquet$")]
    rows: PositiveInt
    bytes: PositiveInt


class DatasetInfo(_Frozen):
    """The content of dataset.json."""

    format_version: Literal[2] = 2
    name: str
    class_names: tuple[str, ...]
    image: ImageSize | None
    """The size of all images if they are stored as raw pixels; None: image files of any size."""
    splits: dict[Split, NonNegativeInt]
    shards: tuple[Shard, ...]
    """The column `shard` of `index.parquet` is a position in this tuple."""
    content_digest: str
    notes: tuple[str, ...] = ()
    """How the images or their splits came about, as far as a reader of results must know it."""
    short_side: PositiveInt | None = None
    """Pixels; larger images were shrunk to it and encoded again. None: all images are the authors' bytes."""
    mask_classes: tuple[str, ...] = ()
    """The names of the values in the images' masks (`ray_jobs.data.masks`); empty, and not written: no masks."""

    @model_validator(mode="after")
    def _all_splits(self) -> Self:
        if set(self.splits) != set(SPLITS):
            raise ValueError(f"splits: expected {', '.join(SPLITS)}, not {', '.join(self.splits)}")
        return self


def content_digest(
    name: str,
    samples: Iterable[tuple[str, int, str, list[int] | None]],
    class_names: Sequence[str],
    short_side: int | None = None,
    mask_classes: Sequence[str] = (),
    masks: Mapping[str, str] | None = None,
    decoding: Mapping[str, int] | None = None,
) -> str:
    """Return the identity of a dataset's name and content, which does not depend on how its files are laid out.

    Args:
        samples: (sample_id, label, split, labels), in any order.
        masks: with `mask_classes`, sample_id -> the digest of the image's mask.
        decoding: sample_id -> `images.DECODING`, of images of which an earlier decoder read other pixels.
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
        digest.update(json.dumps([sample_id, int(label), split, *several, *mask, *mark]).encode())
    return digest.hexdigest()


def shuffle_key(sample_id: str) -> bytes:
    """Return the key by which the rows of a split are ordered. Draws of labels and batches depend on this order."""
    return hashlib.sha256(f"shuffle/{sample_id}".encode()).digest()


def shard_file(number: int) -> str:
    """Return the name of a shard, relative to the dataset's folder."""
    return f"shards/{number:05d}.parquet"


def write_shard(path: Path, samples: Iterable[Sample], row_group_bytes: int = ROW_GROUP_BYTES) -> list[int]:
    """Write one shard, with one row group in memory at a time; return where each image's bytes begin in the file.

    The same samples give the same bytes.

    Raises:
        ValueError: a raw image has a number of bytes that does not match its size.
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
    """Return `pa.array(values)` in a fifth of its time: copy them once, into `memory`, which is large enough."""
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


def write_dataset(
    folder: Path,
    name: str,
    class_names: Sequence[str],
    image: ImageSize | None,
    shards: Sequence[Shard],
    index: pa.Table,
    notes: Sequence[str] = (),
    short_side: int | None = None,
    mask_classes: Sequence[str] = (),
    masks: Mapping[str, str] | None = None,
    decoding: Mapping[str, int] | None = None,
) -> DatasetInfo:
    """Write dataset.json and index.parquet beside the shards. `index` is a table of INDEX.

    Args:
        masks: with `mask_classes`, as in `content_digest`; None: the images have no masks.
        decoding: as in `content_digest`.

    Raises:
        UserError: two images have the same sample_id.
    """
    shuffled = pa.array([shuffle_key(sample_id) for sample_id in index["sample_id"].to_pylist()], pa.binary())
    order = pc.sort_indices(
        pa.table({"split": index["split"], "key": shuffled}),
        sort_keys=[("split", "ascending"), ("key", "ascending")],
    )
    index = index.take(order).select(INDEX.names).cast(INDEX)
    ids = index["sample_id"]
    if len(pc.unique(ids)) < len(ids):
        raise UserError(f"{name}: two images have the same key and the same bytes")
    pq.write_table(index, folder / "index.parquet", compression="zstd")
    splits = index["split"].to_pylist()
    info = DatasetInfo(
        name=name,
        class_names=tuple(class_names),
        image=image,
        splits={split: splits.count(split) for split in SPLITS},
        shards=tuple(shards),
        content_digest=content_digest(
            name,
            zip(
                ids.to_pylist(), index["label"].to_pylist(), splits, index["labels"].to_pylist(), strict=True
            ),
            class_names,
            short_side,
            mask_classes,
            masks,
            decoding,
        ),
        notes=tuple(notes),
        short_side=short_side,
        mask_classes=tuple(mask_classes),
    )
    without: set[str] = (
        set() if mask_classes else {"mask_classes"}
    )  # a dataset without masks is as before there were any
    text = json.dumps(info.model_dump(mode="json", exclude=without), indent=1, ensure_ascii=False)
    (folder / "dataset.json").write_text(text + "\n", encoding="utf-8")
    return info


def open_dataset(folder: Path) -> Dataset:
    """Open the dataset in `folder`.

    Raises:
        UserError: dataset.json is missing, damaged or of another version.
    """
    info = _read_info(folder)
    return Dataset(folder, info, LocalShards(folder, [shard.file for shard in info.shards]))


def open_artifact(store: Store, manifest: Manifest, cache_bytes: int = CACHE_BYTES) -> Dataset:
    """Open the dataset of an artifact.

    From S3, the index and the card are downloaded. Images are read on demand, by ranges, through a cache of
    `cache_bytes` that all processes on this machine share.

    Raises:
        UserError: as `open_dataset`.
        StoreError: the store cannot be read, or files are damaged.
    """
    is_remote = store.uri.startswith("s3://")
    not_needed = ("shards/", "facts/") if is_remote else ("facts/",)
    folder = local_files(
        store, manifest, [file for file in manifest.files if not file.path.startswith(not_needed)]
    )
    if not is_remote:
        return open_dataset(folder)
    info = _read_info(folder)
    names = [f"{manifest.folder}/{shard.file}" for shard in info.shards]
    return Dataset(folder, info, RemoteShards(store, names, Cache(cache_bytes)))


def _read_info(folder: Path) -> DatasetInfo:
    path = folder / "dataset.json"
    try:
        return DatasetInfo.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{folder} is not a dataset: it does not contain dataset.json") from error
    except ValidationError as error:
        raise UserError(f"{path} is damaged or of another version: {error}") from error


class Dataset:
    """A dataset for reading. Every method raises UserError with the file's name if a file is missing or damaged."""

    def __init__(self, folder: Path, info: DatasetInfo, shards: Shards) -> None:
        self.folder = folder
        self.info = info
        self._shards = shards

    def __reduce__(self) -> tuple[type[Dataset], tuple[Path, DatasetInfo, Shards]]:
        return Dataset, (self.folder, self.info, self._shards)  # without the cached index

    @cached_property
    def _index(self) -> dict[Split, pa.Table]:
        path = self.folder / "index.parquet"
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path} is missing or damaged: {error}") from error
        if missing := [name for name in _READ if name not in table.schema.names]:
            raise UserError(f"{path}: missing columns: {', '.join(missing)}")
        by_split = {split: table.filter(pc.equal(table["split"], split)) for split in SPLITS}
        for split, rows in by_split.items():
            if len(rows) != self.info.splits[split]:
                raise UserError(
                    f"{path} has {len(rows)} images in {split}, but dataset.json says {self.info.splits[split]}"
                )
        return by_split

    def index(self, split: Split) -> pa.Table:
        """Return the rows of a split (INDEX), ordered by a hash of their sample_id, as its labels and images are."""
        return self._index[split]

    def require(self, *splits: Split) -> None:
        """Raise UserError if one of the splits has no images."""
        for split in splits:
            if not self.info.splits[split]:
                raise UserError(
                    f"dataset {self.info.name} has no images in its {split} split, which this stage needs"
                )

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Return the labels [n] of a split, without reading its images."""
        return np.asarray(self.index(split)["label"].to_numpy(), np.int64)

    def sample_ids(self, split: Split) -> list[str]:
        """Return the identities of a split's samples, in the order of its labels and images."""
        return list(self.index(split)["sample_id"].to_pylist())

    def images(
        self, split: Split, preprocessing: Preprocessing, indices: ArrayLike | None = None
    ) -> NDArray[np.uint8]:
        """Return the images [n, resolution, resolution, channels] of a split, or of its rows `indices`, in their order.

        Raw images of the model's size are copied; all others are decoded as by `load_image`, on all cores.

        Raises:
            UserError: the images do not fit into the free memory.
            ValueError: an index is out of range.
        """
        num_rows = self.info.splits[split]
        rows = np.arange(num_rows) if indices is None else np.asarray(indices, np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= num_rows):
            raise ValueError(
                f"indices {rows.min()}..{rows.max()} are out of range: split {split!r} has {num_rows} images"
            )
        return self.load(self.index(split).take(rows), preprocessing)

    def load(self, rows: pa.Table, preprocessing: Preprocessing) -> NDArray[np.uint8]:
        """Return the images of rows of the index; otherwise as `images`."""
        shape = (len(rows), preprocessing.resolution, preprocessing.resolution, preprocessing.channels)
        _check_memory(shape)
        output = np.empty(shape, np.uint8)
        order = np.lexsort((rows["offset"].to_numpy(), rows["shard"].to_numpy()))
        with self.reader(rows) as reader:
            if self.is_raw(preprocessing):
                reader.fetch(order)
                if damaged := reader.gather(
                    np.arange(len(rows)), output.reshape(len(rows), math.prod(shape[1:]))
                ):
                    raise damaged[0][1]
                return output

            def decode(start: int) -> None:
                reader.fetch(order[start : start + _AHEAD])
                for slot in order[start : start + _DECODE_CHUNK].tolist():
                    output[slot] = square(reader.stored(slot), preprocessing)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(decode, range(0, len(rows), _DECODE_CHUNK)))
        return output

    def masks(self, split: Split, indices: ArrayLike) -> Iterator[Mask]:
        """Yield the mask [h, w] of each of these rows of a split, in their order, at the image's own size.

        Raises:
            UserError: the dataset has no masks.
        """
        if not self.info.mask_classes:
            raise UserError(
                f"dataset {self.info.name} has no masks; add `masks: true` to its source (shapes, or vtab with task"
                " oxford_iiit_pet)"
            )
        rows = self.index(split).take(np.asarray(indices, np.int64))
        shards = sorted(pc.unique(rows["shard"]).to_pylist())
        paths = [self.folder / mask_file(self.info.shards[shard].file) for shard in shards]
        yield from map(decode_mask, read_masks(paths, rows["sample_id"].combine_chunks()))

    def is_raw(self, preprocessing: Preprocessing) -> bool:
        """Return whether images are stored as raw pixels of exactly the size that the model takes."""
        side = preprocessing.resolution
        return self.info.image == ImageSize.model_construct(
            height=side, width=side, channels=preprocessing.channels
        )

    def reader(self, rows: pa.Table) -> Reader:
        """Return a reader of the bytes of these rows of the index."""
        return Reader(self._shards, rows)


class Images(NamedTuple):
    """Labelled images that are read on demand: some rows of a dataset's index."""

    dataset: Dataset
    rows: pa.Table

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.asarray(self.rows["label"].to_numpy(), np.int64)

    def take(self, indices: NDArray[np.int64]) -> Images:
        return Images(self.dataset, self.rows.take(indices))


def _row_groups(samples: Iterable[Sample], row_group_bytes: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    size = 0
    for sample in samples:
        expected = sample.height * sample.width * sample.channels
        if sample.format == "raw" and len(sample.image) != expected:
            raise ValueError(
                f"raw image {sample.key!r} has {len(sample.image)} bytes, but its size needs {expected}"
            )
        group.append(sample)
        size += len(sample.image)
        if size >= row_group_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _check_memory(shape: tuple[int, ...]) -> None:
    needed, free = int(np.prod(shape, dtype=np.int64)), psutil.virtual_memory().available
    if needed > 0.8 * free:
        raise UserError(
            f"images {list(shape)} need {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB of memory are free: "
            "use a lower resolution or fewer images"
        )
