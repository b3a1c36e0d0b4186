"""Temporary folders that are cleaned up even if their process is killed: the next process removes them.

And the error of a full disk, which names what was being written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "vitflow-scratch-"
_MAKING_SECONDS = 60.0  # between creating a folder and locking it, at most


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder for temporary files, and remove it after the block.

    Its process holds a lock on it. Folders without a lock are removed first, because their processes were killed.

    Args:
        parent: where to make it; None is the folder for temporary files (TMPDIR).
    """
    parent = parent or Path(tempfile.gettempdir())
    for abandoned in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is another user's, in use, or just being removed
            _sweep(abandoned)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(opened, fcntl.LOCK_SH)
            yield Path(name)
        finally:
            os.close(opened)


@contextmanager
def named_if_full(place: Path) -> Iterator[None]:
    """Name a file, or the folder of files, that the block writes in the error of a full disk; `write` does not."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT} and error.filename is None:
            error.filename = str(place)
        raise


def _sweep(folder: Path) -> None:
    """Remove a folder that no process holds. Raises OSError if it is held, or is not this user's."""
    if folder.lstat().st_uid != os.getuid() or time.time() - folder.lstat().st_mtime < _MAKING_SECONDS:
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(opened)
