"""Untrusted .npz files: the headers are checked before memory is allocated.

In: a file. Out: its arrays by the names of the paper's files (google-research/vision_transformer), first their shapes,
then their numbers. Nothing in it is executed, and no name in it is used as a path.
"""

import io
import math
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from vit_model.errors import UserError
from vit_model.formats.npz_layout import BIT_ROOT, BLOCK, older

# Prefixes of the image encoder. The second and third are of training checkpoints, the rest of two-tower models.
PREFIXES = ("", "params/", "opt/target/", "params/img/", "img/", "opt/target/img/")
BFLOAT16 = np.dtype("V2")  # numpy has no bfloat16 and stores raw bytes
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)

# Exceptions of numpy and zipfile for a damaged file; the last two for an array header that is not a Python literal.
DAMAGED = (
    *(ValueError, OSError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error, struct.error),
    *(SyntaxError, tokenize.TokenError),
)

MAX_LAYERS = 1000
MAX_NPY_HEADER = 512  # numpy itself pads one to 128 bytes
MAX_DIRECTORY = 4 * 2**20  # a giant's training checkpoint has 0.3 MiB
# How many bytes the arrays may claim beyond the file's size. Floats hardly compress, but a new head of zeros does.
MAX_INFLATION = 2**30


class Stored(NamedTuple):
    """An array in a file, by its header; `layer` is its index on the first axis if layers are stacked."""

    member: str
    layer: int | None
    shape: tuple[int, ...]


@contextmanager
def opened(path: Path) -> "Iterator[np.lib.npyio.NpzFile]":
    """Open the archive in `path`. Any error while it is open becomes a UserError that names the file."""
    if not path.is_file():
        raise UserError(f"{path} is missing or not a file")
    try:
        with _File(path) as file:
            if file.read(2) != b"PK":  # numpy would read a single array of any size
                raise UserError("not a zip archive")
            file.seek(0)
            archive: np.lib.npyio.NpzFile = np.load(file, allow_pickle=False, max_header_size=MAX_NPY_HEADER)
            yield archive
    except ValidationError as error:
        reasons = "; ".join(problem["msg"] for problem in error.errors())
        raise UserError(f"{path} does not describe a valid model: {reasons}") from error
    except DAMAGED as error:
        raise UserError(f"{path} is not a readable checkpoint: {error}") from error


class _File(io.FileIO):
    """A file that refuses large reads, because zipfile reads a table of contents of any length at once."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > MAX_DIRECTORY:
            raise UserError(f"its table of contents claims {size} bytes; the limit is {MAX_DIRECTORY}")
        return super().read(size)


def headers(archive: "np.lib.npyio.NpzFile", file_size: int) -> tuple[str, dict[str, Stored]]:
    """Return the prefix, and the arrays under it by the paper's names, from the headers alone."""
    assert archive.zip is not None
    if len(set(archive.files)) != len(archive.files):
        raise UserError("it holds two arrays with the same name")
    members = {info.filename.removesuffix(".npy"): info for info in archive.zip.infolist()}
    roots = ("embedding/kernel", BIT_ROOT)
    prefix = next((prefix for prefix in PREFIXES for root in roots if f"{prefix}{root}" in members), None)
    if prefix is None:
        raise UserError(
            f"neither a ViT of Google (no array 'embedding/kernel') nor a BiT; it has {some(sorted(members))}"
        )
    stored: dict[str, Stored] = {}
    claimed = 0
    for member, info in members.items():
        if member.startswith(prefix):
            claimed += info.file_size
            if claimed > file_size + MAX_INFLATION:
                raise UserError(f"its arrays claim {claimed} bytes, but the file has {file_size}")
            for name, array in _by_paper_name(member, member[len(prefix) :], _shape(archive.zip, info)):
                if name in stored:
                    raise UserError(f"arrays {stored[name].member!r} and {member!r} are the same layer")
                stored[name] = array
    return prefix, stored


def _by_paper_name(member: str, name: str, shape: tuple[int, ...]) -> list[tuple[str, Stored]]:
    """Return an array by the paper's name, or one entry per layer if all layers are stacked in it."""
    layers: list[tuple[str, int | None]] = [(name, None)]
    stacked = "Transformer/encoderblock/"
    if name.startswith(stacked) and shape:
        if shape[0] > MAX_LAYERS:
            raise UserError(f"array {member!r} stacks {shape[0]} layers; the limit is {MAX_LAYERS}")
        layers = [(f"{BLOCK}{layer}/{name[len(stacked) :]}", layer) for layer in range(shape[0])]
        shape = shape[1:]
    if re.search(r"(^|/)gn(\d|_root|_proj)/(scale|bias)$", name) and shape[:-1] == (1, 1, 1):
        shape = shape[-1:]
    return [(older(layer_name), Stored(member, layer, shape)) for layer_name, layer in layers]


def _shape(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[int, ...]:
    """Return the shape in an array's header. Raises UserError for an unsupported dtype or a wrong number of bytes."""
    array = f"array {info.filename[:200]!r}"
    if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(f"{array} is encrypted, or compressed by a method that numpy does not use")
    with archive.open(info) as member:
        start = io.BytesIO(member.read(MAX_NPY_HEADER + 12))
    version = np.lib.format.read_magic(start)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise UserError(f"{array} has version {version} of the .npy format; 1.0 and 2.0 are supported")
    shape, _, dtype = readers[version](start, max_header_size=MAX_NPY_HEADER)
    if dtype not in DTYPES:
        raise UserError(f"{array} holds {dtype}; float32, float16 and bfloat16 are supported")
    if not all(side > 0 for side in shape):
        raise UserError(f"{array} is {list(shape)}; every side must be positive")
    if info.file_size != start.tell() + math.prod(shape) * dtype.itemsize:
        raise UserError(f"{array} is {dtype} {list(shape)}, but has {info.file_size} bytes, which does not match")
    return tuple(map(int, shape))


def as_float32(numbers: NDArray[np.generic]) -> NDArray[np.float32]:
    """Convert numbers of one of `DTYPES` to float32."""
    if numbers.dtype == BFLOAT16:
        bits = np.ascontiguousarray(numbers).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    return numbers.astype(np.float32, copy=False)


def some(names: list[str]) -> str:
    """Return at most five untrusted names for a message."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name[:200]) for name in names[:5]) + more
