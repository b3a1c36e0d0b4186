"""The 19 tasks of VTAB-1k: a module for each data set, which reads its archives as the authors ship them.

A module has what a source has (`ray_jobs.sources.archives.entries`): `listing`, and `rows` or `processed` where it
needs them. `splits` says which records are used for what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from pipelines.spec.vtab import Task, VtabSource
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.vtab import (
    aerial,
    caltech101,
    cifar,
    dtd,
    medical,
    oxford_flowers102,
    oxford_iiit_pet,
    scenes,
    sun397,
    svhn,
    synthetic,
)

_MODULES: dict[Task, ModuleType] = {
    "caltech101": caltech101,
    "cifar": cifar,
    "dtd": dtd,
    "oxford_flowers102": oxford_flowers102,
    "oxford_iiit_pet": oxford_iiit_pet,
    "svhn": svhn,
    "sun397": sun397,
    "patch_camelyon": medical,
    "eurosat": aerial,
    "resisc45": aerial,
    "diabetic_retinopathy": medical,
    "clevr_count": scenes,
    "clevr_dist": scenes,
    "dmlab": scenes,
    "kitti": scenes,
    "dsprites_loc": synthetic,
    "dsprites_ori": synthetic,
    "smallnorb_azi": synthetic,
    "smallnorb_ele": synthetic,
}


def listing(source: VtabSource, files: Files) -> Listing:
    """The records that VTAB uses. Raises ValueError for an archive that is not as its authors make it."""
    found: Listing = _MODULES[source.task].listing(source, files)
    return found


def rows(source: VtabSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Images that lie in arrays, [h, w, c]."""
    yield from _MODULES[source.task].rows(source, files, numbers)


def processed(source: VtabSource, key: str, image: bytes) -> bytes:
    """An image file as VTAB's copy of the data set has it; itself with `pixels: raw`, and where it was not changed."""
    recipe = getattr(_MODULES[source.task], "processed", None)
    if recipe is None or source.pixels == "raw":
        return image
    changed: bytes = recipe(source, key, image)
    return changed
