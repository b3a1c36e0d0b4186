"""Weights of others: `read` tells the format of a file or folder from its content and reads it in our terms.

In: a path; each module of this package reads and writes one format. Out: an `Imported`.
Nothing in a file is executed, and memory is taken only for what the file really holds.
Use: `imported = read(Path("vit-base-patch16-224"))`; `hugging_face.write(folder, model, contract)`.
"""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from vit_model.config import Architecture, Preprocessing
from vit_model.errors import UserError
from vit_model.weights import load_model


class Imported(NamedTuple):
    """A foreign checkpoint in our terms."""

    architecture: Architecture
    weights: dict[str, Tensor]
    """By our names, float32, exactly the architecture's."""
    preprocessing: Preprocessing | None
    """None: the file does not say."""
    class_names: tuple[str, ...]
    """() where there is no head; "0", "1", ... where names are not said."""
    license: str | None
    lines: tuple[str, ...]
    """What was taken, resized, dropped, newly initialised; one sentence each."""
    training_data: str = "unknown"
    """As a `ModelContract` has it."""


EXPECTED = (
    "a folder with config.json of Hugging Face, timm or vitflow, or a file of .npz, safetensors or torch.save"
)


def read(path: Path) -> Imported:
    """The checkpoint in a file or folder, whatever its name ends in.

    Raises UserError, naming the file and what was expected, for anything that is not a whole, sound checkpoint
    of an architecture that `ViTConfig` can say exactly.
    """
    from vit_model.formats import hugging_face, timm
    from vit_model.formats.files import is_pickle, is_safetensors, read_json, zip_names

    if path.is_dir():
        config = read_json(path / "config.json")
        if "model_type" in config:
            return hugging_face.read(path)
        if isinstance(config.get("architecture"), dict):
            return _read_own(path)
        if "architecture" in config:
            return timm.read(path)
        raise UserError(f"{path}: config.json has neither model_type nor architecture; {EXPECTED} fits")
    if not path.is_file():
        raise UserError(f"{path} is missing; {EXPECTED} fits")
    if any(name.endswith(".npy") for name in zip_names(path)):
        from vit_model.formats import npz

        return npz.read(path)
    if is_safetensors(path) or is_pickle(path):
        return timm.read(path)
    raise UserError(f"{path} is in no format known here; {EXPECTED} fits")


def _read_own(folder: Path) -> Imported:
    model, contract = load_model(folder)
    return Imported(
        architecture=contract.architecture,
        weights=model.state_dict(),
        preprocessing=contract.preprocessing,
        class_names=contract.class_names,
        license=contract.license,
        lines=("weights: all of a model of vitflow's.",),
        training_data=contract.training_data,
    )
