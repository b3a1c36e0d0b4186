"""CIFAR-10 and CIFAR-100 as their authors ship them, python or binary version.

In: the archive, or the files that were in it. Out: images [32, 32, 3] with fine labels; keys are running numbers over
the files in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.spec import CIFAR_FILES, CifarSource
from ray_jobs.data.images import content_id
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources import hash_fraction
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.arrays import unpickle_arrays
from ray_jobs.sources.archives.entries import Files, Listing, table
from vit_model.errors import UserError

if TYPE_CHECKING:
    from ray_jobs.sources.archives.containers import Member

DEV_FRACTION = 1 / 12
PIXELS = 3 * 32 * 32
MAX_BYTES = 2**28  # of one file, unpacked; CIFAR-100's train has 155 MB


class Images(NamedTuple):
    """`planes` [n, 3072], uint8: red, green, blue, each row by row; `labels` [n]; the first `num_train` are train's."""

    class_names: tuple[str, ...]
    planes: NDArray[np.uint8]
    labels: NDArray[np.int64]
    num_train: int


def _content(planes: NDArray[np.uint8]) -> str:
    return content_id(sha256(as_image(planes).tobytes()).digest())


def listing(source: CifarSource, files: Files) -> Listing:
    """All images; a hash of the pixels draws dev from train, so that copies of one image stay together."""
    found = _read(source, tuple(sorted(files.items())))
    entries = []
    for row, (planes, label) in enumerate(zip(found.planes, found.labels.tolist(), strict=True)):
        part, number = ("train", row) if row < found.num_train else ("test", row - found.num_train)
        dev = part == "train" and hash_fraction("vitflow cifar", _content(planes))
        split = "dev" if part == "train" and dev < DEV_FRACTION else part
        entries.append(
            {"key": f"{part}-{number:05d}", "label": label, "split": split}
            | {"file": "", "offset": row, "length": PIXELS, "codec": "row"}
        )
    return Listing(found.class_names, table(entries), ImageSize(height=32, width=32, channels=3))


def rows(source: CifarSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Images [32, 32, 3]."""
    planes = _read(source, tuple(sorted(files.items()))).planes
    yield from (as_image(planes[number]) for number in numbers)


def as_image(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[3072] of planes as an image [32, 32, 3]."""
    return planes.reshape(3, 32, 32).transpose(1, 2, 0)


@lru_cache(maxsize=1)  # a task reads several shards of one source
def _read(source: CifarSource, located: tuple[tuple[str, str], ...]) -> Images:
    files = dict(located)
    for version in ("binary", "python"):
        _, names = CIFAR_FILES[source.classes, version]
        if all(name in files for name in names):
            return read(source.classes, version, partial(containers.read_file, files, limit=MAX_BYTES))
    [archive] = files
    return read_archive(files, archive, source.classes)[0]


def read_archive(files: Files, archive: str, classes: int) -> tuple[Images, str]:
    """The images of an authors' archive, and whether it is their "binary" or "python" version. Raises UserError."""
    members = {member.path: member for member in containers.members(files, archive)}
    for version in ("binary", "python"):
        folder, names = CIFAR_FILES[classes, version]
        found = {name: members[path] for name in names if (path := f"{folder}/{name}") in members}
        if len(found) == len(names):
            return read(classes, version, partial(_member, files, found)), version
    raise UserError(
        f"{archive} has not the files of CIFAR-{classes}: is it the archive that its authors ship?"
    )


def _member(files: Files, found: Mapping[str, Member], name: str) -> bytes:
    return containers.read_member(files, found[name], MAX_BYTES)


def read(classes: int, version: str, content: Callable[[str], bytes]) -> Images:
    """The images of "binary" or "python" files, of which `content` gives the bytes by name. Raises UserError."""
    _, (meta, *train, test) = CIFAR_FILES[classes, version]
    key = "label_names" if classes == 10 else "fine_label_names"
    class_names = _text(content(meta), meta) if version == "binary" else _texts(content(meta), meta, key)
    if len(class_names) != classes:
        raise UserError(f"{meta} has {len(class_names)} names, CIFAR-{classes} has {classes} classes")
    parts = [
        _records(content(name), name, classes)
        if version == "binary"
        else _batch(content(name), name, classes)
        for name in (*train, test)
    ]
    labels = np.concatenate([own for _, own in parts])
    if labels.min() < 0 or labels.max() >= classes:
        raise UserError(f"labels are from {labels.min()} to {labels.max()}, not 0 to {classes - 1}")
    planes = np.concatenate([own for own, _ in parts])
    return Images(class_names, planes, labels, len(planes) - len(parts[-1][0]))


_Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def _records(data: bytes, name: str, classes: int) -> _Part:
    """One label byte (of CIFAR-100 two, of which the second is the fine one) and the pixels, over and over."""
    width = PIXELS + (1 if classes == 10 else 2)
    if not data or len(data) % width:
        raise UserError(f"{name} has {len(data):,} bytes, which are no records of {width}")
    records = np.frombuffer(data, np.uint8).reshape(-1, width)
    return records[:, -PIXELS:], records[:, -PIXELS - 1].astype(np.int64)


def _batch(data: bytes, name: str, classes: int) -> _Part:
    batch = _pickled(data, name)
    planes, labels = batch.get("data"), batch.get("labels" if classes == 10 else "fine_labels")
    if not isinstance(planes, np.ndarray) or planes.dtype != np.uint8 or planes.shape[1:] != (PIXELS,):
        raise UserError(f"{name} has no data of uint8 [n, {PIXELS}]")
    if not isinstance(labels, list) or not len(labels) == len(planes) > 0:
        raise UserError(f"{name} has not as many labels as images")
    if not all(type(label) is int and 0 <= label < classes for label in labels):
        raise UserError(f"{name} has labels that are not from 0 to {classes - 1}")
    return planes, np.array(labels, np.int64)


def _pickled(data: bytes, name: str) -> dict[object, object]:
    try:
        found = unpickle_arrays(data)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{name} is not a pickled dict")
    return found


def _texts(data: bytes, name: str, key: str) -> tuple[str, ...]:
    found = _pickled(data, name).get(key)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise UserError(f"{name} has no list {key}")
    return tuple(found)


def _text(data: bytes, name: str) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in data.decode().splitlines() if line.strip())
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is no text: {error}") from error
