"""Read an untrusted file with a library that may crash, hang or take all memory: the program of `sandbox`.

    python -I sandboxed.py SECONDS BYTES rar ARCHIVE           the members, as a tar
    python -I sandboxed.py SECONDS BYTES hdf5 FILE ARRAY       the array ("x", "latents/classes"), as .npy
    python -I sandboxed.py SECONDS BYTES mat FILE VARIABLE     the variable, as .npy

The result goes to standard output. An error is one line on standard error, to append to the file's name, and exit
code 2. The process may have BYTES of address space and write no file; SIGALRM ends it after SECONDS without progress,
because no Python code runs while a library hangs. It imports only the standard library and the one library that the
file needs.
"""

from __future__ import annotations

import io
import math
import resource
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class RefusedError(Exception):
    """The reason why a file is refused, to append to the file's name."""


# ------------------------------------------------------------------------------------------------- RAR

MAX_MEMBER = 2**30  # bytes of an unpacked member: an image, or a list of labels
_ADVICE = "unpack it and pack it as zip or tar"
_MEMORY = f"needs more memory to be unpacked than is allowed: {_ADVICE}"
# unrar's dll.hpp: flags of an archive and of a member, messages to the callback and its answers, codes of errors
_OLD_COMMENT, _VOLUME, _FIRST_VOLUME = 0x0002, 0x0001, 0x0100
_SPLIT_BEFORE, _ENCRYPTED, _DIRECTORY = 0x01, 0x04, 0x20
_DATA, _VOLUME_CHANGES, _VOLUME_CHANGES_ANSI = 1, 3, 0
_VOLUME_IS_MISSING = 0
_CONTINUE, _STOP = 1, -1
_END_OF_ARCHIVE, _BAD_DATA = 10, 12
_REASONS = {
    11: _MEMORY,
    14: f"was packed by a version of RAR that the library does not read: {_ADVICE}",
    22: f"has encrypted file names: {_ADVICE}",
    24: f"has encrypted file names: {_ADVICE}",
    25: _MEMORY,
}


def rar(path: str) -> Iterator[bytes]:
    """Yield the members of a RAR as a tar.

    unrar2-cffi contains unrar (`pip install 'vitflow[rar]'`; unrar's licence permits unpacking). Further volumes are
    read from the archive's folder. Links become symbolic links without a target, so that the reader of the tar refuses
    each of them.
    """
    try:
        from unrar.cffi import unrarlib
    except ImportError:
        raise RefusedError(f"is a RAR: pip install 'vitflow[rar]' to read it, or {_ADVICE}") from None
    archive, is_empty = _Rar(unrarlib, path), True
    while (header := archive.next_header()) is not None:
        is_empty = False
        content = archive.content(header)
        if header.Flags & _DIRECTORY:
            continue
        info = tarfile.TarInfo(archive.name(header))
        info.type = tarfile.SYMTYPE if header.RedirType else tarfile.REGTYPE
        info.size = len(content)
        # a fixed format, so that the same RAR gives the same bytes
        yield info.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)
    if is_empty:
        raise RefusedError("is truncated or damaged: it has no members")
    yield bytes(2 * tarfile.BLOCKSIZE)


class _Rar:
    """A RAR opened with unrar's library, which reads the members in order."""

    def __init__(self, library: Any, path: str) -> None:
        self.library, self.count = library, 0
        self.chunks: list[bytes] = []
        self.missing: list[str] = []
        self.data = library.RAROpenArchiveDataEx(path, library.C_RAR_OM_EXTRACT)  # keeps `opened` alive
        self.opened = self.data.value
        self.archive = library.RAROpenArchiveEx(self.opened)
        self.check(self.opened.OpenResult, "at its beginning")
        if self.opened.Flags & _VOLUME and not self.opened.Flags & _FIRST_VOLUME:
            raise RefusedError("is not the first volume: give the first, which ends in .part1.rar or .rar")
        self.handle = library.ffi.new_handle(self.answer)
        library.RARSetCallbackPtr(self.archive, library.PyUNRARCALLBACKStub, self.handle)

    def answer(self, message: int, address: int, number: int) -> int:
        """Answer the library's messages; it would ask for a missing volume forever."""
        _show_progress()
        ffi = self.library.ffi
        if message == _DATA:
            self.chunks.append(bytes(ffi.buffer(ffi.cast("char *", address), number)))
            return _CONTINUE
        if message == _VOLUME_CHANGES and number == _VOLUME_IS_MISSING:
            self.missing.append(Path(ffi.string(ffi.cast("wchar_t *", address))).name)
            return _STOP
        # other messages ask for a password or a larger dictionary
        return _CONTINUE if message in (_VOLUME_CHANGES, _VOLUME_CHANGES_ANSI) else _STOP

    def check(self, code: int, where: str) -> None:
        """Raise RefusedError if a call of the library failed."""
        if self.missing:
            raise RefusedError(
                f"is the first of several volumes, and {self.missing[0]} is missing: put all volumes into one folder"
            )
        if code == _BAD_DATA and self.opened.Flags & _OLD_COMMENT:
            raise RefusedError(f"was packed by RAR 1 or 2, with a comment that the library does not read: {_ADVICE}")
        if code:
            raise RefusedError(_REASONS.get(code, f"is truncated or damaged: {where}, error {code}"))

    def next_header(self) -> Any:
        """Return the header of the next member; None at the end."""
        # the package's own iterator takes a damaged header for the end
        header = self.library.RARHeaderDataEx()
        code = self.library.RARReadHeaderEx(self.archive, header)
        if code == _END_OF_ARCHIVE:
            return None
        self.check(code, f"after {self.count} members")
        self.count += 1
        if header.Flags & _ENCRYPTED:
            raise RefusedError(f"is encrypted: {_ADVICE}")
        if header.Flags & _SPLIT_BEFORE:
            raise RefusedError(f"is damaged: {self.name(header)!r} begins in an earlier volume")
        return header

    def name(self, header: Any) -> str:
        """Return the path of a member."""
        # wchar_t may hold a surrogate pair
        raw: str = self.library.ffi.string(header.FileNameW)
        return raw.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def content(self, header: Any) -> bytes:
        """Return the content of a member; empty for a folder or a link."""
        name, size = self.name(header), header.UnpSize + (header.UnpSizeHigh << 32)
        is_skipped = header.Flags & _DIRECTORY or header.RedirType
        if size > MAX_MEMBER and not is_skipped:
            raise RefusedError(f"has a member of {size:,} bytes, {name!r}: {_ADVICE}")
        self.chunks.clear()
        operation = self.library.C_RAR_SKIP if is_skipped else self.library.C_RAR_TEST
        null = self.library.ffi.NULL
        self.check(self.library.RARProcessFileW(self.archive, operation, null, null), f"in {name!r}")
        content = b"".join(self.chunks)
        if len(content) != size and not is_skipped:
            raise RefusedError(f"is damaged: {name!r} has {len(content):,} bytes, its header says {size:,}")
        return content


