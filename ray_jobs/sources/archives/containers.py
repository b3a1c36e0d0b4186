"""Files inside of archives: what there is, and the byte range of each; then those ranges are read, and nothing else.

A `file` is a name of `files`, or a chain of names joined by "::", a file inside of an archive:
"caltech-101.zip::caltech-101/101_ObjectCategories.tar.gz". What a file is, is seen from its first bytes, never from its
name. The bytes of a file that begins as gz, bz2 or xz are those of its unpacked content. The first of `train.zip.001`,
`train.zip.002`, ... stands for all of them joined, the first volume of a RAR (`x.part1.rar`, ...) for all volumes.

    members(files, file)            regular files in a tar, zip or RAR
    read(files, entries)            the bytes of each entry
    read_member, read_file          small things, such as lists of labels
    local(files, file)              a path on this machine, for libraries that want one

All of it may come from anybody: nothing is written but into the cache folder under names of our own, a size is
believed only after as many bytes have come, and what can't be right is a UserError that names the file.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from io import BufferedWriter
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow as pa

from pipelines.file_names import parts_of
from ray_jobs.sources.archives.blobs import (
    FREE_BYTES,
    MAGIC_BYTES,
    MAX_RATIO,
    Blob,
    decompressed,
    kept,
    local_path,
    open_blob,
    unpacker,
)
from ray_jobs.sources.archives.entries import Bad, Files
from ray_jobs.sources.archives.headers import THREADS, Found, Refused, listed
from vit_model.errors import UserError

MAX_IMAGE_BYTES = 2**28  # of one entry, unpacked
SMALL = 64 * 2**20
MAX_DEPTH = 8  # names of a chain
_CHAIN = "::"
_CHUNK = 2**20
_NOT_ITS_CRC = "its bytes are not those that its archive has the checksum of"
_REMEMBERED = 1024  # files of one call of `read`
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Member(NamedTuple):
    """A regular file in an archive, and where its bytes are, as in ENTRIES."""

    path: str
    """In the archive, with "/"."""
    file: str
    offset: int
    length: int
    codec: str
    """"stored" or "deflate"."""
    size: int
    """Of its content, as the archive says."""
    crc: int | None = None
    """CRC-32 of its content, where the archive has one."""


class Contents(NamedTuple):
    """What an archive holds, in its order; `refused`: links, paths that lead outside, and what can't be read."""

    members: list[Member]
    refused: list[Bad]


def contents(files: Files, file: str) -> Contents:
    """What is in an archive of files that anybody may have made: what is refused is listed, for the quarantine.

    Hidden files and macOS's shadows (`.x`, `__MACOSX/`) are left out.

    Raises:
        UserError: it is no archive, truncated or damaged.
    """
    place = _resolve(files, file)
    found, refused = _found(place.blob)
    inside = [
        Member(one.path, place.file, place.offset + one.offset, one.length, one.codec, one.size, one.crc)
        for one in found
    ]
    return Contents(inside, [Bad(f"{file}/{one.path}", one.reason, file) for one in refused])


def members(files: Files, file: str) -> list[Member]:
    """The regular files in an archive, in its order; one that has anything else in it but folders is refused.

    Raises:
        UserError: it is no archive, truncated or damaged, or holds links, paths that lead outside, and the like.
    """
    found, refused = contents(files, file)
    if refused:
        raise UserError(f"{refused[0].key} can't be used: {refused[0].reason}")
    return found


def each_contents(files: Files, names: Iterable[str]) -> Iterator[Contents]:
    """`contents` of each of many archives, in their order, several at a time where they are on S3."""
    return _in_flight(files, lambda name: contents(files, name), names)


