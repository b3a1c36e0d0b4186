"""Foreign files as plain JSON and tensors. Nothing in them is executed, and their claims are checked first.

In: paths. Out: a JSON object as a dict; tensors by the file's names, mapped from the file and not copied.
`Source` says where one of our tensors lies in a foreign checkpoint; `to_ours` and `to_theirs` convert both ways.
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
from vit_model.contract import MAX_CONTRACT_BYTES
from vit_model.errors import UserError
from vit_model.model import ViT
from vit_model.weights import check_header_size, require_finite, require_shapes

TENSOR_NAMES = re.compile(
    r"collections OrderedDict|torch (\w+Storage|\w*float\w*|Size)|torch\._utils _rebuild_(tensor|tensor_v2|parameter)"
)
# Where training codes keep the weights, and their moving averages (timm, DeiT, ...).
RAW, AVERAGED = ("model", "state_dict"), ("state_dict_ema", "model_ema")
# The prefixes that torch.compile, DataParallel and Lightning add to every name.
WRAPPERS = re.compile(r"^((module|model)\.)+")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Exceptions of pickletools, zipfile and torch for a damaged or hostile pickle or archive.
PICKLE_ERRORS = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, ArithmeticError, AssertionError, AttributeError, EOFError),
    *(LookupError, MemoryError, NotImplementedError, RuntimeError, TypeError, ValueError),
)
README = "README.md"
MAX_README_BYTES = 2**20


class Source(NamedTuple):
    """The foreign tensors that hold one of our tensors, stacked along their first axis."""

    names: tuple[str, ...]
    """Empty if the foreign model has no such tensor and computes as if it were zeros."""
    shape: tuple[int, ...]
    """The shape of each of them."""


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises UserError if it is missing, too long, damaged or not a JSON object."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    if (size := path.stat().st_size) > MAX_CONTRACT_BYTES:
        raise UserError(f"{path} has {size} bytes; the limit is {MAX_CONTRACT_BYTES}")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def is_safetensors(path: Path) -> bool:
    """Return whether a file begins like a safetensors file: a length, then a JSON object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def zip_names(path: Path) -> list[str]:
    """Return the names in a zip archive; none if the file is not one."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except zipfile.BadZipFile:
        return []


def is_pickle(path: Path) -> bool:
    """Return whether torch.save wrote a file: a zip archive with a pickle, or (before 1.6) a pickle."""
    if any(name.endswith("/data.pkl") for name in zip_names(path)):
        return True
    with path.open("rb") as file:
        return file.read(2) == b"\x80\x02"


def read_tensors(path: Path, averages: bool = True) -> tuple[dict[str, Tensor], list[str]]:
    """Read the tensors of a safetensors or torch.save file, on the CPU, in the file's dtypes.

    Args:
        averages: if a checkpoint has both, take the moving averages of the weights, as timm does.

    Returns:
        The tensors, without the prefixes of torch.compile, DataParallel and Lightning; lines about the choice.

    Raises UserError if the file has another format, is truncated, claims more than it holds, would execute code, or
    has two tensors of one name.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing")
    lines: list[str] = []
    if is_pickle(path):
        tensors, lines = _read_pickle(path, averages)
    else:
        check_header_size(path)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        except (SafetensorError, RuntimeError) as error:  # RuntimeError: torch lacks a dtype
            raise UserError(f"{path} is not a complete safetensors file: {error}") from error
    bare = {WRAPPERS.sub("", name.replace("_orig_mod.", "")): tensor for name, tensor in tensors.items()}
    if len(bare) < len(tensors):
        raise UserError(f"{path}: duplicate tensor names after removing prefixes such as `model.`")
    return bare, lines


