"""Whether a local file of an artifact is what its manifest says: its size always, its sha256 once per version of it.

What was found right is remembered in the user's cache folder as an empty file, whose name is a hash of the version
(device, inode, size, times of modification and change) and of the sha256. So any number of processes may write there
at once, on any file system, and the folder may be deleted at any time. A version does not tell of a disk that loses
bits by itself: `vitflow verify` reads everything again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from pipelines.identity import cache_folder, file_version, sha256
from pipelines.store import CHECKSUMMED, FileEntry


def fault(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with a file, in words; None where it is as its entry says."""
    try:
        version = path.stat()
        if (wrong := _size_fault(version, entry)) is not None:
            return wrong
        mark = _mark(version, entry)
        if entry.path.startswith(CHECKSUMMED) or mark.exists():
            return None
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"can't be read: {error.strerror}"
    if digest != entry.sha256:
        return digest_fault(digest, entry)
    _put(mark)
    return None


def size_fault(path: Path, entry: FileEntry) -> str | None:
    """The same, but of the size alone."""
    try:
        return _size_fault(path.stat(), entry)
    except OSError as error:
        return f"can't be read: {error.strerror}"


def digest_fault(digest: str, entry: FileEntry) -> str:
    """That a file has this sha256, and not its entry's."""
    return f"has sha256 {digest[:12]}, its manifest says {entry.sha256[:12]}"


def remember(path: Path, entry: FileEntry, is_right: bool) -> None:
    """Remember that a file was read and found to have its entry's sha256, or forget that it ever had."""
    with contextlib.suppress(OSError):  # then it is read again the next time
        mark = _mark(path.stat(), entry)
        if is_right:
            _put(mark)
        else:
            mark.unlink()


def _size_fault(version: os.stat_result, entry: FileEntry) -> str | None:
    if not stat.S_ISREG(version.st_mode):
        return "is not a file"
    if version.st_size != entry.size:
        return f"has {version.st_size:,} bytes, its manifest says {entry.size:,}"
    return None


def _mark(version: os.stat_result, entry: FileEntry) -> Path:
    name = sha256(f"{file_version(version)} {entry.sha256}")
    return cache_folder() / "checked" / name[:2] / name[2:]


def _put(mark: Path) -> None:
    with contextlib.suppress(OSError):  # a cache: where it can't be kept, files are read again
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
