"""VTAB's rendered objects: dSprites (location, orientation) and SmallNORB (azimuth, elevation).

In: dSprites' HDF5 file or the npz with the same content, SmallNORB's six files of binary matrices, gzipped or not. Out:
grey images of 64 and 96 pixels per side.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pipelines.spec.vtab import VtabSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.arrays import (
    MAX_BLOCK,
    hdf5_array,
    hdf5_slice,
    npy_header,
    npz_member,
    read_norb,
    read_npz,
)
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
_BLOCK = 2**25  # bytes of images to read at once


def location(x: NDArray[np.int64]) -> NDArray[np.int64]:
    """dSprites-Location: 32 positions along x in 16 classes of 2."""
    return x // 2


def orientation(number: NDArray[np.int64]) -> NDArray[np.int64]:
    """dSprites-Orientation: 40 angles in 16 classes of alternately 3 and 2: 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, ..."""
    return number * 2 // 5


CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "dsprites_loc": tuple(f"x {2 * number} to {2 * number + 1}" for number in range(16)),
    "dsprites_ori": tuple(
        f"turn {-(-5 * number // 2)} to {-(-5 * (number + 1) // 2) - 1}" for number in range(16)
    ),
    "smallnorb_azi": tuple(f"{20 * number} degrees" for number in range(18)),
    "smallnorb_ele": tuple(f"{30 + 5 * number} degrees" for number in range(9)),
}


def listing(source: VtabSource, files: Files) -> Listing:
    """List the records that VTAB uses. Raises UserError for files that are not in their authors' format."""
    names = CLASS_NAMES[source.task]
    if source.task.startswith("dsprites"):
        latents = _latents(containers.local(files, _DSPRITES))
        label = (
            location(latents[:, _X])
            if source.task == "dsprites_loc"
            else orientation(latents[:, _ORIENTATION])
        )
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
        packed_numbers, packed = _sprites(source, containers.local(files, _DSPRITES))
        for position in np.searchsorted(packed_numbers, numbers):
            yield np.unpackbits(packed[position]).reshape(SPRITE, SPRITE, 1) * np.uint8(255)
        return
    sizes = {part: len(_norb_info(files, part)) for part in _NORB_FILES}
    places = [splits.row_place(sizes, number) for number in numbers]
    images = {
        part: _norb_images(
            containers.local(files, f"{_NORB_FILES[part]}-dat.mat.gz"),
            sizes[part],
            [row for part_of_image, row in places if part_of_image == part],
        )
        for part in sizes
    }
    for part, _ in places:
        yield next(images[part])


# ------------------------------------------------------------------------------------------------- dSprites