def _read_pickle(path: Path, averages: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Read a state dict that torch.save wrote, also as an entry of a training's checkpoint."""
    zipped = bool(zip_names(path))
    try:
        if zipped:
            _require_stored(path)
        _require_tensors_alone(path, zipped)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except PICKLE_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is not a complete torch.save file that holds only tensors: {reason}") from error
    lines: list[str] = []
    for _ in range(2):  # a checkpoint may be within another's entry
        entries = content if isinstance(content, dict) else {}
        raw, averaged = (
            next((key for key in keys if isinstance(entries.get(key), dict)), None) for keys in (RAW, AVERAGED)
        )
        taken = (averaged or raw) if averages else (raw or averaged)
        if taken is None:
            break
        if averaged is not None:
            kind = "the moving averages" if taken == averaged else "the weights themselves"
            other = f"; the file also has {raw if taken == averaged else averaged}" if raw else ""
            lines.append(f"weights: {taken}, {kind}{other}.")
        content = entries[taken]
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UserError(f"{path} holds a {type(content).__name__}; expected a dict of tensors by name")
    tensors = {name: part for name, part in content.items() if isinstance(part, Tensor)}
    # A tensor is a view, and a view can repeat one number a billion times.
    if any(part.layout != torch.strided or part.device.type != "cpu" for part in tensors.values()) or (
        sum(part.numel() * part.element_size() for part in tensors.values()) > path.stat().st_size
    ):
        raise UserError(f"{path}: its tensors claim more than its {path.stat().st_size} bytes can hold")
    return tensors, lines


def _require_stored(path: Path) -> None:
    """Refuse an archive that torch.save did not write, because a compressed entry could fill the memory."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
                raise UserError(f"{entry.filename} is compressed or longer than the file")


def _require_tensors_alone(path: Path, zipped: bool) -> None:
    """Refuse everything that torch.load(weights_only=True) refuses, and bytearrays, which it allows in any size."""
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
            raise UserError(
                f"it refers to {str(argument).replace(' ', '.')}, which could execute code. If you trust the file, save"
                " its weights alone: torch.save(torch.load(FILE, weights_only=False)['state_dict'], NEW);"
                " or ['model'], or .state_dict() of a whole model"
            )
        if operation.name == "PROTO" and argument != 2:
            raise UserError(f"its pickle has protocol {argument}, not 2")


def require_plausible(path: Path, config: ViTConfig, tensors: dict[str, Tensor]) -> None:
    """Refuse an architecture that is too large for a file before a model of that size is built."""
    count = sum(tensor.numel() for tensor in tensors.values())
    # A block has at least eight tensors. Zero biases, which may be missing in the file, are far less than half.
    if config.num_blocks > len(tensors) or config.num_parameters > 2 * count:
        raise UserError(
            f"{path} has {count} numbers in {len(tensors)} tensors; the architecture has {config.depth} blocks of width"
            f" {config.width} and many more numbers"
        )


def shapes_of(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of our tensors, by name."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in ViT(config).state_dict().items()}


def to_ours(path: Path, sources: dict[str, Source], config: ViTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the foreign `tensors` to ours, float32.

    Raises UserError, naming the tensors, for missing or unexpected tensors, for a wrong shape or dtype, and for NaN or
    infinite values.
    """
    expected = {name: source.shape for source in sources.values() for name in source.names}
    require_shapes(f"{path}: ", expected, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if other := [f"{name} is {tensors[name].dtype}" for name in expected if tensors[name].dtype not in FLOATS]:
        raise UserError(f"{path}: {', '.join(other)}; quantised weights are not supported; floating point is")
    weights = {}
    for name, shape in shapes_of(config).items():
        parts = [tensors[part].float() for part in sources[name].names]
        for part, tensor in zip(sources[name].names, parts, strict=True):
            require_finite(f"{path}: tensor {part!r}", tensor)
        # A copy, so that the file may be deleted and no tensor shares memory with another.
        weights[name] = torch.cat(parts).reshape(shape) if parts else torch.zeros(shape)
    return weights


def take(path: Path, tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """Pop a tensor of a known shape from `tensors`, as float32. Raises UserError if it is missing or differs."""
    if name not in tensors or tuple(tensors[name].shape) != shape or tensors[name].dtype not in FLOATS:
        held = f"{tensors[name].dtype} {list(tensors[name].shape)}" if name in tensors else "missing"
        raise UserError(f"{path}: {name} is {held}; expected floating point {list(shape)}")
    return tensors.pop(name).float()


def to_theirs(weights: dict[str, Tensor], sources: dict[str, Source]) -> dict[str, Tensor]:
    """Convert our tensors, which are `checked_weights`, to the foreign ones.

    Raises UserError for a tensor that the other format does not have, unless it is all zeros.
    """
    theirs = {}
    for name, source in sources.items():
        tensor = weights[name]
        if not source.names and tensor.any():
            raise UserError(f"weight {name!r} cannot be written: this format has no such tensor and assumes zeros")
        for part, values in zip(source.names, tensor.reshape(-1).chunk(len(source.names) or 1), strict=False):
            theirs[part] = values.reshape(source.shape).clone()
    return theirs


def read_license(folder: Path) -> str | None:
    """Return the licence in the model card, from the front matter of README.md; None if there is none.

    The hub's `license: other` has its name in `license_name`.
    """
    path = folder / README
    if not path.is_file():
        return None
    with path.open("rb") as file:
        text = file.read(MAX_README_BYTES).decode(errors="replace")
    front = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    lines = re.findall(r"^license(_name)?:[ \t]*(\S.*?)[ \t\r]*$", front.group(1), re.MULTILINE) if front else []
    stated = {key: value.strip("'\"") for key, value in lines}
    return stated.get("_name") if stated.get("") == "other" else stated.get("")


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_bytes(f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode())
