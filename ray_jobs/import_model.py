"""The import stage: turn pretrained weights into a model artifact.

In: a file or a folder in one of the formats of `vit_model.formats`. Out: model.safetensors and config.json. The stage
prints which weights it took, resized, dropped or newly initialised. Only vitflow records the images on which weights
were trained; for other weights the contract's training data is "unknown". A wrong mean or std is the most common
silent mistake with pretrained weights, so the stage never guesses them: the file or the configuration states them.

    python -m ray_jobs.import_model --spec STORE/artifacts/import/<key>/attempts/<n>/attempt.json

ray, torch and the rest of `vit_model` are imported in functions: the stage's process checks its --spec without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import ValidationError

from pipelines.files.fetch import fetched
from pipelines.spec import UNSTATED, GivenPreprocessing, Import
from ray_jobs.process.cluster import in_task
from ray_jobs.process.context import Context, Result, model_digest
from ray_jobs.process.stage import run_stage
from vit_model.contract import ModelContract, Preprocessing
from vit_model.errors import UserError, reasons

if TYPE_CHECKING:
    from vit_model.build import Network
    from vit_model.formats import Imported

_NAMES_SHOWN, _LETTERS_SHOWN = 5, 60


def main(context: Context[Import]) -> Result:
    """Run the import in one Ray task."""
    return in_task(import_model, context)


def import_model(context: Context[Import]) -> Result:
    """Read the weights, check them and write the model (in a Ray task)."""
    from vit_model import formats, weights

    config = context.config
    context.check_source("before it was read")
    with fetched(config.path) as path:
        imported = formats.read(path, config.averages)
    context.check_source("while it was read")
    for line in imported.lines:
        print(line, flush=True)
    model, contract = model_of(imported, config)
    for line in describe(contract, imported.preprocessing):
        print(line, flush=True)
    with context.staging() as staging:
        weights.save_model(staging.path, model, contract)
    metrics: dict[str, float | int | str] = {
        "parameters": contract.architecture.num_parameters,
        "classes": len(contract.class_names),
    }
    return Result(model_digest(staging.files), staging.files, metrics)


def model_of(imported: Imported, config: Import) -> tuple[Network, ModelContract]:
    """Return the model and its contract. Raises UserError as `contract_of`."""
    import torch

    from vit_model.build import build

    contract = contract_of(imported, config)
    with torch.device("meta"):
        model = build(contract.architecture)
    model.load_state_dict(imported.weights, assign=True)
    return model, contract


def contract_of(imported: Imported, config: Import) -> ModelContract:
    """Return the contract of the model.

    Raises:
        UserError: mean and std are unknown, or the parts of the contract contradict each other.
    """

    architecture = imported.architecture
    height, width = architecture.image_shape
    if height != width:
        raise UserError(f"{config.path}: image_size {height} x {width}; only square images are supported")
    try:
        return ModelContract(
            architecture=architecture,
            class_names=imported.class_names,
            problem_type=imported.problem_type,
            thresholds=imported.thresholds,
            preprocessing=preprocessing_of(imported, config),
            training_data=imported.training_data,
            license=imported.license,
        )
    except ValidationError as error:
        raise UserError(f"{config.path}: {reasons(error)}") from error


def preprocessing_of(imported: Imported, config: Import) -> Preprocessing:
    """Return the file's preprocessing, overridden by the configuration's values.

    Raises:
        UserError: neither states mean and std.
        ValidationError: they do not fit the model.
    """

    from_file, from_config = imported.preprocessing, config.preprocessing
    if from_config is None and from_file is None:
        raise UserError(f"{config.path} {UNSTATED}")
    if from_config is None:
        assert from_file is not None
        return from_file
    architecture = imported.architecture
    fields = {} if from_file is None else from_file.model_dump()
    fields |= {"resolution": architecture.image_shape[0], "channels": architecture.in_channels}
    if from_config.crop is not None:
        for name in ("crop_fraction", "crop_offset"):  # these belong to the file's crop
            fields.pop(name, None)
    return Preprocessing.model_validate(fields | _for_channels(from_config, architecture.in_channels))


def _for_channels(preprocessing: GivenPreprocessing, channels: int) -> dict[str, object]:
    """Return the configured fields; a single mean or std applies to every channel."""
    fields = preprocessing.model_dump(exclude_none=True)
    for name in ("mean", "std"):
        if len(fields[name]) == 1:
            fields[name] *= channels
    return fields


def describe(contract: ModelContract, from_file: Preprocessing | None) -> Iterator[str]:
    """Yield lines for the user to check: shape, classes, preprocessing (also the file's, if it differs), licence."""
    model, names = contract.architecture, contract.class_names
    if model.family == "vit":
        shape = f"width {model.width}, depth {model.depth}, {model.num_heads} heads, patches of {model.patch_size}"
    else:
        shape = f"a ResNet of {', '.join(map(str, model.units))} units, width factor {model.width_factor}"
    yield (f"model: {shape}, images of {contract.preprocessing.resolution}; {model.num_parameters:,} parameters")
    shown = ", ".join(map(_plain, names[:_NAMES_SHOWN])) + (", ..." if len(names) > _NAMES_SHOWN else "")
    several = ", any number of them in an image" if contract.problem_type.startswith("multi") else ""
    yield (f"classes: {len(names)} ({shown}){several}" if names else "classes: none, the model outputs representations")
    origin = "from the file" if contract.preprocessing == from_file else "as given"
    yield f"preprocessing, {origin}: {_in_words(contract.preprocessing)}"
    if from_file not in {None, contract.preprocessing}:
        yield f"preprocessing in the file, not used: {_in_words(from_file)}"
    yield f"license: {_plain(contract.license or 'not stated in the file')}"


def _plain(text: str) -> str:
    """Return untrusted text, shortened and with a terminal's control characters escaped."""
    return repr(text[:_LETTERS_SHOWN])[1:-1]


def _in_words(pixels: Preprocessing) -> str:
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (pixels.mean, pixels.std))
    size = f"{pixels.resolution} x {pixels.resolution}"
    resized = pixels.resized
    way = f"squashed to {resized} x {resized}" if pixels.crop == "squash" else f"shorter side to {resized}"
    if pixels.crop == "center" or resized != pixels.resolution:
        way += f", the middle {size} of it"
    return f"mean {mean}, std {std}; {pixels.interpolation}, {way}"


if __name__ == "__main__":
    run_stage("import_model")
