"""Bytes from S3 on this machine's disk: files in one folder, of which those used longest ago leave first.

Several threads and processes share it. A file is there whole or not at all; whether its bytes are right its reader
knows, by checksums of its own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from pipelines.files.digests import cache_folder


class Descriptor:
    """A file that is open for reading until nobody holds it: a thread may be reading what another has let go."""

    def __init__(self, path: str | Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if "number" in self.__dict__:
            os.close(self.number)


class Cache:
    """At most `budget` bytes in the user's cache folder. A file that is open stays readable after it has left."""

    def __init__(self, budget: int) -> None:
        self.folder, self.budget = cache_folder() / "ranges", budget
        self.hits = self.fetched_bytes = 0
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Cache], tuple[int]]:
        return Cache, (self.budget,)  # another machine has another folder

    def open(self, name: str, fetch: Callable[[], bytes]) -> Descriptor:
        """The file of that name, opened; fetched before where it is not there."""
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
        temporary.write_bytes(data)
        file = Descriptor(temporary)
        temporary.replace(path)
        with self._lock:
            self.fetched_bytes += len(data)
            self._make_room()
        return file

    def drop(self, name: str) -> None:
        """Forget a file, whose bytes are wrong."""
        (self.folder / name).unlink(missing_ok=True)

    def _make_room(self) -> None:
        files = []
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):  # another process makes room too
                    status = (path := Path(folder, name)).stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in files) - self.budget
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size
