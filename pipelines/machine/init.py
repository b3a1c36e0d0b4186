"""`vitflow init`: examine a folder or an archive of images, choose a model that fits, write a recipe.

The recipe is an ordinary file to edit; `init` keeps no other state.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.markup import escape

from pipelines.files.sources import source_files
from pipelines.recipe.load import load_pipeline, yaml_text
from pipelines.spec import FolderSource, ModelSize, RecipeError, quantity
from vit_model.errors import UserError

if TYPE_CHECKING:
    from ray_jobs.sources.readers.folder import Entry, Listing

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


def write_recipe(file: Path, images: Path, console: Console) -> None:
    """Write a recipe to `file`; print the images found, the choice, and an estimate of the run time.

    Raises:
        RecipeError: the file exists, or the images have no supported layout.
    """
    listing, sample = examine(file, images)

    def say(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    side = _typical_side(listing.root, sample)
    say(f"found {summary(listing)}")
    gpus = count_gpus()
    machine = f"{gpus} GPU(s)" if gpus else f"{os.cpu_count()} CPU cores"
    choice = _choose(side, len(listing.entries), gpus)
    size = choice.model
    say(
        f"images are about {side} pixels per side; chose resolution {choice.resolution}, patches of {size.patch_size}, "
        f"width {size.width}, depth {size.depth}, for {machine}"
    )
    _warn_of_small_sets(listing, say)
    rate = _images_per_second(choice)
    parallel = gpus or max(1, os.cpu_count() or 1)
    trainings = -(-len(LEARNING_RATES) // parallel) + 1  # the sweep in parallel, then the refit
    minutes = trainings * choice.steps * choice.batch_size / rate / 60 + 1
    say(
        f"one training sees {choice.steps * choice.batch_size:,} images, at {rate:,.0f} images/s measured here: "
        f"about {quantity(round(minutes), 'minute')} in all"
    )
    write_checked(file, _recipe(file, images, listing, choice))
    say(f"wrote {file}; next: vitflow run {file}")


def write_checked(file: Path, text: str) -> None:
    """Write a recipe and read it; remove it again if it cannot be read. Raises RecipeError."""
    try:
        file.write_text(text, encoding="utf-8")
        load_pipeline(str(file))
    except (RecipeError, UnicodeEncodeError):
        file.unlink()
        raise


def examine(file: Path, images: Path) -> tuple[Listing, Iterator[str | bytes]]:
    """Check that a recipe can be written to `file`, and list the images in a folder or an archive.

    Returns:
        The images; a sample of them, as paths or files' bytes.

    Raises:
        RecipeError: it cannot, or the images have no supported layout, or the archive is damaged.
    """
    from ray_jobs.sources.archives import containers, entries
    from ray_jobs.sources.readers import folder

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
    source = FolderSource(kind="folder", root=str(images))
    try:
        if not Path(source.root).is_file():
            listing = folder.scan(Path(source.root))
            return listing, (f"{source.root}/{entry.key}" for entry in _sample(listing))
        files = {name: str(place) for name, place in source_files(source).items()}
        listing, members, _ = folder.find(source, files)
    except UserError as error:
        raise RecipeError(str(error)) from None
    rows = entries.table(entry._asdict() | entries.place(members[entry.key]) for entry in _sample(listing))
    return listing, (data for data in containers.read(files, rows) if isinstance(data, bytes))


def _sample(listing: Listing) -> Sequence[Entry]:
    return listing.entries[:: max(1, len(listing.entries) // SIZE_SAMPLE)]


def summary(listing: Listing) -> str:
    from ray_jobs.sources.readers.features import counted

    splits = Counter(entry.split for entry in listing.entries if entry.split)
    counts = listing.counts()
    given = f"with the splits {counted(splits)}" if splits else "without splits, so random ones are drawn"
    others = len(listing.ignored) + len(listing.special)
    ignored = f"; {others} other files ignored" if others else ""
    return f"{len(listing.entries)} images of {len(counts)} classes ({counted(counts)}), {given}{ignored}"


def _typical_side(root: str, sample: Iterable[str | bytes]) -> int:
    """Return the median shorter side of a sample of the images, from their headers."""
    from PIL import Image

    from vit_model.preprocessing import open_image

    sides = []
    for each in sample:
        try:
            with open_image(each) as image:
                sides.append(min(image.size))
        except (OSError, ValueError, Image.DecompressionBombError):
            continue  # ingest will quarantine it, with its reason
    if not sides:
        raise RecipeError(f"{root}: cannot open any of the sampled images")
    return round(statistics.median(sides))


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


def _warn_of_small_sets(listing: Listing, say: Callable[[str], None]) -> None:
    if len(listing.entries) < FEW_IMAGES:
        root = shlex.quote(f"images.source.root={listing.root}")
        say(
            f"{len(listing.entries)} images are few: a ViT trained on them from scratch will be weak, often no better "
            "than the report's pixel baselines; pretrained weights help most: "
            f"vitflow run finetune_imported --set {root} --set backbone.path=CHECKPOINT"
        )


def _images_per_second(choice: Choice) -> float:
    """Measure the speed of training on one GPU or one core of this machine."""
    from ray_jobs.training.cost import images_per_second

    return images_per_second(choice.model, choice.resolution, choice.batch_size)


def shots_of(listing: Listing) -> Sequence[int]:
    """Return the numbers of shots for which the smallest class has enough images (about 7 of 10 are train)."""
    trains = [entry for entry in listing.entries if entry.split in {None, "train"}]
    share = 0.7 if all(entry.split is None for entry in listing.entries) else 1.0
    smallest = min(sum(entry.label == label for entry in trains) for label in range(len(listing.class_names)))
    return [shots for shots in (1, 5, 10, 25) if shots <= smallest * share] or [1]


def pipeline_name(file: Path) -> str:
    """Return a pipeline's name after its file."""
    return (re.sub(r"[^a-z0-9_-]+", "-", file.stem.lower()).strip("-_0123456789") or "mine")[:40]


def _recipe(file: Path, images: Path, listing: Listing, choice: Choice) -> str:
    size, root = choice.model, images.expanduser().resolve()
    return f"""\
# Written by `vitflow init` for {len(listing.entries)} images of {len(listing.class_names)} classes. Edit it freely.
#   vitflow run {file}
name: {pipeline_name(file)}
description: {yaml_text(f"A ViT trained on {root.name}, beside baselines on pixels.")}

stages:
  images:
    job: ingest
    source: {{kind: folder, name: {yaml_text(root.name)}, root: {yaml_text(str(root))}}}

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
    shots: [{", ".join(map(str, shots_of(listing)))}]

  # What it must beat.
  pixels:
    job: baselines
    data: images
    methods: [majority, k-NN, logistic regression]

  report:
    job: report
    title: {yaml_text(f"A ViT for {root.name}")}
    of: [images, vit, few_shot, pixels]
"""
