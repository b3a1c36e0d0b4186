"""Digests of files outside the store, cached in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from pipelines.spec import RecipeError


def file_digests(files: Iterable[tuple[str, str | Path]]) -> list[tuple[Any, ...]]:
    """Return (name, sha256 of the contents) of each file, cached by (device, inode, size, mtime, ctime).

    For an object s3://bucket/key it is (name, ETag, size), because reading it would take too long. For
    hf:ORG/NAME@COMMIT/name the sha256 is the hub's, so a model there has the same key as its files in a folder.

    Raises:
        RecipeError: a file cannot be read.
    """
    cached = read_cache(_DIGESTS)
    fresh: dict[str, str] = {}
    lines: list[tuple[Any, ...]] = []
    objects = []
    for name, location in files:
        if isinstance(location, str) and location.startswith("s3://"):
            objects.append((name, location))
            continue
        if isinstance(location, str) and location.startswith("hf:"):
            lines.append((name, _hub_digest(location)))
            continue
        path = Path(location)
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise RecipeError(f"{path} is not a regular file (a FIFO, a socket or a device): remove it")
            version = file_version(status)
            digest = cached.get(version)
            if digest is None:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                fresh[version] = digest
        except OSError as error:
            raise RecipeError(f"{path}: {error.strerror}") from None
        lines.append((name, digest))
    if fresh:
        write_cache(_DIGESTS, cached | fresh)
    if objects:
        from pipelines.files.s3 import facts

        versions = facts(uri for _, uri in objects)
        lines += [(name, *versions[uri]) for name, uri in objects]
    return lines


def _hub_digest(location: str) -> str:
    from pipelines.files.hub import digests

    path, _, name = location.rpartition("/")
    return digests(path)[name]


def file_version(status: os.stat_result) -> str:
    """Return what changes when a file is written or replaced: device, inode, size, mtime and ctime."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def cache_folder() -> Path:
    """Return vitflow's cache folder of this user."""
    return user_cache_path("vitflow")


_DIGESTS = "file-digests.json"


def read_cache(name: str) -> dict[str, str]:
    """Return what a file of the cache folder maps; nothing if it cannot be read: it only saves time."""
    path = cache_folder() / name
    try:
        status = path.stat()
        return _parsed(path, status.st_ino, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError, TypeError):
        return {}


# The file may be large, and a plan needs it once per source. Every change replaces the file, so its inode changes.
@lru_cache(maxsize=2)
def _parsed(path: Path, inode: int, modified: int, size: int) -> dict[str, str]:
    return dict(json.loads(path.read_text()))


def write_cache(name: str, content: dict[str, str]) -> None:
    """Replace a file of the cache folder, if it can be written."""
    with contextlib.suppress(OSError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{name}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(content))
        temporary.replace(folder / name)