def _is_npz(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\3\4"


def _latents(path: Path) -> NDArray[np.int64]:
    """Return the latent classes [n, 6]. Raises UserError for a class out of its range."""
    if _is_npz(path):
        latents = read_npz(path, ["latents_classes"])["latents_classes"]
    else:
        latents = hdf5_slice(hdf5_array(path, "latents/classes", "<i8", (None, 6)), np.s_[:])
    if latents.dtype != np.int64 or latents.ndim != 2 or latents.shape[1] != 6 or not len(latents):
        raise UserError(f"{path.name}: latent classes are {latents.dtype} {latents.shape}, not int64 [n, 6]")
    if latents.min() < 0 or (latents.max(0) >= _LATENTS).any():
        raise UserError(
            f"{path.name}: latent classes reach {latents.max(0).tolist()}; expected less than {_LATENTS}"
        )
    return cast(NDArray[np.int64], latents)


@lru_cache(maxsize=1)  # a task reads several shards of one source
def _sprites(source: VtabSource, path: Path) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return ascending numbers [n] and bits [n, 512] of the images that VTAB uses: 40 MB of the file's 3 GB.

    The file is read once from beginning to end, in blocks. An npz does not allow reading a single image, and for HDF5
    it is expensive, because a chunk may contain some pixels of thousands of images.
    """
    size = len(_latents(path))
    dev_fraction = source.dev_fraction if source.subset == "whole" else None
    chosen, _ = splits.used(source.task, {"train": range(size)}, dev_fraction)
    numbers = np.array(sorted(one.number for one in chosen))
    packed, start = [], 0
    for block in _npz_blocks(path, size) if _is_npz(path) else _hdf5_blocks(path, size):
        if block.max() > 1:
            raise UserError(f"{path.name} has pixels of value {block.max()}; expected 0 and 1")
        first, last = np.searchsorted(numbers, (start, start + len(block)))
        packed.append(np.packbits(block.reshape(len(block), -1)[numbers[first:last] - start], axis=1))
        start += len(block)
    return numbers, np.concatenate(packed)


def _hdf5_blocks(path: Path, size: int) -> Iterator[NDArray[np.uint8]]:
    """Yield the images [n, 64, 64], whole chunks at a time."""
    images = hdf5_array(path, "imgs", "u1", (size, SPRITE, SPRITE))
    chunk = images.chunks[0] if images.chunks else 1
    length = min(max(_BLOCK // SPRITE**2 // chunk, 1) * chunk, MAX_BLOCK // SPRITE**2)
    for start in range(0, size, length):
        yield hdf5_slice(images, np.s_[start : start + length])


def _npz_blocks(path: Path, size: int) -> Iterator[NDArray[np.uint8]]:
    """Yield the images [n, 64, 64] from `imgs.npy`. Raises UserError for a different or damaged array."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(npz_member(archive, "imgs")) as file:
            shape, fortran, dtype = npy_header(file)
            if (shape, fortran, dtype) != ((size, SPRITE, SPRITE), False, np.dtype("u1")):
                raise UserError(f"imgs is {dtype} {shape}, not uint8 {(size, SPRITE, SPRITE)}")
            for start in range(0, size, _BLOCK // SPRITE**2):
                length = min(_BLOCK // SPRITE**2, size - start) * SPRITE**2
                data = file.read(length)
                if len(data) < length:
                    raise UserError("imgs is truncated")
                yield np.frombuffer(data, np.uint8).reshape(-1, SPRITE, SPRITE)
    except (KeyError, ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path.name} is not dSprites' npz, or damaged: {error}") from error


# ------------------------------------------------------------------------------------------------- SmallNORB


def _norb_info(files: Files, part: str) -> NDArray[np.int32]:
    """Return instance, elevation, azimuth and lighting [n, 4] of the pairs in one of SmallNORB's two parts."""
    name = f"{_NORB_FILES[part]}-info.mat.gz"
    info = read_norb(containers.read_file(files, name))
    if info.dtype != np.dtype("<i4") or info.ndim != 2 or info.shape[1] != 4:
        raise UserError(f"{name} is {info.dtype} {info.shape}, not int32 [n, 4]")
    return info


def _norb_records(source: VtabSource, files: Files, part: str) -> Records:
    info = _norb_info(files, part)
    if source.task == "smallnorb_ele":
        return Records(range(len(info)), info[:, _ELEVATION].tolist())
    if (info[:, _AZIMUTH] % 2).any():
        raise UserError(f"{_NORB_FILES[part]}-info.mat.gz has an odd azimuth; expected 0, 2, ... 34")
    return Records(range(len(info)), (info[:, _AZIMUTH] // 2).tolist())


def _norb_images(path: Path, size: int, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the first camera's images of these pairs from a matrix uint8 [size, 2, 96, 96]."""
    header = struct.pack("<6i", 0x1E3D4C55, 4, size, 2, NORB, NORB)
    with path.open("rb") as file:
        if file.read(len(header)) != header:
            raise UserError(f"{path.name} is not a matrix of {size} pairs of uint8 {NORB} x {NORB}")
        for number in numbers:
            file.seek(len(header) + number * 2 * NORB**2)
            data = file.read(NORB**2)
            if len(data) < NORB**2:
                raise UserError(f"{path.name} is truncated: it ends in pair {number}")
            yield np.frombuffer(data, np.uint8).reshape(NORB, NORB, 1)
