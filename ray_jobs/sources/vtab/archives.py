"""What the modules of data sets share: members by their names, lists of lines, images that OpenCV changes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files
from vit_model.errors import UserError
from vit_model.preprocessing import FORMATS, MAX_PIXELS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ray_jobs.sources.archives.containers import Member


def by_path(files: Files, file: str) -> dict[str, Member]:
    """The members of an archive by their path."""
    return {member.path: member for member in containers.members(files, file)}


def lines_of(files: Files, file: str, members: dict[str, Member], path: str) -> list[str]:
    """The lines of a small text file in an archive that are not empty. Raises UserError when it is not there."""
    return lines(content(files, file, members, path), path)


def content(files: Files, file: str, members: dict[str, Member], path: str, limit: int = 2**26) -> bytes:
    """A small file in an archive. Raises UserError when it is not there."""
    if path not in members:
        raise UserError(f"{file} has no {path}: is it the archive that its authors ship?")
    return containers.read_member(files, members[path], limit)


def lines(data: bytes, name: str) -> list[str]:
    """The lines of a text that are not empty, without blanks around them. Raises UserError for what is no text."""
    return [line.strip() for line in text(data, name).splitlines() if line.strip()]


def text(data: bytes, name: str) -> str:
    """The text in a file's bytes. Raises UserError for what is no text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is no text: {error}") from error


def decode_bgr(image: bytes, *, upright: bool = False) -> NDArray[np.uint8]:
    """An image file as OpenCV decodes it, [h, w, 3], BGR, the alpha dropped; of a GIF the first frame.

    upright: turned as its EXIF data says. A JPEG with damage inside is decoded. Raises UserError for what is no image.
    """
    import cv2
    from PIL import Image

    try:
        # The header alone: OpenCV would take the memory for whatever size it claims.
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            small = opened.width * opened.height <= MAX_PIXELS
            if small and opened.format == "GIF":  # which only some versions of OpenCV read
                return np.ascontiguousarray(np.asarray(opened.convert("RGB"))[..., ::-1])
    # Pillow's readers raise whatever their parsing trips over, see ray_jobs.data.images
    except Exception as error:
        raise UserError(f"not an image: {error}") from error
    if not small:
        raise UserError("too many pixels (bomb)")
    cv2.setNumThreads(1)  # a task has one core
    flags = cv2.IMREAD_COLOR | (cv2.IMREAD_ANYDEPTH if upright else cv2.IMREAD_IGNORE_ORIENTATION)
    try:
        found: Any = cv2.imdecode(np.frombuffer(image, np.uint8), flags)
    except cv2.error as error:
        raise UserError(f"OpenCV can't decode it: {error}") from error
    if found is None:
        raise UserError("OpenCV can't decode it")
    return cast("NDArray[np.uint8]", found)


def encode_jpeg(bgr: NDArray[np.uint8], quality: int) -> bytes:
    """A JPEG file of pixels [h, w, 3], BGR."""
    import cv2

    _, encoded = cv2.imencode(".jpg", bgr, [int(cv2.IMWRITE_JPEG_QUALITY), quality])
    return encoded.tobytes()


def numbered(names: dict[int, str], file: str) -> Sequence[str]:
    """The names of classes 0, 1, ... without a gap. Raises UserError for a class that has none."""
    if lost := sorted(set(range(max(names, default=-1) + 1)) - set(names)):
        raise UserError(f"{file} has no image of class {lost[0] + 1}, by which it would have a name")
    return [names[label] for label in range(len(names))]
