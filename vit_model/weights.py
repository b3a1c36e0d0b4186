"""Models as files: a folder with `model.safetensors` (float32) and `config.json` (a `ModelContract`).

In: a model and its contract; or a folder. Out: the files, the same bytes for the same weights; or both back.
Nothing in a file is executed, and a file is checked against its configuration before memory is allocated for it.
Use: `save_model(folder, model, contract)`; `model, contract = load_model(folder)`.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vit_model.blocks import resize_axis, resize_position_embedding
from vit_model.build import Network, build_for
from vit_model.config import Architecture, ViTConfig
from vit_model.contract import CONTRACT_FILE, WEIGHTS_FILE, Contract, ModelContract, read_contract
from vit_model.errors import UserError
from vit_model.parts import HEADS
from vit_model.sizes import different_encoders

MAX_HEADER_BYTES = 16 * 2**20  # as for contracts


def save_model(folder: Path, model: Network, contract: ModelContract) -> None:
    """Write the model's weights and contract to `folder`, which is created if it is missing.

    Raises ValueError if the contract describes another model, or a weight is NaN or infinite.
    """
    save_weights(folder, model, contract)
    write_contract(folder, contract)


def write_contract(folder: Path, contract: Contract) -> None:
    """Write config.json to `folder`."""
    text = json.dumps(contract.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False)
    (folder / CONTRACT_FILE).write_bytes(f"{text}\n".encode())


def save_weights(folder: Path, model: Network, contract: ModelContract) -> None:
    """Do `save_model`, but write the weights only."""
    write_tensors(folder, checked_weights(model, contract))


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write model.safetensors to `folder`, which is created if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / WEIGHTS_FILE
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        # safetensors has the system's error number, such as a full disk's, only in its text
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from None


def checked_weights(model: Network, contract: ModelContract) -> dict[str, Tensor]:
    """Return the model's weights as all formats write them: float32, contiguous, on the CPU.

    Raises ValueError if the contract describes another model, or a weight is NaN or infinite.
    """
    if contract.architecture != model.config:
        raise ValueError(f"contract is for {contract.architecture!r}, the model is {model.config!r}")
    return finite_weights(model)


def finite_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a module's weights: float32, contiguous, on the CPU. Raises ValueError if one is NaN or infinite."""
    weights = {
        name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in model.state_dict().items()
    }
    for name, tensor in weights.items():
        require_finite(f"weight {name!r}", tensor)
    return weights


def load_model(folder: Path) -> tuple[Network, ModelContract]:
    """Load the model in `folder`, float32 on the CPU in evaluation mode, and its contract; of pixels, a `Segmenter`.

    Raises UserError, naming the file, if one of the two files is missing, cut short or invalid, or if the tensors do
    not match the contract's architecture or hold NaN or infinite values.
    """
    contract = read_contract(folder)
    architecture = contract.architecture
    model = load_tensors(folder, architecture, architecture.num_parameters, lambda: build_for(contract))
    return model.eval(), contract


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def load_tensors(
    folder: Path, architecture: Architecture, parameters: int | None, make: Callable[[], AnyModule]
) -> AnyModule:
    """Return the module that `make` makes with the weights of model.safetensors in `folder`, float32 on the CPU.

    Args:
        architecture: of the model in it.
        parameters: how many there should be; None: as `make` makes them.

    Raises UserError, see `load_model`.
    """
    path = folder / WEIGHTS_FILE
    check_header_size(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, not a dict
            headers = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in stored.items()}
            # Compare counts first, because a hostile depth of 10^9 must not be built.
            count = sum(math.prod(shape) for shape, _ in headers.values())
            if len(headers) < architecture.num_blocks or parameters not in (None, count):
                raise UserError(
                    f"{path} has {count} parameters in {len(headers)} tensors; "
                    f"the architecture in {CONTRACT_FILE} has {parameters or architecture.num_parameters}"
                )
            with torch.device("meta"):
                model = make()
            _require_same(path, model, headers)
            tensors = {name: file.get_tensor(name) for name in headers}
    except SafetensorError as error:
        raise UserError(f"{path} is not a complete safetensors file: {error}") from error
    for name, tensor in tensors.items():
        require_finite(f"{path}: tensor {name!r}", tensor)
    model.load_state_dict(tensors, assign=True)
    return model


