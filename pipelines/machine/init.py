"""`vitflow init`: examine the images of a source, choose a model that fits, write a recipe.

The recipe is an ordinary file to edit; `init` keeps no other state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from pipelines.machine import pretrained
from pipelines.machine.budget import Fits, Machine, described, estimate, this_machine
from pipelines.machine.examined import Draft, Examined, Say, examine, write_checked
from pipelines.spec import ModelSize, RecipeError
from ray_jobs.training.cost import images_per_second
from vit_model.config import MaeOptions, ViTConfig
from vit_model.detection.contract import GROUPS, SCALES, check

FEW_IMAGES = 10_000  # below this, a ViT from scratch overfits, and the paper uses transfer
LEARNING_RATES = ("3.0e-4", "1.0e-3", "3.0e-3")


class Choice(NamedTuple):
    """A resolution, a model and the length of its training."""

    resolution: int
    model: ModelSize
    batch_size: int
    steps: int

    def decoder(self) -> MaeOptions:
        """Return a masked autoencoder's decoder that fits the model: half its width, a third of its depth.

        The authors' heads are 32 wide, and their decoder is for ViT-B and larger.
        """
        width = self.model.width // 2
        depth = max(2, self.model.depth // 3)
        return MaeOptions(decoder_width=width, decoder_depth=depth, decoder_heads=width // 32)

    def model_text(self) -> str:
        """Return the model as YAML on one line."""
        names = ("patch_size", "width", "depth", "num_heads")
        return f"{{{', '.join(f'{name}: {getattr(self.model, name)}' for name in names)}}}"


# (minimum side of the images in pixels, resolution, model) for machines without and with a GPU; the first match is used
CPU_CHOICES = (
    (64, 64, ModelSize(patch_size=8, width=128, depth=6, num_heads=4)),
    (32, 32, ModelSize(patch_size=4, width=128, depth=6, num_heads=4)),
    (0, 16, ModelSize(patch_size=2, width=64, depth=4, num_heads=4)),
)
GPU_CHOICES = (
    (160, 224, ModelSize(patch_size=16, width=384, depth=12, num_heads=6)),  # ViT-S/16
    (64, 96, ModelSize(patch_size=8, width=384, depth=12, num_heads=6)),
    (0, 32, ModelSize(patch_size=4, width=192, depth=12, num_heads=3)),
)
CPU_DENSE = "patch_size: 8, width: 128, depth: 4, num_heads: 4"  # of boxes or masks
CPU_PASSES, GPU_PASSES = 60_000, 1_000_000  # images seen in one training, at most 100 epochs
ADVICE = (
    "{number:,} images are few: a ViT trained on them from scratch will be weak. Pretrained weights help most:"
    " --from {weights} (from the Hugging Face hub), or a file or folder of Google's, timm's or Hugging Face's weights"
)


def write_recipe(file: Path, images: Path, source: str, weights: Sequence[str], store: str, console: Console) -> None:
    """Write a recipe to `file`; print the images found, the choices, and an estimate of the run time.

    Args:
        weights: pretrained weights to start from; several are compared. Without any, few images start from the newest
            weights that were imported into the store, else from scratch.

    Raises:
        RecipeError: as `examine`; or the weights cannot be used.
        StoreError: weights on S3 or the hub cannot be read. StoreUnreachable: they do not answer.
    """

    def say(text: str) -> None:
        console.print(escape(text), soft_wrap=True)

    backbones = pretrained.read_all(weights, store)
    examined, machine = examine(images, source), this_machine()
    for line in examined.summary():
        say(line)
    if not {None, "train"} & {*examined.listing.entries["split"].to_pylist()}:
        raise RecipeError(
            f"{images}: the train split has no images. Add training images; or rename the folders and files that name "
            "a split, and ingest draws splits"
        )
    number = len(examined.listing.entries)
    if not weights and number < FEW_IMAGES:
        backbones = pretrained.imported_before(store, examined.source.has_masks)
        say(
            f"starting from {backbones[0].name}, which is in {store}; --from takes other weights"
            if backbones
            else ADVICE.format(number=number, weights=pretrained.EXAMPLES[machine.gpus > 0])
        )
    if examined.source.has_boxes or examined.source.has_masks:
        draft = _of_places(examined, backbones, machine, say)
    elif not examined.listing.class_names:
        draft = _without_labels(examined, backbones, machine, say)
    elif backbones:
        draft = pretrained.draft(examined, backbones, machine, say)
    else:
        draft = _from_scratch(examined, machine, say)
    options, why = pretrained.settings(backbones)
    write_checked(file, examined.recipe(file, draft, options))
    if why:
        say(why)
    say(f"wrote {file}; next: vitflow run {file}{options}")


def _from_scratch(images: Examined, machine: Machine, say: Say) -> Draft:
    """Draft a recipe that trains a new ViT."""
    smoothing = "" if images.source.has_several_labels else "\n    label_smoothing: 0.1"
    rates, trials, comment = pretrained.sweep(images, LEARNING_RATES)
    choice = _chosen(images, machine, trials, say)
    stages = f"""\
  # {comment}
  vit:
    job: finetune
    data: images
    model: {choice.model_text()}
    resolution: {choice.resolution}
    learning_rates: [{", ".join(rates)}]
    steps: {choice.steps}
    batch_size: {choice.batch_size}
    augment: crop_flip{smoothing}
    threads: {machine.threads(max(1, trials))}{machine.dtype_line}

