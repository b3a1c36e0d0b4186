"""SVHN, cropped digits: two MATLAB files of arrays with the images along the last axis; the label 10 means 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.spec.vtab import VtabSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives.arrays import read_array
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.vtab import splits
from ray_jobs.sources.vtab.splits import Records
from vit_model.errors import UserError

_PARTS = ("train", "test")


class _Images(NamedTuple):
    """`pixels` [32, 32, 3, n], uint8; `labels` [n], 0 to 9."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


def listing(source: VtabSource, files: Files) -> Listing:
    """List all images of train and test, 32 x 32 pixels; VTAB does not use `extra`."""
    labels = {part: _read(files, part).labels for part in _PARTS}
    parts = {part: Records(range(len(labels[part])), labels[part]) for part in _PARTS}
    return splits.listing(source, "0123456789", parts, image=ImageSize(height=32, width=32, channels=3))


def rows(source: VtabSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield images [32, 32, 3]."""
    parts = {part: _read(files, part) for part in _PARTS}
    sizes = {part: len(images.labels) for part, images in parts.items()}
    for number in numbers:
        part, row = splits.row_place(sizes, number)
        yield parts[part].pixels[..., row]


def _read(files: Files, part: str) -> _Images:
    """Return the images of one file. Raises UserError if it contains anything else."""
    name = f"{part}_32x32.mat"
    pixels = read_array(files, name, "X", np.uint8, (32, 32, 3, None))
    labels = read_array(files, name, "y", np.number, (pixels.shape[3], 1))
    if not np.isin(labels, range(1, 11)).all():
        raise UserError(f"{name}: expected y, one label from 1 to 10 for each of {pixels.shape[3]:,} images")
    return _Images(pixels, labels.reshape(-1).astype(np.int64) % 10)
