"""Archives and image files for tests, as others make them."""

import base64
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Container, Mapping

import numpy as np
from PIL import Image


def image(seed: int, form: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (24, 16)) -> bytes:
    """An image file; another seed, another image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, form)
    return file.getvalue()


def png(**chunks: bytes) -> bytes:
    """A PNG of these chunks."""
    parts = {kind.encode(): data for kind, data in chunks.items()}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )


def png_claiming(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return png(IHDR=header, IDAT=zlib.compress(b""), IEND=b"")


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


def rar(
    members: Mapping[str, bytes],
    links: Container[str] = (),
    flags: int = 0,
    own_flags: int = 0,
    version: int = 29,
) -> bytes:
    """A RAR 4 with its members stored, which needs no licence to write: a header each, CRC-32 of headers and data.

    `links` are symbolic links to what their content says; `flags` are the archive's, `own_flags` each member's.
    """
    files = [
        _rar_file(name, data, own_flags, 0o120777 if name in links else 0o100644, version)
        for name, data in members.items()
    ]
    return b"".join([_RAR, _rar_block(0x73, flags, bytes(6)), *files, _rar_block(0x7B, 0x4000, b"")])


def rar_volumes(members: Mapping[str, bytes], length: int, old_names: bool = False) -> list[bytes]:
    """The same cut into volumes of so many bytes of content: x.part1.rar, x.part2.rar, ... or x.rar, x.r00, ..."""
    volumes: list[list[bytes]] = [[]]
    left = length
    for name, data in members.items():
        place = 0
        while place < len(data) or not place:
            if not left:
                volumes.append([])
                left = length
            piece = data[place : place + left]
            before, after = 1 if place else 0, 2 if place + len(piece) < len(data) else 0
            volumes[-1].append(_rar_file(name, data, before | after, piece=piece))
            place, left = place + max(len(piece), 1), left - len(piece)
    return [
        b"".join(
            [
                _RAR,
                _rar_block(0x73, (0x0001 if old_names else 0x0011) | (0x0100 if number == 1 else 0), bytes(6)),
                *files,
                _rar_block(0x7B, 0x4000 | (1 if number < len(volumes) else 0), b""),
            ]
        )
        for number, files in enumerate(volumes, start=1)
    ]


_RAR = b"Rar!\x1a\x07\x00"


def _rar_block(kind: int, flags: int, fields: bytes) -> bytes:
    rest = struct.pack("<BHH", kind, flags, 7 + len(fields)) + fields
    return struct.pack("<H", zlib.crc32(rest) & 0xFFFF) + rest


def _rar_file(
    name: str, data: bytes, flags: int, mode: int = 0o100644, version: int = 29, piece: bytes | None = None
) -> bytes:
    """A member, or a piece of one; the last piece has the checksum of all, the others have their own."""
    content = data if piece is None else piece
    crc = zlib.crc32(content if flags & 2 else data)
    method = 0x30 if version == 29 else 0x33  # what is stored can be read of any version
    encoded = name.encode()
    if max(name) > "\uffff":  # flag 0x200: behind the name it comes again in UTF-16
        letters = name.encode("utf-16-le")
        packed = b"".join(b"\xaa" + letters[place : place + 8] for place in range(0, len(letters), 8))
        encoded, flags = b"x\0\0" + packed, flags | 0x200
    fields = struct.pack("<IIBIIBBHI", len(content), len(data), 3, crc, 0, version, method, len(encoded), mode)
    return _rar_block(0x74, 0x8000 | flags, fields + encoded) + content


# Two of the files that rarfile is tested with (github.com/markokr/rarfile, ISC licence, Copyright Marko Kreen and
# contributors): RAR 2.02 with a comment, and RAR 5 with a file and two hard links to it.
RAR_202_WITH_COMMENT = base64.b64decode(
    "UmFyIRoHAL0BcwIAMwAAAAAAAAD4BXUAACYACgAUNO5QEABMAAAAAAABCm2gqCufB5X+B6ujga2pgG3PdAiAQgAHAAAABwAAAAC6"
    "fRl6bgNjPRQwCQAgAAAARklMRTEuVFhUIVF1AAAZAAwADzDeWWZpbGUxY29tbWVudGZpbGUxDQpYL3QIgEIABwAAAAcAAAAA48Nf"
    "eHEDYz0UMAkAIAAAAEZJTEUyLlRYVK1kdQAAGQAMAA8wPV5maWxlMmNvbW1lbnRmaWxlMg0K"
)
RAR_5_WITH_HARD_LINKS = base64.b64decode(
    "UmFyIRoHAQDz4YLrCwEFBwAGAQGAgIAAYRz1tiACArcABoAQtIMCnYz0TaLmt8WAAwEKc3Rlc3QxLnR4dMSqNEQ0JPoy60f6xE19"
    "veYFgIIKjMEDKpXKIptQGpPdQPwAQAIA1GAENu0V+bdUgypkTs18H+C32RN0MAIDD4AABoAQtIMCnYz0TQAAAACAAAEKc3Rlc3Qy"
    "LnR4dA4FBAAKc3Rlc3QxLnR4dPHidBEwAgMPgAAGgBC0gwKdjPRNAAAAAIAAAQpzdGVzdDMudHh0DgUEAApzdGVzdDEudHh0HXdW"
    "UQMFBAA="
)