def read(files: Files, entries: pa.Table) -> Iterator[bytes | UserError]:
    """The bytes of each entry, in their order, or why they can't be had."""
    blobs: dict[str, Blob] = {}

    def one(row: tuple[str, int, int, str, int | None]) -> bytes | UserError:
        file, offset, length, codec, crc = row
        if not offset and (data := _object(files, file, length)) is not None:
            return data
        try:
            if file not in blobs:
                if len(blobs) >= _REMEMBERED:
                    blobs.clear()
                blobs[file] = _resolve(files, file).blob
            return _checked(_range(blobs[file], offset, length, codec, MAX_IMAGE_BYTES), crc)
        except FileNotFoundError as error:
            return UserError(f"{error.filename} is gone")
        except UserError as error:
            return error

    columns = (entries[name].to_pylist() for name in ("file", "offset", "length", "codec", "crc"))
    return _in_flight(files, one, zip(*columns, strict=True))


def read_member(files: Files, member: Member, limit: int = SMALL) -> bytes:
    """A member's content. Raises UserError: larger than `limit`, truncated or damaged."""
    blob = _resolve(files, member.file).blob
    blob = blob._replace(name=f"{blob.name}: {member.path}")
    data = _range(blob, member.offset, member.length, member.codec, limit)
    if len(data) != member.size:
        raise UserError(f"{blob.name} has {len(data):,} bytes, its archive says {member.size:,}")
    return _checked(data, member.crc, f"{blob.name}: ")


def read_file(files: Files, file: str, limit: int = SMALL) -> bytes:
    """A file's content. Raises UserError: larger than `limit`, truncated or damaged."""
    blob = _resolve(files, file).blob
    return _range(blob, 0, blob.size, "stored", limit)


def outermost(files: Container[str], file: str) -> str:
    """The name in `files` that a chain starts with, which may contain "::"; else everything before the first "::"."""
    names = file.split(_CHAIN)
    chains = (_CHAIN.join(names[:number]) for number in range(len(names), 0, -1))
    return next((chain for chain in chains if chain in files), names[0])


def local(files: Files, file: str) -> Path:
    """A path on this machine with the file's content, to be read only; what lies elsewhere or packed is kept there.

    Raises:
        UserError: truncated or damaged.
    """
    return local_path(_resolve(files, file).blob)


# ------------------------------------------------------------------------------------------------- where bytes lie


class _Place(NamedTuple):
    """A file's content: `blob`, which lies at `offset` of the content of the file `file`."""

    file: str
    offset: int
    blob: Blob


def _resolve(files: Files, file: str) -> _Place:
    """Raises UserError: there is no such file, or what it is in is truncated or damaged."""
    first = outermost(files, file)
    inner = file.removeprefix(first).split(_CHAIN)[1:]
    if len(inner) >= MAX_DEPTH:
        raise UserError(f"{file!r}: {len(inner)} archives in each other are too many")
    place = _Place(first, 0, decompressed(open_blob(_locations(files, first))))
    chain = first
    for path in inner:
        chain += f"{_CHAIN}{path}"
        if (found := _by_path(place.blob).get(path)) is None:
            raise UserError(f"{place.blob.name} has no file {path!r} in it")
        name = f"{place.blob.name}: {path}"
        blob = _content(place.blob, found)._replace(name=name)
        unpacked = decompressed(blob)
        stays = found.codec == "stored" and unpacked is blob
        place = _Place(place.file, place.offset + found.offset, blob) if stays else _Place(chain, 0, unpacked)
    return place


def _locations(files: Files, name: str) -> list[str]:
    """Where a file lies; several places where it is the first of several parts."""
    if name not in files:
        raise UserError(f"there is no file {name!r} among {', '.join(sorted(files)[:5]) or 'none'}")
    found = parts_of(name, files)
    # the names of a cut file's pieces end in numbers; for a RAR, its library finds the next volume
    stem, dot, digits = name.rpartition(".")
    if len(found) > 1 and digits.isdecimal():
        for number, part in enumerate(found, start=1):
            if part != (expected := f"{stem}{dot}{number:0{len(digits)}d}"):
                raise UserError(f"{files[name]}: its part {expected} is missing")
    return [files[part] for part in found]


