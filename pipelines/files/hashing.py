"""The sha256 of local files, and the user's cache folder, in which these and other digests are kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from pipelines.spec import RecipeError

_DIGESTS = "file-digests.json"


def local_digests(paths: Iterable[Path]) -> Iterator[str]:
    """Return the sha256 of each file's contents, cached by (device, inode, size, mtime, ctime).

    Raises:
        RecipeError: a file cannot be read.
    """
    cached = read_cache(_DIGESTS)
    fresh: dict[str, str] = {}
    digests = []
    for path in paths:
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise RecipeError(f"{path}: not a regular file but a FIFO, a socket or a device; remove it")
            version = file_version(status)
            digest = cached.get(version)
            if digest is None:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                fresh[version] = digest
        except OSError as error:
            raise RecipeError(f"{path}: {error.strerror}") from None
        digests.append(digest)
    if fresh:
        write_cache(_DIGESTS, cached | fresh)
    return iter(digests)


def file_version(status: os.stat_result) -> str:
    """Return an identifier of a file's version: device, inode, size, mtime and ctime."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def cache_folder() -> Path:
    """Return this user's cache folder of vitflow."""
    return _cache_folder(os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))


@cache
def _cache_folder(*environment: str | None) -> Path:
    return user_cache_path("vitflow")  # 50 us, for each file of a table


def read_cache(name: str) -> dict[str, Any]:
    """Return the mapping in a file of the cache folder; empty if it cannot be read, because it only saves time."""
    path = cache_folder() / name
    try:
        status = path.stat()
        return _parsed(path, status.st_ino, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError, TypeError):
        return {}


# The file may be large, and a plan needs it once per source. Every change replaces the file, so its inode changes.
@lru_cache(maxsize=4)
def _parsed(path: Path, inode: int, modified: int, size: int) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def write_cache(name: str, content: dict[str, Any]) -> None:
    """Replace a file of the cache folder, if it can be written."""
    with contextlib.suppress(OSError):
        path = cache_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)
