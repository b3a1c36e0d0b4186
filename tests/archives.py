"""Archives and image files for tests, as others make them."""

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np
from PIL import Image


def image(seed: int, form: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (24, 16)) -> bytes:
    """An image file; another seed, another image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, form)
    return file.getvalue()


def tar(members: Mapping[str, bytes], mode: str = "w", form: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar of these files; a name that ends in "/" is a folder."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=form) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def zipped(members: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return file.getvalue()


def rar(members: Mapping[str, bytes]) -> bytes:
    """A RAR 4 with its members stored, which needs no licence to write: a header each, CRC-32 of headers and data."""

    def block(kind: int, flags: int, fields: bytes) -> bytes:
        rest = struct.pack("<BHH", kind, flags, 7 + len(fields)) + fields
        return struct.pack("<H", zlib.crc32(rest) & 0xFFFF) + rest

    parts = [b"Rar!\x1a\x07\x00", block(0x73, 0, bytes(6))]
    for name, data in members.items():
        encoded = name.encode()
        fields = struct.pack(
            "<IIBIIBBHI", len(data), len(data), 3, zlib.crc32(data), 0, 29, 0x30, len(encoded), 0o100644
        )
        parts += [block(0x74, 0x8000, fields + encoded), data]
    return b"".join([*parts, block(0x7B, 0x4000, b"")])
