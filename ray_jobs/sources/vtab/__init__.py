"""The 19 tasks of VTAB-1k: one module per dataset, which reads the archives as their authors ship them.

A module has the interface of a source (`ray_jobs.sources.archives.entries`): `listing`, and `rows` or `processed` if it
needs them. `splits` selects the records of each split.
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
    """List the records that VTAB uses. Raises UserError for an archive that is not in its authors' format."""
    task_listing: Listing = _MODULES[source.task].listing(source, files)
    return task_listing


def rows(source: VtabSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield images that are stored in arrays, [h, w, c]."""
    yield from _MODULES[source.task].rows(source, files, numbers)


def processed(source: VtabSource, key: str, image: bytes) -> bytes:
    """Return an image file as it is in VTAB's copy of the dataset; with `pixels: raw`, the file itself."""
    recipe = getattr(_MODULES[source.task], "processed", None)
    if recipe is None or source.pixels == "raw":
        return image
    changed: bytes = recipe(source, key, image)
    return changed
