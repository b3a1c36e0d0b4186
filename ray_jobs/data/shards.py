"""Dataset artifacts: Parquet shards that any Parquet reader opens, and `index.parquet`, which lists the rows to use.

In one folder:

    dataset.json              the dataset's name, classes, splits and shards
    index.parquet             one row per image: identity, label, split, position of its bytes
    shards/00000.parquet ...  the images, ordered by a hash of their names
    masks/00000.parquet ...   for some sources, the masks of each shard's images (`ray_jobs.data.masks`)

Shards do not contain splits: each image is read, decoded and written once, but splits depend on copies and groups, so
they are decided after all images were read. Rows of a split are ordered by a hash of their sample_id, which does not
depend on the shards.

An image's bytes are at [offset, offset + length) of the shard file; `index.parquet` has these positions and the bytes'
xxh3_64. `ray_jobs.data.writing` writes these files.

    dataset = open_dataset(folder)
    dataset.labels("train"), dataset.images("train", preprocessing, indices=[3, 5])
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property
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
from ray_jobs.data.boxes import Box, of_rows
from ray_jobs.data.cache import Cache
from ray_jobs.data.columns import INDEX, large
from ray_jobs.data.decode_pool import DecodePool, Decoder
from ray_jobs.data.masks import Mask, decode_mask, mask_file, read_masks
from ray_jobs.data.reading import LocalShards, Reader, RemoteShards, Shards
from vit_model.contract import Preprocessing
from vit_model.errors import UserError

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
CACHE_BYTES = 64 * 2**30
_AHEAD = 1024  # images whose bytes are fetched from S3 while others are decoded

# columns that every index has; indexes of ingest version 4 or earlier do not have hashes of views
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
    """Empty: the images have no labels."""
    image: ImageSize | None
    """The size of all images if they are stored as raw pixels; None: image files of any size."""
    splits: dict[Split, NonNegativeInt]
    shards: tuple[Shard, ...]
    """The column `shard` of `index.parquet` is a position in this tuple."""
    content_digest: str
    notes: tuple[str, ...] = ()
    """How the images or their splits came about, if a reader of results must know it."""
    short_side: PositiveInt | None = None
    """In pixels; larger images were downsized to it and encoded again. None: all images are the original bytes."""
    mask_classes: tuple[str, ...] = ()
    """The names of the values in the images' masks (`ray_jobs.data.masks`); empty, and not written: no masks."""
    multi_label: bool = False
    """Whether an image can have several labels, or none: the index's column `labels`. Not written if False."""

    has_boxes: bool = False
    """Whether the images have boxes of objects: the index's column `boxes`. Not written if False."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels in the index. Without classes, every image has label 0, whose name is empty."""
        return self.class_names or ("",)

    @model_validator(mode="after")
    def _all_splits(self) -> Self:
        if set(self.splits) != set(SPLITS):
            raise ValueError(f"splits: expected {', '.join(SPLITS)}, not {', '.join(self.splits)}")
        return self


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
        UserError: see `open_dataset`.
        StoreError: the store cannot be read, or files are damaged.
    """
    is_remote = store.uri.startswith("s3://")
    not_needed = ("shards/", "facts/") if is_remote else ("facts/",)
    folder = local_files(store, manifest, [file for file in manifest.files if not file.path.startswith(not_needed)])
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
    """A readable dataset. Every method raises UserError with the file's name if a file is missing or damaged."""

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
        table = table.cast(large(table.schema))
        return {split: table.filter(pc.equal(table["split"], split)) for split in SPLITS}

    def index(self, split: Split) -> pa.Table:
        """Return the rows of a split (`large` INDEX) in the order of labels and images, by a hash of sample_id."""
        return self._index[split]

    def require(self, *splits: Split) -> None:
        """Raise UserError if one of the splits has no images."""
        for split in splits:
            if not self.info.splits[split]:
                raise UserError(f"dataset {self.info.name} has no images in its {split} split, which this stage needs")

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Return the labels [n] of a split, without reading its images.

        Raises:
            UserError: images have several labels; `multi_hot` returns those.
        """
        if self.info.multi_label:
            raise UserError(
                f"dataset {self.info.name} has several labels per image (multi_label), but this stage needs one"
            )
        return np.asarray(self.index(split)["label"].to_numpy(), np.int64)

    def sample_ids(self, split: Split) -> list[str]:
        """Return the ids of a split's samples, in the order of its labels and images."""
        return list(self.index(split)["sample_id"].to_pylist())

    def images(self, split: Split, preprocessing: Preprocessing, indices: ArrayLike | None = None) -> NDArray[np.uint8]:
        """Return the images [n, resolution, resolution, channels] of a split, or of its rows `indices` in their order.

        Raw images of the model's size are copied; all others are decoded on all cores, as `load_image` does.

        Raises:
            UserError: the images do not fit into the free memory.
        """
        rows = self.index(split)
        return self.load(rows if indices is None else rows.take(np.asarray(indices, np.int64)), preprocessing)

    def load(self, rows: pa.Table, preprocessing: Preprocessing) -> NDArray[np.uint8]:
        """Return the images of these rows of the index, like `images`."""
        shape = (len(rows), preprocessing.resolution, preprocessing.resolution, preprocessing.channels)
        _check_memory(shape)
        output = np.empty(shape, np.uint8)
        is_raw, reader = self.is_raw(preprocessing), self.reader(rows)
        decoder = Decoder(reader, preprocessing)
        with closing(DecodePool(decoder, os.cpu_count() or 1, is_raw=is_raw)) as pool:
            if is_raw:
                order = np.arange(len(rows))
                reader.fetch(order)
                pool.submit(order, order, output)()
                return output
            order = np.lexsort((rows["offset"].to_numpy(), rows["shard"].to_numpy()))
            pending: deque[Callable[[], NDArray[np.int64]]] = deque()
            for start in range(0, len(rows), _AHEAD):
                part = order[start : start + _AHEAD]
                reader.fetch(part)
                pending.append(pool.submit(part, part, output, part))
                if len(pending) == 2:
                    pending.popleft()()
            for wait in pending:
                wait()
        return output

    def batches(
        self, rows: pa.Table, preprocessing: Preprocessing, size: int, threads: int
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield the images of these rows, like `load`, `size` at a time; the next are decoded in the meantime."""
        is_raw, reader, side = self.is_raw(preprocessing), self.reader(rows), preprocessing.resolution
        numbers = np.array_split(np.arange(len(rows)), range(size, len(rows), size))
        decoder = Decoder(reader, preprocessing)
        with closing(DecodePool(decoder, threads, is_raw=is_raw)) as pool:
            pending: deque[tuple[NDArray[np.uint8], Callable[[], object]]] = deque()
            for part in [*numbers, None, None]:
                if part is not None:
                    reader.fetch(part)
                    images = np.empty((len(part), side, side, preprocessing.channels), np.uint8)
                    pending.append((images, pool.submit(part, part, images)))
                if pending and (part is None or len(pending) > 2):
                    images, wait = pending.popleft()
                    wait()
                    yield images

    def masks(self, split: Split, indices: ArrayLike) -> Iterator[Mask]:
        """Yield the mask [h, w] of each of these rows of a split, in their order, at the image's original size.

        Raises:
            UserError: the dataset has no masks.
        """
        yield from map(decode_mask, self.masks_of(self.index(split).take(np.asarray(indices, np.int64))))

    def masks_of(self, rows: pa.Table) -> list[bytes]:
        """Return the masks of these rows of the index as PNGs. Raises UserError if the dataset has none."""
        if not self.info.mask_classes:
            raise UserError(
                f"dataset {self.info.name} has no masks; add `masks: true` to its source (shapes, or vtab with task"
                " oxford_iiit_pet), or `mask_classes` (folder)"
            )
        shards = sorted(pc.unique(rows["shard"]).to_pylist())
        paths = [self.folder / mask_file(self.info.shards[shard].file) for shard in shards]
        return read_masks(paths, rows["sample_id"].combine_chunks())

    def boxes(self, split: Split) -> list[list[Box]]:
        """Return the boxes of each image of a split, in the order of its images.

        Raises:
            UserError: the dataset has no boxes.
        """
        if not self.info.has_boxes:
            raise UserError(
                f"dataset {self.info.name} has no boxes; give its source `boxes`, the form of its annotations"
            )
        return of_rows(self.index(split))

    def is_raw(self, preprocessing: Preprocessing) -> bool:
        """Return whether images are stored as raw pixels of exactly the size that the model takes."""
        side = preprocessing.resolution
        return self.info.image == ImageSize.model_construct(height=side, width=side, channels=preprocessing.channels)

    def reader(self, rows: pa.Table) -> Reader:
        """Return a reader of the bytes of these rows of the index."""
        return Reader(self._shards, rows)


class Images(NamedTuple):
    """Labelled images that are read on demand: some rows of a dataset's index."""

    dataset: Dataset
    rows: pa.Table

    @property
    def labels(self) -> NDArray[Any]:
        """The labels, int64 [n]; with several labels per image, whether it has each class, bool [n, classes]."""
        if self.dataset.info.multi_label:
            return multi_hot(self.rows["labels"].combine_chunks(), len(self.dataset.info.class_names))
        return np.asarray(self.rows["label"].to_numpy(), np.int64)

    def take(self, indices: NDArray[np.int64]) -> Images:
        return Images(self.dataset, self.rows.take(indices))


def multi_hot(labels: pa.ListArray, classes: int) -> NDArray[np.bool_]:
    """Return whether each image has each class, [n, classes], from the classes of each image (null: none)."""
    sizes = labels.value_lengths().fill_null(0).to_numpy()
    table = np.zeros((len(sizes), classes), bool)
    table[np.repeat(np.arange(len(sizes)), sizes), labels.flatten().to_numpy()] = True
    return table


def _check_memory(shape: tuple[int, ...]) -> None:
    needed, free = int(np.prod(shape, dtype=np.int64)), psutil.virtual_memory().available
    if needed > 0.8 * free:
        raise UserError(
            f"images {list(shape)} need {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB of memory are free: "
            "use a lower resolution or fewer images"
        )
