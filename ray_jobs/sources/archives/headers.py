"""The headers of tars and zips: `listed` gives the byte range of each file without reading its content.

The standard library parses the headers. This module adds the checks that the library leaves to its callers: damage does
not hide members, offsets only grow, byte ranges are inside the archive and do not overlap, paths stay inside.
"""

from __future__ import annotations

import re
import stat
import struct
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

from pipelines.file_names import left_by_a_system
from ray_jobs.sources.archives.blobs import Blob, Reader
from ray_jobs.sources.archives.entries import Member
from vit_model.errors import UserError

MAX_MEMBERS = 2**22  # of one archive, half a KiB of memory each; all of ImageNet-1k has 1.3 million
MAX_PATH = 1024  # characters
MAX_DEFLATE_RATIO = 1032  # the most that deflate can reach
_MAX_TAR_HEADER, _MAX_ZIP_DIRECTORY = 2**20, 2**28
# of a zip's member: magic, length of its name, length of its extra field
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_CODECS = {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflate"}
_METHODS = {9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstd", 95: "xz", 98: "ppmd", 99: "AES encryption"}
_SHOWN = 200
_PLAIN = re.compile(  # the header of a regular file in a tar, without a prefix
    rb"(.{100})[0-7]{7}\0[0-7]{7}[\0 ][0-7]{7}[\0 ]([0-7]{11})[\0 ][0-7]{11}[\0 ]"  # name, owner, size, time
    rb"([0-7]{6})\0 0\0{100}ustar(?:\x0000|  \0).{80}\0{167}",  # checksum, kind, link, form, owner's names
    re.DOTALL,
)
THREADS = 16  # requests to S3 in flight


class Refused(NamedTuple):
    """A member that cannot be used, with the reason; its path is escaped for display."""

    path: str
    reason: str


def listed(blob: Blob) -> Iterator[Member | Refused]:
    """Yield the members of a tar or zip in order, each path once, without folders and hidden files.

    A member's `file` is "", and its offset is in the blob.

    Raises:
        UserError: it is not a tar or zip, or is truncated or damaged.
    """
    seen: set[str] = set()
    zipped = blob.read(0, min(4, blob.size)) in (b"PK\3\4", b"PK\5\6")
    for number, member in enumerate(_in_zip(blob) if zipped else _in_tar(blob)):
        if number >= MAX_MEMBERS:
            raise UserError(f"{blob.name} has more than {MAX_MEMBERS:,} members")
        path = clean_path(member.path)
        if not path:
            continue
        if isinstance(member, Member) and (reason := _unfit(path, seen)):
            member = Refused(path, reason)
        if isinstance(member, Refused):
            yield Refused(path.encode("unicode_escape").decode()[:_SHOWN], member.reason)
        else:
            seen.add(path)
            yield member if path == member.path else member._replace(path=path)


def clean_path(path: str) -> str:
    """Return a member's path without "./"; empty for files that an operating system left behind."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if any(left_by_a_system(part) and part != ".." for part in parts):
        return ""
    return ("/" if path.startswith("/") else "") + "/".join(parts)


def _unfit(path: str, seen: set[str]) -> str | None:
    """Return why a member cannot be used because of its path; None if it can."""
    if path.startswith("/") or ".." in path.split("/"):
        return "its path leads outside"
    # surrogates (Cs) stand for bytes that are not UTF-8
    is_plain = path.isprintable() or not any(unicodedata.category(letter) in ("Cc", "Cs") for letter in path)
    if len(path) > MAX_PATH or not is_plain:
        return "its name is not UTF-8, or has control characters, or is too long"
    return "its path comes twice" if path in seen else None


# ------------------------------------------------------------------------------------------------- tar


def _in_tar(blob: Blob) -> Iterator[Member | Refused]:
    """Yield the members of an uncompressed tar (v7, ustar, GNU, pax)."""
    reader = Reader(blob, _MAX_TAR_HEADER)
    start = reader.read(tarfile.BLOCKSIZE)
    if not any(start):
        if len(start) < tarfile.BLOCKSIZE:
            raise UserError(f"{blob.name} is empty or truncated")
        return
    try:
        tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise UserError(_unknown(blob, start)) from error
    reader.seek(0)
    try:
        with tarfile.open(fileobj=reader, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            before = -1
            while (info := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                if tar.offset <= before or info.size < 0:
                    raise UserError("its headers lead backwards")
                before = tar.offset
                if member := _tar_member(blob, info):
                    yield member
                if not tar.pax_headers:  # which would apply to all following members
                    for plain in _plain_members(blob, reader, tar.offset):
                        yield plain
                        tar.offset = _after(plain)
            # the library also stops silently at a header that it cannot read
            reader.seek(tar.offset)
            if any(rest := reader.read(tarfile.BLOCKSIZE)) or 0 < len(rest) < tarfile.BLOCKSIZE:
                raise UserError(f"no header at byte {tar.offset:,}")
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, struct.error) as error:
        raise UserError(f"{blob.name} is truncated or damaged: {error}") from error


def _plain_members(blob: Blob, reader: Reader, offset: int) -> Iterator[Member]:
    """Yield the regular files from `offset` up to the first member with another kind of header.

    Their headers are plain ones of a POSIX or GNU tar, with an ASCII name and the right checksum. The library finds
    the same files, but takes three times as long.
    """
    while True:
        reader.seek(offset)
        header = reader.read(tarfile.BLOCKSIZE)
        if not (plain := _PLAIN.fullmatch(header)):
            return
        name, size, checksum = plain[1].partition(b"\0")[0], int(plain[2], 8), int(plain[3], 8)
        if not name or not name.isascii() or checksum != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            return
        member = Member(name.decode(), "", offset + tarfile.BLOCKSIZE, size, "stored", size)
        if member.offset + size > blob.size:
            return
        yield member
        offset = _after(member)


def _after(member: Member) -> int:
    """Return where the header after a member of a tar begins."""
    return member.offset + -(-member.length // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _tar_member(blob: Blob, info: tarfile.TarInfo) -> Member | Refused | None:
    if info.isdir():
        return None
    if info.issparse():
        return Refused(info.name, "it is a sparse file")
    if not info.isreg():
        return Refused(info.name, "it is a link" if info.issym() or info.islnk() else "it is no regular file")
    if info.offset_data + info.size > blob.size:
        raise UserError(f"{info.name!r} ends at byte {info.offset_data + info.size:,}, but the file at {blob.size:,}")
    return Member(info.name, "", info.offset_data, info.size, "stored", info.size)


def _unknown(blob: Blob, start: bytes) -> str:
    if start[:4] == b"RE~^":
        return f"{blob.name} was packed by RAR 1.4 or older, which cannot be read: unpack it and pack it as zip or tar"
    if start[:6] == b"7z\xbc\xaf\x27\x1c":
        return f"{blob.name} is a 7z archive, which cannot be read: unpack it and pack it as zip or tar"
    return f"{blob.name} is not a tar, zip or RAR: it begins with {start[:8].hex(' ') or 'nothing'}"


# ------------------------------------------------------------------------------------------------- zip


def _in_zip(blob: Blob) -> Iterator[Member | Refused]:
    """Yield the members of a zip or ZIP64, from its directory at the end and the header before each member."""
    try:
        with zipfile.ZipFile(Reader(blob, _MAX_ZIP_DIRECTORY)) as archive:
            directory = archive.infolist()
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        ValueError,
        EOFError,
        struct.error,
        OverflowError,
    ) as error:
        hint = "; is its last part missing?" if len(blob.extents) > 1 else ""
        raise UserError(f"{blob.name} is truncated or damaged: {error}{hint}") from error
    files = [info for info in directory if not info.filename.endswith("/")]
    with ThreadPoolExecutor(THREADS) as threads:
        read = threads.map if blob.remote else map
        starts = list(read(lambda info: _start(blob, info), files))
    ranges = sorted((info.header_offset, start + info.compress_size) for info, start in zip(files, starts, strict=True))
    if any(after[0] < before[1] for before, after in pairwise(ranges)):
        raise UserError(f"{blob.name} is damaged: its members overlap")
    yield from map(_zip_member, files, starts)


def _start(blob: Blob, info: zipfile.ZipInfo) -> int:
    """Return where a member's bytes begin."""
    magic, name, extra = _LOCAL_HEADER.unpack(blob.read(info.header_offset, _LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + name + extra
    if magic != b"PK\3\4" or start + info.compress_size > blob.size:
        raise UserError(f"{blob.name} is truncated or damaged: {info.filename!r} is not where its directory says")
    return start


def _zip_member(info: zipfile.ZipInfo, start: int) -> Member | Refused:
    path, method = info.filename.replace("\\", "/"), info.compress_type
    if info.flag_bits & 1:
        return Refused(path, "it is encrypted")
    if method not in _CODECS:
        name = _METHODS.get(method, f"method {method}")
        return Refused(path, f"it is compressed by {name}: pack it with deflate, or as tar")
    # the upper half of the attributes is the Unix mode with the file's type; 0 if it was not written
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
        return Refused(path, "it is a link, or no regular file")
    length, size = info.compress_size, info.file_size
    if size > length * MAX_DEFLATE_RATIO or (method == zipfile.ZIP_STORED and size != length):
        return Refused(path, f"it can't have {size:,} bytes in {length:,}")
    return Member(path, "", start, length, _CODECS[method], size, info.CRC)
