"""`vitflow init --from`: recipes that start from pretrained weights; several are compared, as `bakeoff` does.

The code of the import reads the whole files of weights, so a recipe is written only for weights that an import accepts.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from pipelines.files.fetch import fetched
from pipelines.identity import source_fingerprint
from pipelines.machine.budget import Fits, Machine, described, estimate, name_of
from pipelines.machine.examined import Draft, Examined, Say
from pipelines.recipe.load import yaml_text
from pipelines.recipe.pipeline import stage_name
from pipelines.results.lookup import find_artifact
from pipelines.spec import Import, RecipeError
from pipelines.store import Manifest, Store, StoreAbsent, all_manifests, open_store
from ray_jobs.import_model import contract_of
from ray_jobs.training.cost import images_per_second
from vit_model import formats
from vit_model.config import Architecture, ViTConfig
from vit_model.errors import UserError, reasons

OTHER_STAGES = ("images", "features", "finetune", "detect", "vit", "pixels", "report")
LEARNING_RATES = ("1.0e-5", "3.0e-5", "1.0e-4")  # as pipelines/recipes/bakeoff.yaml has them
BATCH_SIZE, MAX_STEPS, MIN_STEPS, PASSES = 64, 500, 100, 100
# Without a GPU: fewer pixels, rates, images per step, epochs, and images in one training
CPU_SIDE, CPU_RATES, CPU_BATCH_SIZE, CPU_EPOCHS, CPU_PASSES = 160, LEARNING_RATES[1:], 32, 15, 20_000
SWEPT_IMAGES = 1_000  # below this, dev has fewer than 100 images, and chance decides between learning rates
TRAIN_SHARE = 0.7  # of the images, as they are drawn; most sources with splits have about as many
MIN_SIDE = 64  # of the training images of weights that are taken without asking
# weights that fit a machine without and with a GPU
EXAMPLES = ("hf:timm/vit_tiny_patch16_224.augreg_in21k", "hf:timm/vit_base_patch16_224.augreg_in21k")
PIXELS = """\
  # What it must beat.
  pixels:
    job: baselines
    data: images
    methods: [majority, k-NN, {}]
"""


class Backbone(NamedTuple):
    """Weights to start from: the stage that imports them, and their properties."""

    name: str
    config: Import
    architecture: Architecture
    states_preprocessing: bool
    """Whether the files or the configuration state the mean and std of the images."""

    @property
    def resolution(self) -> int:
        """The side of its training images."""
        return self.architecture.image_shape[0]

    def stage(self) -> str:
        """Return the stage that imports it, as YAML."""
        given = self.config.preprocessing
        fields = (
            "" if given is None else f", preprocessing: {json.dumps(given.model_dump(mode='json', exclude_none=True))}"
        )
        remark = "" if self.states_preprocessing else "  # add preprocessing: half, or imagenet"
        return f"  {self.name}: {{job: import, path: {yaml_text(self.config.path)}{fields}}}{remark}"


# ------------------------------------------------------------------------------------------------- weights


def read_all(weights: Sequence[str], store: str) -> list[Backbone]:
    """Read weights as an import does: files, folders, hf:ORG/NAME, or models of the store by key, RUN/STAGE or @ALIAS.

    Raises:
        RecipeError: some do not exist, are the same, or would be refused by an import.
    """
    found: dict[str, tuple[str, str, Import]] = {}
    for given in weights:
        try:
            origin, config = _located(given, store)
            content = source_fingerprint(config)
        except ValidationError as error:
            raise RecipeError(f"--from {given}: {reasons(error)}") from None
        except RecipeError as error:
            reason = str(error).removeprefix("path: ").removeprefix("import: ")
            raise RecipeError(f"--from {given}: {reason}") from None
        assert content is not None
        if content in found:
            raise RecipeError(f"--from {given}: the same weights as {found[content][0]}; leave one of them out")
        found[content] = given, origin, config
    names = _names([origin for _, origin, _ in found.values()])
    return [_read(name, given, config) for name, (given, _, config) in zip(names, found.values(), strict=True)]


def imported_before(store: str, has_masks: bool) -> list[Backbone]:
    """Return the newest weights for colour images that were imported into the store, if any; for masks, a ViT's."""
    try:
        opened = open_store(store, create=False)
    except StoreAbsent:
        return []
    for manifest in reversed([*all_manifests(opened, "import")]):
        with suppress(RecipeError):
            backbone = _read(_names([manifest.stage])[0], manifest.stage, _import_of(opened, manifest))
            fits = isinstance(backbone.architecture, ViTConfig) or not has_masks
            if fits and backbone.architecture.in_channels == 3 and backbone.resolution >= MIN_SIDE:
                return [backbone]
    return []