{pretrained.references(images)}"""
    description = f"A ViT trained on {images.name}, beside baselines on pixels."
    return Draft(description, stages, f"A ViT for {images.name}", ["vit", "pixels"])


def _of_places(images: Examined, backbones: Sequence[pretrained.Backbone], machine: Machine, say: Say) -> Draft:
    """Draft a recipe that detects objects or, with masks, classifies pixels: with pretrained weights or a new ViT.

    Raises:
        RecipeError: there are several backbones, or one that is not a ViT.
    """
    if len(backbones) > 1:
        raise RecipeError(f"--from: {len(backbones)} weights, but a recipe for boxes or masks has one model; give one")
    has_gpu = machine.gpus > 0
    batch_size, side, most = (32, 512, 200_000) if has_gpu else (16, 128, 20_000)
    steps = max(100, min(30 * len(images.listing.entries), most) // batch_size)
    first, scales = "", tuple[float, ...](SCALES)
    if backbones:
        (backbone,) = backbones
        say(f"{backbone.name}: {described(backbone.architecture)}")
        if images.source.has_masks and not isinstance(backbone.architecture, ViTConfig):
            raise RecipeError(f"--from: {backbone.name}: a ResNet has no tokens of patches; give a ViT")
        first, scales = f"{backbone.stage()}\n\n", SCALES if images.source.has_masks else _scales(backbone)
        start = f"""\
backbone: {backbone.name}
    resolution: {backbone.resolution}
    learning_rates: [1.0e-4, 3.0e-4]
    optimizer: {{layer_decay: 0.7}}"""
    else:
        say(f"images are about {images.typical_side()} pixels per side, and are squashed to {side}")
        size = "patch_size: 16, width: 384, depth: 12, num_heads: 6" if has_gpu else CPU_DENSE
        start = f"model: {{{size}}}\n    resolution: {side}\n    learning_rates: [1.0e-3]"
    if images.source.has_masks:
        name, job, title, description = "vit", "finetune", f"Segmentation of {images.name}", "A ViT that segments"
        comment = (
            "A linear layer on each patch's token: docs/protocols.md#segmentation. Smaller patches draw finer borders."
        )
        more = "masks: true\n    class_weights: balanced"
    else:
        name, job, title, description = "detect", "detect", f"Objects in {images.name}", "A detector of the objects in"
        comment = "FCOS on a ViT: docs/detection.md. A higher resolution finds smaller objects, and takes longer."
        more = f"""\
