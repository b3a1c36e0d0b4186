"""Oxford-IIIT Pets: a tar of images, and a tar of annotations with the lists of both splits."""

from __future__ import annotations

from pathlib import PurePosixPath

from pipelines.spec.vtab import VtabSource
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.vtab import archives, splits
from ray_jobs.sources.vtab.splits import Records
from vit_model.errors import UserError

_IMAGES, ANNOTATIONS = "images.tar.gz", "annotations.tar.gz"
_LISTS = {"train": "trainval", "test": "test"}
# PNG and GIF files with JPEG's extension, and two JPEGs with a damaged end.
_ODD = frozenset(
    (
        *("Abyssinian_5", "Abyssinian_34", "beagle_116", "chihuahua_121"),
        *(f"Egyptian_Mau_{number}" for number in (14, 139, 145, 156, 167, 177, 186, 191)),
    )
)
_QUALITY = 95  # TensorFlow's default
_NOTE = "pixels: the 12 files that are no sound JPEG are encoded as one, as in TFDS's 4.0.0, not in VTAB's 3.*"


def listing(source: VtabSource, files: Files) -> Listing:
    """List images of 37 breeds, in the order of the lists' class numbers, which is not alphabetical (mixed case)."""
    annotations, images = archives.by_path(files, ANNOTATIONS), archives.by_path(files, _IMAGES)
    names: dict[int, str] = {}
    parts: dict[str, Records] = {}
    for part, name in _LISTS.items():
        path = f"annotations/{name}.txt"
        rows = [_line(line, path) for line in archives.lines_of(files, ANNOTATIONS, annotations, path)]
        names |= {label: image.rpartition("_")[0] for image, label in rows}
        keys = [f"{image}.jpg" for image, _ in rows]
        parts[part] = Records(keys, [label for _, label in rows], [images.get(f"images/{key}") for key in keys])
    notes = (_NOTE,) if source.pixels == "published" else ()
    return splits.listing(source, archives.numbered(names, ANNOTATIONS), parts, notes=notes)


def _line(line: str, path: str) -> tuple[str, int]:
    """Return the image's name and its label from a line "<name> <class, 1 to 37> <species> <breed>"."""
    image, *numbers = line.split()
    if len(numbers) != 3 or not numbers[0].isdecimal() or not 1 <= int(numbers[0]) <= 37:
        raise UserError(f"{path}: {line!r} is not <image> <class 1 to 37> <species> <breed>")
    return image, int(numbers[0]) - 1


def processed(source: VtabSource, key: str, image: bytes) -> bytes:
    """Encode the first frame of the twelve odd files as JPEG without alpha; return all others unchanged."""
    if PurePosixPath(key).stem not in _ODD:
        return image
    return archives.encode_jpeg(archives.decode_bgr(image), _QUALITY)
