"""Arrays in the files of datasets: npz, HDF5, MATLAB, LeCun's matrices, and CIFAR's pickles.

In: untrusted files. Out: numpy arrays, mapped from a file in the cache, so that a task reads only the rows that it
needs. Nothing in a file is executed, and a size that a file claims is allocated only if the file has that many bytes.
Every function raises UserError for a file that it cannot read.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
from collections.abc import Mapping, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ray_jobs.sources.archives import containers, sandbox
from ray_jobs.sources.archives.blobs import FREE_BYTES, MAX_RATIO, cached, local_path, open_blob
from ray_jobs.sources.archives.entries import Files
from vit_model.errors import UserError

_NPZ, _HDF5 = b"PK\3\4", b"\x89HDF\r\n\x1a\n"


def read_array(files: Files, file: str, name: str, dtype: type[Any], shape: Sequence[int | None]) -> NDArray[Any]:
    """Return the array `name` of an npz, HDF5 or MATLAB v5 file, mapped.

    The array is unpacked once per machine into the cache folder `unpacked`: from an npz as from any zip, with its
    checksum verified; from HDF5 and MATLAB by their libraries in a `sandbox`.

    Args:
        file: a name in `files`, or a chain of names for a file in an archive (`containers`).
        name: "x"; in HDF5 also "latents/classes". A MATLAB struct array becomes a structured array (`sandboxed.mat`).
        dtype: a numpy type, which may be abstract, such as np.integer; np.void for a structured array.
        shape: None for a dimension of any size.

    Raises:
        UserError: the file is damaged or in another format, or the array is missing or has another type or shape.
    """
    path = containers.local(files, file)
    with path.open("rb") as opened:
        start = opened.read(128)
    if start.startswith(_NPZ):
        array = map_npy(containers.local(files, f"{file}::{name}.npy"), f"{file}: {name}")
    elif start.startswith(_HDF5):
        array = map_npy(_converted(path, file, "hdf5", name), f"{file}: {name}")
    elif start[126:128] in (b"IM", b"MI") and 1 in start[124:126]:
        array = map_npy(_converted(path, file, "mat", name), f"{file}: {name}")
    else:
        hint = "; save it as v5" if start.startswith(b"MATLAB 7.3") else ""
        raise UserError(f"{file} is not an npz, HDF5 or MATLAB v5 file, or damaged{hint}")
    return fitting(array, f"{file}: {name}", dtype, shape)


def fitting(array: NDArray[Any], where: str, dtype: type[Any], shape: Sequence[int | None]) -> NDArray[Any]:
    """Return an array of this type and shape, as for `read_array`. Raises UserError for another one."""
    sizes = zip(shape, array.shape, strict=False)
    fits = len(shape) == array.ndim and all(wanted in (None, size) for wanted, size in sizes)
    if not fits or not np.issubdtype(array.dtype, dtype):
        raise UserError(f"{where} is {array.dtype} {array.shape}; expected {dtype.__name__} {tuple(shape)}")
    return array


def _converted(path: Path, file: str, converter: str, name: str) -> Path:
    """Return the path of an .npy file with one array of a file, which `sandbox` writes once per machine."""
    blob = open_blob([str(path)])
    limit = max(FREE_BYTES, MAX_RATIO * blob.size)

    def write(output: BufferedWriter) -> None:
        for chunk in sandbox.converted(file, converter, path, name):
            if output.tell() + len(chunk) > limit:
                raise UserError(f"{file}: {name} has more than {limit:,} bytes (a bomb)")
            output.write(chunk)

    return local_path(cached(file, blob.extents, f"{converter} {name}", write))


def map_npy(path: Path, where: str) -> NDArray[Any]:
    """Map an .npy file of numbers or text. Raises UserError, with a message that begins with `where`."""
    with path.open("rb") as file:
        try:
            # the header of a later version states its own length, possibly GBs, and numpy reads it whole
            if (version := npy.read_magic(file)) != (1, 0):
                raise ValueError(f"version {version}, not (1, 0)")
            shape, fortran, dtype = npy.read_array_header_1_0(file)
        # numpy parses it as Python source: damage can raise SyntaxError, TokenError, MemoryError (too deep), and more
        except Exception as error:
            raise UserError(f"{where} has a damaged header: {error}") from error
        start = file.tell()
    if dtype.hasobject:
        raise UserError(f"{where} contains Python objects")
    return _mapped(path, where, dtype, shape, start, "F" if fortran else "C")


def _mapped(
    path: Path, where: str, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, order: Any = "C"
) -> NDArray[Any]:
    """Map the array after the first `start` bytes of a file. Raises UserError if the size does not match."""
    size = path.stat().st_size - start
    if min(shape, default=0) < 0 or not dtype.itemsize or math.prod(shape) * dtype.itemsize != size:
        raise UserError(f"{where}: its header says {dtype} {shape}, but it has {size:,} bytes")
    # an empty file cannot be mapped
    if not size:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape, order)


# ------------------------------------------------------------------------------------------------- LeCun's matrices

_NORB_TYPES: dict[int, np.dtype[Any]] = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}


def read_norb(files: Files, file: str) -> NDArray[Any]:
    """Map LeCun's binary matrix: magic, number of dimensions, at least three sizes (int32, little-endian), numbers."""
    path = containers.local(files, file)
    with path.open("rb") as opened:
        header = opened.read(8 + 4 * 8)
    magic, dimensions = struct.unpack("<Ii", header[:8].ljust(8, b"\0"))
    if magic not in _NORB_TYPES:
        raise UserError(f"{file} is not a matrix of uint8 or int32: it begins with {magic:#010x}")
    start = 8 + 4 * max(3, dimensions)
    if not 1 <= dimensions <= 8 or len(header) < start:
        raise UserError(f"{file}: expected a matrix of 1 to 8 dimensions, not {dimensions}, or it is truncated")
    shape = struct.unpack(f"<{dimensions}i", header[8 : 8 + 4 * dimensions])
    return _mapped(path, file, _NORB_TYPES[magic], shape, start)


