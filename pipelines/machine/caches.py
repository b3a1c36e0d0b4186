"""This machine's large caches, which vitflow can fill again: files of stores on S3, and unpacked archives."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipelines.environment import environment
from pipelines.files.hashing import cache_folder

CACHES = {"objects": "files of stores on S3", "unpacked": "unpacked archives"}


class Cached(NamedTuple):
    """A file in a cache, with its size in bytes."""

    cache: str
    path: Path
    bytes: int


def unread(days: float) -> Iterator[Cached]:
    """Yield the cached files that nothing has read or written for so many days."""
    for cache in CACHES:
        for folder, _, names in os.walk(cache_folder() / cache):
            for path in (Path(folder, name) for name in names if not name.endswith(".lock")):
                with suppress(OSError):  # it has just been removed
                    if _age(path) >= days:
                        yield Cached(cache, path, path.stat().st_size)


def remove(cached: Cached, days: float) -> bool:
    """Remove a file, unless it was read meanwhile or a process is unpacking it; return whether it is gone."""
    try:
        if cached.cache == "unpacked":
            # the lock remains, because other processes may wait for it
            with cached.path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return _remove(cached.path, days)
        return _remove(cached.path, days)
    except OSError:
        return False


def _remove(path: Path, days: float) -> bool:
    if _age(path) < days:
        return False
    path.unlink()
    with suppress(OSError):  # until a folder is not empty
        for folder in list(path.parents)[: len(path.relative_to(cache_folder()).parts) - 2]:
            folder.rmdir()
    return True


def _age(path: Path) -> float:
    """Return the days since a file was last read or written; file systems note reads at least once a day."""
    status = path.stat()
    return (environment().utc().timestamp() - max(status.st_atime, status.st_mtime)) / 86_400