def _located(given: str, store: str) -> tuple[str, Import]:
    """Return the origin's name and the import of weights: a path if there is such a file, else a model of the store."""
    if "://" in given or given.startswith("hf:") or Path(given).expanduser().exists():
        config = Import(job="import", path=given)
        return config.path, config
    try:
        opened = open_store(store, create=False)
        manifest = find_artifact(opened, given, "model")
    except (StoreAbsent, RecipeError):
        hint = f"; did you mean hf:{given}, on the Hugging Face hub?" if given.count("/") == 1 else ""
        raise RecipeError(
            f"no such file or folder, and no model in {store} has this key, RUN/STAGE or @ALIAS{hint}"
        ) from None
    return manifest.stage, _import_of(opened, manifest)


def _import_of(store: Store, manifest: Manifest) -> Import:
    """Return the import of a model of the store: as it was imported, if that is still possible, else of its files."""
    if manifest.job == "import":
        config = Import.model_validate(manifest.config)
        with suppress(RecipeError):
            if source_fingerprint(config) == manifest.source:
                return config
    return Import(job="import", path=f"{store.uri}/{manifest.folder}")


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


def _read(name: str, given: str, config: Import) -> Backbone:
    """Read weights as an import does. Raises RecipeError if it would refuse them."""
    try:
        with fetched(config.path) as path:
            imported = formats.read(path)
        states = imported.preprocessing is not None or config.preprocessing is not None
        assumed = config if states else Import(job="import", path=config.path, preprocessing="half")
        contract = contract_of(imported, assumed)
    except UserError as error:
        raise RecipeError(f"--from {given}: {error}") from None
    return Backbone(name, config, contract.architecture, states)


def settings(backbones: Sequence[Backbone]) -> tuple[str, str]:
    """Return the options that a run needs for weights without mean and std, and why; both empty if there are none."""
    silent = [backbone.name for backbone in backbones if not backbone.states_preprocessing]
    if not silent:
        return "", ""
    return "".join(f" --set {name}.preprocessing=half" for name in silent), (
        f"{', '.join(silent)}: the weights do not state the mean and std of their images, and wrong values lower the"
        " accuracy without an error. Set preprocessing in each of these stages: half (Google's, AugReg's and most of"
        " timm's ViTs) or imagenet (DeiT, DINO, torchvision); the next command uses half"
    )


# ------------------------------------------------------------------------------------------------- recipes


def draft(images: Examined, backbones: Sequence[Backbone], machine: Machine, say: Say) -> Draft:
    """Draft a recipe that fine-tunes the backbone, or compares several. Raises RecipeError if these take one label."""
    if images.source.has_several_labels and len(backbones) > 1:
        raise RecipeError(f"--from: {len(backbones)} weights, but a comparison needs one label per image; give one")
    for backbone in backbones:
        say(f"{backbone.name}: {described(backbone.architecture)}")
    if len(backbones) > 1:
        return _comparison(images, backbones, machine, say)
    return _one(images, backbones[0], machine, say)


