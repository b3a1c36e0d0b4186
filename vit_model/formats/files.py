"""Files of others as plain JSON and tensors: nothing in them is executed, and what they claim is checked first.

In: paths. Out: a JSON object as a dict; tensors by the names that the file has, mapped from it and not copied.
`Source` says where one of our tensors lies in a foreign checkpoint, `to_ours` and `to_theirs` go both ways.
"""

import json
import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vit_model.config import ViTConfig
from vit_model.errors import UserError
from vit_model.model import ViT
from vit_model.weights import MAX_CONTRACT_BYTES, check_header_size, require_finite

TENSOR_NAMES = re.compile(
    r"collections OrderedDict|torch (\w+Storage|\w*float\w*|Size)|torch\._utils _rebuild_(tensor|tensor_v2|parameter)"
)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# What a damaged or lying pickle or archive makes pickletools, zipfile and torch raise.
PICKLE_ERRORS = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
README = "README.md"
MAX_README_BYTES = 2**20


class Source(NamedTuple):
    """Where one of our tensors lies: foreign tensors which, stacked along their first axis, hold its numbers."""

    names: tuple[str, ...]
    """Empty: the foreign model has no such tensor and computes as if it were zeros."""
    shape: tuple[int, ...]
    """Of each of them."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError for a missing, overlong or damaged one, and for anything else."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    if (size := path.stat().st_size) > MAX_CONTRACT_BYTES:
        raise UserError(f"{path} has {size} bytes; at most {MAX_CONTRACT_BYTES} are read")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON that can be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; a JSON object was expected")
    return content


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as one: a length, then a JSON object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def zip_names(path: Path) -> list[str]:
    """The names in a zip archive; none for a file that is not one."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except zipfile.BadZipFile:
        return []


def is_pickle(path: Path) -> bool:
    """Whether a file is one that torch.save wrote: a zip archive with a pickle, or (before 1.6) a pickle."""
    if any(name.endswith("/data.pkl") for name in zip_names(path)):
        return True
    with path.open("rb") as file:
        return file.read(2) == b"\x80\x02"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a safetensors file or in one of torch.save, on the CPU, in the dtypes that they have there.

    Raises UserError for a file that is neither, is cut short, claims more than it has, or would run something.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing")
    if is_pickle(path):
        return _read_pickle(path)
    check_header_size(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, RuntimeError) as error:  # of torch: dtypes that it has not
        raise UserError(f"{path} is not a whole safetensors file: {error}") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """A state dict that torch.save wrote, also as "model" or "state_dict" in a dict."""
    zipped = bool(zip_names(path))
    try:
        if zipped:
            _require_stored(path)
        _require_tensors_alone(path, zipped)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except PICKLE_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path} is not a whole file of tensors alone, as torch.save writes it: {reason}"
        ) from error
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UserError(f"{path} holds a {type(content).__name__}; a dict of tensors by name was expected")
    tensors = {name: part for name, part in content.items() if isinstance(part, Tensor)}
    # A tensor is a view, and a view can repeat one number a billion times.
    if any(part.layout != torch.strided or part.device.type != "cpu" for part in tensors.values()) or (
        sum(part.numel() * part.element_size() for part in tensors.values()) > path.stat().st_size
    ):
        raise UserError(f"{path}: its tensors claim more than its {path.stat().st_size} bytes can hold")
    return tensors


