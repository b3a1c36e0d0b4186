"""An LRU cache of bytes from S3 on this machine's disk: one folder of files, shared by threads and processes.

A file appears in it only when it is complete. The cache does not verify contents; its readers compare them with their
checksums.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from pipelines.files.hashing import cache_folder
from pipelines.scratch import named_if_full


class Descriptor:
    """A file that stays open for reading until its last reference is gone, so that threads can share it."""

    def __init__(self, path: str | Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if "number" in self.__dict__:
            os.close(self.number)


class Cache:
    """A cache of at most `budget` bytes in the user's cache folder. An open file stays readable after its eviction."""

    def __init__(self, budget: int) -> None:
        self.folder, self.budget = cache_folder() / "ranges", budget
        self.hits = self.fetched_bytes = 0
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Cache], tuple[int]]:
        return Cache, (self.budget,)  # another machine has another folder

    def open(self, name: str, fetch: Callable[[], bytes]) -> Descriptor:
        """Open the file of that name; if it is not in the cache, fetch it first."""
        path = self.folder / name
        with suppress(FileNotFoundError):
            file = Descriptor(path)
            with suppress(FileNotFoundError):
                os.utime(path)
            with self._lock:
                self.hits += 1
            return file
        data = fetch()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        with named_if_full(temporary):
            temporary.write_bytes(data)
        file = Descriptor(temporary)
        temporary.replace(path)
        with self._lock:
            self.fetched_bytes += len(data)
            self._make_room()
        return file

    def drop(self, name: str) -> None:
        """Remove a file, because its bytes are wrong."""
        (self.folder / name).unlink(missing_ok=True)

    def _make_room(self) -> None:
        files = []
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):  # another process may have evicted it
                    status = (path := Path(folder, name)).stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in files) - self.budget
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size