def sweep(images: Examined, rates: Sequence[str]) -> tuple[Sequence[str], int, str]:
    """Return the learning rates that suit the number of images, the trials that they take, and a comment for YAML."""
    if len(images.listing.entries) >= SWEPT_IMAGES:
        comment = "Dev chooses the learning rate, the final model is trained on train and dev, and test is scored once."
        return rates, len(rates), comment
    comment = f"Dev has too few images to choose a learning rate; [{', '.join(rates)}] would try {len(rates)}."
    return rates[len(rates) // 2 :][:1], int(images.source.has_several_labels), comment  # a trial for the thresholds


def references(images: Examined) -> str:
    """Return the stage `pixels` as YAML."""
    return PIXELS.format("logistic regression" if images.source.has_several_labels else "RBF SVM")


def _one(images: Examined, backbone: Backbone, machine: Machine, say: Say) -> Draft:
    side = images.typical_side()
    resolution = _resolution(backbone, side, machine.gpus)
    rates, trials, comment = sweep(images, LEARNING_RATES if machine.gpus else CPU_RATES)
    train = round(len(images.listing.entries) * TRAIN_SHARE)
    batch_size, steps = BATCH_SIZE, min(MAX_STEPS, PASSES * train // BATCH_SIZE)
    if not machine.gpus:
        batch_size, steps = CPU_BATCH_SIZE, min(CPU_EPOCHS * train, CPU_PASSES) // CPU_BATCH_SIZE
    steps = max(MIN_STEPS, steps)
    tuned = backbone.architecture.for_finetuning(resolution, len(images.listing.class_names))
    say(f"images are about {side} pixels per side; fine-tuning {described(tuned)}")
    say(estimate([Fits(tuned, trials, steps, batch_size, machine.dtype)], machine, images_per_second) or "")
    stages = f"""\
{backbone.stage()}

  # {comment}
  vit:
    job: finetune
    data: images
    backbone: {backbone.name}
    resolution: {resolution}
    learning_rates: [{", ".join(rates)}]
    steps: {steps}
    batch_size: {batch_size}
    augment: crop_flip
    threads: {machine.threads(max(1, trials))}{machine.dtype_line}

{references(images)}"""
    description = f"A pretrained {name_of(tuned)}, fine-tuned on {images.name}, beside baselines on pixels."
    return Draft(description, stages, f"A ViT for {images.name}", [backbone.name, "vit", "pixels"])


def _resolution(backbone: Backbone, side: int, gpus: int) -> int:
    """Return a resolution: the backbone's, or less if images are smaller, or there is no GPU."""
    patch = backbone.architecture.patch_size if isinstance(backbone.architecture, ViTConfig) else 32
    limit = min(backbone.resolution, side, backbone.resolution if gpus else CPU_SIDE)
    return backbone.resolution if limit == backbone.resolution else max(1, limit // patch) * patch


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


def _comparison(images: Examined, backbones: Sequence[Backbone], machine: Machine, say: Say) -> Draft:
    resolution = common_resolution(backbones)
    steps = max(MIN_STEPS, min(MAX_STEPS, PASSES * len(images.listing.entries) // BATCH_SIZE))
    say(f"chose resolution {resolution} for all")
    tuned = [backbone.architecture.for_finetuning(resolution, 2) for backbone in backbones]
    fits = [Fits(model, len(LEARNING_RATES), steps, BATCH_SIZE, machine.dtype) for model in tuned]
    say(estimate(fits, machine, images_per_second) or "")
    names, imports = [backbone.name for backbone in backbones], [backbone.stage() for backbone in backbones]
    stages = f"""\
  # One protocol for all backbones: the same images, splits and resolution, the same number of trials, steps and images
  # per step, the same rates to choose from, one refit. The mean, std, interpolation and crop of the images are each
  # backbone's own. The report shows accuracy beside cost.
{chr(10).join(imports)}

  # Frozen features: few labels, then all. Each fit chooses its L2 on its own labels.
  features:
    job: evaluate
    data: images
    matrix: {{backbone: [{", ".join(names)}]}}
    resolution: {resolution}
    shots: [{", ".join(map(str, images.shots()))}]
    linear_probe: true

  # The rate is chosen on dev, the final model is trained on train and dev, and test is scored once.
  finetune:
    job: finetune
    data: images
    matrix: {{backbone: [{", ".join(names)}]}}
    resolution: {resolution}
    learning_rates: [{", ".join(LEARNING_RATES)}]
    steps: {steps}
    batch_size: {BATCH_SIZE}
    augment: crop_flip{machine.dtype_line}
"""
    description = f"Imported backbones on {images.name}, under one protocol, accuracy beside cost."
    return Draft(description, stages, f"Which backbone for {images.name}?", [*names, "features", "finetune"])
