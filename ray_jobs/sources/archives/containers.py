"""Files in archives: list the byte range of each file, then read only these ranges.

A `file` is a name in `files`, or a chain of names joined by "::" for a file in an archive:
"caltech-101.zip::caltech-101/101_ObjectCategories.tar.gz". The format of a file is detected from its first bytes, never
from its name. A file in gz, bz2 or xz is read as its unpacked content. The first of `train.zip.001`, `train.zip.002`,
... stands for all parts joined, the first volume of a RAR (`x.part1.rar`, ...) for all volumes.

    members(files, file)            regular files in a tar, zip or RAR
    read(files, entries)            the bytes of each entry
    read_member, read_file          small files, such as lists of labels
    local(files, file)              a path on this machine, for libraries that need one

Archives are untrusted. Files are only written into the cache folder, under names that do not come from the archive; a
size is trusted only after that many bytes were read; and inconsistencies raise a UserError that names the file.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from io import BufferedWriter
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow as pa

from pipelines.file_names import parts_of
from pipelines.files import s3
from ray_jobs.sources.archives.blobs import (
    FREE_BYTES,
    MAGIC_BYTES,
    MAX_RATIO,
    Blob,
    cached,
    decompressed,
    local_path,
    open_blob,
    unpacker,
)
from ray_jobs.sources.archives.entries import Files, Member, Unusable
from ray_jobs.sources.archives.headers import THREADS, Refused, listed
from vit_model.errors import UserError

MAX_IMAGE_BYTES = 2**28  # of one entry, unpacked
SMALL = 64 * 2**20
MAX_DEPTH = 8  # names in a chain
_CHAIN = "::"
_CHUNK = 2**20
_NOT_ITS_CRC = "its bytes are not those that its archive has the checksum of"
_REMEMBERED = 1024  # resolved files per call of `read`
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Contents(NamedTuple):
    """The content of an archive, in its order. `refused`: links, paths that lead outside, and unreadable members."""

    members: list[Member]
    refused: list[Unusable]


def contents(files: Files, file: str) -> Contents:
    """List an untrusted archive: its regular files, and the refused members, for the quarantine.

    Hidden files and macOS's resource forks (`.x`, `__MACOSX/`) are left out.

    Raises:
        UserError: it is not an archive, or is truncated or damaged.
    """
    place = _resolve(files, file)
    if place.crc is not None and not place.blob.read(0, min(4, place.blob.size)).startswith(b"PK"):
        _check_crc(place.blob, place.crc)  # a zip has the checksum of each member, a tar has none
    regular, refused = _listed(place.blob)
    inside = [member._replace(file=place.file, offset=place.offset + member.offset) for member in regular]
    return Contents(inside, [Unusable(f"{file}/{member.path}", member.reason, file) for member in refused])


def members(files: Files, file: str) -> list[Member]:
    """List the regular files in an archive, in its order; refuse an archive with anything but files and folders.

    Raises:
        UserError: it is not an archive, is truncated or damaged, or contains links, paths that lead outside, etc.
    """
    regular, refused = contents(files, file)
    if refused:
        raise UserError(f"{refused[0].key} cannot be used: {refused[0].reason}")
    return regular


def each_contents(files: Files, names: Iterable[str]) -> Iterator[Contents]:
    """Yield the `contents` of each archive, in order; on S3 several archives are read in parallel."""
    return _in_flight(files, lambda name: contents(files, name), names)


def read(files: Files, entries: pa.Table) -> Iterator[bytes | UserError]:
    """Yield the bytes of each entry, in order, or the reason why they cannot be read."""
    blobs: dict[str, Blob] = {}

    def read_entry(row: tuple[str, int, int, str, int | None]) -> bytes | UserError:
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
    return _in_flight(files, read_entry, zip(*columns, strict=True))


def read_member(files: Files, member: Member, limit: int = SMALL) -> bytes:
    """Return a member's content. Raises UserError if it is larger than `limit`, truncated or damaged."""
    blob = _resolve(files, member.file).blob
    blob = blob._replace(name=f"{blob.name}: {member.path}")
    data = _range(blob, member.offset, member.length, member.codec, limit)
    if len(data) != member.size:
        raise UserError(f"{blob.name} has {len(data):,} bytes, but its archive says {member.size:,}")
    return _checked(data, member.crc, f"{blob.name}: ")


def read_file(files: Files, file: str, limit: int = SMALL) -> bytes:
    """Return a file's content. Raises UserError if it is larger than `limit`, truncated or damaged."""
    _, _, blob, crc = _resolve(files, file)
    return _checked(_range(blob, 0, blob.size, "stored", limit), crc, f"{blob.name}: ")


