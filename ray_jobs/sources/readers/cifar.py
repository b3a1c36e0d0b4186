"""CIFAR-10 and CIFAR-100 as their authors ship them, python or binary version.

In: the archive, or its unpacked files. Out: images [32, 32, 3] with fine labels. Keys are running numbers over the
files, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.spec import CIFAR_FILES, CifarSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.arrays import unpickle_arrays
from ray_jobs.sources.archives.entries import Files, Listing, of_rows
from ray_jobs.sources.readers.features import split_by_pixels
from vit_model.errors import UserError

PIXELS = 3 * 32 * 32
MAX_BYTES = 2**28  # of one unpacked file; CIFAR-100's train has 155 MB


class Images(NamedTuple):
    """`planes` [n, 3072], uint8: red, green, blue, each row by row; `labels` [n]. The first `num_train` are train."""

    class_names: tuple[str, ...]
    planes: NDArray[np.uint8]
    labels: NDArray[np.int64]
    num_train: int


def listing(source: CifarSource, files: Files) -> Listing:
    """List all images. dev is drawn from train by a hash of the pixels, so that copies of one image stay together."""
    images = _read(source, tuple(sorted(files.items())))
    sizes = {"train": images.num_train, "test": len(images.labels) - images.num_train}
    parts = [part for part, size in sizes.items() for _ in range(size)]
    keys = [f"{part}-{number:05d}" for part, size in sizes.items() for number in range(size)]
    splits = [
        split_by_pixels("vitflow cifar", part, as_image(planes), source.dev_fraction)
        for part, planes in zip(parts, images.planes, strict=True)
    ]
    entries = of_rows(keys, images.labels.tolist(), splits, PIXELS)
    return Listing(images.class_names, entries, ImageSize(height=32, width=32, channels=3))


def rows(source: CifarSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield images [32, 32, 3]."""
    planes = _read(source, tuple(sorted(files.items()))).planes
    yield from (as_image(planes[number]) for number in numbers)


def as_image(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert planes [3072] to an image [32, 32, 3]."""
    return planes.reshape(3, 32, 32).transpose(1, 2, 0)


@lru_cache(maxsize=1)  # a task reads several shards of one source
def _read(source: CifarSource, located: tuple[tuple[str, str], ...]) -> Images:
    files = dict(located)
    for version in ("binary", "python"):
        _, names = CIFAR_FILES[source.classes, version]
        if all(name in files for name in names):
            contents = {name: containers.read_file(files, name, MAX_BYTES) for name in names}
            return read(source.classes, version, contents)
    [archive] = files
    return read_archive(files, archive, source.classes)[0]


def read_archive(files: Files, archive: str, classes: int) -> tuple[Images, str]:
    """Return the images of an authors' archive, and its version, "binary" or "python". Raises UserError."""
    members = {member.path: member for member in containers.members(files, archive)}
    for version in ("binary", "python"):
        folder, names = CIFAR_FILES[classes, version]
        by_name = {name: members[path] for name in names if (path := f"{folder}/{name}") in members}
        if len(by_name) == len(names):
            contents = {name: containers.read_member(files, member, MAX_BYTES) for name, member in by_name.items()}
            return read(classes, version, contents), version
    expected = " or ".join(f"{CIFAR_FILES[classes, version][0]}/..." for version in ("binary", "python"))
    raise UserError(
        f"{archive} does not contain the CIFAR-{classes} files (expected {expected}). Use the authors' archive"
    )


def read(classes: int, version: str, contents: Mapping[str, bytes]) -> Images:
    """Read the images of "binary" or "python" files, from their contents by name. Raises UserError."""
    _, (meta, *train, test) = CIFAR_FILES[classes, version]
    key = "label_names" if classes == 10 else "fine_label_names"
    is_binary, data = version == "binary", contents[meta]
    class_names = tuple(containers.lines(data, meta)) if is_binary else _texts(data, meta, key)
    if len(class_names) != classes:
        raise UserError(f"{meta} has {len(class_names)} names, but CIFAR-{classes} has {classes} classes")
    parse = _records if is_binary else _batch
    parts = [parse(contents[name], name, classes) for name in (*train, test)]
    labels = np.concatenate([part_labels for _, part_labels in parts])
    if labels.min() < 0 or labels.max() >= classes:
        raise UserError(f"labels range from {labels.min()} to {labels.max()}; expected 0 to {classes - 1}")
    planes = np.concatenate([part_planes for part_planes, _ in parts])
    return Images(class_names, planes, labels, len(planes) - len(parts[-1][0]))


_Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def _records(data: bytes, name: str, classes: int) -> _Part:
    """Parse records of one label byte (CIFAR-100: two, the second is the fine label) and the pixels."""
    width = PIXELS + (1 if classes == 10 else 2)
    if not data or len(data) % width:
        raise UserError(f"{name} has {len(data):,} bytes, not a multiple of the {width} bytes of a record")
    records = np.frombuffer(data, np.uint8).reshape(-1, width)
    return records[:, -PIXELS:], records[:, -PIXELS - 1].astype(np.int64)


def _batch(data: bytes, name: str, classes: int) -> _Part:
    batch = _pickled(data, name)
    planes, labels = batch.get("data"), batch.get("labels" if classes == 10 else "fine_labels")
    if not isinstance(planes, np.ndarray) or planes.dtype != np.uint8 or planes.shape[1:] != (PIXELS,):
        raise UserError(f"{name} does not contain data of uint8 [n, {PIXELS}]")
    if not isinstance(labels, list) or not len(labels) == len(planes) > 0:
        raise UserError(f"{name}: expected a list with one label for each of its {len(planes):,} images")
    if not all(type(label) is int and 0 <= label < classes for label in labels):
        raise UserError(f"{name} has labels outside 0 to {classes - 1}")
    return planes, np.array(labels, np.int64)


def _pickled(data: bytes, name: str) -> dict[object, object]:
    try:
        value = unpickle_arrays(data)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{name} is not a pickled dict")
    return value


def _texts(data: bytes, name: str, key: str) -> tuple[str, ...]:
    texts = _pickled(data, name).get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{name} does not contain a list of names {key!r}")
    return tuple(texts)
