"""TFRecord files and the tf.train.Example messages in them, without TensorFlow.

A record is the payload's length (8 bytes, little-endian), a masked CRC32C of these bytes, the payload, and its masked
CRC32C. An Example is a protocol buffer: features (1) { feature (1): map of name (1) to value (2) }, where a value is a
list of bytes (1), floats (2) or int64 (3). The parser works on positions, so that an image is a byte range of its file.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import IO

import crc32c

from vit_model.errors import UserError

_CHUNK = 2**20
_MASK = 0xA282EAD8
Values = list[bytes] | list[int] | list[float]


def tfrecords(file: IO[bytes], start: int = 0, end: int = sys.maxsize) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of the payload of every TFRecord in [start, end) of a file, after verifying its checksums.

    Raises:
        UserError: the file is damaged or truncated; the message has the record's number.
    """
    number = 0
    while start < end:
        file.seek(start)  # the caller may read the file between records
        header = file.read(12)
        if not header:
            return
        if len(header) < 12:
            raise UserError(f"record {number} is truncated")
        length = int.from_bytes(header[:8], "little")
        if _masked(crc32c.crc32c(header[:8])) != int.from_bytes(header[8:], "little"):
            raise UserError(f"record {number} has a damaged length")
        left, crc = length, 0
        while left and (chunk := file.read(min(_CHUNK, left))):
            left, crc = left - len(chunk), crc32c.crc32c(chunk, crc)
        footer = file.read(4)
        if left or len(footer) < 4 or start + 16 + length > end:
            raise UserError(f"record {number} is truncated")
        if _masked(crc) != int.from_bytes(footer, "little"):
            raise UserError(f"record {number} is damaged: its checksum does not match")
        yield start + 12, length
        start, number = start + 16 + length, number + 1


def parse_example(data: bytes) -> dict[str, Values]:
    """Return the features of a serialised tf.train.Example. Raises UserError if `data` is not one."""
    return {name: _values(data, start, end) for name, (start, end) in _features(data).items()}


def feature_range(data: bytes, name: str) -> tuple[int, int]:
    """Return (offset, length) of the single bytes value of the feature `name` in a serialised tf.train.Example.

    Raises:
        UserError: there is no such feature, or it is not exactly one value of bytes.
    """
    features = _features(data)
    if name not in features:
        raise UserError(f"no feature {name!r}; features: {', '.join(sorted(features)) or 'none'}")
    lists = list(_fields(data, *features[name]))
    values = [part for field, start, end in lists if field == 1 for part in _fields(data, start, end)]
    if [field for field, _, _ in lists] != [1] or [field for field, _, _ in values] != [1]:
        raise UserError(f"feature {name!r} is not one value of bytes")
    _, start, end = values[0]
    return start, end - start


def _features(data: bytes) -> dict[str, tuple[int, int]]:
    """Return (start, end) of the value of each feature."""
    values = {}
    for _, start, end in _fields(data, 0, len(data), wanted=1):
        for _, inner, outer in _fields(data, start, end, wanted=1):
            name, place = "", (outer, outer)
            for field, first, last in _fields(data, inner, outer):
                if field == 1:
                    name = _name(data[first:last])
                elif field == 2:
                    place = first, last
            values[name] = place
    return values


def _name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"damaged example: a feature's name is not UTF-8: {error}") from error


def _values(data: bytes, start: int, end: int) -> Values:
    values: Values = []
    for field, first, last in _fields(data, start, end):
        if field == 1:
            values = [data[begin:stop] for _, begin, stop in _fields(data, first, last, wanted=1)]
        elif field == 2:
            values = _floats(data, first, last)
        elif field == 3:
            values = _integers(data, first, last)
    return values


def _floats(data: bytes, start: int, end: int) -> list[float]:
    """Return floats that are packed into one field, or have a field of four bytes each."""
    floats: list[float] = []
    for _, first, last in _fields(data, start, end, wanted=1):
        if (last - first) % 4:
            raise UserError("damaged example: floats of odd length")
        floats += struct.unpack_from(f"<{(last - first) // 4}f", data, first)
    return floats


def _integers(data: bytes, start: int, end: int) -> list[int]:
    integers = []
    for _, first, last in _fields(data, start, end, wanted=1):
        while first < last:
            value, first = _varint(data, first, last)
            integers.append(value - 2**64 if value >= 2**63 else value)
    return integers


def _fields(data: bytes, start: int, end: int, wanted: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield (number, start, end) of the content of each field of the message at [start, end), or of fields `wanted`."""
    while start < end:
        tag, start = _varint(data, start, end)
        kind = tag & 7
        if kind == 0:
            _, stop = _varint(data, start, end)
        elif kind == 2:
            length, start = _varint(data, start, end)
            stop = start + length
        elif kind in (1, 5):
            stop = start + (8 if kind == 1 else 4)
        else:
            raise UserError(f"not an example: a field of wire type {kind}")
        if stop > end:
            raise UserError("truncated or damaged example")
        if wanted in (None, tag >> 3):
            yield tag >> 3, start, stop
        start = stop


def _varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Return (value, the position after it)."""
    value = 0
    for place in range(start, min(end, start + 10)):
        value |= (data[place] & 0x7F) << 7 * (place - start)
        if data[place] < 0x80:
            return value & (2**64 - 1), place + 1
    raise UserError("truncated or damaged example")


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
