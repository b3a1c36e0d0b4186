"""The images of a source, examined for a recipe: how many, of which classes, how large."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml
from PIL import Image
from pydantic import ValidationError

from pipelines.file_names import left_by_a_system
from pipelines.files.sources import source_files
from pipelines.recipe.load import load_pipeline, yaml_text
from pipelines.spec import SOURCE_TYPES, RecipeError, Source, quantity
from ray_jobs.data.columns import each_label
from ray_jobs.sources import catalog
from ray_jobs.sources.archives.entries import Listing
from ray_jobs.sources.names import counted, listed, split_in
from ray_jobs.sources.readers.folder import EXTENSIONS
from vit_model.errors import UserError, reasons
from vit_model.preprocessing import open_image

# beside images: likely their labels
LABEL_FILES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xml", ".txt")
SIZE_SAMPLE = 100  # images whose size is read, spread over the folder
Say = Callable[[str], None]


class Draft(NamedTuple):
    """What a recipe says besides its images: its stages as YAML, and a report of the stages `of`."""

    description: str
    stages: str
    title: str
    of: Sequence[str]


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
        number = len(self.listing.class_names)
        kind = f"of {quantity(number, 'class', 'classes')}" if number else "without labels"
        if self.source.has_masks:
            of_pixels = getattr(self.source, "mask_classes", None)  # known without reading if the source names them
            kind = f"with masks of {quantity(len(of_pixels), 'class', 'classes')}" if of_pixels else "with masks"
        return f"{quantity(len(self.listing.entries), 'image')} {kind}"

    def summary(self) -> Iterator[str]:
        """Yield lines about the images, their classes and splits, and about files that are left out."""
        for member in self.listing.unusable[:1]:
            number = quantity(len(self.listing.unusable), "entry", "entries")
            yield f"{number} that cannot be used, such as {member.key}: {member.reason}"
        splits = Counter(self.listing.entries["split"].to_pylist())
        official = {split: number for split, number in splits.items() if split is not None}
        drawn = f"with the splits {counted(official)}" if official else "without splits, so random ones are drawn"
        if self.source.has_masks:
            yield f"found {self.classes}, {drawn}"
            yield from self.listing.notes
            return
        if not self.listing.class_names:
            yield "; ".join([f"found {quantity(len(self.listing.entries), 'file')}", *self.listing.notes])
            if (sibling := _sibling_class(self.root.expanduser().resolve())) is not None:
                yield f"if {self.name} and {sibling.name} are classes, give their parent: --images {sibling.parent}"
            return
        labels = Counter(each_label(self.listing.entries).to_pylist())
        counts = {name: labels[label] for label, name in enumerate(self.listing.class_names)}
        yield f"found {self.classes} ({counted(counts)}), {drawn}"
        yield from self.listing.notes
        is_by_folder = self.source.kind == "folder" and not self.source.has_boxes  # labels have folders of their own
        if is_by_folder and (empty := _without_images(self.root.expanduser(), self.listing)):
            yield f"{quantity(len(empty), 'folder')} without images: {listed(empty, 10)}"

    @property
    def name(self) -> str:
        """The name of the folder or archive."""
        return self.root.expanduser().resolve().name

    def recipe(self, file: Path, draft: Draft, options: str) -> str:
        """Return a recipe: an ingest of these images, the draft's stages, and their report; `options`: of its run."""
        return f"""\
# Written by `vitflow init` for {self.classes}. Edit it freely.
#   vitflow run {file}{options}
name: {_pipeline_name(file)}
description: {yaml_text(draft.description)}

stages:
  images:
    job: ingest
    source: {_as_yaml(self.fields)}

{draft.stages}
  report:
    job: report
    title: {yaml_text(draft.title)}
    of: [images, {", ".join(draft.of)}]
"""

    def shots(self) -> Sequence[int]:
        """Return the numbers of shots for which the smallest class has enough images (about 7 of 10 are train)."""
        labels, splits = (self.listing.entries[name].to_pylist() for name in ("label", "split"))
        trains = Counter(label for label, split in zip(labels, splits, strict=True) if split in {None, "train"})
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


def examine(images: Path, source: str) -> Examined:
    """List the images of a source.

    Args:
        images: the source's root.
        source: its kind, or its fields as YAML, such as "{kind: cifar, classes: 100}".

    Raises:
        RecipeError: there is no such source, or its files are missing or damaged.
    """
    fields = _source_fields(images, source)
    try:
        checked: Any = SOURCE_TYPES[fields["kind"]].model_validate(fields)
        files = {name: str(place) for name, place in source_files(checked).items()}
        return Examined(images, fields, checked, files, catalog.listing(checked, files))
    except ValidationError as error:
        raise RecipeError(f"--source: {reasons(error)}") from None
    except UserError as error:
        raise RecipeError(
            str(error).replace("source.root:", "--images:", 1) + _as_option(str(error), _stated(source))
        ) from None


