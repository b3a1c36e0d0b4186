"""A RAR becomes a tar on standard output, in a process that may crash: `python -I rar.py ARCHIVE`.

Only the standard library and unrar2-cffi are imported, which has unrar inside (`pip install 'vitflow[rar]'`; unrar's
licence allows to unpack). What is wrong is one line on standard error that follows the archive's name, and exit code 2.
"""

from __future__ import annotations

import io
import resource
import sys
import tarfile
from typing import BinaryIO

MAX_MEMORY = 2**32  # bytes of address space: a header may ask for any dictionary
MAX_MEMBER = 2**30  # bytes, unpacked: a member is an image, or a list of labels
_DIRECTORY, _ENCRYPTED = 0x20, 0x04
_END_OF_ARCHIVE = 10
_ADVICE = "unpack it and pack it as zip or tar"


def convert(path: str, out: BinaryIO) -> None:
    """Write the members of the RAR at `path` as a tar. Raises ValueError."""
    try:
        from unrar.cffi.unrarlib import BadRarFile, RarArchive, RarHeader, RARHeaderDataEx, RARReadHeaderEx
    except ImportError:
        raise ValueError(f"is a RAR: pip install 'vitflow[rar]' to read it, or {_ADVICE}") from None
    count = 0
    try:
        # format and fields are fixed: the same RAR gives the same bytes
        with (
            RarArchive.open_for_processing(path) as archive,
            tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            # the package's own iterator takes a damaged header for the end
            while (code := RARReadHeaderEx(archive.handle, data := RARHeaderDataEx())) == 0:
                header = RarHeader(archive, data)
                count += 1
                if header.Flags & _DIRECTORY:
                    header.skip()
                    continue
                name, size = header.FileNameW, header.UnpSize + (header.headerDataEx.UnpSizeHigh << 32)
                if header.Flags & _ENCRYPTED:
                    raise ValueError(f"is encrypted: {_ADVICE}")
                if size > MAX_MEMBER:
                    raise ValueError(f"has a member of {size:,} bytes, {name!r}: {_ADVICE}")
                chunks: list[bytes] = []
                header.test(chunks.append)
                content = b"".join(chunks)
                if len(content) != size:
                    raise ValueError(
                        f"is damaged: {name!r} has {len(content):,} bytes, its header says {size:,}"
                    )
                info = tarfile.TarInfo(name)
                info.size = size
                if header.headerDataEx.RedirType:
                    info.type, info.linkname, info.size = tarfile.SYMTYPE, "", 0
                tar.addfile(info, io.BytesIO(content))
    except BadRarFile as error:
        raise ValueError(f"is truncated or damaged: {error}") from None
    if code != _END_OF_ARCHIVE or not count:
        raise ValueError(f"is truncated or damaged: after {count} members comes error {code}")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    try:
        convert(sys.argv[1], sys.stdout.buffer)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
