"""SVHN, cropped digits: two MATLAB files of arrays with the images along the last axis; the label 10 means 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def listing(source: VtabSource, files: Files) -> Listing:
    """List all images of train and test, 32 x 32 pixels; VTAB does not use `extra`."""
    labels = {part: _labels(files, part) for part in _PARTS}
    parts = {part: Records(range(len(labels[part])), labels[part]) for part in _PARTS}
    return splits.listing(source, "0123456789", parts, image=ImageSize(height=32, width=32, channels=3))


def rows(source: VtabSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield images [32, 32, 3]."""
    yield from splits.rows({part: np.moveaxis(_pixels(files, part), 3, 0) for part in _PARTS}, numbers)


def _pixels(files: Files, part: str) -> NDArray[np.uint8]:
    """Return the images of a file [32, 32, 3, n]."""
    return read_array(files, f"{part}_32x32.mat", "X", np.uint8, (32, 32, 3, None))


def _labels(files: Files, part: str) -> NDArray[np.int64]:
    """Return the labels of a file [n], 0 to 9."""
    name, size = f"{part}_32x32.mat", _pixels(files, part).shape[3]
    labels = read_array(files, name, "y", np.number, (size, 1)).reshape(-1)
    if not np.isin(labels, range(1, 11)).all():
        raise UserError(f"{name}: expected y, one label from 1 to 10 for each of {size:,} images")
    return labels.astype(np.int64) % 10
