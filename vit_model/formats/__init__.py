"""Foreign weights: `read` detects the format of a file or folder from its content and converts it to ours.

In: a path; each module of this package reads and writes one format. Out: an `Imported`.
Nothing in a file is executed, and memory is allocated only for data that the file really holds.
Use: `imported = read(Path("vit-base-patch16-224"))`; `hugging_face.write(folder, model, contract)`.
"""

from pathlib import Path

from vit_model.errors import UserError
from vit_model.formats import hugging_face, npz, timm
from vit_model.formats.files import is_pickle, is_safetensors, read_json, zip_names
from vit_model.formats.imported import Imported
from vit_model.weights import load_model

__all__ = ["Imported", "read"]

EXPECTED = "expected a folder with a config.json of Hugging Face, timm or vitflow, or an .npz, safetensors or .pt file"


def read(path: Path, averages: bool = True) -> Imported:
    """Read the checkpoint in a file or folder, independent of its name.

    If a checkpoint has both weights and their moving averages, `averages` chooses.

    Raises UserError, naming the file and what was expected, for anything that is not a complete, valid checkpoint
    of an architecture that our configurations can express exactly.
    """
    if path.is_dir():
        config = read_json(path / "config.json")
        if "model_type" in config:
            return hugging_face.read(path)
        if isinstance(config.get("architecture"), dict):
            return _read_vitflow(path)
        if "architecture" in config:
            return timm.read(path, averages)
        raise UserError(f"{path}: config.json has neither model_type nor architecture; {EXPECTED}")
    if not path.is_file():
        raise UserError(f"{path} is missing; {EXPECTED}")
    if any(name.endswith(".npy") for name in zip_names(path)):
        return npz.read(path)
    if is_safetensors(path) or is_pickle(path):
        return timm.read(path, averages)
    raise UserError(f"{path} has an unknown format; {EXPECTED}")


def _read_vitflow(folder: Path) -> Imported:
    model, contract = load_model(folder)
    if contract.mask_classes:
        raise UserError(f"{folder}: the model classifies pixels ({', '.join(contract.mask_classes)}), not images")
    return Imported(
        architecture=contract.architecture,
        weights=model.state_dict(),
        preprocessing=contract.preprocessing,
        class_names=contract.class_names,
        license=contract.license,
        lines=("weights: all of a vitflow model.",),
        training_data=contract.training_data,
        problem_type=contract.problem_type,
        thresholds=contract.thresholds,
    )
