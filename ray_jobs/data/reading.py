"""Read the bytes of a dataset's images: from local files, or from S3 by ranges through a cache on local disk.

In: rows of a dataset's index, which have each image's position and checksum. Out: the image's bytes, or
`DamagedError` if storage repeatedly returns other bytes.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import xxhash
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pipelines.store import Store, StoreError, StoreUnreachable
from ray_jobs.data.cache import Cache, Descriptor
from ray_jobs.data.decode import DamagedError, Stored
from vit_model.errors import UserError

PIECE_BYTES = 16 * 2**20  # per request to S3; Amazon recommends 8 to 16 MB
_GAP = 2**20  # bytes between two images up to which one request for both is better than two
_RETRIES = 3
_THREADS = 8  # parallel requests
_COLUMNS = ["key", "format", "width", "height", "channels", "shard", "offset", "length", "checksum"]
_OPEN = 32  # pieces that are held open; they use disk space beyond the cache's budget


class Shards(Protocol):
    """The shards of a dataset: local files, or pieces of objects in a cache."""

    names: list[str]

    @property
    def cache(self) -> Cache | None:
        """The cache of the pieces; None: the shards are local files."""

    def open(self, shard: int, start: int, end: int, again: bool) -> tuple[Descriptor, int]:
        """Open a file with the bytes [start, end) of a shard; return it and its first position in the shard.

        With `again`, a cached file is fetched anew. Raises OSError or UserError if there is no such file.
        """


class LocalShards:
    """Shards in a folder."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.cache = None
        self.names = [str(folder / file) for file in files]

    def open(self, shard: int, start: int, end: int, again: bool) -> tuple[Descriptor, int]:
        return Descriptor(self.names[shard]), 0


class RemoteShards:
    """Shards on S3, read in pieces that a cache keeps on this machine."""

    def __init__(self, store: Store, names: list[str], cache: Cache) -> None:
        self._store, self.names, self.cache = store, names, cache

    def open(self, shard: int, start: int, end: int, again: bool) -> tuple[Descriptor, int]:
        shard_name = self.names[shard]
        name = f"{sha256(f'{self._store.id}/{shard_name}'.encode()).hexdigest()[:32]}/{start}-{end}"
        if again:
            self.cache.drop(name)
        return self.cache.open(name, lambda: self._store.read_range(shard_name, start, end - start)), start


def pieces(rows: pa.Table) -> NDArray[np.int64]:
    """Return the number of each row's piece, [n]. A piece is neighbouring images in a shard, at most `PIECE_BYTES`.

    Pieces are numbered in storage order. They depend on the rows alone, not on where the shards are.
    """
    if not len(rows):
        return np.empty(0, np.int64)
    shard, start, length = (rows[name].to_numpy().astype(np.int64) for name in ("shard", "offset", "length"))
    order = np.lexsort((start, shard))
    shard, start, end = shard[order], start[order], (start + length)[order]
    apart = (np.diff(shard) != 0) | (start[1:] - end[:-1] > _GAP)
    runs = [0, *(np.flatnonzero(apart) + 1).tolist(), len(rows)]
    is_first = np.zeros(len(rows), bool)
    for at, stop in pairwise(runs):
        while at < stop:
            is_first[at] = True
            at = max(at + 1, at + int(np.searchsorted(end[at:stop], start[at] + PIECE_BYTES, "right")))
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.cumsum(is_first) - 1
    return numbers


class _Opened(NamedTuple):
    file: Descriptor
    begin: int


