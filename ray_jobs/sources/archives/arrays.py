"""Arrays in the files of datasets: MATLAB, HDF5, LeCun's matrices, npz, and CIFAR's pickles.

In: untrusted bytes or paths. Out: numpy arrays. Nothing in a file is executed, and no size that a file claims is
allocated before as many bytes are there. Every function raises UserError for a file that it cannot read. The readers in
this module always consume their input, so they terminate; calls of the HDF5 library have a time limit.
"""

from __future__ import annotations

import faulthandler
import io
import math
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from vit_model.errors import UserError

if TYPE_CHECKING:
    import h5py

MAX_BYTES = 2**30  # of an unpacked file in memory; the largest, SVHN's train file, has a fifth of it
MAX_NPZ_BYTES = 2**32  # of one npz: dSprites has 3 GB of pixels
MAX_CHUNK = 2**26  # bytes that HDF5 unpacks at once
MAX_BLOCK = 2**28  # bytes of an HDF5 array in memory at once
SECONDS = 300  # limit of a call of the HDF5 library, which unpacks at most MAX_BLOCK
_MAX_RATIO = 1100  # deflate packs at most 1,032 bytes into one

# ------------------------------------------------------------------------------------------------- MATLAB

# scipy's reader can crash the process when a file is damaged, so only the tests use it.
_MATRIX, _COMPRESSED = 14, 15
_CELL, _STRUCT, _CHAR, _NUMBERS = 1, 2, 4, range(6, 16)
_COMPLEX = 8
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_ENCODED = {1: "latin1", 2: "latin1", 4: "utf-16", 16: "utf-8", 17: "utf-16"}
_MAX_DEPTH = 8


def read_mat(data: bytes) -> dict[str, NDArray[Any]]:
    """Return the variables of a MATLAB v5 file as `scipy.io.loadmat` does: real numbers, text, cells and structs.

    Numbers keep their stored type. Text is an array with one string per row, a struct array has object fields. Arrays
    have at least two dimensions, those of text one dimension less.
    """
    if data[:4] == b"\x89HDF":
        raise UserError("unsupported MATLAB v7.3 file (HDF5); save it as v5")
    if data[126:128] not in (b"IM", b"MI") or 1 not in data[124:126]:
        raise UserError("not a MATLAB v5 file")
    order = "<" if data[126:128] == b"IM" else ">"
    try:
        return dict(_variable(*element, order, 0) for element in _inflated(data, order))
    except UserError:
        raise
    except ValueError as error:  # numpy's, for inconsistent sizes and names
        raise UserError(f"damaged MATLAB file: {error}") from error