def _require_stored(path: Path) -> None:
    """Refuse an archive that torch.save did not write: a compressed entry could fill the memory."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
                raise UserError(f"{entry.filename} is compressed or longer than the file")


def _require_tensors_alone(path: Path, zipped: bool) -> None:
    """Refuse what torch.load(weights_only=True) refuses, and what it allows beside tensors: bytearrays of any size."""
    if zipped:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                _require_known_names(file)
    else:
        with path.open("rb") as file:
            for _ in range(5):  # a magic number, a version, the machine, the content, the storages' keys
                _require_known_names(file)


def _require_known_names(file: IO[bytes]) -> None:
    for operation, argument, _ in pickletools.genops(file):
        if operation.name == "GLOBAL" and not TENSOR_NAMES.fullmatch(str(argument)):
            raise UserError(f"it names {str(argument).replace(' ', '.')}")
        if operation.name == "PROTO" and argument != 2:
            raise UserError(f"its pickle has protocol {argument}, not 2")


def require_plausible(path: Path, config: ViTConfig, found: dict[str, Tensor]) -> None:
    """Refuse an architecture that cannot be in a file, by counting, before anything of its size is built."""
    held = sum(tensor.numel() for tensor in found.values())
    # A block has eight tensors or more. What has no counterpart in the file (zero biases) is far less than half.
    if config.num_blocks > len(found) or config.num_parameters > 2 * held:
        raise UserError(
            f"{path} has {held} numbers in {len(found)} tensors; the architecture has {config.depth} blocks of width"
            f" {config.width} and many more numbers"
        )


def shapes_of(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of our tensors, by name."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in ViT(config).state_dict().items()}


def to_ours(
    path: Path, sources: dict[str, Source], config: ViTConfig, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Our tensors, float32, out of the foreign ones in `found`.

    Raises UserError, naming the tensors, for missing ones, for others than `sources` knows, for a wrong shape or
    dtype, and for NaN or infinite values.
    """
    expected = {name: source.shape for source in sources.values() for name in source.names}
    if missing := sorted(expected.keys() - found.keys()):
        raise UserError(f"{path} lacks tensors of the architecture: {', '.join(missing)}")
    if surplus := sorted(found.keys() - expected.keys()):
        raise UserError(f"{path} holds tensors that the architecture has not: {', '.join(surplus)}")
    wrong = [
        f"{name} {list(found[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if tuple(found[name].shape) != shape
    ]
    if wrong:
        raise UserError(f"{path}: wrong shapes: {', '.join(wrong)}")
    if other := [f"{name} is {found[name].dtype}" for name in expected if found[name].dtype not in FLOATS]:
        raise UserError(f"{path}: {', '.join(other)}; quantised weights are not read, floating point is")
    weights = {}
    for name, shape in shapes_of(config).items():
        parts = [found[part].float() for part in sources[name].names]
        for part, tensor in zip(sources[name].names, parts, strict=True):
            require_finite(f"{path}: tensor {part!r}", tensor)
        # A copy, so that the file may be deleted and nobody's tensors are shared.
        weights[name] = torch.cat(parts).reshape(shape) if parts else torch.zeros(shape)
    return weights


def take(path: Path, found: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """Remove a tensor of a known shape from `found`, as float32. Raises UserError for a missing or other one."""
    if name not in found or tuple(found[name].shape) != shape or found[name].dtype not in FLOATS:
        held = f"{found[name].dtype} {list(found[name].shape)}" if name in found else "missing"
        raise UserError(f"{path}: {name} is {held}; floating point {list(shape)} was expected")
    return found.pop(name).float()


def to_theirs(weights: dict[str, Tensor], sources: dict[str, Source]) -> dict[str, Tensor]:
    """The foreign tensors out of ours, which are `checked_weights`.

    Raises UserError for a tensor that the other format has not, unless it is all zeros.
    """
    theirs = {}
    for name, source in sources.items():
        tensor = weights[name]
        if not source.names and tensor.any():
            raise UserError(
                f"weight {name!r} has no place in this format, which computes as if it were zeros"
            )
        for part, values in zip(source.names, tensor.reshape(-1).chunk(len(source.names) or 1), strict=False):
            theirs[part] = values.reshape(source.shape).clone()
    return theirs


def read_license(folder: Path) -> str | None:
    """What the model card says of the licence: the line of README.md's front matter."""
    path = folder / README
    if not path.is_file():
        return None
    with path.open("rb") as file:
        text = file.read(MAX_README_BYTES).decode(errors="replace")
    front = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    line = re.search(r"^license:[ \t]*(\S.*?)[ \t\r]*$", front.group(1), re.MULTILINE) if front else None
    return line.group(1).strip("'\"") if line else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_bytes(f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode())