class Reader:
    """A thread-safe reader that returns and checks the bytes of the images of `rows`. Methods take row numbers."""

    def __init__(self, shards: Shards, rows: pa.Table) -> None:
        self._shards, self._rows = shards, rows.select(_COLUMNS)
        self._key, self._format = (rows[name].combine_chunks() for name in ("key", "format"))
        self.size = np.stack([rows[name].to_numpy() for name in ("width", "height", "channels")], axis=1)
        self.shard, self.offset, self.length = (
            rows[name].to_numpy().astype(np.int64) for name in ("shard", "offset", "length")
        )
        self._checksum = rows["checksum"].to_numpy()
        self._piece = self.shard if shards.cache is None else pieces(rows)
        self._opened: OrderedDict[int, _Opened] = OrderedDict()
        self._pending: dict[int, Future[None]] = {}
        self._mapped: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(_THREADS)

    def __reduce__(self) -> tuple[type[Reader], tuple[Shards, pa.Table]]:
        return Reader, (self._shards, self._rows)  # another process opens the files itself

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._pool.shutdown(cancel_futures=True)
        self._opened.clear()
        self._mapped.clear()

    @cached_property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(shard, start, end) of each piece, [pieces] each."""
        order = np.lexsort((self.offset, self._piece))
        piece = self._piece[order]
        first = np.flatnonzero(np.diff(piece, prepend=-1))
        last = np.append(first[1:], len(piece)) - 1
        bounds = np.zeros((3, int(piece[-1]) + 1), np.int64)
        bounds[:, piece[first]] = (
            self.shard[order[first]],
            self.offset[order[first]],
            self.offset[order[last]] + self.length[order[last]],
        )
        return bounds[0], bounds[1], bounds[2]

    def check_room(self, needed: int | None, hint: str) -> None:
        """Raise UserError if `needed` bytes (None: all) do not fit into this machine's cache."""
        if (cache := self._shards.cache) is None:
            return
        every = int((self._bounds[2] - self._bounds[1]).sum())
        if (needed := every if needed is None else min(needed, every)) > cache.budget:
            raise UserError(
                f"cache_gib {cache.budget / 2**30:.3g} is less than the {needed / 2**30:.3g} GiB of images that are "
                f"read repeatedly from S3 ({hint}). Increase cache_gib"
            )

    def metrics(self) -> dict[str, float | int]:
        """Return the cache's hits and fetched bytes; nothing if the shards are local."""
        if (cache := self._shards.cache) is None:
            return {}
        return {"cache_hits": cache.hits, "fetched_bytes": cache.fetched_bytes}

    def read(self, row: int) -> bytes:
        """Return an image's bytes.

        Raises:
            DamagedError: the bytes do not match their checksum.
            UserError: the shard is missing or cannot be read.
        """
        piece, length = int(self._piece[row]), int(self.length[row])
        for attempt in range(_RETRIES + 1):
            opened = self._open(piece, again=attempt > 0)
            try:
                data = os.pread(opened.file.number, length, int(self.offset[row]) - opened.begin)
            except OSError:  # a bad sector: retried, then reported as damage
                continue
            if xxhash.xxh3_64_intdigest(data) == self._checksum[row]:
                return data
        raise DamagedError(
            f"shard {self._shards.names[self.shard[row]]} is missing or damaged: "
            f"image {self._key[row].as_py()!r} has other bytes than at ingest"
        )

    def stored(self, row: int) -> Stored:
        """Return an image with its columns of the index. Raises the errors of `read`."""
        key, form = self._key[row].as_py(), self._format[row].as_py()
        return Stored(key, self.read(row), form, *self.size[row].tolist())

    def gather(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> list[tuple[int, DamagedError]]:
        """Copy the bytes of rows of equal length into `out` [n, length]; return (slot, error) per damaged row."""
        size = out.shape[1]
        pieces_of_rows = self._piece[rows]
        order = np.argsort(pieces_of_rows)
        starts = np.flatnonzero(np.diff(pieces_of_rows[order])) + 1
        for slots in np.split(order, starts) if len(rows) else ():
            begin, windows = self._map(int(pieces_of_rows[slots[0]]), size)
            start = self.offset[rows[slots]] - begin
            inside = start < len(windows)
            out[slots[inside]] = windows[start[inside]]
        damaged = []
        checksums = np.array(list(map(xxhash.xxh3_64_intdigest, out)), np.uint64)
        for slot in np.flatnonzero(checksums != self._checksum[rows]).tolist():
            try:
                out[slot] = np.frombuffer(self.read(int(rows[slot])), np.uint8)
            except DamagedError as error:
                damaged.append((slot, error))
        return damaged

    def fetch(self, rows: NDArray[np.int64]) -> None:
        """Start to fetch the pieces of these rows into the cache, without waiting. Do nothing if shards are local."""
        if self._shards.cache is None:
            return
        with self._lock:
            for piece in np.unique(self._piece[rows]).tolist():
                pending = self._pending.get(piece)
                if piece not in self._opened and (pending is None or pending.done()):
                    self._pending[piece] = self._pool.submit(self._bring, piece)

    def wait(self, rows: NDArray[np.int64]) -> None:
        """Wait until the pieces of these rows that were requested are in the cache, where other processes find them.

        If a request failed, do not raise its error: whoever reads the piece repeats the request.
        """
        with self._lock:
            pending = [self._pending.pop(piece, None) for piece in np.unique(self._piece[rows]).tolist()]
        wait([request for request in pending if request is not None])

    def _map(self, piece: int, size: int) -> tuple[int, NDArray[np.uint8]]:
        """Return (where the piece begins, its file as windows [position, size] of the bytes at each position)."""
        if piece not in self._mapped:
            file, begin = self._open(piece)
            windows: NDArray[np.uint8] = np.empty((0, size), np.uint8)
            if os.fstat(file.number).st_size >= size:  # otherwise it is damaged, and `read` reports it
                mapped = np.frombuffer(mmap.mmap(file.number, 0, access=mmap.ACCESS_READ), np.uint8)
                windows = sliding_window_view(mapped, size)
            if len(self._mapped) >= _OPEN:
                self._mapped.pop(next(iter(self._mapped)))
            self._mapped[piece] = begin, windows
        return self._mapped[piece]

    def _open(self, piece: int, again: bool = False) -> _Opened:
        with self._lock:
            if again:
                self._opened.pop(piece, None)
            elif piece in self._opened:
                self._opened.move_to_end(piece)
                return self._opened[piece]
            pending = self._pending.get(piece)
        try:
            if pending is not None:
                pending.result()
            opened = self._start(piece, again)
        except StoreUnreachable:
            raise
        except (OSError, StoreError) as error:
            name = self._shards.names[self._bounds[0][piece]]
            raise UserError(f"shard {name} is missing or damaged: {error}") from error
        finally:
            with self._lock:
                self._pending.pop(piece, None)  # a failed request is repeated the next time
        with self._lock:
            self._opened[piece] = opened
            if len(self._opened) > _OPEN:
                self._opened.popitem(last=False)
        return opened

    def _start(self, piece: int, again: bool = False) -> _Opened:
        shard, start, end = (int(bounds[piece]) for bounds in self._bounds)
        return _Opened(*self._shards.open(shard, start, end, again))

    def _bring(self, piece: int) -> None:
        self._start(piece)  # ignore the result: the piece is in the cache now