@torch.no_grad()
def transfer_backbone(model: Network, source: Network, classes: Sequence[int] | None = None) -> list[str]:
    """Copy the weights of `source` to the new `model`: all but the heads for fine-tuning (section 3.2).

    Position embeddings are resized if the grids differ; a ResNet has none.

    Args:
        classes: for each class of `model`, its number in `source`, whose classifier is then taken over, with the tanh
            layer if there is one (both models or neither have one). None drops both head layers, because they belong
            to the source's training; `model` keeps its own, newly initialised.

    Returns:
        A line for each change.

    Raises:
        UserError: the encoders are not the same function of their weights; the message has both values.
    """
    ours, theirs = model.config, source.config
    if different := different_encoders(ours, theirs):
        raise UserError(f"backbone does not match the model: {different}")
    weights = source.state_dict()
    has_tanh = "pre_logits.weight" in weights
    if classes is None:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(HEADS)}
    else:
        rows = torch.tensor(classes)
        weights |= {name: tensor[rows] for name, tensor in weights.items() if name.startswith(("head.", "head_dist."))}
    lines = []
    if isinstance(ours, ViTConfig) and isinstance(theirs, ViTConfig):
        lines = resize_positions(weights, theirs, ours)
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)
    if classes is not None:
        order = "" if list(classes) == list(range(theirs.num_classes)) else ", in the model's order"
        return [*lines, f"head: the source's {theirs.num_classes} classes were kept{order}"]
    if has_tanh:
        lines.append("pre_logits: the source's tanh layer was dropped")
    if theirs.num_classes:
        lines.append(f"head: the source's {theirs.num_classes} classes were dropped")
    if "pre_logits.weight" in parameters:
        lines.append("pre_logits: newly initialised")
    if ours.num_classes:
        lines.append(f"head: newly initialised for {ours.num_classes} classes")
    return lines


def resize_positions(weights: dict[str, Tensor], old: ViTConfig, new: ViTConfig) -> list[str]:
    """Resize the learned position tables in `weights` to another grid, in place; return a line about it.

    Raises UserError for relative positions, because distances along one raster mean nothing on another.
    """
    if old.grid == new.grid or old.position in ("none", "sincos2d", "sincos2d_moco", "rope"):
        return []
    if old.position == "relative":
        raise UserError(
            f"relative positions of a {old.grid[0]}x{old.grid[1]} grid have no counterpart on {new.grid[0]}x"
            f"{new.grid[1]}; keep the resolution"
        )
    if old.position == "learned1d":
        prefix = old.num_class_positions
        weights["pos_embed"] = resize_position_embedding(
            weights["pos_embed"], old.grid, new.grid, prefix, old.position_resize
        )
    else:
        weights["pos_embed_y"] = resize_axis(weights["pos_embed_y"], new.grid[0])
        weights["pos_embed_x"] = resize_axis(weights["pos_embed_x"], new.grid[1])
    sizes = (f"{rows}x{columns}" for rows, columns in (old.grid, new.grid))
    return [f"pos_embed: resized from {' to '.join(sizes)} patches"]


def check_header_size(path: Path) -> None:
    """Refuse a file whose header claims more than any header needs, before that much is read."""
    if not path.is_file():
        raise UserError(f"{path} is missing: a model is a folder with {WEIGHTS_FILE} and {CONTRACT_FILE}")
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    limit = min(MAX_HEADER_BYTES, path.stat().st_size - 8)
    if not 0 < header <= limit:
        raise UserError(
            f"{path} is not a complete safetensors file: its header claims {header} bytes, at most {limit} fit"
        )


def _require_same(path: Path, model: nn.Module, headers: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Raise UserError unless a file's tensors have a model's names and shapes, and are float32."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    require_shapes(f"{path}: ", shapes, {name: shape for name, (shape, _) in headers.items()})
    if other := [f"{name} is {dtype}" for name, (_, dtype) in headers.items() if dtype != "F32"]:
        raise UserError(f"{path}: {', '.join(other)}; the architecture needs F32")


def require_shapes(where: str, expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError, naming the tensors, unless a file's tensors have the architecture's names and shapes."""
    for problem, names in (
        ("missing", sorted(expected.keys() - shapes.keys())),
        ("unexpected", sorted(shapes.keys() - expected.keys())),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            listed = ", ".join(name[:200] for name in names[:5])
            raise UserError(f"{where}{problem} tensors for this architecture: {listed}{more}")
    if wrong := [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if shapes[name] != shape
    ]:
        raise UserError(f"{where}wrong shapes: {', '.join(wrong)}")


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise UserError, with the tensor's `name`, unless all values are finite."""
    if not torch.isfinite(tensor).all():
        raise UserError(f"{name} holds NaN or infinite values; all must be finite")