# ------------------------------------------------------------------------------------------------- HDF5, MATLAB

_MAX_RATIO = 1100  # deflate packs at most 1,032 bytes into one
_BLOCK = 2**25  # bytes to read at once, or the chunks of one row


def hdf5(path: str, name: str) -> Iterator[bytes]:
    """Yield an array of an HDF5 file as .npy.

    Refuse links, data outside the file, filters that are not HDF5's own, and more items than the file's bytes can hold.
    """
    import h5py
    import numpy as np

    with h5py.File(path, "r", locking="best-effort") as file:
        parts = name.split("/")
        for end in range(1, len(parts) + 1):
            link = file.get("/".join(parts[:end]), getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise RefusedError(f"does not contain {name}" if link is None else f"has a link for {name}")
        array = file[name]
        if not isinstance(array, h5py.Dataset) or array.dtype.kind not in "biuf" or not array.shape:
            raise RefusedError(f"{name} is not an array of numbers")
        if array.external or array.is_virtual:
            raise RefusedError(f"stores {name} in another file")
        if unusual := set(array._filters) - {"gzip", "shuffle", "fletcher32", "lzf"}:
            raise RefusedError(f"uses unsupported filters for {name}: {', '.join(sorted(unusual))}")
        stored = array.id.get_storage_size()
        if array.nbytes > stored * (_MAX_RATIO if array._filters else 1):
            raise RefusedError(f"claims {array.nbytes} bytes of {name}, but only {stored} are stored")
        header = io.BytesIO()
        description = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(header, description | {"shape": array.shape})
        yield header.getvalue()
        # whole chunks, because one may contain some pixels of thousands of images
        chunk = array.chunks[0] if array.chunks else 1
        row = math.prod(array.shape[1:]) * array.dtype.itemsize
        length = max(_BLOCK // max(row * chunk, 1), 1) * chunk
        for start in range(0, array.shape[0], length):
            yield array[start : start + length].tobytes()


def mat(path: str, name: str) -> Iterator[bytes]:
    """Yield a variable of a MATLAB v5 file as .npy, as `scipy.io.loadmat` reads it.

    A struct array becomes a structured array of the fields that have one number or one text in every item.
    """
    import numpy as np
    import scipy.io

    value = scipy.io.loadmat(path, variable_names=[name], appendmat=False).get(name)
    if value is None:
        raise RefusedError(f"does not contain {name}")
    if value.dtype.names:
        fields = {field: [np.ravel(item) for item in value[field].flat] for field in value.dtype.names}
        single = {
            field: np.array([item[0] for item in items])
            for field, items in fields.items()
            if all(item.size == 1 and item.dtype.kind in "biufU" for item in items)
        }
        fields_of_items = [(field, items.dtype) for field, items in single.items()]
        value = np.empty(value.size, fields_of_items)
        for field, items in single.items():
            value[field] = items
    if value.dtype.hasobject or value.dtype.kind == "c":
        raise RefusedError(f"{name} is not an array of real numbers, text or structs")
    content = io.BytesIO()
    np.lib.format.write_array(content, value, version=(1, 0), allow_pickle=False)
    yield content.getvalue()


# ------------------------------------------------------------------------------------------------- the process

_CONVERTERS: dict[str, Callable[..., Iterator[bytes]]] = {"rar": rar, "hdf5": hdf5, "mat": mat}
_seconds = 0


def _show_progress() -> None:
    signal.alarm(_seconds)


def main(seconds: str, memory: str, converter: str, *arguments: str) -> int:
    """Write a converter's output to standard output; return the exit code of the process."""
    global _seconds
    _seconds = int(seconds)
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _show_progress()
    try:
        for chunk in _CONVERTERS[converter](*arguments):
            signal.alarm(0)  # the reader of the output may take any time
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            _show_progress()
    except RefusedError as error:
        reason = str(error)
    except MemoryError:
        reason = _MEMORY
    # a damaged file makes the libraries raise anything
    except Exception as error:
        reason = f"is truncated or damaged: {error}"
    else:
        return 0
    print(reason.replace("\n", " "), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