channels: {256 if has_gpu else 64}
    convs: {4 if has_gpu else 2}
    scales: [{", ".join(f"{scale:g}" for scale in scales)}]"""
    stages = f"""\
{first}  # {comment}
  {name}:
    job: {job}
    data: images
    {start}
    steps: {steps}
    batch_size: {batch_size}
    augment: squash_crop_flip
    {more}
    threads: {machine.threads(2 if backbones else 1)}{machine.dtype_line}
"""
    return Draft(f"{description} {images.name}.", stages, title, [name])


def _scales(backbone: pretrained.Backbone) -> tuple[float, ...]:
    """Return the scales of a pyramid on a backbone, which needs an even grid for the coarsest. Raises RecipeError."""
    try:
        with suppress(ValueError):
            check(backbone.architecture, GROUPS, SCALES)
            return SCALES
        check(backbone.architecture, GROUPS, SCALES[:-1])
    except ValueError as error:
        raise RecipeError(f"--from: {backbone.name}: {error}") from None
    return SCALES[:-1]


def _without_labels(images: Examined, backbones: Sequence[pretrained.Backbone], machine: Machine, say: Say) -> Draft:
    """Draft a recipe that groups images by their features: of pretrained weights, or of a ViT that learns from them.

    Raises:
        RecipeError: there are several backbones, which cannot be compared without labels.
    """
    if len(backbones) > 1:
        raise RecipeError(f"--from: {len(backbones)} weights, but without labels nothing tells which is best; give one")
    say("without labels there is no accuracy: the report shows groups of images that the model finds alike")
    if backbones:
        (backbone,) = backbones
        say(f"{backbone.name}: {described(backbone.architecture)}")
        stages, model = backbone.stage(), backbone.name
    else:
        stages, model = _pretraining(images, machine, say), "vit"
    stages += f"""

  # A feature per image, in Parquet.
  embed:
    job: embed
    data: images
    backbone: {model}
    threads: {machine.threads(1)}
"""
    title = f"Groups in {images.name}"
    description = f"Features of {images.name}, which has no labels, and groups of images that are alike."
    return Draft(description, stages, title, [model, "embed"])


def _pretraining(images: Examined, machine: Machine, say: Say) -> str:
    """Return the stage of a pretraining without labels, as YAML."""
    choice = _chosen(images, machine, 0, say, is_masked=True)
    decoder = choice.decoder().model_dump(exclude_defaults=True)
    # On CPUs, as the estimate was measured: workers that wait for each other are slow beside other programs.
    workers = "" if machine.gpus else f"\n    workers: 1\n    threads: {machine.threads(1)}{machine.dtype_line}"
    return f"""\
  # A masked autoencoder: the ViT sees a quarter of an image's patches, and a decoder predicts the others.
  vit:
    job: pretrain
    data: images
    objective: mae
    mae: {{{", ".join(f"{name}: {value}" for name, value in decoder.items())}}}
    model: {choice.model_text()}
    resolution: {choice.resolution}
    steps: {choice.steps}
    batch_size: {choice.batch_size}
    learning_rate: 1.0e-3
    augment: resized_crop_flip{workers}"""


def _chosen(images: Examined, machine: Machine, trials: int, say: Say, is_masked: bool = False) -> Choice:
    """Choose a model for images and `trials` trainings and a refit, or one training; print both, and the run time."""
    side = images.typical_side()
    choice = _choose(side, len(images.listing.entries), machine.gpus)
    architecture = choice.model.architecture(choice.resolution, 3, len(images.listing.class_names))
    mae = choice.decoder() if is_masked else None
    say(f"images are about {side} pixels per side; chose a {described(architecture, mae)}")
    fits = [Fits(architecture, trials, choice.steps, choice.batch_size, machine.dtype, mae)]
    say(estimate(fits, machine, images_per_second) or "")
    return choice


def _choose(side: int, images: int, gpus: int) -> Choice:
    _, resolution, model = next(choice for choice in (GPU_CHOICES if gpus else CPU_CHOICES) if side >= choice[0])
    batch_size = 64 if images < 5_000 else 256
    passes = min(100 * images, GPU_PASSES if gpus else CPU_PASSES)
    return Choice(resolution, model, batch_size, max(100, passes // batch_size))
