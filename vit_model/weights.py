"""Models as files: a folder with `model.safetensors` (float32) and `config.json` (a `ModelContract`).

In: a model and its contract; or a folder. Out: the files, the same bytes for the same weights; or both back.
Nothing in a file is executed, and a file is checked against its configuration before memory is taken for it.
Use: `save_model(folder, model, contract)`; `model, contract = load_model(folder)`.
"""

import json
import math
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vit_model.build import Network, build
from vit_model.config import Architecture, ModelContract, ViTConfig
from vit_model.errors import UserError
from vit_model.positions import resize_axis, resize_position_embedding

WEIGHTS_FILE = "model.safetensors"
CONTRACT_FILE = "config.json"
# The largest real ones are a few hundred kB (22,000 class names); a hostile one could ask for gigabytes.
MAX_HEADER_BYTES = MAX_CONTRACT_BYTES = 16 * 2**20

HEADS = ("pre_logits.", "head.", "head_dist.")
# What does not change the encoder's function of its weights. The image's size only changes the positions.
NOT_ENCODER = {
    "image_size",
    "num_classes",
    "representation_head",
    "head_bias",
    "dropout",
    "stochastic_depth",
    "layer_scale",
    "position_resize",
}


def save_model(folder: Path, model: Network, contract: ModelContract) -> None:
    """Write the model's weights and contract into `folder`, which is made when missing.

    Raises ValueError when the contract describes another model, or when a weight is NaN or infinite.
    """
    tensors = checked_weights(model, contract)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    text = json.dumps(contract.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False)
    (folder / CONTRACT_FILE).write_bytes(f"{text}\n".encode())


def checked_weights(model: Network, contract: ModelContract) -> dict[str, Tensor]:
    """The model's weights as every format writes them: float32, contiguous, on the CPU.

    Raises ValueError when the contract describes another model, or when a weight is NaN or infinite.
    """
    if contract.architecture != model.config:
        raise ValueError(f"contract is for {contract.architecture!r}, the model is {model.config!r}")
    weights = {
        name: tensor.detach().to("cpu", torch.float32).contiguous()
        for name, tensor in model.state_dict().items()
    }
    for name, tensor in weights.items():
        require_finite(f"weight {name!r}", tensor)
    return weights


def load_model(folder: Path) -> tuple[Network, ModelContract]:
    """The model in `folder`, float32 on the CPU, in evaluation mode, and its contract.

    Raises ValueError, naming the file, when one of the two is missing, cut short or not what it claims to be,
    has other tensors than the contract's architecture, or NaN or infinite values.
    """
    contract = read_contract(folder)
    path = folder / WEIGHTS_FILE
    check_header_size(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, not a dict
            found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in stored.items()}
            model = _empty_model(path, contract, found)
            tensors = {name: file.get_tensor(name) for name in found}
    except SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file: {error}") from error
    for name, tensor in tensors.items():
        require_finite(f"{path}: tensor {name!r}", tensor)
    model.load_state_dict(tensors, assign=True)
    return model.eval(), contract


@torch.no_grad()
def transfer_backbone(model: Network, source: Network) -> list[str]:
    """Copy everything but the heads from `source` into `model`, a new one, for fine-tuning (section 3.2).

    Both head layers are left behind (the tanh layer belongs to pretraining); `model` keeps its own, as it was
    initialised. Position embeddings are resized when the grids differ; a ResNet has none. Returns lines that say
    what was done.
    Raises ValueError when the encoders are not the same function of their weights, naming both values.
    """
    ours, theirs = model.config, source.config
    if different := _different_fields(ours, theirs):
        pairs = ", ".join(
            f"{name} {getattr(theirs, name)!r} and {getattr(ours, name)!r}" for name in different
        )
        raise UserError(f"backbone does not fit the model: they have {pairs}")
    weights = {name: tensor for name, tensor in source.state_dict().items() if not name.startswith(HEADS)}
    lines = []
    if isinstance(ours, ViTConfig) and isinstance(theirs, ViTConfig):
        lines = resize_positions(weights, theirs, ours)
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)
    if "pre_logits.weight" in source.state_dict():
        lines.append("pre_logits: the source's tanh layer was dropped")
    if theirs.num_classes:
        lines.append(f"head: the source's {theirs.num_classes} classes were dropped")
    if "pre_logits.weight" in parameters:
        lines.append("pre_logits: newly initialised")
    if ours.num_classes:
        lines.append(f"head: newly initialised for {ours.num_classes} classes")
    return lines


