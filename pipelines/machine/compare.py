"""`vitflow init --compare`: a recipe that compares imported backbones on the images of a source, as `bakeoff` does.

The code of the import reads the whole files of weights, so a recipe is written only for weights that an import accepts.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from pipelines.files.fetch import fetched
from pipelines.identity import source_fingerprint
from pipelines.machine.init import Examined, count_gpus, examine, pipeline_name, write_checked
from pipelines.recipe.load import yaml_text
from pipelines.recipe.pipeline import stage_name
from pipelines.spec import Import, RecipeError, quantity
from ray_jobs.import_model import contract_of
from ray_jobs.training.cost import images_per_second
from vit_model import compute, formats
from vit_model.config import Architecture, ViTConfig
from vit_model.errors import UserError, reasons
from vit_model.sizes import size_of

OTHER_STAGES = ("images", "features", "finetune", "report")
LEARNING_RATES = ("1.0e-5", "3.0e-5", "1.0e-4")  # as pipelines/recipes/bakeoff.yaml has them
BATCH_SIZE, MAX_STEPS, MIN_STEPS, PASSES = 64, 500, 100, 100
MEASURED_FLOPS = 2e11  # of a measured step, of 8 to 64 images
FEATURES = 4  # features per image: the backbone's and three untrained models'


class Backbone(NamedTuple):
    """Weights to compare: the stage that imports them, their path, and their properties."""

    name: str
    path: str
    architecture: Architecture
    states_preprocessing: bool
    """Whether the files state the mean and std of the images."""

    @property
    def resolution(self) -> int:
        """The side of its training images."""
        return self.architecture.image_shape[0]


def write_comparison(file: Path, images: Path, source: str, paths: Sequence[str], console: Console) -> None:
    """Write a recipe to `file` that compares the weights at `paths`; print what was found, chosen and estimated.

    Raises:
        RecipeError: as `examine`; fewer than two weights, the same weights twice, or weights that do not exist or that
            no import accepts.
        StoreError: weights on S3 or the hub cannot be read. StoreUnreachable: they do not answer.
    """

    def say(text: str) -> None:
        console.print(escape(text), soft_wrap=True)

    configs = _imports(paths)
    examined = examine(file, images, source)
    for line in examined.summary():
        say(line)
    backbones = []
    for name, config in zip(_names(paths), configs, strict=True):
        backbone = _read(name, config)
        backbones.append(backbone)
        say(f"{name}: {backbone.architecture.num_parameters:,} parameters, {_described(backbone)}")
    resolution = common_resolution(backbones)
    steps = max(MIN_STEPS, min(MAX_STEPS, PASSES * len(examined.listing.entries) // BATCH_SIZE))
    say(
        f"chose resolution {resolution} for all; each has {len(LEARNING_RATES)} trials and a refit of {steps} steps "
        f"of {BATCH_SIZE} images"
    )
    say(_estimate(backbones, resolution, steps, len(examined.listing.entries)))
    write_checked(file, _recipe(file, examined, backbones, resolution, steps))
    silent = [backbone.name for backbone in backbones if not backbone.states_preprocessing]
    settings = "".join(f" --set {name}.preprocessing=half" for name in silent)
    if silent:
        say(
            f"{', '.join(silent)}: the weights do not state the mean and std of their images, and wrong values lower "
            "the accuracy without an error. Set preprocessing in each of these stages: half (Google's, AugReg's and "
            "most of timm's ViTs) or imagenet (DeiT, DINO, torchvision); the command above uses half"
        )
    say(f"wrote {file}; next: vitflow run {file}{settings}")


def _imports(paths: Sequence[str]) -> list[Import]:
    """Return the imports of these weights.

    Raises:
        RecipeError: there are fewer than two, the same ones twice, or some do not exist.
    """
    if len(paths) < 2:
        raise RecipeError(
            f"--compare {' '.join(paths)}: give at least two backbones, as in --compare A.npz B_folder hf:ORG/NAME"
        )
    configs: dict[str, tuple[str, Import]] = {}
    for path in paths:
        try:
            config = Import(job="import", path=path)
        except ValidationError as error:
            raise RecipeError(f"--compare {path}: {reasons(error)}") from None
        try:
            content = source_fingerprint(config)
        except RecipeError as error:
            reason = str(error).removeprefix("path: ").removeprefix("import: ")
            raise RecipeError(f"--compare {path}: {reason}") from None
        assert content is not None
        if content in configs:
            raise RecipeError(
                f"--compare {path}: the same weights as {configs[content][0]}; leave one of them out"
            )
        configs[content] = path, config
    return [config for _, config in configs.values()]


def _names(paths: Sequence[str]) -> list[str]:
    """Return a distinct stage name for each path, after its file or folder."""
    taken = [*OTHER_STAGES]
    for path in paths:
        name = stage_name(path)
        if name == "model":  # as an export calls every file
            name = stage_name(path.rstrip("/").rpartition("/")[0])
        number, free = 2, name
        while free in taken:
            free, number = f"{name[:36]}_{number}", number + 1
        taken.append(free)
    return taken[len(OTHER_STAGES) :]


def _read(name: str, config: Import) -> Backbone:
    """Read weights as an import does. Raises RecipeError if it would refuse them."""

    try:
        with fetched(config.path) as path:
            imported = formats.read(path)
        states = imported.preprocessing is not None
        given = config if states else Import(job="import", path=config.path, preprocessing="half")
        contract = contract_of(imported, given)
    except UserError as error:
        raise RecipeError(f"--compare {config.path}: {error}") from None
    return Backbone(name, config.path, contract.architecture, states)


def _described(backbone: Backbone) -> str:
    model = backbone.architecture
    shape = f"patches of {model.patch_size}, " if isinstance(model, ViTConfig) else ""
    flops = compute.forward_flops(model) / 1e9
    return f"{shape}trained at {backbone.resolution} pixels, {flops:,.3g} GFLOPs per image there"


def common_resolution(backbones: Sequence[Backbone]) -> int:
    """Return a resolution for fine-tuning all: the most frequent training resolution, in a tie the lowest.

    If none of these is a multiple of all patch sizes, return the multiple that is nearest to the lowest.
    """
    counts = Counter(backbone.resolution for backbone in backbones)
    trained_at = sorted(counts, key=lambda resolution: (-counts[resolution], resolution))
    shapes = [backbone.architecture for backbone in backbones]
    multiple = math.lcm(*(shape.patch_size for shape in shapes if isinstance(shape, ViTConfig)))
    nearest = max(1, round(min(counts) / multiple)) * multiple
    return next((resolution for resolution in trained_at if resolution % multiple == 0), nearest)


def _estimate(backbones: Sequence[Backbone], resolution: int, steps: int, images: int) -> str:
    """Measure the cheapest backbone's training here, and estimate the run time of all from their operations."""

    tuned = [backbone.architecture.for_finetuning(resolution, 2) for backbone in backbones]
    cheapest = min(tuned, key=compute.train_flops)
    gpus = count_gpus()
    batch_size = min(64, max(8, round(MEASURED_FLOPS / compute.train_flops(cheapest))))
    speed = images_per_second(size_of(cheapest, head=True), resolution, batch_size)
    trainings = (len(LEARNING_RATES) + 1) * steps * BATCH_SIZE
    flops = sum(trainings * compute.train_flops(model) for model in tuned)
    flops += sum(FEATURES * images * compute.forward_flops(model) for model in tuned)
    units = gpus or os.cpu_count() or 1
    minutes = flops / (compute.train_flops(cheapest) * speed * units) / 60
    machine = f"{gpus} GPU(s)" if gpus else f"{units} CPU cores"
    about = f"{minutes / 60:,.1f} hours" if minutes > 90 else quantity(max(1, round(minutes)), "minute")
    return (
        f"the smallest one trains on {speed:,.3g} images/s measured here: about {about} in all on {machine}"
    )


