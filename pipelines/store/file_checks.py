"""Compare local files of an artifact with its manifest: the size always, the sha256 once per version of a file.

A file that passed is recorded in the user's cache folder as an empty file, named by a hash of the version (device,
inode, size, mtime and ctime) and the sha256. So any number of processes may write there at once, on any file system,
and the folder may be deleted at any time. Bit rot does not change the version; `vitflow verify` reads everything again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from pathlib import Path

from pipelines.files.hashing import cache_folder, file_version
from pipelines.identity import sha256
from pipelines.store.records import CHECKSUMMED, FileEntry

# These errors mean that the file is missing or the disk cannot read it. Others, such as no permission or too many open
# files, do not mean that it is damaged.
OF_THE_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO}


def fault(path: Path, entry: FileEntry) -> str | None:
    """Return a description of the fault of a file; None if it matches its entry.

    Raises:
        OSError: the file may be there, but this process cannot read it.
    """
    try:
        version = path.stat()
        if (wrong_size := _size_fault(version, entry)) is not None:
            return wrong_size
        mark = _mark(version, entry)
        if entry.path.startswith(CHECKSUMMED) or os.path.exists(mark):  # noqa: PTH110 (no error without a cache)
            return None
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        if error.errno not in OF_THE_FILE:
            raise
        return f"cannot be read: {error.strerror}"
    if digest != entry.sha256:
        return digest_fault(digest, entry)
    _put(mark)
    return None


def size_fault(path: Path, entry: FileEntry) -> str | None:
    """Do the same, but check only the size."""
    try:
        return _size_fault(path.stat(), entry)
    except OSError as error:
        if error.errno not in OF_THE_FILE:
            raise
        return f"cannot be read: {error.strerror}"


def digest_fault(digest: str, entry: FileEntry) -> str:
    """Return the description of a file with this sha256 instead of its entry's."""
    return f"has sha256 {digest[:12]}, its manifest says {entry.sha256[:12]}"


def remember(path: Path, entry: FileEntry, is_right: bool) -> None:
    """Remember that a file has its entry's sha256, or forget it."""
    with contextlib.suppress(OSError):  # a cache: without it, the file is read again
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
    with contextlib.suppress(OSError):  # a cache: without it, files are read again
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