def _inflated(data: bytes, order: str) -> Iterator[tuple[int, memoryview]]:
    """Yield (type, content) of the top elements of a file, decompressed."""
    left = MAX_BYTES
    for kind, content in _elements(memoryview(data)[128:], order):
        if kind != _COMPRESSED:
            yield kind, content
            continue
        inflater = zlib.decompressobj()
        try:
            element = inflater.decompress(content, left + 1)
        except zlib.error as error:
            raise UserError(f"damaged MATLAB file: {error}") from error
        left -= len(element)
        if left < 0:
            raise UserError(f"the MATLAB file unpacks to more than {MAX_BYTES} bytes (bomb)")
        if not inflater.eof:
            raise UserError("truncated MATLAB file")
        yield from _elements(memoryview(element), order)


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Yield (type, content) of consecutive elements; a small one has up to 4 bytes inside its tag."""
    start = 0
    while start < len(data):
        if start + 8 > len(data):
            raise UserError("truncated MATLAB file")
        kind, length = struct.unpack_from(f"{order}II", data, start)
        small = kind >> 16
        begin = start + (4 if small else 8)
        end = begin + (small or length)
        if end > len(data) or small > 4:
            raise UserError("truncated or damaged MATLAB file")
        yield kind & 0xFFFF, data[begin:end]
        padding = 0 if kind == _COMPRESSED else -(end - begin) % 8
        start = start + 8 if small else end + padding


def _variable(kind: int, content: memoryview, order: str, depth: int) -> tuple[str, NDArray[Any]]:
    """Return (name, value) of a matrix element: flags and class, dimensions, name, then the content of its class."""
    if not content and depth:  # an empty cell
        return "", np.zeros((0, 0))
    parts = list(_elements(content, order)) if kind == _MATRIX and depth < _MAX_DEPTH else []
    if len(parts) < 3 or len(parts[0][1]) != 8 or len(parts[1][1]) % 4:
        raise UserError("damaged MATLAB file")
    (flags,) = struct.unpack_from(f"{order}I", parts[0][1])
    shape = struct.unpack(f"{order}{len(parts[1][1]) // 4}i", parts[1][1])
    if not 2 <= len(shape) <= 32 or min(shape) < 0:
        raise UserError(f"damaged MATLAB file: an array of shape {shape}")
    name, kind, inner = bytes(parts[2][1]).decode("latin1"), flags & 0xFF, parts[3:]
    if flags >> 8 & _COMPLEX:
        raise UserError(f"variable {name!r}: complex numbers are not supported")
    if kind == _STRUCT:
        return name, _struct(shape, inner, order, depth)
    if kind == _CELL:
        return name, _cells(shape, inner, order, depth)
    if kind != _CHAR and kind not in _NUMBERS:
        raise UserError(
            f"variable {name!r}: unsupported MATLAB class {kind}; expected numbers, text, cells or structs"
        )
    stored, values = inner[0] if inner else (2, memoryview(b""))
    if kind == _CHAR and stored in _ENCODED:
        return name, _text(shape, bytes(values), _ENCODED[stored], order)
    if kind == _CHAR or stored not in _STORED:
        raise UserError(f"variable {name!r}: unsupported MATLAB data type {stored}")
    flat = np.frombuffer(values, np.dtype(order + _STORED[stored]))
    return name, flat.reshape(shape, order="F")


def _cells(
    shape: tuple[int, ...], inner: Sequence[tuple[int, memoryview]], order: str, depth: int
) -> NDArray[Any]:
    if math.prod(shape) != len(inner):
        raise UserError(f"damaged MATLAB file: expected {shape} cells, got {len(inner)}")
    cells = np.empty(len(inner), object)
    for number, element in enumerate(inner):
        cells[number] = _variable(*element, order, depth + 1)[1]
    return cells.reshape(shape, order="F")


def _struct(
    shape: tuple[int, ...], inner: Sequence[tuple[int, memoryview]], order: str, depth: int
) -> NDArray[Any]:
    """Return a struct array from its elements: the length of a name, the padded names, then all fields of each item."""
    if len(inner) < 2 or len(inner[0][1]) != 4:
        raise UserError("damaged MATLAB file: a struct without names")
    (width,), names = struct.unpack(f"{order}i", inner[0][1]), bytes(inner[1][1])
    if width < 1:
        raise UserError(f"damaged MATLAB file: names of {width} letters")
    fields = [
        names[start : start + width].split(b"\0")[0].decode("latin1") for start in range(0, len(names), width)
    ]
    if math.prod(shape) * len(fields) != len(inner) - 2 or not fields or not all(fields):
        raise UserError(
            f"damaged MATLAB file: {shape} structs with fields {fields}, but {len(inner) - 2} values"
        )
    structs = np.empty(math.prod(shape), [(field, object) for field in fields])
    for number, field in enumerate(fields):
        for item, element in enumerate(inner[2 + number :: len(fields)]):
            structs[field][item] = _variable(*element, order, depth + 1)[1]
    return structs.reshape(shape, order="F")


def _text(shape: tuple[int, ...], data: bytes, encoding: str, order: str) -> NDArray[Any]:
    """Return an array of strings from an array of characters; its last dimension becomes the string."""
    letters = data.decode(encoding + {"<": "-le", ">": "-be"}[order] if encoding == "utf-16" else encoding)
    if math.prod(shape) != len(letters):
        raise UserError(f"damaged MATLAB file: text of shape {shape}, but {len(letters)} characters")
    grid = np.array(list(letters), "U1").reshape(shape, order="F").reshape(-1, shape[-1])
    return np.array(["".join(row) for row in grid]).reshape(shape[:-1])


# ------------------------------------------------------------------------------------------------- HDF5


@contextmanager
def _limited() -> Iterator[None]:
    """End the process, with a traceback, if the block takes more than `SECONDS`.

    The HDF5 library may loop forever on a damaged file, and it holds the GIL, so that Python code cannot stop it.
    """
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def open_hdf5(path: Path) -> h5py.File:
    """Open an HDF5 file for reading."""
    import h5py

    try:
        with _limited():
            return h5py.File(path, "r", locking="best-effort")
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{path.name} is not an HDF5 file, or damaged: {error}") from error


def hdf5_array(path: Path, name: str, dtype: str | None, shape: Sequence[int | None]) -> h5py.Dataset:
    """Return the array `name` ("x", "latents/classes") of an HDF5 file, for `hdf5_slice`. The file stays open with it.

    Links, data outside the file, unusual filters, and more items than the file's bytes can hold are refused.

    Args:
        dtype: None: any integer type.
        shape: None for a dimension of any size.
    """
    import h5py

    where = f"{path.name}: {name}"
    file = open_hdf5(path)
    try:
        with _limited():
            parts = name.split("/")
            for end in range(1, len(parts) + 1):
                link = file.get("/".join(parts[:end]), getlink=True)
                if not isinstance(link, h5py.HardLink):
                    raise UserError(f"{where} is missing" if link is None else f"{where} is a link")
            array = file[name]
            if not isinstance(array, h5py.Dataset):
                raise UserError(f"{where} is not an array")
            _check_array(where, array, dtype, shape)
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise UserError(f"{where} cannot be read: {error}") from error
    return array


def hdf5_slice(array: h5py.Dataset, index: int | slice) -> NDArray[Any]:
    """Return `array[index]`. Raises UserError if it is damaged."""
    try:
        with _limited():
            return np.asarray(array[index])
    except (OSError, RuntimeError) as error:
        raise UserError(f"{Path(array.file.filename).name}: {array.name} is damaged: {error}") from error


def hdf5_rows(array: h5py.Dataset, numbers: Sequence[int]) -> NDArray[Any]:
    """Return the items (images) of these numbers along the first axis. Raises UserError if they are damaged.

    Each chunk is unpacked once, because it may contain some pixels of thousands of images.
    """
    wanted = np.asarray(numbers, np.int64)
    length = array.chunks[0] if array.chunks else 1
    length = max(min(length, MAX_BLOCK * array.shape[0] // max(array.nbytes, 1)), 1)
    items = np.empty((len(wanted), *array.shape[1:]), array.dtype)
    order = np.argsort(wanted)
    blocks, starts = np.unique(wanted[order] // length, return_index=True)
    for block, positions in zip(blocks.tolist(), np.split(order, starts)[1:], strict=True):
        first = block * length
        items[positions] = hdf5_slice(array, np.s_[first : first + length])[wanted[positions] - first]
    return items


def _check_array(where: str, array: h5py.Dataset, dtype: str | None, shape: Sequence[int | None]) -> None:
    fits = array.dtype == np.dtype(dtype) if dtype else array.dtype.kind in "iu"
    if not fits or array.shape is None or len(array.shape) != len(shape):
        raise UserError(f"{where} is {array.dtype} {array.shape}, not {dtype or 'integers'} {tuple(shape)}")
    if any(wanted not in (None, size) for wanted, size in zip(shape, array.shape, strict=True)):
        raise UserError(f"{where} is {array.shape}, not {tuple(shape)}")
    if array.external or array.is_virtual:
        raise UserError(f"{where} stores its data in another file")
    if unusual := set(array._filters) - {"gzip", "shuffle", "fletcher32", "lzf"}:
        raise UserError(f"{where}: unsupported filters: {', '.join(sorted(unusual))}")
    stored = array.id.get_storage_size()
    if array.nbytes > stored * (_MAX_RATIO if array._filters else 1):
        raise UserError(f"{where} claims {array.nbytes} bytes, but only {stored} are stored")
    if array.chunks and math.prod(array.chunks) * array.dtype.itemsize > MAX_CHUNK:
        raise UserError(f"{where} has chunks of more than {MAX_CHUNK} bytes")


# ------------------------------------------------------------------------------------------------- NORB, npz

_NORB_TYPES: dict[int, np.dtype[Any]] = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}


def read_norb(data: bytes) -> NDArray[Any]:
    """Read LeCun's binary matrix: magic, number of dimensions, at least three sizes (int32, little-endian), numbers."""
    if len(data) < 8:
        raise UserError("truncated: shorter than the header of a NORB matrix")
    magic, dimensions = struct.unpack("<Ii", data[:8])
    if magic not in _NORB_TYPES:
        raise UserError(f"not a NORB matrix of uint8 or int32: it begins with {magic:#010x}")
    header = 8 + 4 * max(3, dimensions)
    if not 1 <= dimensions <= 8 or len(data) < header:
        raise UserError(f"a NORB matrix of {dimensions} dimensions, or truncated")
    shape = struct.unpack(f"<{dimensions}i", data[8 : 8 + 4 * dimensions])
    dtype = _NORB_TYPES[magic]
    if min(shape) < 0 or math.prod(shape) * dtype.itemsize != len(data) - header:
        raise UserError(f"its header says {dtype} {shape}, but it has {len(data) - header} bytes")
    return np.frombuffer(data, dtype, offset=header).reshape(shape)