def _as_option(message: str, stated: dict[str, Any]) -> str:
    """Return the option of init, with the stated fields, for the fields that a message advises; empty without any."""
    values = r"'[^']*'|true|false|NAME|\[NAME, NAME\]|(?:coco|yolo|voc|kitti)(?=,)"
    advised = dict(re.findall(rf"source\.(\w+): ({values})", message))
    fields = stated | {name: yaml.safe_load(value) for name, value in advised.items()}
    return f'. For init, this is --source "{_as_yaml(fields)}"' if advised else ""


def _as_yaml(fields: dict[str, Any]) -> str:
    """Return the fields of a source as YAML on one line."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(text, value))}]"
        return yaml_text(value) if isinstance(value, str) else json.dumps(value)

    texts = {name: text(value) for name, value in fields.items()}
    return f"{{{', '.join(f'{name}: {text}' for name, text in texts.items())}}}"


def _stated(source: str) -> dict[str, Any]:
    """Return the fields that --source states, of a folder if it does not state a kind. Raises RecipeError."""
    try:
        stated = yaml.safe_load(source)
    except yaml.YAMLError:
        raise RecipeError(f"--source {source}: not YAML; expected a kind or '{{FIELD: VALUE, ...}}'") from None
    return {"kind": "folder"} | stated if isinstance(stated, dict) else {"kind": stated}


def _source_fields(images: Path, source: str) -> dict[str, Any]:
    """Return the fields of a source with this root. Raises RecipeError for an unknown kind, or one without a root."""
    fields = _stated(source)
    kinds = [kind for kind, type_ in SOURCE_TYPES.items() if "root" in type_.model_fields]
    if fields.get("kind") not in kinds:
        raise RecipeError(f"--source: unknown kind {fields.get('kind')!r}; expected one of: {', '.join(kinds)}")
    root = images.expanduser().resolve()
    more: dict[str, Any] = {}
    if fields["kind"] == "folder":
        more = {"name": root.name} | ({"labels": False} if _is_flat(root) else {})
    return {"kind": fields["kind"]} | more | fields | {"root": str(root)}


def _is_flat(root: Path) -> bool:
    """Return whether a folder has images but no folders, which would be classes, and no table of labels."""
    if not root.is_dir():
        return False
    files = [path for path in root.iterdir() if not path.name.startswith(".")]
    is_labelled = any(path.is_dir() or path.suffix.lower() in LABEL_FILES for path in files)
    return not is_labelled and any(path.suffix.lower() in EXTENSIONS for path in files)


def _sibling_class(root: Path) -> Path | None:
    """Return a folder of images beside a folder of images, if that is likely a class: it has no split's name."""
    if not _is_flat(root) or split_in(root.name) is not None:
        return None
    with suppress(OSError):  # of another user
        siblings = sorted(path for path in root.parent.iterdir() if not path.name.startswith("."))
        return next((path for path in siblings if path != root and _is_flat(path)), None)
    return None


def _without_images(root: Path, listing: Listing) -> list[str]:
    """Return the outermost folders below a root that the listing has no images of, without a system's and hidden ones.

    An archive has none.
    """
    used = {str(folder) for key in listing.entries["key"].to_pylist() for folder in PurePath(key).parents}
    empty = []
    for folder, folders, _ in os.walk(root):
        names = [name for name in sorted(folders) if not left_by_a_system(name)]
        paths = {name: Path(folder, name).relative_to(root).as_posix() for name in names}
        empty += [path for path in paths.values() if path not in used]
        folders[:] = [name for name in names if paths[name] in used]
    return empty


def write_checked(file: Path, text: str) -> None:
    """Write a recipe and read it; remove it again if it cannot be read. Raises RecipeError."""
    try:
        file.write_text(text, encoding="utf-8")
        load_pipeline(str(file))
    except (RecipeError, UnicodeEncodeError):
        file.unlink()
        raise


def _pipeline_name(file: Path) -> str:
    """Return a pipeline's name after its file."""
    name = re.sub(r"[^a-z0-9_-]+", "-", file.stem.lower()).lstrip("-_0123456789").rstrip("-_")
    return (name or "mine")[:40]
