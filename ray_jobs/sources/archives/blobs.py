"""One interface to stored bytes: a file, an object on S3, the parts of a split file, or a range of one of these.

A `Blob` is a sequence of extents, each a byte range of a local file or of s3://bucket/key. Content that cannot be read
by ranges (gz, bz2, xz, a compressed member that is itself an archive) is unpacked once per machine into the folder
`unpacked` of the cache, and read as a blob from there. You can delete that folder whenever nothing runs.
"""

from __future__ import annotations

import bz2
import fcntl
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pipelines import identity
from pipelines.files import s3
from pipelines.files.hashing import cache_folder
from pipelines.scratch import named_if_full, scratch_folder
from ray_jobs.data.cache import Descriptor
from ray_jobs.sources.archives import sandbox
from vit_model.errors import UserError

# unpacked per packed byte; photographs reach 1.1, arrays of labels some hundred, but those are small
MAX_RATIO = 200
FREE_BYTES = 2**30  # a file may unpack to this size at any ratio
MAX_DICTIONARY = 2**29  # bytes of memory to unpack xz; its largest preset needs 2**26
BLOCK, LOCAL_BLOCK = 2**20, 2**12  # bytes read at once: one S3 request; neighbouring headers of a local file
_CHUNK = 2**20
_COPIED = 2**24  # bytes per request when a whole blob is read
_OPEN_FILES = 64


class Extent(NamedTuple):
    """A byte range of a local file or an object. `version` changes when the content at `location` changes."""

    location: str
    version: str
    start: int
    length: int

    @property
    def remote(self) -> bool:
        return self.location.startswith("s3://")


class Blob(NamedTuple):
    """Consecutive extents; `name` is for messages."""

    name: str
    extents: tuple[Extent, ...]

    @property
    def size(self) -> int:
        return sum(extent.length for extent in self.extents)

    @property
    def remote(self) -> bool:
        return any(extent.remote for extent in self.extents)

    def slice(self, offset: int, length: int) -> tuple[Extent, ...]:
        """Return the extents of a range. Raises UserError if it is not inside the blob."""
        extents: list[Extent] = []
        first, last, begin = offset, offset + length, 0
        for location, version, position, size in self.extents:
            start, end = max(first - begin, 0), min(last - begin, size)
            if start < end:
                extents.append(Extent(location, version, position + start, end - start))
            begin += size
        if first < 0 or length < 0 or last > begin:
            raise UserError(f"{self.name} is truncated or damaged: bytes {first:,} to {last:,} of {begin:,}")
        return tuple(extents)

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes of a range. Raises UserError if it is not inside the blob, or the file became shorter."""
        data = b"".join(map(_read, self.slice(offset, length)))
        if len(data) != length:
            raise UserError(f"{self.name} became shorter while it was read")
        return data


class Reader(io.RawIOBase):
    """A blob as a seekable file. `largest` limits one read, because a damaged header may ask for any size."""

    def __init__(self, blob: Blob, largest: int, block: int = BLOCK) -> None:
        self.blob, self.largest = blob, largest
        self.size, self.block = blob.size, block if blob.remote else LOCAL_BLOCK
        self.place = 0
        # a read may begin in one block and end in the next
        self.read_block = lru_cache(maxsize=2)(self._block)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = offset + (0, self.place, self.size)[whence]
        if self.place < 0:
            raise UserError(f"{self.blob.name} is damaged: it points before its beginning")
        return self.place

    def read(self, length: int | None = -1) -> bytes:
        left = max(self.size - self.place, 0)
        length = left if length is None or length < 0 else min(length, left)
        if length > self.largest:
            raise UserError(f"{self.blob.name} is damaged: it has a header of {length:,} bytes")
        if length < self.block:
            first, inside = divmod(self.place, self.block)
            data = self.read_block(first)[inside : inside + length]
            if len(data) < length:
                data += self.read_block(first + 1)[: length - len(data)]
        else:
            data = self.blob.read(self.place, length)
        self.place += length
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _block(self, number: int) -> bytes:
        return self.blob.read(number * self.block, min(self.block, self.size - number * self.block))


def open_blob(locations: Iterable[str]) -> Blob:
    """Open local paths or s3:// addresses as one blob.

    Raises:
        OSError: a file is missing or cannot be read.
        StoreError: an object cannot be read.
        UserError: it is not a regular file.
    """
    extents = []
    for location in locations:
        if location.startswith("s3://"):
            etag, size = s3.facts([location])[location]
            extents.append(Extent(location, etag, 0, size))
        else:
            status = Path(location).stat()
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{location} is not a regular file")
            version = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
            extents.append(Extent(location, version, 0, status.st_size))
    return Blob(extents[0].location, tuple(extents))


@lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str, _version: str) -> Descriptor:
    return Descriptor(path)


def _read(extent: Extent) -> bytes:
    if extent.remote:
        return s3.read_range(extent.location, extent.start, extent.length, extent.version)
    file = _opened(extent.location, extent.version)
    return os.pread(file.number, extent.length, extent.start)


# ------------------------------------------------------------------------------------------------- unpacking


def unpacker(start: bytes) -> Callable[[Reader], Iterator[bytes]] | None:
    """Return the function that unpacks a file that begins with `start`; None if it is not packed."""
    for magic, unpack in _PACKED.items():
        if start.startswith(magic) and (magic != b"BZh" or start[3:4].isdigit()):
            return unpack
    return None


def decompressed(blob: Blob) -> Blob:
    """Return the content of gz, bz2 or xz, or a RAR as a tar, detected by magic bytes; else the blob unchanged.

    Raises:
        UserError: the file is truncated or damaged, or unpacks to far more than its size (a bomb).
    """
    unpack = unpacker(blob.read(0, min(MAGIC_BYTES, blob.size)))
    if unpack is None:
        return blob
    limit = max(FREE_BYTES, MAX_RATIO * blob.size)

    def write(file: io.BufferedWriter) -> None:
        written = 0
        try:
            for chunk in unpack(Reader(blob, _COPIED, _COPIED)):
                written += len(chunk)
                if written > limit:
                    raise UserError(f"{blob.name} unpacks to more than {limit:,} bytes (a bomb)")
                file.write(chunk)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise UserError(f"{blob.name} is truncated or damaged: {error}") from error
        except OSError as error:
            # bz2 raises OSError without a number for damaged data; errors of the disk have one
            if error.errno is not None:
                raise
            raise UserError(f"{blob.name} is truncated or damaged: {error}") from error

    return cached(blob.name, blob.extents, unpack.__name__, write)


def _unpack_gzip(reader: Reader) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=reader) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _unpack_bz2(reader: Reader) -> Iterator[bytes]:
    return _streams(reader, bz2.BZ2Decompressor)


def _unpack_xz(reader: Reader) -> Iterator[bytes]:
    return _streams(reader, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, MAX_DICTIONARY))


def _streams(reader: Reader, make: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]) -> Iterator[bytes]:
    """Decompress consecutive streams, which may have zeros between them; anything else is an error."""
    data = reader.read(_CHUNK)
    while data:
        stream = make()
        while not stream.eof:
            if stream.needs_input and not data and not (data := reader.read(_CHUNK)):
                raise EOFError("it ends inside of a stream")
            yield stream.decompress(data, _CHUNK)
            data = b""
        data = stream.unused_data.lstrip(b"\0")
        while not data and (more := reader.read(_CHUNK)):
            data = more.lstrip(b"\0")


def _unpack_rar(reader: Reader) -> Iterator[bytes]:
    with scratch_folder(_cache()) as folder:
        yield from sandbox.converted(reader.blob.name, "rar", _linked(_volumes(reader.blob), folder))


def _volumes(blob: Blob) -> list[Blob]:
    """Return the volumes of a RAR, which start with RAR's signature, unlike the parts of a split file."""
    volumes: list[tuple[Extent, ...]] = []
    for extent in blob.extents:
        if not volumes or Blob(blob.name, (extent,)).read(0, min(len(_RAR), extent.length)) == _RAR:
            volumes.append(())
        volumes[-1] += (extent,)
    return [blob] if len(volumes) == 1 else [Blob(extents[0].location, extents) for extents in volumes]