# ------------------------------------------------------------------------------------------------- pickles

# The opcodes that Python 2 wrote for dicts and lists of text, numbers and arrays; none that creates other objects.
_OPCODES = frozenset(
    (
        *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "NONE", "NEWTRUE", "NEWFALSE"),
        *("PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"),
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE"),
        *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    )
)


def unpickle_arrays(data: bytes) -> object:
    """Load one of CIFAR's Python 2 pickles: a dict (or list) of text, numbers, lists and numpy arrays of numbers.

    numpy's own classes are never called, because they trust the pickle. Stand-ins record their arguments, and the
    arrays at the top level are built from their bytes afterwards.
    """
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in _OPCODES:
                raise UserError(f"unexpected opcode {opcode.name}")
            if opcode.name == "LONG_BINPUT" and int(argument or 0) > len(data):
                raise UserError("it has more references than bytes")
        loaded = _Unpickler(io.BytesIO(data), encoding="latin1").load()
        if isinstance(loaded, dict):
            return {key: _array(value) for key, value in loaded.items()}
        return [_array(value) for value in loaded] if isinstance(loaded, list) else _array(loaded)
    # a hostile pickle can make the unpickler raise anything
    except Exception as error:
        raise UserError(f"not a pickle of plain arrays, or damaged: {error}") from error


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds only stand-ins. Each instance has its own, so one pickle cannot change another's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        dtype = type("dtype", (_Recorded,), {})
        array = type("array", (_Recorded,), {})
        self._stand_ins: Mapping[tuple[str, str], Any] = {
            ("numpy", "dtype"): dtype,
            ("numpy", "ndarray"): array,
            ("numpy.core.multiarray", "_reconstruct"): lambda *arguments: array(*arguments),
            ("numpy._core.multiarray", "_reconstruct"): lambda *arguments: array(*arguments),
            # how Python 3 writes bytes for Python 2
            ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._stand_ins:
            raise UserError(f"it refers to {module}.{name}")
        return self._stand_ins[module, name]


class _Recorded:
    """A stand-in for a numpy dtype or array, with the arguments and the state that a pickle gives it."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


def _array(value: object) -> object:
    """Convert a recorded array to an array; return anything else unchanged."""
    if not isinstance(value, _Recorded):
        return value
    _, shape, dtype, fortran, content = value.state  # numpy's ndarray.__reduce__, version 1
    raw = content.encode("latin1") if isinstance(content, str) else content
    name, order = str(dtype.arguments[0]), dtype.state[1]
    if name not in ("u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "b1") or order not in "<>|=":
        raise UserError(f"unsupported array type {name}")
    flat = np.frombuffer(raw, np.dtype(order + name if order != "|" else name))
    return flat.reshape(shape, order="F" if fortran else "C")
