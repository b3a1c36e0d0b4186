"""VTAB's medical images: Patch Camelyon and Diabetic Retinopathy.

In: Patch Camelyon's six gzipped HDF5 files; Kaggle's archives of fundus photographs, its labels of train, and those of
test, which were published later.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from pipelines.spec.vtab import VtabSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.arrays import read_array
from ray_jobs.sources.archives.entries import Files, Listing, Member
from ray_jobs.sources.vtab import pixels, splits
from ray_jobs.sources.vtab.splits import Records
from vit_model.errors import UserError

PATCH = 96  # pixels per side
_PCAM = {"train": "train", "validation": "valid", "test": "test"}
CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "patch_camelyon": ("no tumour", "tumour"),
    "diabetic_retinopathy": ("none", "mild", "moderate", "severe", "proliferative"),
}
_GRADES = ("0", "1", "2", "3", "4")
_USAGE = {"Public": "validation", "Private": "test"}


def listing(source: VtabSource, files: Files) -> Listing:
    """List the records that VTAB uses. Raises UserError for files that are not in their authors' format."""
    names = CLASS_NAMES[source.task]
    if source.task == "patch_camelyon":
        labels = {part: _tumours(files, part).tolist() for part in _PCAM}
        parts = {part: Records([f"{_PCAM[part]}_{n}" for n in range(len(each))], each) for part, each in labels.items()}
        return splits.listing(source, names, parts, image=ImageSize(height=PATCH, width=PATCH, channels=3))
    raw = "raw pixels: VTAB's are scaled, sharpened and cropped (btgraham-300); not comparable with published results"
    note = raw if source.pixels == "raw" else "pixels: btgraham-300, JPEG of quality 72, as TFDS makes them"
    return splits.listing(source, names, _eyes(files), notes=(note,))


def rows(source: VtabSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield Patch Camelyon's images [96, 96, 3] with these numbers of the listing."""
    yield from splits.rows({part: _patches(files, part) for part in _PCAM}, numbers)


def processed(source: VtabSource, key: str, image: bytes) -> bytes:
    """Convert a photograph of Diabetic Retinopathy as TFDS's `btgraham-300` does. Raises UserError."""
    return pixels.btgraham(image)


# ------------------------------------------------------------------------------------------------- Patch Camelyon


def _patches(files: Files, part: str) -> NDArray[np.uint8]:
    """Return the images of a part [n, 96, 96, 3]."""
    file = f"camelyonpatch_level_2_split_{_PCAM[part]}_x.h5.gz"
    return read_array(files, file, "x", np.uint8, (len(_tumours(files, part)), PATCH, PATCH, 3))


def _tumours(files: Files, part: str) -> NDArray[np.integer]:
    """Return the labels of a part [n]; 1: the inner 32 x 32 pixels contain tumour tissue."""
    file = f"camelyonpatch_level_2_split_{_PCAM[part]}_y.h5.gz"
    return read_array(files, file, "y", np.integer, (None, 1, 1, 1)).reshape(-1)


# ------------------------------------------------------------------------------------------------- Retinopathy


def _eyes(files: Files) -> dict[str, Records]:
    """Return the labelled photographs by part; a column of the test labels says which are for validation."""
    solution = _grades(files, "retinopathy_solution.csv", ("image", "level", "Usage"))
    if unknown := {row["Usage"] for row in solution.values()} - set(_USAGE):
        raise UserError(f"retinopathy_solution.csv: unknown Usage {min(unknown)!r}; expected Public or Private")
    graded = {"train": _grades(files, "trainLabels.csv.zip", ("image", "level"))}
    for usage, part in _USAGE.items():
        graded[part] = {image: row for image, row in solution.items() if row["Usage"] == usage}
    photographs = {"train": _photographs(files, "train.zip"), "test": _photographs(files, "test.zip")}
    photographs["validation"] = photographs["test"]
    return {part: _records(images, photographs[part]) for part, images in graded.items()}


def _records(graded: Mapping[str, Mapping[str, str]], photographs: Mapping[str, Member]) -> Records:
    for image, row in graded.items():
        if row["level"] not in _GRADES:
            raise UserError(f"{image} has the level {row['level']!r}, not 0 to 4")
    labels = [int(row["level"]) for row in graded.values()]
    return Records(list(graded), labels, [photographs.get(image) for image in graded])


def _grades(files: Files, name: str, columns: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Return the rows of a list of labels, zipped or not, by image."""
    data = containers.read_file(files, name)
    if data.startswith(b"PK"):
        data = containers.read_file(files, f"{name}::{name.removesuffix('.zip')}")
    try:
        reader = csv.DictReader(data.decode("utf-8-sig").splitlines(), strict=True)
        rows = {row["image"]: row for row in reader}
    except (csv.Error, UnicodeDecodeError, KeyError) as error:
        raise UserError(f"{name} is not CSV with {', '.join(columns)}: {error}") from error
    if tuple(reader.fieldnames or ()) != columns or any(None in row or None in row.values() for row in rows.values()):
        raise UserError(
            f"{name}: expected the columns {', '.join(columns)} in each row; its header is {reader.fieldnames}"
        )
    return rows


def _photographs(files: Files, archive: str) -> dict[str, Member]:
    """Return `<number>_left.jpeg` and `<number>_right.jpeg` in any folder, by name without extension."""
    whole = archive if archive in files else f"{archive}.001"
    members = ((PurePosixPath(member.path), member) for member in containers.members(files, whole))
    return {path.stem: member for path, member in members if path.suffix == ".jpeg"}
