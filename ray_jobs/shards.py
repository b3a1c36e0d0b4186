"""A dataset artifact: Parquet shards that any reader opens, and `dataset.json` that says what is in them.

In: samples. Out: `<folder>/dataset.json` and `<folder>/shards/<split>-00000.parquet`, one row an image. Every
row group is one uncompressed page of about 16 MB with a checksum, so that the bytes of image i also lie at
data_page_offset + header + sum(4 + length of the images before it) + 4 in the file; the page's header is what
is left of the column's total_compressed_size after all images (about 32 bytes).

    dataset = open_dataset(folder)
    dataset.labels("train"), dataset.images("train", preprocessing, indices=[3, 5])
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import psutil
import pyarrow as pa
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

from vit_model.config import Preprocessing
from vit_model.preprocessing import load_image

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
ROW_GROUP_BYTES = 16 * 2**20  # of images: a good size for one ranged read from S3
_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.binary(), nullable=False),
        pa.field("format", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("channels", pa.int32(), nullable=False),
        pa.field("label", pa.int32(), nullable=False),
    ]
)
_ONE_PAGE = 2**30  # pages are cut at this many bytes or rows: never, within a row group
_DECODE_CHUNK = 16  # images a task of the thread pool: less and handing them over costs more than it spreads


class Sample(NamedTuple):
    """One row: `image` is a file's bytes, or with format "raw" its pixels, uint8 in [h, w, c] order."""

    sample_id: str
    key: str
    image: bytes
    format: str
    width: int
    height: int
    channels: int
    label: int


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ImageSize(_Frozen):
    """The size that all images share when they are stored as raw pixels."""

    height: PositiveInt
    width: PositiveInt
    channels: Literal[1, 3]


class Shard(_Frozen):
    """One Parquet file, relative to the dataset's folder."""

    split: Split
    file: Annotated[str, Field(pattern=r"^shards/[A-Za-z0-9_-]+\.parquet$")]
    rows: PositiveInt


class DatasetInfo(_Frozen):
    """dataset.json."""

    format_version: Literal[1] = 1
    name: str
    class_names: tuple[str, ...]
    image: ImageSize | None
    splits: dict[Split, NonNegativeInt]
    shards: tuple[Shard, ...]
    """In the order of their rows within a split."""
    content_digest: str

    @model_validator(mode="after")
    def _rows_add_up(self) -> Self:
        for split in SPLITS:
            rows = sum(shard.rows for shard in self.shards if shard.split == split)
            if self.splits.get(split) != rows:
                raise ValueError(f"splits.{split} is {self.splits.get(split)}, its shards have {rows} rows")
        return self


def shuffle_key(sample_id: str) -> str:
    """Rows are written in this order: archives come class by class, a loader may shuffle a window only."""
    return hashlib.sha256(f"shuffle/{sample_id}".encode()).hexdigest()


def content_digest(name: str, samples: Iterable[tuple[str, int, str]], class_names: Sequence[str]) -> str:
    """Identity of what a dataset is called and holds, from (sample_id, label, split) in any order, not of its files."""
    digest = hashlib.sha256(json.dumps([name, *class_names]).encode())
    for sample_id, label, split in sorted(samples):
        digest.update(json.dumps([sample_id, int(label), split]).encode())
    return digest.hexdigest()


def shard_file(split: str, number: int) -> str:
    """Name of a shard, relative to the dataset's folder."""
    return f"shards/{split}-{number:05d}.parquet"


