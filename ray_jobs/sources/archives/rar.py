"""Convert a RAR to a tar on standard output, in a process that may crash: `python -I rar.py ARCHIVE`.

It imports only the standard library and unrar2-cffi, which contains unrar (`pip install 'vitflow[rar]'`; unrar's
licence permits unpacking). An error is one line on standard error, which continues the archive's name, and exit code 2.
SIGALRM ends a process that makes no progress for `SECONDS`, because no Python code runs while the library hangs.

Further volumes are read from the archive's folder. Links become symbolic links without a target, so that the reader of
the tar refuses each of them.
"""

from __future__ import annotations

import io
import resource
import signal
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

SECONDS = 300  # limit without progress, which is a header or at most 4 MiB of a member
MAX_MEMORY = 2**32  # bytes of address space, because a header may ask for any dictionary
MAX_MEMBER = 2**30  # bytes of an unpacked member: an image, or a list of labels
_ADVICE = "unpack it and pack it as zip or tar"
# unrar's dll.hpp: flags of an archive and of a member, messages to the callback and its answers, codes of errors
_OLD_COMMENT, _VOLUME, _FIRST_VOLUME = 0x0002, 0x0001, 0x0100
_SPLIT_BEFORE, _ENCRYPTED, _DIRECTORY = 0x01, 0x04, 0x20
_DATA, _VOLUME_CHANGES, _VOLUME_CHANGES_ANSI = 1, 3, 0
_VOLUME_IS_MISSING = 0
_CONTINUE, _STOP = 1, -1
_END_OF_ARCHIVE, _BAD_DATA = 10, 12
_REASONS = {
    11: f"needs more than {MAX_MEMORY >> 30} GiB of memory to be unpacked: {_ADVICE}",
    14: f"was packed by a version of RAR that the library does not read: {_ADVICE}",
    22: f"has encrypted file names: {_ADVICE}",
    24: f"has encrypted file names: {_ADVICE}",
    25: f"needs more than {MAX_MEMORY >> 30} GiB of memory to be unpacked: {_ADVICE}",
}


def convert(path: str, out: BinaryIO) -> None:
    """Write the members of the RAR at `path` as a tar. Raises ValueError."""
    # a fixed format, so that the same RAR gives the same bytes
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for member, content in _members(path):
            signal.alarm(0)  # the reader of the tar may take any time
            tar.addfile(member, io.BytesIO(content))
            signal.alarm(SECONDS)


def _members(path: str) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    try:
        from unrar.cffi import unrarlib as library
    except ImportError:
        raise ValueError(f"is a RAR: pip install 'vitflow[rar]' to read it, or {_ADVICE}") from None
    chunks: list[bytes] = []
    missing: list[str] = []

    def called(message: int, address: int, number: int) -> int:
        """Answer the library's messages; it would ask for a missing volume forever."""
        signal.alarm(SECONDS)
        if message == _DATA:
            chunks.append(bytes(library.ffi.buffer(library.ffi.cast("char *", address), number)))
            return _CONTINUE
        if message == _VOLUME_CHANGES and number == _VOLUME_IS_MISSING:
            missing.append(Path(library.ffi.string(library.ffi.cast("wchar_t *", address))).name)
            return _STOP
        # other messages ask for a password or a larger dictionary
        return _CONTINUE if message in (_VOLUME_CHANGES, _VOLUME_CHANGES_ANSI) else _STOP

    def check(code: int, where: str) -> None:
        if missing:
            raise ValueError(
                f"is the first of several volumes, and {missing[0]} is missing: put all volumes into one folder"
            )
        if code == _BAD_DATA and opened.Flags & _OLD_COMMENT:
            raise ValueError(
                f"was packed by RAR 1 or 2, with a comment that the library does not read: {_ADVICE}"
            )
        if code:
            raise ValueError(_REASONS.get(code, f"is truncated or damaged: {where}, error {code}"))

    data = library.RAROpenArchiveDataEx(path, library.C_RAR_OM_EXTRACT)  # keeps what `opened` points to alive
    opened = data.value
    archive = library.RAROpenArchiveEx(opened)
    check(opened.OpenResult, "at its beginning")
    if opened.Flags & _VOLUME and not opened.Flags & _FIRST_VOLUME:
        raise ValueError("is not the first volume: give the first, which ends in .part1.rar or .rar")
    handle = library.ffi.new_handle(called)
    library.RARSetCallbackPtr(archive, library.PyUNRARCALLBACKStub, handle)
    count = 0
    # the package's own iterator takes a damaged header for the end
    while (code := library.RARReadHeaderEx(archive, header := library.RARHeaderDataEx())) != _END_OF_ARCHIVE:
        signal.alarm(SECONDS)
        check(code, f"after {count} members")
        count += 1
        # wchar_t may hold a surrogate pair
        raw = library.ffi.string(header.FileNameW)
        name = raw.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        size = header.UnpSize + (header.UnpSizeHigh << 32)
        skipped = header.Flags & _DIRECTORY or header.RedirType
        if header.Flags & _ENCRYPTED:
            raise ValueError(f"is encrypted: {_ADVICE}")
        if header.Flags & _SPLIT_BEFORE:
            raise ValueError(f"is damaged: {name!r} begins in an earlier volume")
        if size > MAX_MEMBER and not skipped:
            raise ValueError(f"has a member of {size:,} bytes, {name!r}: {_ADVICE}")
        chunks.clear()
        operation = library.C_RAR_SKIP if skipped else library.C_RAR_TEST
        check(library.RARProcessFileW(archive, operation, library.ffi.NULL, library.ffi.NULL), f"in {name!r}")
        if header.Flags & _DIRECTORY:
            continue
        info, content = tarfile.TarInfo(name), b"".join(chunks)
        if header.RedirType:
            info.type = tarfile.SYMTYPE
        elif len(content) != size:
            raise ValueError(f"is damaged: {name!r} has {len(content):,} bytes, its header says {size:,}")
        info.size = len(content)
        yield info, content
    if not count:
        raise ValueError("is truncated or damaged: it has no members")


def main(path: str) -> int:
    """Convert the RAR at `path` to a tar on standard output; return the exit code of the process."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    try:
        convert(path, sys.stdout.buffer)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
