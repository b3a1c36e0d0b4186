"""Masks of Oxford-IIIT Pets: the trimaps of the annotations, one PNG per image.

The authors' values are 1 foreground, 2 background, 3 "not classified": a border around the pet, collars and the like,
which is ignored here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa

from pipelines.spec.vtab import VtabSource
from ray_jobs.data.masks import IGNORED, Mask, decode_mask
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, place, table
from ray_jobs.sources.vtab import archives
from ray_jobs.sources.vtab.oxford_iiit_pet import ANNOTATIONS
from vit_model.errors import UserError

MASK_CLASSES = ("background", "pet")
_VALUES = {1: 1, 2: 0, 3: IGNORED}


def masks(source: VtabSource, files: Files, entries: pa.Table) -> Iterator[Mask | UserError]:
    """Yield the mask [h, w] of each image, in order, or why it cannot be used."""
    members = archives.by_path(files, ANNOTATIONS)
    stems = [PurePosixPath(key).stem for key in entries["key"].to_pylist()]
    trimaps = [members.get(f"annotations/trimaps/{stem}.png") for stem in stems]
    rows = [{"key": member.path, "label": 0} | place(member) for member in trimaps if member]
    contents = containers.read(files, table(rows))
    for member in trimaps:
        try:
            yield _mask(next(contents)) if member else UserError("not in the archive")
        except UserError as error:
            yield error


def _mask(data: bytes | UserError) -> Mask:
    """Return a mask from a trimap's file. Raises UserError if it is not one."""
    if isinstance(data, UserError):
        raise data
    trimap = decode_mask(data)
    if unknown := sorted(set(np.unique(trimap).tolist()) - set(_VALUES)):
        raise UserError(f"it has the value {unknown[0]}, not 1, 2 or 3")
    values = np.zeros(256, np.uint8)
    values[list(_VALUES)] = list(_VALUES.values())
    return np.asarray(values[trimap])
