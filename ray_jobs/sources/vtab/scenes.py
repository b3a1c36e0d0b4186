"""VTAB's images of scenes: CLEVR (count, distance), KITTI (distance of the nearest vehicle), DMLab.

In: CLEVR's zip; KITTI's zips of images and labels and its devkit; DMLab's tar of TFRecord files. `scene_labels`
computes their labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import IO, Any

from pipelines.spec.vtab import VtabSource
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Listing, Member, table
from ray_jobs.sources.archives.examples import feature_range, parse_example, tfrecords
from ray_jobs.sources.vtab import archives, pixels, scene_labels, splits
from ray_jobs.sources.vtab.splits import Records
from vit_model.errors import UserError

CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "clevr_count": tuple(f"{number} objects" for number in scene_labels.CLEVR_OBJECTS),
    "clevr_dist": ("to 8", "8 to 8.5", "8.5 to 9", "9 to 9.5", "9.5 to 10", "10 to 100"),
    "kitti": ("to 8 m", "8 to 20 m", "beyond 20 m", "no vehicle"),
    "dmlab": tuple(map(str, range(6))),
}
_CLEVR = "CLEVR_v1.0.zip"
_CLEVR_LABELS: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    "clevr_count": scene_labels.clevr_count,
    "clevr_dist": scene_labels.clevr_distance,
}
_MAX_SCENES = 2**30  # bytes of a list of scenes; the largest has some hundred million
_CLEVR_PARTS = {"train": "train", "validation": "val"}  # the test images have no scenes
_Row = tuple[str, int, Member | None]  # key, label, position of its bytes
_DMLAB = "dmlab.tar.gz"
_DMLAB_FILE = re.compile(r"dmlab-(train|validation|test)\.tfrecord")


def listing(source: VtabSource, files: Files) -> Listing:
    """List the records that VTAB uses. Raises UserError for files that are not in their authors' format."""
    if source.task == "kitti":
        parts = _kitti(files)
    elif source.task == "dmlab":
        parts = _dmlab(files)
    else:
        parts = _clevr(files, _CLEVR_LABELS[source.task])
    return splits.listing(source, CLASS_NAMES[source.task], parts)


def processed(source: VtabSource, key: str, image: bytes) -> bytes:
    """Remove the alpha channel of CLEVR's images. Raises UserError."""
    return pixels.without_alpha(image) if source.task in _CLEVR_LABELS else image


def _clevr(files: Files, label: Callable[[Mapping[str, Any]], int]) -> dict[str, Records]:
    """Pair scenes and images by name, because the two lists have different orders."""
    images = {PurePosixPath(path).name: member for path, member in archives.by_path(files, _CLEVR).items()}
    parts = {}
    for part, name in _CLEVR_PARTS.items():
        path = f"{_CLEVR}::CLEVR_v1.0/scenes/CLEVR_{name}_scenes.json"
        try:
            scenes = scene_labels.clevr_scenes(containers.read_file(files, path, _MAX_SCENES))
            named = ((scene["image_filename"], scene) for scene in scenes)
            parts[part] = _records([(key, label(scene), images.get(key)) for key, scene in named])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(f"{path}: {error}") from error
    return parts


def _kitti(files: Files) -> dict[str, Records]:
    """Assign the images of `training` to parts, by the drive in which each was recorded."""
    images = _numbered(files, "data_object_image_2.zip", "training/image_2", ".png")
    annotations = _numbered(files, "data_object_label_2.zip", "training/label_2", ".txt")
    rand, mapping = (
        containers.text(containers.read_file(files, f"devkit_object.zip::mapping/{name}.txt"), f"{name}.txt")
        for name in ("train_rand", "train_mapping")
    )
    drives = scene_labels.kitti_drives(rand, mapping)
    if missing := [number for number in range(len(drives)) if number not in annotations]:
        raise UserError(f"data_object_label_2.zip does not contain training/label_2/{missing[0]:06d}.txt")
    by_part: dict[str, list[_Row]] = {part: [] for part in splits.PARTS}
    texts = _texts(files, [annotations[number] for number in range(len(drives))])
    for number, (drive, text) in enumerate(zip(drives, texts, strict=True)):
        try:
            label = scene_labels.kitti_label(text)
        except ValueError as error:
            raise UserError(f"data_object_label_2.zip: {number:06d}.txt: {error}") from error
        by_part[scene_labels.PARTS.get(drive, "train")].append((f"{number:06d}.png", label, images.get(number)))
    return {part: _records(rows) for part, rows in by_part.items()}


def _numbered(files: Files, archive: str, folder: str, extension: str) -> dict[int, Member]:
    """Return the files `<folder>/<6 digits><extension>` of an archive, by number."""
    name = re.compile(rf"(.*/)?{folder}/(\d{{6}}){re.escape(extension)}")
    matches = ((name.fullmatch(member.path), member) for member in containers.members(files, archive))
    return {int(match[2]): member for match, member in matches if match}


def _texts(files: Files, members: list[Member]) -> list[str]:
    texts = []
    contents = containers.read(files, table(member._asdict() for member in members))
    for member, data in zip(members, contents, strict=True):
        if isinstance(data, UserError):
            raise UserError(f"{member.file}: {member.path}: {data}") from data
        texts.append(containers.text(data, f"{member.file}: {member.path}"))
    return texts


def _dmlab(files: Files) -> dict[str, Records]:
    """List the images in the records of each TFRecord file, as byte ranges of the unpacked tar."""
    by_part: dict[str, list[_Row]] = {part: [] for part in splits.PARTS}
    with containers.local(files, _DMLAB).open("rb") as tar:
        for member in containers.members(files, _DMLAB):
            match = _DMLAB_FILE.match(PurePosixPath(member.path).name)
            if match is None:
                continue
            try:
                by_part[match[1]] += _examples(tar, member)
            except ValueError as error:
                raise UserError(f"{_DMLAB}: {member.path}: {error}") from error
    if not any(by_part.values()):
        raise UserError(f"{_DMLAB} does not contain files dmlab-<split>.tfrecord-...")
    return {part: _records(rows) for part, rows in by_part.items()}


def _examples(tar: IO[bytes], file: Member) -> Iterator[_Row]:
    """Yield name, label and position in the tar of the image in each record of a TFRecord file."""
    for start, length in tfrecords(tar, file.offset, file.offset + file.length):
        if length > containers.MAX_IMAGE_BYTES:
            raise UserError(f"has a record of {length:,} bytes")
        tar.seek(start)
        data = tar.read(length)
        features = parse_example(data)
        names, labels = features.get("filename", []), features.get("label", [])
        if len(names) != 1 or len(labels) != 1 or not isinstance(names[0], bytes):
            raise UserError(f"has a record with {', '.join(sorted(features))}; expected one filename, label and image")
        offset, size = feature_range(data, "image")
        key = names[0].decode()
        yield key, int(labels[0]), Member(key, file.file, start + offset, size, "stored", size)


def _records(rows: Sequence[_Row]) -> Records:
    return Records([key for key, _, _ in rows], [label for _, label, _ in rows], [member for *_, member in rows])
