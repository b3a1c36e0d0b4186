"""SVHN, cropped digits: two MATLAB files of arrays with the images along the last axis; the label 10 means 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.spec.vtab import VtabSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.arrays import read_mat
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.vtab import splits
from ray_jobs.sources.vtab.splits import Records
from vit_model.errors import UserError

_MAX_BYTES = 2**28  # of one file; train has 182 MB


class _Images(NamedTuple):
    """`pixels` [32, 32, 3, n], uint8; `labels` [n], 0 to 9."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


def listing(source: VtabSource, files: Files) -> Listing:
    """List all images of train and test, 32 x 32 pixels; VTAB does not use `extra`."""
    parts = {
        part: Records(range(len(images.labels)), images.labels)
        for part, images in _read(tuple(sorted(files.items()))).items()
    }
    return splits.listing(source, "0123456789", parts, image=ImageSize(height=32, width=32, channels=3))


def rows(source: VtabSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield images [32, 32, 3]."""
    parts = _read(tuple(sorted(files.items())))
    sizes = {part: len(images.labels) for part, images in parts.items()}
    for number in numbers:
        part, row = splits.row_place(sizes, number)
        yield parts[part].pixels[..., row]


@lru_cache(maxsize=1)  # a task reads several shards of one source
def _read(located: tuple[tuple[str, str], ...]) -> dict[str, _Images]:
    files = dict(located)
    return {
        part: from_mat(containers.read_file(files, f"{part}_32x32.mat", _MAX_BYTES), f"{part}_32x32.mat")
        for part in ("train", "test")
    }


def from_mat(data: bytes, name: str) -> _Images:
    """Return the images of one file. Raises UserError if it contains anything else."""
    variables = read_mat(data)
    pixels, labels = variables.get("X"), variables.get("y")
    if pixels is None or pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise UserError(f"{name}: expected X, uint8 [32, 32, 3, n]")
    if labels is None or labels.size != pixels.shape[3] or not np.isin(labels, range(1, 11)).all():
        raise UserError(f"{name}: expected y, one label from 1 to 10 for each of {pixels.shape[3]:,} images")
    return _Images(pixels, labels.reshape(-1).astype(np.int64) % 10)
