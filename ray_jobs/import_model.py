"""The import stage: convert pretrained weights to a model of the store.

In: a file or folder in a format of `vit_model.formats`. Out: model.safetensors and config.json. The log says what was
imported, resized, dropped or newly initialised. Only vitflow's own files say which images the weights were trained on;
otherwise the contract's training data is "unknown". A wrong mean and std is the most common silent mistake with such
weights, so they are never guessed: if the file does not contain them, the configuration must.

    python -m ray_jobs.import_model --spec STORE/artifacts/import/<key>/attempts/<n>/attempt.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import ValidationError

from pipelines.files.fetch import fetched
from pipelines.spec import GivenPreprocessing, Import
from ray_jobs.process.stage import Context, Result, model_digest, run_stage
from vit_model.errors import UserError, reasons

if TYPE_CHECKING:
    from vit_model.config import ModelContract, Preprocessing
    from vit_model.formats import Imported

_NAMES_SHOWN, _LETTERS_SHOWN = 5, 60


def main(context: Context[Import]) -> Result:
    """Import in one Ray task."""
    import ray

    task = ray.remote(num_cpus=1)(import_model)
    result: Result = ray.get(task.remote(context))
    return result


def import_model(context: Context[Import]) -> Result:
    """Read, check and write the model."""
    import torch

    from vit_model import formats
    from vit_model.build import build
    from vit_model.weights import save_model

    config = context.config
    context.check_source("before it was read")
    with fetched(config.path) as path:
        imported = formats.read(path)
    context.check_source("while it was read")
    for line in imported.lines:
        print(line, flush=True)
    contract = contract_of(imported, config)
    for line in describe(contract, imported.preprocessing):
        print(line, flush=True)
    with torch.device("meta"):
        model = build(contract.architecture)
    model.load_state_dict(imported.weights, assign=True)
    with context.staging() as staging:
        save_model(staging.path, model, contract)
    metrics: dict[str, float | int | str] = {
        "parameters": contract.architecture.num_parameters,
        "classes": len(contract.class_names),
    }
    return Result(model_digest(staging.files), staging.files, metrics)


def contract_of(imported: Imported, config: Import) -> ModelContract:
    """Return the model's contract. Raises UserError if mean and std are unknown, or the parts contradict each other."""
    from vit_model.config import ModelContract

    architecture = imported.architecture
    height, width = architecture.image_shape
    if height != width:
        raise UserError(f"{config.path}: image_size {height} x {width} is not supported; it must be square")
    try:
        return ModelContract(
            architecture=architecture,
            class_names=imported.class_names,
            preprocessing=preprocessing_of(imported, config),
            training_data=imported.training_data,
            license=imported.license,
        )
    except ValidationError as error:
        raise UserError(f"{config.path}: {reasons(error)}") from error


def preprocessing_of(imported: Imported, config: Import) -> Preprocessing:
    """Return the file's preprocessing, overridden by the configuration's.

    Raises UserError if neither has mean and std, and pydantic's ValidationError if they do not match the model.
    """
    from vit_model.config import Preprocessing

    stored, override = imported.preprocessing, config.preprocessing
    if override is None and stored is None:
        raise UserError(
            f"{config.path} does not say which mean and std its images had, and wrong values silently lower accuracy: "
            "give --preprocessing half (0.5 and 0.5: Google's, AugReg's and most of timm's ViTs), imagenet (DeiT, "
            "DINO, torchvision) or a file with them; in a recipe, preprocessing: half"
        )
    if override is None:
        assert stored is not None
        return stored
    architecture = imported.architecture
    fields = {} if stored is None else stored.model_dump()
    fields |= {"resolution": architecture.image_shape[0], "channels": architecture.in_channels}
    if override.crop is not None:
        fields.pop("crop_fraction", None)  # the fraction belongs to the file's own crop rule
    return Preprocessing.model_validate(fields | _for_channels(override, architecture.in_channels))


def _for_channels(override: GivenPreprocessing, channels: int) -> dict[str, object]:
    """Return the fields of the override; a single mean or std applies to every channel."""
    fields = override.model_dump(exclude_none=True)
    for name in ("mean", "std"):
        if len(fields[name]) == 1:
            fields[name] *= channels
    return fields


def describe(contract: ModelContract, stored: Preprocessing | None) -> Iterator[str]:
    """Yield lines for a reader to check: shape, classes, preprocessing (and the file's own, `stored`), licence."""
    model, names = contract.architecture, contract.class_names
    if model.family == "vit":
        shape = f"width {model.width}, depth {model.depth}, {model.num_heads} heads, patches of {model.patch_size}"
    else:
        shape = f"a ResNet of {', '.join(map(str, model.units))} units, width factor {model.width_factor}"
    yield (
        f"model: {shape}, images of {contract.preprocessing.resolution}; {model.num_parameters:,} parameters"
    )
    shown = ", ".join(map(_plain, names[:_NAMES_SHOWN])) + (", ..." if len(names) > _NAMES_SHOWN else "")
    yield f"classes: {len(names)} ({shown})" if names else "classes: none, the model returns representations"
    origin = "from the file" if contract.preprocessing == stored else "as configured"
    yield f"preprocessing, {origin}: {_in_words(contract.preprocessing)}"
    if stored not in {None, contract.preprocessing}:
        yield f"the file has other preprocessing: {_in_words(stored)}"
    yield f"license: {_plain(contract.license or 'the file does not say')}"


def _plain(text: str) -> str:
    """Return untrusted text, shortened and without characters that control a terminal."""
    return repr(text[:_LETTERS_SHOWN])[1:-1]


def _in_words(pixels: Preprocessing) -> str:
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (pixels.mean, pixels.std))
    size = f"{pixels.resolution} x {pixels.resolution}"
    if pixels.crop == "squash":
        steps = f"squashed to {size}"
    else:
        shorter = int(pixels.resolution / pixels.crop_fraction + 1e-6)
        steps = f"shorter side resized to {shorter}, centre {size} cropped"
    return f"mean {mean}, std {std}; {pixels.interpolation}, {steps}"


if __name__ == "__main__":
    run_stage("import_model")
