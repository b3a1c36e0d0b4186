"""Shared by the modules of datasets: members by name, lines of text files, images decoded and encoded by OpenCV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from ray_jobs.data.images import translate_errors
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Member
from ray_jobs.sources.vtab.splits import Records
from vit_model.errors import UserError
from vit_model.preprocessing import MAX_PIXELS, open_image


def by_path(files: Files, file: str) -> dict[str, Member]:
    """Return the members of an archive by their paths."""
    return {member.path: member for member in containers.members(files, file)}


def by_folder(
    lists: Mapping[str, Sequence[str]], prefix: str, members: Mapping[str, Member]
) -> tuple[list[str], dict[str, Records]]:
    """Return the classes, which are the folders of the listed images, and the records of each list."""
    folder = {key: key.rpartition("/")[0] for keys in lists.values() for key in keys}
    names = sorted(set(folder.values()))
    label = {name: number for number, name in enumerate(names)}
    return names, {
        part: Records(keys, [label[folder[key]] for key in keys], [members.get(f"{prefix}{key}") for key in keys])
        for part, keys in lists.items()
    }


def lines_of(files: Files, file: str, members: dict[str, Member], path: str) -> list[str]:
    """Return the lines, except empty ones, of a small text file in an archive. Raises UserError if it is missing."""
    return containers.lines(content(files, file, members, path), path)


def content(files: Files, file: str, members: dict[str, Member], path: str) -> bytes:
    """Return the content of a small file in an archive. Raises UserError if it is missing."""
    if path not in members:
        raise UserError(f"{file} does not contain {path}. Use the authors' archive")
    return containers.read_member(files, members[path], 2**26)


def decode_bgr(image: bytes, *, upright: bool = False) -> NDArray[np.uint8]:
    """Decode an image file with OpenCV: [h, w, 3], BGR, without alpha; of a GIF the first frame.

    A damaged JPEG is decoded as far as possible. With `upright`, the image is rotated by its EXIF orientation.

    Raises:
        UserError: the reason (stored in the quarantine) why it cannot be decoded.
    """
    # Pillow reads only the header here; OpenCV would allocate the memory for any size that it claims.
    with translate_errors(), open_image(image) as opened:
        if opened.width * opened.height > MAX_PIXELS:
            raise UserError("too many pixels (bomb)")
        if opened.format == "GIF":  # which only some versions of OpenCV read
            return np.ascontiguousarray(np.asarray(opened.convert("RGB"))[..., ::-1])
    cv2.setNumThreads(1)  # a task has one core
    flags = cv2.IMREAD_COLOR | (cv2.IMREAD_ANYDEPTH if upright else cv2.IMREAD_IGNORE_ORIENTATION)
    try:
        pixels: Any = cv2.imdecode(np.frombuffer(image, np.uint8), flags)
    except cv2.error as error:
        raise UserError(f"OpenCV can't decode it: {error}") from error
    if pixels is None:
        raise UserError("OpenCV can't decode it")
    return cast("NDArray[np.uint8]", pixels)


def encode_jpeg(bgr: NDArray[np.uint8], quality: int) -> bytes:
    """Encode pixels [h, w, 3], BGR, as a JPEG file."""
    _, encoded = cv2.imencode(".jpg", bgr, [int(cv2.IMWRITE_JPEG_QUALITY), quality])
    return encoded.tobytes()


def numbered(names: dict[int, str], file: str) -> Sequence[str]:
    """Return the names of classes 0, 1, ... in order. Raises UserError for a class without a name."""
    if missing := sorted(set(range(max(names, default=-1) + 1)) - set(names)):
        raise UserError(f"{file} has no image of class {missing[0] + 1}, so the name of the class is unknown")
    return [names[label] for label in range(len(names))]
