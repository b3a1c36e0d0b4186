"""The import stage: weights that others trained become a model like any other.

In: a file or a folder from outside (`vit_model.formats` says which). Out: model.safetensors and config.json. What was
taken, resized, dropped or newly initialised is printed. Nobody but vitflow says on which images weights were trained:
the contract's training data is then "unknown". Wrong mean and std are the commonest silent mistake with such weights,
so they are never guessed: where the file does not say them, the configuration does.

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
    """Read, check, write."""
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
    """The contract of the model. Raises UserError where nobody says the mean and std, or the parts don't fit."""
    from vit_model.config import ModelContract

    architecture = imported.architecture
    height, width = architecture.image_shape
    if height != width:
        raise UserError(f"{config.path}: image_size {height} x {width}; images are brought to squares here")
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
    """What the file says, with what the configuration gives in its place.

    Raises UserError where neither has mean and std, pydantic's where they don't fit the model.
    """
    from vit_model.config import Preprocessing

    said, given = imported.preprocessing, config.preprocessing
    if given is None and said is None:
        raise UserError(
            f"{config.path} does not say which mean and std its images had, and wrong ones do harm that nobody sees: "
            "give --preprocessing half (0.5 and 0.5: Google's, AugReg's and most of timm's ViTs), imagenet (DeiT, "
            "DINO, torchvision) or a file with them; in a recipe, preprocessing: half"
        )
    if given is None:
        assert said is not None
        return said
    architecture = imported.architecture
    fields = {} if said is None else said.model_dump()
    fields |= {"resolution": architecture.image_shape[0], "channels": architecture.in_channels}
    if given.crop is not None:
        fields.pop("crop_fraction", None)  # the fraction belongs to the file's own rule
    return Preprocessing.model_validate(fields | _for_channels(given, architecture.in_channels))


def _for_channels(given: GivenPreprocessing, channels: int) -> dict[str, object]:
    """The fields that are given; a single mean or std is every channel's."""
    fields = given.model_dump(exclude_none=True)
    for name in ("mean", "std"):
        if len(fields[name]) == 1:
            fields[name] *= channels
    return fields


def describe(contract: ModelContract, said: Preprocessing | None) -> Iterator[str]:
    """What a reader should check: shape, classes, pixels (and what the file `said` of them), licence."""
    model, names = contract.architecture, contract.class_names
    if model.family == "vit":
        shape = f"width {model.width}, depth {model.depth}, {model.num_heads} heads, patches of {model.patch_size}"
    else:
        shape = f"a ResNet of {', '.join(map(str, model.units))} units, width factor {model.width_factor}"
    yield (
        f"model: {shape}, images of {contract.preprocessing.resolution}; {model.num_parameters:,} parameters"
    )
    shown = ", ".join(map(_plain, names[:_NAMES_SHOWN])) + (", ..." if len(names) > _NAMES_SHOWN else "")
    yield f"classes: {len(names)} ({shown})" if names else "classes: none, it gives representations"
    whose = "as the file says" if contract.preprocessing == said else "as given"
    yield f"preprocessing, {whose}: {_in_words(contract.preprocessing)}"
    if said not in {None, contract.preprocessing}:
        yield f"the file says otherwise: {_in_words(said)}"
    yield f"license: {_plain(contract.license or 'the file does not say')}"


def _plain(text: str) -> str:
    """A stranger's text, short and without characters that steer a terminal."""
    return repr(text[:_LETTERS_SHOWN])[1:-1]


def _in_words(pixels: Preprocessing) -> str:
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (pixels.mean, pixels.std))
    size = f"{pixels.resolution} x {pixels.resolution}"
    if pixels.crop == "squash":
        way = f"straight to {size}"
    else:
        way = (
            f"shorter side to {int(pixels.resolution / pixels.crop_fraction + 1e-6)}, the middle {size} of it"
        )
    return f"mean {mean}, std {std}; {pixels.interpolation}, {way}"


if __name__ == "__main__":
    run_stage("import_model")