def _different_fields(ours: Architecture, theirs: Architecture) -> list[str]:
    """Fields in which two configurations differ as encoders."""
    if ours.family != theirs.family:
        return ["family"]
    different = [
        name
        for name in type(ours).model_fields
        if name not in NOT_ENCODER and getattr(ours, name) != getattr(theirs, name)
    ]
    # how large layer_scale begins is forgotten at once; whether there is one is not
    if isinstance(ours, ViTConfig) and isinstance(theirs, ViTConfig):
        different += ["layer_scale"] * ((ours.layer_scale is None) != (theirs.layer_scale is None))
    return different


def resize_positions(weights: dict[str, Tensor], old: ViTConfig, new: ViTConfig) -> list[str]:
    """Bring the learned position tables among `weights` to another grid, in place; returns lines that say so.

    Raises ValueError for relative positions, whose distances along one raster mean nothing on another.
    """
    if old.grid == new.grid or old.position in ("none", "sincos2d", "sincos2d_moco"):
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


def read_contract(folder: Path) -> ModelContract:
    """The contract of the model in `folder`. Raises ValueError, naming the file, where it is missing or none."""
    path = folder / CONTRACT_FILE
    if not path.is_file():
        raise UserError(f"{path} is missing: a model is a folder with {WEIGHTS_FILE} and {CONTRACT_FILE}")
    if path.stat().st_size > MAX_CONTRACT_BYTES:
        raise UserError(
            f"{path} has {path.stat().st_size} bytes; a contract has at most {MAX_CONTRACT_BYTES}"
        )
    try:
        return ModelContract.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path} is not a model contract: {error}") from error


def check_header_size(path: Path) -> None:
    """Refuse a file whose header claims more than a header needs, before anything reads that much."""
    if not path.is_file():
        raise UserError(f"{path} is missing: a model is a folder with {WEIGHTS_FILE} and {CONTRACT_FILE}")
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    limit = min(MAX_HEADER_BYTES, path.stat().st_size - 8)
    if not 0 < header <= limit:
        raise UserError(
            f"{path} is not a whole safetensors file: its header claims {header} bytes, at most {limit} fit"
        )


def _empty_model(
    path: Path, contract: ModelContract, found: dict[str, tuple[tuple[int, ...], str]]
) -> Network:
    """A model on "meta" for tensors of these names, shapes and dtypes, or ValueError."""
    # Counts first: a hostile depth of 10^9 must not be built to see that it does not fit.
    count = sum(math.prod(shape) for shape, _ in found.values())
    expected = contract.architecture.num_parameters
    if count != expected or len(found) < contract.architecture.num_blocks:
        raise UserError(
            f"{path} has {count} numbers in {len(found)} tensors; "
            f"the architecture in {CONTRACT_FILE} has {expected}"
        )
    with torch.device("meta"):
        model = build(contract.architecture)
    expected_shapes = {name: (tuple(tensor.shape), "F32") for name, tensor in model.state_dict().items()}
    if unknown := sorted(found.keys() - expected_shapes.keys()):
        raise UserError(f"{path} holds tensors that the architecture has not: {', '.join(unknown[:5])}")
    if missing := sorted(expected_shapes.keys() - found.keys()):
        raise UserError(f"{path} lacks tensors of the architecture: {', '.join(missing[:5])}")
    for name, expected_shape in expected_shapes.items():
        if found[name] != expected_shape:
            raise UserError(
                f"{path}: tensor {name!r} is {found[name]}, the architecture needs {expected_shape}"
            )
    return model


def require_finite(what: str, tensor: Tensor) -> None:
    if not torch.isfinite(tensor).all():
        raise UserError(f"{what} holds NaN or infinite values; all must be finite")
