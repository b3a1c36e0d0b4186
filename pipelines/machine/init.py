"""`vitflow init`: examine the images of a source, choose a model that fits, write a recipe.

The recipe is an ordinary file to edit; `init` keeps no other state.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from PIL import Image
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from pipelines.files.sources import source_files
from pipelines.recipe.load import load_pipeline, yaml_text
from pipelines.spec import SOURCE_TYPES, ModelSize, RecipeError, Source, quantity
from ray_jobs.sources import catalog
from ray_jobs.sources.archives.entries import Listing
from ray_jobs.sources.readers.features import counted
from vit_model.errors import UserError, reasons
from vit_model.preprocessing import open_image

SIZE_SAMPLE = 100  # images whose size is read, spread over the folder
FEW_IMAGES = 10_000  # below this, a ViT from scratch overfits, and the paper uses transfer
LEARNING_RATES = (3e-4, 1e-3, 3e-3)


class Choice(NamedTuple):
    """A resolution, a model and the length of its training."""

    resolution: int
    model: ModelSize
    batch_size: int
    steps: int


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
CPU_PASSES, GPU_PASSES = 60_000, 1_000_000  # images seen in one training, at most 100 epochs


def write_recipe(file: Path, images: Path, source: str, console: Console) -> None:
    """Write a recipe to `file`; print the images found, the choice, and an estimate of the run time.

    Raises:
        RecipeError: as `examine`.
    """
    examined = examine(file, images, source)

    def say(text: str) -> None:
        console.print(escape(text), soft_wrap=True)

    side, number = examined.typical_side(), examined.listing.entries.num_rows
    for line in examined.summary():
        say(line)
    gpus = count_gpus()
    machine = f"{gpus} GPU(s)" if gpus else f"{os.cpu_count()} CPU cores"
    choice = _choose(side, number, gpus)
    size = choice.model
    say(
        f"images are about {side} pixels per side; chose resolution {choice.resolution}, patches of {size.patch_size}, "
        f"width {size.width}, depth {size.depth}, for {machine}"
    )
    _warn_of_small_sets(images, number, say)
    rate = _images_per_second(choice)
    parallel = gpus or max(1, os.cpu_count() or 1)
    trainings = -(-len(LEARNING_RATES) // parallel) + 1  # the sweep in parallel, then the refit
    minutes = trainings * choice.steps * choice.batch_size / rate / 60 + 1
    say(
        f"one training sees {choice.steps * choice.batch_size:,} images, at {rate:,.0f} images/s measured here: "
        f"about {quantity(round(minutes), 'minute')} in all"
    )
    write_checked(file, _recipe(file, examined, choice))
    say(f"wrote {file}; next: vitflow run {file}")


def write_checked(file: Path, text: str) -> None:
    """Write a recipe and read it; remove it again if it cannot be read. Raises RecipeError."""
    try:
        file.write_text(text, encoding="utf-8")
        load_pipeline(str(file))
    except (RecipeError, UnicodeEncodeError):
        file.unlink()
        raise


class Examined(NamedTuple):
    """The images to write a recipe for."""

    root: Path
    fields: dict[str, Any]
    """The fields of the recipe's source."""
    source: Source
    files: dict[str, str]
    listing: Listing

    @property
    def classes(self) -> str:
        return f"{len(self.listing.entries)} images of {len(self.listing.class_names)} classes"

    def source_text(self) -> str:
        """Return the source as YAML on one line."""
        texts = {
            name: yaml_text(value) if isinstance(value, str) else json.dumps(value)
            for name, value in self.fields.items()
        }
        return f"{{{', '.join(f'{name}: {text}' for name, text in texts.items())}}}"

    def summary(self) -> Iterator[str]:
        """Yield lines about the images, their classes and splits, and about files that are left out."""
        labels, splits = (Counter(self.listing.entries[name].to_pylist()) for name in ("label", "split"))
        official = {split: number for split, number in splits.items() if split is not None}
        drawn = (
            f"with the splits {counted(official)}" if official else "without splits, so random ones are drawn"
        )
        counts = {name: labels[label] for label, name in enumerate(self.listing.class_names)}
        yield f"found {self.classes} ({counted(counts)}), {drawn}"
        yield from self.listing.notes

    def shots(self) -> Sequence[int]:
        """Return the numbers of shots for which the smallest class has enough images (about 7 of 10 are train)."""
        labels, splits = (self.listing.entries[name].to_pylist() for name in ("label", "split"))
        trains = Counter(
            label for label, split in zip(labels, splits, strict=True) if split in {None, "train"}
        )
        share = 1.0 if any(splits) else 0.7
        smallest = min(trains[label] for label in range(len(self.listing.class_names)))
        return [shots for shots in (1, 5, 10, 25) if shots <= smallest * share] or [1]

    def typical_side(self) -> int:
        """Return the median shorter side of a sample of the images, from their headers.

        Raises:
            RecipeError: none of them can be opened.
        """
        entries, size = self.listing.entries, self.listing.image
        if size is not None:
            return min(size.height, size.width)
        step = max(1, len(entries) // SIZE_SAMPLE)
        sides: list[int] = []
        for data in catalog.images(self.source, self.files, entries.take([*range(0, len(entries), step)])):
            if isinstance(data, UserError):
                continue  # ingest will quarantine it with a reason
            if not isinstance(data, bytes):
                sides.append(min(data.shape[:2]))
                continue
            try:
                with open_image(data) as image:
                    sides.append(min(image.size))
            except (OSError, ValueError, Image.DecompressionBombError):
                continue  # the same
        if not sides:
            raise RecipeError(f"{self.root}: cannot open any of the sampled images")
        return round(float(statistics.median(sides)))


def examine(file: Path, images: Path, source: str) -> Examined:
    """Check that a recipe can be written to `file`, and list the images of a source.

    Args:
        images: the source's root.
        source: its kind, or its fields as YAML, such as "{kind: cifar, classes: 100}".

    Raises:
        RecipeError: the recipe cannot be written, there is no such source, or its files are missing or damaged.
    """
    if file.exists():
        raise RecipeError(f"{file} exists; use another name, or remove it")
    if not file.parent.is_dir():
        raise RecipeError(f"{file.parent} is not a folder; create it, or write the recipe elsewhere")
    if file.suffix not in {".yaml", ".yml"}:
        raise RecipeError(f"{file}: expected a name that ends in .yaml")
    try:
        with tempfile.TemporaryFile(dir=file.parent):  # fail before the slow part
            pass
    except OSError as error:
        raise RecipeError(f"{file}: cannot write to {file.parent.resolve()}: {error.strerror}") from None
    fields = _source_fields(images, source)
    try:
        checked: Any = SOURCE_TYPES[fields["kind"]].model_validate(fields)
        files = {name: str(place) for name, place in source_files(checked).items()}
        return Examined(images, fields, checked, files, catalog.listing(checked, files))
    except ValidationError as error:
        raise RecipeError(f"--source: {reasons(error)}") from None
    except UserError as error:
        raise RecipeError(str(error)) from None


def _source_fields(images: Path, source: str) -> dict[str, Any]:
    """Return the fields of a source with this root. Raises RecipeError for an unknown kind, or one without a root."""
    stated = yaml.safe_load(source)
    fields = stated if isinstance(stated, dict) else {"kind": stated}
    kinds = [kind for kind, type_ in SOURCE_TYPES.items() if "root" in type_.model_fields]
    if fields.get("kind") not in kinds:
        raise RecipeError(
            f"--source: unknown kind {fields.get('kind')!r}; expected one of: {', '.join(kinds)}"
        )
    root = images.expanduser().resolve()
    name = {"name": root.name} if fields["kind"] == "folder" else {}
    return {"kind": fields["kind"]} | name | fields | {"root": str(root)}


def count_gpus() -> int:
    """Return the number of GPUs of this machine, without importing torch."""
    if shutil.which("nvidia-smi") is None:
        return 0
    return len([path for path in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", path.name)])


def _choose(side: int, images: int, gpus: int) -> Choice:
    _, resolution, model = next(
        choice for choice in (GPU_CHOICES if gpus else CPU_CHOICES) if side >= choice[0]
    )
    batch_size = 64 if images < 5_000 else 256
    passes = min(100 * images, GPU_PASSES if gpus else CPU_PASSES)
    return Choice(resolution, model, batch_size, max(100, passes // batch_size))


def _warn_of_small_sets(images: Path, number: int, say: Callable[[str], None]) -> None:
    if number < FEW_IMAGES:
        root = shlex.quote(f"images.source.root={images}")
        say(
            f"{number} images are few: a ViT trained on them from scratch will be weak, often no better "
            "than the report's pixel baselines; pretrained weights help most: "
            f"vitflow run finetune_imported --set {root} --set backbone.path=CHECKPOINT"
        )


def _images_per_second(choice: Choice) -> float:
    """Measure the speed of training on one GPU or one core of this machine."""
    from ray_jobs.training.cost import images_per_second

    return images_per_second(choice.model, choice.resolution, choice.batch_size)


def pipeline_name(file: Path) -> str:
    """Return a pipeline's name after its file."""
    return (re.sub(r"[^a-z0-9_-]+", "-", file.stem.lower()).strip("-_0123456789") or "mine")[:40]


def _recipe(file: Path, images: Examined, choice: Choice) -> str:
    size, name = choice.model, images.root.expanduser().resolve().name
    return f"""\
# Written by `vitflow init` for {images.classes}. Edit it freely.
#   vitflow run {file}
name: {pipeline_name(file)}
description: {yaml_text(f"A ViT trained on {name}, beside baselines on pixels.")}

stages:
  images:
    job: ingest
    source: {images.source_text()}

  # A sweep over learning rates: dev chooses, train + dev are used for the last training, test is scored once.
  vit:
    job: finetune
    data: images
    model: {{patch_size: {size.patch_size}, width: {size.width}, depth: {size.depth}, num_heads: {size.num_heads}}}
    resolution: {choice.resolution}
    learning_rates: [{", ".join(f"{rate:g}" for rate in LEARNING_RATES)}]
    steps: {choice.steps}
    batch_size: {choice.batch_size}
    augment: crop_flip
    label_smoothing: 0.1

  # How good are its features? A linear classifier on a few images of each class.
  few_shot:
    job: evaluate
    data: images
    backbone: vit
    shots: [{", ".join(map(str, images.shots()))}]

  # What it must beat.
  pixels:
    job: baselines
    data: images
    methods: [majority, k-NN, logistic regression]

  report:
    job: report
    title: {yaml_text(f"A ViT for {name}")}
    of: [images, vit, few_shot, pixels]
"""
