"""Tell from its header whether libjpeg decodes a JPEG to the same pixels as Pillow, which is slower.

A file is a sequence of segments, each with its length, up to the first scan (ITU T.81, Annex B).
"""

from __future__ import annotations

import io
from typing import NamedTuple

import simplejpeg
from PIL import ExifTags, Image

_START = b"\xff\xd8"
_SCAN, _PROGRESSIVE = 0xDA, 0xC2
# Segments that Pillow reads and libjpeg mostly ignores -> the length of a harmless segment (JFIF without a thumbnail,
# Adobe's). Pillow has to read EXIF, ICC profiles, Photoshop's and others, and refuses the file if it cannot.
_APPS = {0xE0: 16, 0xEE: 14} | dict.fromkeys((*range(0xE1, 0xEE), 0xEF), 0)
# sequential and progressive frames, Huffman and quantisation tables, restarts, APPn, comments
_USUAL = frozenset({0xC0, 0xC1, _PROGRESSIVE, 0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})
_CHANNELS = {"Gray": 1, "YCbCr": 3}


class PlainJpeg(NamedTuple):
    """A JPEG of 8 bits per channel, grey or YCbCr, without an orientation to apply."""

    height: int
    width: int
    channels: int
    in_one_scan: bool
    """Whether the first scan has all components of all pixels."""


def plain_jpeg(data: bytes) -> PlainJpeg | None:
    """Return the size and channels of a plain JPEG; None: Pillow has to decode the file.

    Raises what Pillow raises for a damaged header.
    """
    if (first_scan := _first_scan(data)) is None:
        return None
    in_scan, is_progressive, needs_pillow = first_scan
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if space not in _CHANNELS:
        return None
    if needs_pillow:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
                return None
    channels = _CHANNELS[space]
    return PlainJpeg(height, width, channels, in_scan == channels and not is_progressive)


def _first_scan(data: bytes) -> tuple[int, bool, bool] | None:
    """Return (components of the first scan, whether the frame is progressive, whether Pillow must read the header)."""
    if not data.startswith(_START):
        return None
    at, is_progressive, needs_pillow = len(_START), False, False
    while len(data) > at + 4 and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == _SCAN:
            return data[at + 4], is_progressive, needs_pillow
        if marker not in _USUAL:
            return None
        length = int.from_bytes(data[at + 2 : at + 4])
        is_progressive |= marker == _PROGRESSIVE
        needs_pillow |= marker in _APPS and length != _APPS[marker]
        at += 2 + length
    return None
