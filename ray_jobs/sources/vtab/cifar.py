"""CIFAR-100, python or binary version, with fine labels from 0. Keys are running numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipelines.spec.vtab import VtabSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.readers import cifar
from ray_jobs.sources.vtab import splits
from ray_jobs.sources.vtab.splits import Records

_FILE = "cifar-100-python.tar.gz"
_NOTE = "the archive is the python version: taken to have the order of the binary one, by which TFDS numbers images"


def listing(source: VtabSource, files: Files) -> Listing:
    """List all images, 32 x 32 pixels."""
    images, version = _read(tuple(sorted(files.items())))
    train, test = images.labels[: images.num_train], images.labels[images.num_train :]
    parts = {part: Records(range(len(labels)), labels) for part, labels in (("train", train), ("test", test))}
    size = ImageSize(height=32, width=32, channels=3)
    notes = (_NOTE,) if version == "python" else ()
    return splits.listing(source, images.class_names, parts, image=size, notes=notes)


def rows(source: VtabSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield images [32, 32, 3]. `splits.listing` numbers test after train, which is their order here."""
    images, _ = _read(tuple(sorted(files.items())))
    yield from (cifar.as_image(images.planes[number]) for number in numbers)


@lru_cache(maxsize=1)  # a task reads several shards of one source
def _read(located: tuple[tuple[str, str], ...]) -> tuple[cifar.Images, str]:
    return cifar.read_archive(dict(located), _FILE, 100)