def text(data: bytes, name: str) -> str:
    """Decode a file's bytes as text. Raises UserError if the data is not text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not text in UTF-8: {error}") from error


def lines(data: bytes, name: str) -> list[str]:
    """Return the stripped lines of a text, except empty ones. Raises UserError if the data is not text."""
    return [line.strip() for line in text(data, name).splitlines() if line.strip()]


def outermost(files: Container[str], file: str) -> str:
    """Return the name in `files` that a chain begins with (it may contain "::"), else the text before "::"."""
    names = file.split(_CHAIN)
    chains = (_CHAIN.join(names[:number]) for number in range(len(names), 0, -1))
    return next((chain for chain in chains if chain in files), names[0])


def local(files: Files, file: str) -> Path:
    """Return a local, read-only path with the file's content; remote and packed files get a copy in the cache.

    Raises:
        UserError: the file is truncated or damaged.
    """
    _, _, blob, crc = _resolve(files, file)
    return local_path(blob, None if crc is None else partial(_check_crc, blob, crc))


# ------------------------------------------------------------------------------------------------- positions


class _Place(NamedTuple):
    """The content of a file, `blob`, which begins at `offset` in the content of `file`.

    `crc` is its CRC-32, if its archive has one that is not verified yet.
    """

    file: str
    offset: int
    blob: Blob
    crc: int | None = None


def _resolve(files: Files, file: str) -> _Place:
    """Return the content of a file. Raises UserError if it does not exist, or its archive is damaged."""
    first = outermost(files, file)
    inner = file.removeprefix(first).split(_CHAIN)[1:]
    if len(inner) >= MAX_DEPTH:
        raise UserError(f"{file!r}: {len(inner)} nested archives are too many; expected at most {MAX_DEPTH - 1}")
    place = _Place(first, 0, decompressed(open_blob(_locations(files, first))))
    chain = first
    for path in inner:
        chain += f"{_CHAIN}{path}"
        if (member := _by_path(place.blob).get(path)) is None:
            raise UserError(f"{place.blob.name} does not contain {path!r}")
        name = f"{place.blob.name}: {path}"
        blob = _content(place.blob, member)._replace(name=name)
        unpacked = decompressed(blob)
        is_range = member.codec == "stored" and unpacked is blob
        place = (
            _Place(place.file, place.offset + member.offset, blob, member.crc)
            if is_range
            else _Place(chain, 0, unpacked)
        )
    return place


def _locations(files: Files, name: str) -> list[str]:
    """Return the location of a file, or of all parts of a file that was split."""
    if name not in files:
        raise UserError(f"no file {name!r}; files: {', '.join(sorted(files)[:5]) or 'none'}")
    parts = parts_of(name, files)
    # the names of a split file's parts end in numbers; a RAR's library finds the next volume itself
    stem, dot, digits = name.rpartition(".")
    if len(parts) > 1 and digits.isdecimal():
        for number, part in enumerate(parts, start=1):
            if part != (expected := f"{stem}{dot}{number:0{len(digits)}d}"):
                raise UserError(f"{files[name]}: its part {expected} is missing")
    return [files[part] for part in parts]


@lru_cache(maxsize=4)  # because an outer archive is listed for each inner one
def _listed(blob: Blob) -> tuple[list[Member], list[Refused]]:
    regular: list[Member] = []
    refused: list[Refused] = []
    for member in listed(blob):
        regular.append(member) if isinstance(member, Member) else refused.append(member)
    return regular, refused


@lru_cache(maxsize=4)
def _by_path(blob: Blob) -> dict[str, Member]:
    return {member.path: member for member in _listed(blob)[0]}


# ------------------------------------------------------------------------------------------------- bytes


def _content(blob: Blob, member: Member) -> Blob:
    """Return a member as a blob: a range of the archive, or the content that was unpacked from it."""
    extents = blob.slice(member.offset, member.length)
    if member.codec == "stored":
        return Blob(blob.name, extents)
    packed = Blob(f"{blob.name}: {member.path}", extents)
    if member.size > max(FREE_BYTES, MAX_RATIO * member.length):
        raise UserError(f"{packed.name} unpacks to {member.size:,} bytes (a bomb)")

    def write(file: BufferedWriter) -> None:
        written, crc = 0, 0
        for chunk in _inflated(packed):
            written, crc = written + len(chunk), zlib.crc32(chunk, crc)
            if written > member.size:
                break
            file.write(chunk)
        if written != member.size:
            raise UserError(f"{packed.name} is damaged: its archive says that it has {member.size:,} bytes")
        if crc != member.crc:
            raise UserError(f"{packed.name} is damaged: {_NOT_ITS_CRC}")

    return cached(packed.name, extents, "deflate", write)


def _inflated(blob: Blob) -> Iterator[bytes]:
    """Yield the content of a member that is packed by deflate, in chunks."""
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
    """Return the content of a range of a file. Its messages are stored as reasons in the quarantine."""
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


def _checked(data: bytes, crc: int | None, where: str = "") -> bytes:
    """Return the content. Raises UserError if it does not match the archive's CRC-32."""
    if crc is not None and zlib.crc32(data) != crc:
        raise UserError(f"{where}{_NOT_ITS_CRC}")
    return data


def _check_crc(blob: Blob, crc: int) -> None:
    """Raise UserError if a file, of any size, does not match its archive's CRC-32."""
    actual = 0
    for start in range(0, blob.size, _CHUNK):
        actual = zlib.crc32(blob.read(start, min(_CHUNK, blob.size - start)), actual)
    if actual != crc:
        raise UserError(f"{blob.name} is damaged: {_NOT_ITS_CRC}")


def _object(files: Files, file: str, length: int) -> bytes | None:
    """Read a whole S3 object in one request; return None if `file` is not one, or must be unpacked."""
    location = files.get(file, "")
    if not location.startswith("s3://") or not 0 < length <= MAX_IMAGE_BYTES or len(parts_of(file, files)) > 1:
        return None
    data = s3.read_range(location, 0, length)
    return data if len(data) == length and unpacker(data[:MAGIC_BYTES]) is None else None


def _in_flight(files: Files, function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
    """Yield function(item) for each item, in order; if files are on S3, compute several in parallel."""
    if not any(location.startswith("s3://") for location in files.values()):
        yield from map(function, items)
        return
    remaining = iter(items)
    with ThreadPoolExecutor(THREADS) as threads:
        waiting: deque[Future[_Out]] = deque()
        waiting.extend(threads.submit(function, item) for item in islice(remaining, 2 * THREADS))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(threads.submit(function, item) for item in islice(remaining, 1))