def read_npz(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the arrays of these names in an npz file. Arrays of Python objects are refused, others are not read."""
    arrays: dict[str, NDArray[Any]] = {}
    left = MAX_NPZ_BYTES
    try:
        with zipfile.ZipFile(path) as archive:
            for name in names:
                member = npz_member(archive, name)
                left -= member.file_size
                if left < 0 or member.file_size > _MAX_RATIO * member.compress_size:
                    raise UserError(f"{name} of {member.file_size} bytes is too large (bomb)")
                with archive.open(member) as file:
                    shape, fortran, dtype = npy_header(file)
                    if dtype.hasobject:
                        raise UserError(f"{name} contains Python objects")
                    if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
                        raise UserError(f"the header of {name} says {dtype} {shape}, which is not its size")
                    flat = np.frombuffer(_exactly(file, member.file_size - file.tell()), dtype)
                    arrays[name] = flat.reshape(shape, order="F" if fortran else "C")
    except KeyError as error:
        raise UserError(f"{path.name}: missing array: {error}") from error
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path.name} is not an npz file, or damaged: {error}") from error
    return arrays


def npz_member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """Return the member of an npz with the array of this name.

    Raises:
        KeyError: there is no such array.
        UserError: it is packed by a method that numpy does not use.
    """
    member = archive.getinfo(f"{name}.npy")
    # lzma allocates as many GB as a damaged member says, and its exceptions are not zipfile's
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(f"{name} is packed by method {member.compress_type}, not by deflate")
    return member


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an .npy file: shape, whether in Fortran order, and type. Raises UserError."""
    # the header of a later version states its own length, possibly GBs, and numpy reads it whole
    if (version := npy.read_magic(file)) != (1, 0):
        raise UserError(f"npy of version {version}, not (1, 0)")
    try:
        shape, fortran, dtype = npy.read_array_header_1_0(file)
    # numpy parses it as Python source: damage can raise SyntaxError, TokenError, MemoryError (too deep), and more
    except Exception as error:
        raise UserError(f"damaged header: {error}") from error
    return shape, fortran, dtype


def _exactly(file: Any, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        chunk = file.read(min(2**24, size - len(data)))
        if not chunk:
            raise EOFError("truncated")
        data += chunk
    return data


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
    """An unpickler that only finds stand-ins. Each instance has its own, so that a pickle cannot change others'."""

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
