"""CIFAR-100 (datasets.md 2.2), python or binary version: fine labels, 0-based, keys are running numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.spec.vtab import VtabSource
from ray_jobs.shards import ImageSize
from ray_jobs.sources.arrays import unpickle_arrays
from ray_jobs.sources.entries import Files, Listing
from ray_jobs.sources.vtab import archives, splits
from ray_jobs.sources.vtab.splits import Records

_FILE = "cifar-100-python.tar.gz"
_PIXELS = 3 * 32 * 32
_MAX_BYTES = 2**28  # of one file, unpacked; train has 155 MB
_NOTE = "the archive is the python version: taken to have the order of the binary one, by which TFDS numbers images"


class _Images(NamedTuple):
    """`planes` [n, 3072], uint8: red, green, blue, each row by row; `labels` [n]."""

    planes: NDArray[np.uint8]
    labels: NDArray[Any]


class _Read(NamedTuple):
    class_names: tuple[str, ...]
    parts: dict[str, _Images]
    python: bool


def listing(source: VtabSource, files: Files) -> Listing:
    """All images, 32 x 32 pixels."""
    found = _read(tuple(sorted(files.items())))
    parts = {part: Records(range(len(images.labels)), images.labels) for part, images in found.parts.items()}
    size = ImageSize(height=32, width=32, channels=3)
    return splits.listing(
        "cifar", found.class_names, parts, image=size, notes=(_NOTE,) if found.python else ()
    )


def rows(source: VtabSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Images [32, 32, 3]."""
    parts = _read(tuple(sorted(files.items()))).parts
    sizes = {part: len(images.labels) for part, images in parts.items()}
    for number in numbers:
        part, row = splits.row_place(sizes, number)
        yield parts[part].planes[row].reshape(3, 32, 32).transpose(1, 2, 0)


@lru_cache(maxsize=1)  # a task reads several shards of one source
def _read(located: tuple[tuple[str, str], ...]) -> _Read:
    files = dict(located)
    members = archives.by_path(files, _FILE)

    def content(path: str) -> bytes:
        return archives.content(files, _FILE, members, path, _MAX_BYTES)

    if "cifar-100-binary/train.bin" in members:
        names = archives.lines(content("cifar-100-binary/fine_label_names.txt"), "fine_label_names.txt")
        images = {part: from_binary(content(f"cifar-100-binary/{part}.bin")) for part in ("train", "test")}
        return _Read(tuple(names), images, python=False)
    meta = unpickle_arrays(content("cifar-100-python/meta"))
    given = meta.get("fine_label_names") if isinstance(meta, dict) else None
    if not isinstance(given, list):
        raise ValueError("cifar-100-python/meta has no fine_label_names")
    images = {part: from_pickle(content(f"cifar-100-python/{part}"), part) for part in ("train", "test")}
    return _Read(tuple(map(str, given)), images, python=True)


def from_binary(data: bytes) -> _Images:
    """The records of a .bin file: coarse label, fine label, 3,072 bytes. Raises ValueError for part of a record."""
    if not data or len(data) % (2 + _PIXELS):
        raise ValueError(f"CIFAR-100's records have {2 + _PIXELS} bytes; a file has {len(data):,}")
    records = np.frombuffer(data, np.uint8).reshape(-1, 2 + _PIXELS)
    return _Images(records[:, 2:], records[:, 1])


def from_pickle(data: bytes, name: str) -> _Images:
    """The dict of a Python 2 pickle: `data` [n, 3072] and `fine_labels`. Raises ValueError for anything else."""
    found = unpickle_arrays(data)
    planes, labels = (
        (found.get("data"), found.get("fine_labels")) if isinstance(found, dict) else (None, None)
    )
    if not isinstance(planes, np.ndarray) or planes.dtype != np.uint8 or planes.shape[1:] != (_PIXELS,):
        raise ValueError(f"cifar-100-python/{name} has no uint8 data [n, {_PIXELS}]")
    if (
        not isinstance(labels, list)
        or len(labels) != len(planes)
        or not all(type(one) is int for one in labels)
    ):
        raise ValueError(
            f"cifar-100-python/{name} has not one of fine_labels for each of its {len(planes)} images"
        )
    return _Images(planes, np.array(labels))
