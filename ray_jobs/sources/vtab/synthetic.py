"""VTAB's rendered objects: dSprites (location, orientation) and SmallNORB (azimuth, elevation).

In: dSprites' HDF5 file or the npz with the same content, SmallNORB's six files of binary matrices, gzipped or not. Out:
grey images of 64 and 96 pixels per side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipelines.spec.vtab import VtabSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.arrays import fitting, read_array, read_norb
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.vtab import splits
from ray_jobs.sources.vtab.splits import Records
from vit_model.errors import UserError

SPRITE, NORB = 64, 96  # pixels per side
_DSPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.hdf5"
_NORB_FILES = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
_LATENTS = (1, 3, 6, 40, 32, 32)  # colour, shape, scale, orientation, x, y
_ORIENTATION, _X = 3, 4  # columns of dSprites' latents
_ELEVATION, _AZIMUTH = 1, 2  # columns of SmallNORB's info


def location(x: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the classes of dSprites-Location: 32 positions along x in 16 classes of 2."""
    return x // 2


def orientation(number: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the classes of dSprites-Orientation: 40 angles in 16 classes of 3 and 2 in turn: 0, 0, 0, 1, 1, 2, ..."""
    return number * 2 // 5


CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "dsprites_loc": tuple(f"x {2 * number} to {2 * number + 1}" for number in range(16)),
    "dsprites_ori": tuple(f"turn {-(-5 * number // 2)} to {-(-5 * (number + 1) // 2) - 1}" for number in range(16)),
    "smallnorb_azi": tuple(f"{20 * number} degrees" for number in range(18)),
    "smallnorb_ele": tuple(f"{30 + 5 * number} degrees" for number in range(9)),
}


def listing(source: VtabSource, files: Files) -> Listing:
    """List the records that VTAB uses. Raises UserError for files that are not in their authors' format."""
    names = CLASS_NAMES[source.task]
    if source.task.startswith("dsprites"):
        latents = _latents(files)
        label = location(latents[:, _X]) if source.task == "dsprites_loc" else orientation(latents[:, _ORIENTATION])
        parts = {"train": Records(range(len(label)), label.tolist())}
        side = SPRITE
    else:
        parts = {part: _norb_records(source, files, part) for part in _NORB_FILES}
        side = NORB
    image = ImageSize(height=side, width=side, channels=1)
    return splits.listing(source, names, parts, image=image)


def rows(source: VtabSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the images [h, w, 1] with these numbers of the listing.

    dSprites' 0 and 1 become 0 and 255; of SmallNORB's pairs the first camera's images are used.
    """
    if source.task.startswith("dsprites"):
        name = _names(files)[0]
        sprites = read_array(files, _DSPRITES, name, np.uint8, (len(_latents(files)), SPRITE, SPRITE))
        for number in numbers:
            if (image := sprites[number]).max() > 1:
                raise UserError(f"{_DSPRITES} has pixels of value {image.max()}; expected 0 and 1")
            yield image[:, :, None] * np.uint8(255)
        return
    parts = {part: _norb_images(files, part)[:, 0, :, :, None] for part in _NORB_FILES}
    yield from splits.rows(parts, numbers)


# ------------------------------------------------------------------------------------------------- dSprites


def _names(files: Files) -> tuple[str, str]:
    """Return the names of the images and of the latent classes; the npz has the same content as the HDF5 file."""
    with containers.local(files, _DSPRITES).open("rb") as file:
        return ("imgs", "latents_classes") if file.read(2) == b"PK" else ("imgs", "latents/classes")


def _latents(files: Files) -> NDArray[np.int64]:
    """Return the latent classes [n, 6]. Raises UserError for a class out of its range."""
    latents = read_array(files, _DSPRITES, _names(files)[1], np.int64, (None, 6))
    if not len(latents) or latents.min() < 0 or (latents.max(0) >= _LATENTS).any():
        reach = latents.max(0, initial=0).tolist()
        raise UserError(f"{_DSPRITES}: latent classes reach {reach}; expected 0 to less than {_LATENTS}")
    return latents


# ------------------------------------------------------------------------------------------------- SmallNORB


def _norb_info(files: Files, part: str) -> NDArray[np.int32]:
    """Return instance, elevation, azimuth and lighting [n, 4] of the pairs in one of SmallNORB's two parts."""
    name = f"{_NORB_FILES[part]}-info.mat.gz"
    return fitting(read_norb(files, name), name, np.int32, (None, 4))


def _norb_images(files: Files, part: str) -> NDArray[np.uint8]:
    """Return the pairs of images [n, 2, 96, 96] of a part."""
    name, size = f"{_NORB_FILES[part]}-dat.mat.gz", len(_norb_info(files, part))
    return fitting(read_norb(files, name), name, np.uint8, (size, 2, NORB, NORB))


def _norb_records(source: VtabSource, files: Files, part: str) -> Records:
    info = _norb_info(files, part)
    if source.task == "smallnorb_ele":
        return Records(range(len(info)), info[:, _ELEVATION].tolist())
    if (info[:, _AZIMUTH] % 2).any():
        raise UserError(f"{_NORB_FILES[part]}-info.mat.gz has an odd azimuth; expected 0, 2, ... 34")
    return Records(range(len(info)), (info[:, _AZIMUTH] // 2).tolist())