def _linked(volumes: list[Blob], folder: Path) -> Path:
    """Link all volumes into `folder`, where the library finds them by name; return the link to the first."""
    links = [folder / volume.name.rpartition("/")[2][-_MAX_NAME:] for volume in volumes]
    for link, volume in zip(links, volumes, strict=True):
        link.symlink_to(local_path(volume).resolve())
    return links[0]


_RAR = b"Rar!\x1a\x07"
_MAX_NAME = 60  # characters, of at most four bytes each
_PACKED = {b"\x1f\x8b\x08": _unpack_gzip, b"BZh": _unpack_bz2, b"\xfd7zXZ\0": _unpack_xz, _RAR: _unpack_rar}
MAGIC_BYTES = max(map(len, _PACKED))


def local_path(blob: Blob, check: Callable[[], None] | None = None) -> Path:
    """Return a local file with these bytes: the file itself, or a copy in the cache. Raises UserError, StoreError.

    `check` runs before a copy is cached; it raises UserError if the bytes are damaged.
    """
    (first, *more) = blob.extents or (Extent("", "", 0, 0),)
    if blob.extents and not more and not first.remote and first.start == 0:
        path = Path(first.location)
        if path.stat().st_size == first.length:
            return path

    def write(file: io.BufferedWriter) -> None:
        if check is not None:
            check()
        for start in range(0, blob.size, _COPIED):
            file.write(blob.read(start, min(_COPIED, blob.size - start)))

    return Path(cached(blob.name, blob.extents, "checked copy" if check else "copy", write).extents[0].location)


def cached(name: str, extents: tuple[Extent, ...], how: str, write: Callable[[io.BufferedWriter], None]) -> Blob:
    """Return the output of `write` for these extents, written once per machine and kept in the cache folder."""
    key = identity.sha256(identity.canonical_json([how, [list(extent) for extent in extents]]))[:40]
    folder = _cache()
    path = folder / key
    if not path.exists():
        with (folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # wait if another process is making it
            if not path.exists():
                temporary = path.with_suffix(".tmp")
                try:
                    with named_if_full(temporary), temporary.open("wb") as file:
                        write(file)
                        file.flush()
                        os.fsync(file.fileno())
                    temporary.rename(path)
                finally:
                    temporary.unlink(missing_ok=True)
    return open_blob([str(path)])._replace(name=name)


def _cache() -> Path:
    folder = cache_folder() / "unpacked"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
