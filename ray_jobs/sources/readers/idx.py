"""IDX files, the format of MNIST and of what was made in its image: grey images and their labels.

In: the four files as their authors ship them, gzipped or not (`pipelines.spec.IdxSource` knows where). Out: arrays, the
classes that are wanted, and a split that never moves: the authors' test is test, a twelfth of train is dev.

A file is two zero bytes, the type of its numbers (8: uint8), the number of its dimensions, each dimension as a
big-endian uint32, and then the numbers. Nothing that a header claims is believed before as many bytes have come.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.spec import IdxSource
from ray_jobs.data.images import content_id
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources import hash_fraction
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Listing, table
from vit_model.errors import UserError

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
DEV_FRACTION = 1 / 12
MAX_SIDE = 1024  # pixels; such images are stored raw, which suits small ones
MAX_BYTES = 2**30  # of one file, unpacked; the largest set of this family, EMNIST, has half of it
_CHUNK = 2**20


class Images(NamedTuple):
    """`images` [n, h, w, 1] (uint8), `labels` [n] from 0 up, and of each its key and its split."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    keys: list[str]
    splits: list[str]


def listing(source: IdxSource, files: Files) -> Listing:
    """The images of the wanted classes, with their splits."""
    found = _read(source, tuple(sorted(files.items())))
    height, width, channels = found.images.shape[1:]
    entries = (
        {"key": key, "label": label, "split": split, "file": "", "offset": row, "codec": "row"}
        | {"length": height * width}
        for row, (key, label, split) in enumerate(
            zip(found.keys, found.labels.tolist(), found.splits, strict=True)
        )
    )
    size = ImageSize(height=height, width=width, channels=channels)
    return Listing(tuple(source.class_names[label] for label in source.kept()), table(entries), size)


def rows(source: IdxSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """The images [h, w, 1] of these rows of the listing."""
    yield from _read(source, tuple(sorted(files.items()))).images[list(numbers)]


@lru_cache(maxsize=1)  # a task reads several shards of one source
def _read(source: IdxSource, files: tuple[tuple[str, str], ...]) -> Images:
    given = dict(files)
    paths = {
        name: containers.local(given, name) if path.startswith("s3://") else Path(path)
        for name, path in files
    }
    return read(paths, len(source.class_names), source.kept())


def read(files: Mapping[str, Path], num_classes: int, classes: Sequence[int]) -> Images:
    """The images of `classes`, ascending labels out of 0..num_classes-1, which become 0, 1, ... in their order.

    `files` has the path of each of the four files by its name in `FILES`.

    Raises:
        UserError: a file that is damaged or not IDX, files that don't fit together, a label outside
            0..num_classes-1, a class without an image in train.
    """
    images, labels, keys, splits = [], [], [], []
    for split, names in FILES.items():
        every, given = _read_pair(files[names[0]], files[names[1]], num_classes)
        kept = np.flatnonzero(np.isin(given, classes))
        images.append(every[kept])
        labels.append(np.searchsorted(classes, given[kept]))
        keys += [f"{split}-{row:06d}" for row in kept]
        splits += [_split(split, image.tobytes()) for image in images[-1]]
    if images[0].shape[1:] != images[1].shape[1:]:
        sizes = [f"{part.shape[1]} x {part.shape[2]}" for part in images]
        raise UserError(f"images of train are {sizes[0]} pixels, those of test {sizes[1]}")
    found = Images(np.concatenate(images)[..., None], np.concatenate(labels), keys, splits)
    trained = set(found.labels[np.array(splits) == "train"].tolist())
    if lost := [given for label, given in enumerate(classes) if label not in trained]:
        more = f", nor have {', '.join(map(str, lost[1:]))}" if lost[1:] else ""
        raise UserError(f"{files[FILES['train'][1]]}: the class {lost[0]} has no image in train{more}")
    return found


def read_file(path: Path) -> NDArray[np.uint8]:
    """The array of one IDX file of uint8, gzipped or not.

    Raises:
        UserError: it is something else, damaged, shorter or longer than its header says, or larger than MAX_BYTES.
    """
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not zipped:
                return _parse(path, file)
            with gzip.GzipFile(fileobj=file) as unzipped:
                return _parse(path, unzipped)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is truncated or damaged: {error}") from error


def _parse(path: Path, file: IO[bytes] | gzip.GzipFile) -> NDArray[np.uint8]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise UserError(f"{path} is not an IDX file: it begins with {magic.hex(' ') or 'nothing'}")
    kind, dimensions = magic[2], magic[3]
    if kind != 8 or dimensions not in (1, 3):
        raise UserError(
            f"{path} has numbers of type {kind:#04x} in {dimensions} dimensions; "
            "images are type 0x08 in 3, labels type 0x08 in 1"
        )
    header = file.read(4 * dimensions)
    if len(header) < 4 * dimensions:
        raise UserError(f"{path} is truncated: it ends inside its header")
    shape = [int.from_bytes(header[start : start + 4]) for start in range(0, len(header), 4)]
    expected = math.prod(shape)
    if not 0 < expected <= MAX_BYTES or max(shape[1:], default=1) > MAX_SIDE:
        raise UserError(
            f"{path} says that it holds {' x '.join(map(str, shape))} numbers; "
            f"there must be some, at most {MAX_BYTES:,}, in images of at most {MAX_SIDE} pixels a side"
        )
    data = bytearray()
    while chunk := file.read(min(_CHUNK, expected + 1 - len(data))):
        data += chunk
    if len(data) != expected:
        found = f"{len(data):,}" if len(data) < expected else "more"
        raise UserError(
            f"{path} is truncated or damaged: its header says {expected:,} numbers, there are {found}"
        )
    return np.frombuffer(bytes(data), np.uint8).reshape(shape)


def _read_pair(
    images_file: Path, labels_file: Path, num_classes: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images [n, h, w] and labels [n] that fit together."""
    images, labels = read_file(images_file), read_file(labels_file)
    if images.ndim != 3:
        raise UserError(f"{images_file} has numbers in {images.ndim} dimension; images have 3")
    if labels.ndim != 1:
        raise UserError(f"{labels_file} has numbers in {labels.ndim} dimensions; labels have 1")
    if len(images) != len(labels):
        raise UserError(f"{images_file} has {len(images):,} images, {labels_file} {len(labels):,} labels")
    if (largest := int(labels.max())) >= num_classes:
        raise UserError(
            f"{labels_file} has the label {largest}; source.class_names names 0 to {num_classes - 1}"
        )
    return images, labels


def _split(given: str, pixels: bytes) -> str:
    """By the pixels alone: copies of one image stay together, and the choice of classes moves none."""
    dev = (
        given == "train" and hash_fraction("vitflow idx", content_id(sha256(pixels).digest())) < DEV_FRACTION
    )
    return "dev" if dev else given
