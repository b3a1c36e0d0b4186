"""IDX files, the format of MNIST and its successors: grey images and their labels.

In: the four files as their authors ship them, gzipped or not, located by `pipelines.spec.IdxSource`. Out: arrays, the
wanted classes, and a fixed split: the authors' test is test, and a twelfth of train is dev.

A file is two zero bytes, the type of its numbers (8: uint8), the number of its dimensions, each dimension as a
big-endian uint32, and then the numbers. The sizes in a header are trusted only after as many bytes were read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.spec import FASHION_MNIST_NAME, IdxSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Listing, of_rows
from ray_jobs.sources.readers.features import split_by_pixels
from vit_model.errors import UserError

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FIRST_LABELS = bytes((9, 2, 1, 1, 6, 1, 4, 6, 5, 7, 4, 5, 7, 3, 4, 1))  # of Fashion-MNIST's test images
DEV_FRACTION = 1 / 12
MAX_SIDE = 1024  # pixels; the images are stored raw, which suits small ones
MAX_BYTES = 2**30  # of one unpacked file; the largest dataset of this family, EMNIST, has half of it


class Images(NamedTuple):
    """`images` [n, h, w, 1] (uint8), `labels` [n] from 0, and the key and the split of each image."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    keys: list[str]
    splits: list[str]


def listing(source: IdxSource, files: Files) -> Listing:
    """List the images of the wanted classes, with their splits.

    Raises:
        UserError: see `read`; or another set, such as MNIST, whose files are called the same, has Fashion-MNIST's name.
    """
    name = FILES["test"][1]
    first = read_file(files, name)[: len(FIRST_LABELS)].tobytes()
    if source.name.startswith(FASHION_MNIST_NAME) and first != FIRST_LABELS:
        raise UserError(
            f"{files[name]}: not Fashion-MNIST's labels. Set source.name and source.class_names, for MNIST to "
            '["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]'
        )
    images = _read(source, tuple(sorted(files.items())))
    height, width, channels = images.images.shape[1:]
    entries = of_rows(images.keys, images.labels.tolist(), images.splits, height * width)
    size = ImageSize(height=height, width=width, channels=channels)
    return Listing(tuple(source.class_names[label] for label in source.selected()), entries, size)


def rows(source: IdxSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the images [h, w, 1] of these rows of the listing."""
    yield from _read(source, tuple(sorted(files.items()))).images[list(numbers)]


@lru_cache(maxsize=1)  # a task reads several shards of one source
def _read(source: IdxSource, located: tuple[tuple[str, str], ...]) -> Images:
    return read(dict(located), len(source.class_names), source.selected())


def read(files: Files, num_classes: int, classes: Sequence[int]) -> Images:
    """Read the images of some classes.

    Args:
        files: the four files, by their names in `FILES`.
        num_classes: labels are 0..num_classes-1.
        classes: ascending labels, which become 0, 1, ...

    Raises:
        UserError: a file is damaged or not IDX, files do not fit together, a label is outside 0..num_classes-1, a
            class has no image in train.
    """
    images, labels, keys, splits = [], [], [], []
    for split, names in FILES.items():
        all_images, all_labels = _read_pair(files, *names, num_classes)
        selected = np.flatnonzero(np.isin(all_labels, classes))
        images.append(all_images[selected])
        labels.append(np.searchsorted(classes, all_labels[selected]))
        keys += [f"{split}-{row:06d}" for row in selected]
        splits += [split_by_pixels("vitflow idx", split, image, DEV_FRACTION) for image in images[-1]]
    if images[0].shape[1:] != images[1].shape[1:]:
        sizes = [f"{part.shape[1]} x {part.shape[2]}" for part in images]
        raise UserError(f"the images of train are {sizes[0]} pixels, but those of test {sizes[1]}")
    result = Images(np.concatenate(images)[..., None], np.concatenate(labels), keys, splits)
    trained = set(result.labels[np.array(splits) == "train"].tolist())
    if untrained := [number for label, number in enumerate(classes) if label not in trained]:
        named = f"classes {', '.join(map(str, untrained))} have" if untrained[1:] else f"class {untrained[0]} has"
        raise UserError(f"{files[FILES['train'][1]]}: {named} no image in train")
    return result


def read_file(files: Files, name: str) -> NDArray[np.uint8]:
    """Read the array of one IDX file of uint8, gzipped or not.

    Raises:
        UserError: not IDX, damaged, shorter or longer than its header says, or larger than MAX_BYTES.
    """
    path, data = files[name], containers.read_file(files, name, MAX_BYTES)
    if len(data) < 4 or data[:2] != b"\0\0":
        raise UserError(f"{path} is not an IDX file: it begins with {data[:4].hex(' ') or 'nothing'}")
    kind, dimensions = data[2], data[3]
    if kind != 8 or dimensions not in (1, 3):
        raise UserError(
            f"{path} has type {kind:#04x} and {dimensions} dimensions; "
            "expected type 0x08 with 3 dimensions (images) or 1 (labels)"
        )
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise UserError(f"{path} is truncated: it ends inside its header")
    shape = np.frombuffer(data, ">u4", dimensions, offset=4).tolist()
    expected = math.prod(shape)
    if not expected or max(shape[1:], default=1) > MAX_SIDE:
        raise UserError(
            f"{path}: its header says {' x '.join(map(str, shape))} numbers; "
            f"expected at least 1, in images of at most {MAX_SIDE} pixels per side"
        )
    if len(data) - start != expected:
        raise UserError(
            f"{path} is truncated or damaged: its header says {expected:,} numbers, but it has {len(data) - start:,}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _read_pair(
    files: Files, images_name: str, labels_name: str, num_classes: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read images [n, h, w] and their labels [n]."""
    images_file, labels_file = files[images_name], files[labels_name]
    images, labels = read_file(files, images_name), read_file(files, labels_name)
    if images.ndim != 3:
        raise UserError(f"{images_file}: expected images with 3 dimensions, not {images.ndim}")
    if labels.ndim != 1:
        raise UserError(f"{labels_file}: expected labels with 1 dimension, not {labels.ndim}")
    if len(images) != len(labels):
        raise UserError(f"{images_file} has {len(images):,} images, but {labels_file} {len(labels):,} labels")
    if (largest := int(labels.max())) >= num_classes:
        raise UserError(
            f"{labels_file} has the label {largest}, but source.class_names has names for 0 to {num_classes - 1}"
        )
    return images, labels