def write_shard(path: Path, samples: Iterable[Sample], row_group_bytes: int = ROW_GROUP_BYTES) -> int:
    """Write one shard, holding one row group in memory; returns its number of rows. Same samples, same bytes.

    Raises ValueError for a raw image whose bytes do not fit its size.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    num_rows = 0
    with pq.ParquetWriter(
        path,
        _SCHEMA,
        compression="NONE",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        data_page_size=_ONE_PAGE,
        max_rows_per_page=_ONE_PAGE,
    ) as writer:
        for group in _row_groups(samples, row_group_bytes):
            columns = [
                pa.array(values, field.type)
                for values, field in zip(zip(*group, strict=True), _SCHEMA, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA), row_group_size=len(group))
            num_rows += len(group)
    return num_rows


def write_info(folder: Path, info: DatasetInfo) -> None:
    """Write dataset.json."""
    text = json.dumps(info.model_dump(mode="json"), indent=1, ensure_ascii=False)
    (folder / "dataset.json").write_text(text + "\n", encoding="utf-8")


def open_dataset(folder: Path) -> Dataset:
    """The dataset in `folder`. Raises ValueError when there is none, or its dataset.json does not fit."""
    path = folder / "dataset.json"
    try:
        return Dataset(folder, DatasetInfo.model_validate_json(path.read_bytes()))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is no dataset: it has no dataset.json") from error
    except ValidationError as error:
        raise ValueError(f"{path} is damaged or of another version: {error}") from error


class Dataset(NamedTuple):
    """A dataset to read. Every method raises ValueError, with its name, for a missing or damaged file."""

    folder: Path
    info: DatasetInfo

    def require(self, *splits: Split) -> None:
        """Raise ValueError when one of the splits has no images."""
        for split in splits:
            if not self.info.splits[split]:
                raise ValueError(
                    f"dataset {self.info.name} has no images in its {split} split, which this needs"
                )

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Labels [n] of a split, without touching its images."""
        return np.concatenate(
            [np.zeros(0, np.int64), *(column.to_numpy() for column in self._column(split, "label"))]
        ).astype(np.int64)

    def sample_ids(self, split: Split) -> list[str]:
        """Identities of a split's samples, in the order of its labels and images."""
        return [identity for column in self._column(split, "sample_id") for identity in column.to_pylist()]

    def images(
        self, split: Split, preprocessing: Preprocessing, indices: ArrayLike | None = None
    ) -> NDArray[np.uint8]:
        """Images [n, resolution, resolution, channels] of a split, or of the rows `indices` in their order.

        Raw images of that very size are copied; all others go through `load_image` on all cores. Raises
        ValueError when the result would not fit into the memory that is free, or an index is out of range.
        """
        num_rows = self.info.splits[split]
        rows = np.arange(num_rows) if indices is None else np.asarray(indices, np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= num_rows):
            raise ValueError(
                f"indices {rows.min()}..{rows.max()} of split {split!r}, which has {num_rows} images"
            )
        side = preprocessing.resolution
        shape = (len(rows), side, side, preprocessing.channels)
        _check_memory(shape)
        output = np.empty(shape, np.uint8)
        as_stored = self.info.image == ImageSize.model_construct(
            height=side, width=side, channels=preprocessing.channels
        )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for slots, table, places in self._tables(split, rows):
                if as_stored:
                    output[slots] = _raw_pixels(table["image"].chunk(0), shape[1:])[places]
                else:
                    _decode_into(output, slots, table, places, preprocessing, pool)
        return output

    def _shards(self, split: Split) -> list[Shard]:
        return [shard for shard in self.info.shards if shard.split == split]

    def _column(self, split: Split, name: str) -> Iterator[pa.ChunkedArray]:
        for shard in self._shards(split):
            with _parquet(self.folder, shard) as file:
                yield file.read(columns=[name], use_threads=False)[name]

    def _tables(
        self, split: Split, rows: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], pa.Table, NDArray[np.int64]]]:
        """(positions in `rows`, a row group that holds them, their places in it); each is read once."""
        columns = ["image", "format", "width", "height", "channels", "key"]
        start = 0
        for shard in self._shards(split):
            with _parquet(self.folder, shard) as file:
                for group in range(file.num_row_groups):
                    stop = start + file.metadata.row_group(group).num_rows
                    slots = np.flatnonzero((rows >= start) & (rows < stop))
                    if len(slots):
                        yield (
                            slots,
                            file.read_row_group(group, columns, use_threads=False),
                            rows[slots] - start,
                        )
                    start = stop


@contextmanager
def _parquet(folder: Path, shard: Shard) -> Iterator[pq.ParquetFile]:
    path = folder / shard.file
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if file.metadata.num_rows != shard.rows:
                raise ValueError(
                    f"shard {path} has {file.metadata.num_rows} rows, dataset.json says {shard.rows}"
                )
            yield file
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"shard {path} is missing or damaged: {error}") from error


def _row_groups(samples: Iterable[Sample], row_group_bytes: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    size = 0
    for sample in samples:
        expected = sample.height * sample.width * sample.channels
        if sample.format == "raw" and len(sample.image) != expected:
            raise ValueError(
                f"raw image {sample.key!r} has {len(sample.image)} bytes, its size needs {expected}"
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
        raise ValueError(
            f"images {list(shape)} need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of memory are free: "
            "use a lower resolution or fewer images"
        )


def _raw_pixels(images: pa.BinaryArray, size: tuple[int, ...]) -> NDArray[np.uint8]:
    """The pixels of a row group [rows, h, w, c], a view of Arrow's memory."""
    offsets = np.frombuffer(images.buffers()[1], np.int32)[images.offset : images.offset + len(images) + 1]
    data = np.frombuffer(images.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    return data.reshape(len(images), *size)


def _decode_into(
    output: NDArray[np.uint8],
    slots: NDArray[np.int64],
    table: pa.Table,
    places: NDArray[np.int64],
    preprocessing: Preprocessing,
    pool: ThreadPoolExecutor,
) -> None:
    """Decode a row group's images into their slots, so that their order is independent of threads' timing."""

    def decode(start: int) -> None:
        chunk = range(start, min(start + _DECODE_CHUNK, len(slots)))
        for position, row in zip(chunk, table.take(places[list(chunk)]).to_pylist(), strict=True):
            output[slots[position]] = _load(row, preprocessing)

    list(pool.map(decode, range(0, len(slots), _DECODE_CHUNK)))


def _load(row: dict[str, Any], preprocessing: Preprocessing) -> NDArray[np.uint8]:
    source = row["image"]
    if row["format"] == "raw":
        source = np.frombuffer(source, np.uint8).reshape(row["height"], row["width"], row["channels"])
    try:
        return load_image(source, preprocessing)
    except ValueError as error:
        raise ValueError(f"image {row['key']!r} was readable at ingest and is not now: {error}") from error