@lru_cache(maxsize=4)  # of archives in archives the outer one is asked for each inner one
def _found(blob: Blob) -> tuple[list[Found], list[Refused]]:
    found: list[Found] = []
    refused: list[Refused] = []
    for one in listed(blob):
        found.append(one) if isinstance(one, Found) else refused.append(one)
    return found, refused


@lru_cache(maxsize=4)
def _by_path(blob: Blob) -> dict[str, Found]:
    return {one.path: one for one in _found(blob)[0]}


# ------------------------------------------------------------------------------------------------- bytes


def _content(blob: Blob, found: Found) -> Blob:
    """A member as a blob: a range of the archive, or what was unpacked from it."""
    extents = blob.slice(found.offset, found.length)
    if found.codec == "stored":
        return Blob(blob.name, extents)
    packed = Blob(f"{blob.name}: {found.path}", extents)
    if found.size > max(FREE_BYTES, MAX_RATIO * found.length):
        raise UserError(f"{packed.name} unpacks to {found.size:,} bytes (a bomb)")

    def write(file: BufferedWriter) -> None:
        written, crc = 0, 0
        for chunk in _inflated(packed):
            written, crc = written + len(chunk), zlib.crc32(chunk, crc)
            if written > found.size:
                break
            file.write(chunk)
        if written != found.size:
            raise UserError(f"{packed.name} is damaged: its archive says that it has {found.size:,} bytes")
        if crc != found.crc:
            raise UserError(f"{packed.name} is damaged: {_NOT_ITS_CRC}")

    return kept(packed.name, extents, "deflate", write)


def _inflated(blob: Blob) -> Iterator[bytes]:
    """The content of a member that is packed with deflate, in chunks."""
    stream, place = zlib.decompressobj(-zlib.MAX_WBITS), 0
    try:
        while not stream.eof:
            packed = stream.unconsumed_tail
            if not packed:
                packed = blob.read(place, min(_CHUNK, blob.size - place))
                place += len(packed)
            chunk = stream.decompress(packed, _CHUNK)
            if not chunk and not packed:
                raise UserError(f"{blob.name} is truncated")
            yield chunk
    except zlib.error as error:
        raise UserError(f"{blob.name} is damaged: {error}") from error


def _range(blob: Blob, offset: int, length: int, codec: str, limit: int) -> bytes:
    """The content of a range of a file."""
    if length > limit:
        raise UserError(f"{blob.name} has {length:,} bytes at {offset:,}, more than {limit:,}")
    if codec == "stored":
        return blob.read(offset, length)
    data = bytearray()
    for chunk in _inflated(Blob(blob.name, blob.slice(offset, length))):
        data += chunk
        if len(data) > limit:
            raise UserError(f"{blob.name} has more than {limit:,} bytes at {offset:,} (a bomb)")
    return bytes(data)


def _checked(data: bytes, crc: int | None, whose: str = "") -> bytes:
    """Raise UserError where the content is not the one that the archive has the CRC-32 of."""
    if crc is not None and zlib.crc32(data) != crc:
        raise UserError(f"{whose}{_NOT_ITS_CRC}")
    return data


def _object(files: Files, file: str, length: int) -> bytes | None:
    """A whole object on S3 in one request; None where `file` is something else, or is to be unpacked first."""
    location = files.get(file, "")
    if (
        not location.startswith("s3://")
        or not 0 < length <= MAX_IMAGE_BYTES
        or len(parts_of(file, files)) > 1
    ):
        return None
    from pipelines.files import s3  # boto3 only for what lies on S3

    data = s3.read_range(location, 0, length)
    return data if len(data) == length and unpacker(data[:MAGIC_BYTES]) is None else None


def _in_flight(files: Files, function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
    """function(item) of each, in order; where files are on S3 some are asked for before their turn."""
    if not any(location.startswith("s3://") for location in files.values()):
        yield from map(function, items)
        return
    left = iter(items)
    with ThreadPoolExecutor(THREADS) as threads:
        waiting: deque[Future[_Out]] = deque()
        waiting.extend(threads.submit(function, item) for item in islice(left, 2 * THREADS))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(threads.submit(function, item) for item in islice(left, 1))