def _recipe(
    file: Path,
    images: Examined,
    backbones: Sequence[Backbone],
    resolution: int,
    steps: int,
) -> str:
    name, names = images.root.expanduser().resolve().name, ", ".join(backbone.name for backbone in backbones)
    imports = "\n".join(
        f"  {backbone.name}: {{job: import, path: {yaml_text(backbone.path)}}}"
        + ("" if backbone.states_preprocessing else "  # add preprocessing: half, or imagenet")
        for backbone in backbones
    )
    return f"""\
# Written by `vitflow init --compare` for {images.classes}. Edit it.
#   vitflow run {file}
# One protocol for all backbones: the same images, splits and resolution, the same number of trials, steps and images
# per step, the same rates to choose from, one refit. The mean, std, interpolation and crop of the images are each
# backbone's own. The report shows accuracy beside cost.
name: {pipeline_name(file)}
description: {yaml_text(f"Imported backbones on {name}, under one protocol, accuracy beside cost.")}

stages:
  images:
    job: ingest
    source: {images.source_text()}

{imports}

  # Frozen features: few labels, then all. Each fit chooses its L2 on its own labels.
  features:
    job: evaluate
    data: images
    matrix: {{backbone: [{names}]}}
    resolution: {resolution}
    shots: [{", ".join(map(str, images.shots()))}]
    linear_probe: true

  # The rate is chosen on dev, the final model is trained on train and dev, and test is scored once.
  finetune:
    job: finetune
    data: images
    matrix: {{backbone: [{names}]}}
    resolution: {resolution}
    learning_rates: [{", ".join(LEARNING_RATES)}]
    steps: {steps}
    batch_size: {BATCH_SIZE}
    augment: crop_flip

  report:
    job: report
    title: {yaml_text(f"Which backbone for {name}?")}
    of: [images, {names}, features, finetune]
"""
