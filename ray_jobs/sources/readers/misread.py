"""Checks of a user's own images: layouts and labels that would be read as something else, without an error."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from pipelines.spec import quantity
from ray_jobs.sources.boxes.folders import form_of
from ray_jobs.sources.names import MASKS, SPLIT_WORDS, listed, split_in, words_in
from ray_jobs.sources.readers.label_tables import METADATA
from vit_model.errors import UserError

SEPARATORS = (";", "|", ",", " ")
_MASK = re.compile(r"[ _-](mask|masks|seg|segmentation|label|labels|gt|annotation)(_?\d+)?\Z", re.IGNORECASE)
_FORMS = {"coco": "COCO", "yolo": "YOLO", "voc": "Pascal VOC", "kitti": "KITTI"}
_COCO_FOLDER = re.compile(r"(train|val|test|unlabeled)20\d\d")


def check_not_inside(root: Path | str, images: Iterable[str]) -> None:
    """Raise UserError for split folders below the top, because their test images could be drawn into train."""
    folders: dict[str, set[str]] = defaultdict(set)
    for folder in {key.rpartition("/")[0] for key in images}:
        parts = folder.split("/")
        for depth in range(1, len(parts)):
            folders["/".join(parts[:depth])].add(parts[depth])
    for folder, names in sorted(folders.items()):
        splits = {SPLIT_WORDS[name.lower()]: name for name in names if name.lower() in SPLIT_WORDS}
        contained = {split_in(name): name for name in names}
        if None not in contained:  # such as seg_train and seg_test, or val and test
            splits |= contained  # type: ignore[arg-type]
        if len(splits) > 1 and ("train" in splits or None not in contained):
            raise UserError(
                f"{root}: {folder} contains split folders ({', '.join(sorted(splits.values()))}). Set the root to "
                f"{folder}, or put the split folders at the top (train/<class>/), or add a {METADATA} with a column "
                "`split`"
            )


def check_not_splits(root: Path | str, tops: Iterable[str]) -> None:
    """Raise UserError for top folders that differ only in the name of a split, such as seg_train and seg_test."""
    words = {top: words_in(top) for top in sorted(tops)}
    forms: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for top, found in words.items():
        if split_in(top) is not None:
            forms[tuple("" if word in SPLIT_WORDS else word for word in found)].append(top)
    for named in forms.values():
        if len({split_in(top) for top in named}) > 1:
            if others := sorted(words.keys() - set(named)):
                problem = (
                    f"{listed(others)} {'do' if others[1:] else 'does'} not. Move {'them' if others[1:] else 'it'} out"
                )
            else:
                problem = "but none of them is train. Add that folder"
            raise UserError(
                f"{root}: {' and '.join(named)} name splits, {problem}; or, if these are classes, rename them"
            )


def check_not_masks(root: Path | str, images: Sequence[str]) -> None:
    """Raise UserError for masks among images: in a folder beside theirs, at any depth, or beside the images."""
    stems = {key.rpartition(".")[0]: key for key in images}
    own = {PurePosixPath(key.rpartition("/")[0]) for key in images}
    folders = {str(folder) for each in own for folder in (each, *each.parents)} - {"."}
    inside: dict[str, list[str]] = defaultdict(list)
    for folder in sorted(folders):
        inside[folder.rpartition("/")[0]].append(folder)
    for siblings in inside.values():
        words = {folder: {*words_in(folder.rpartition("/")[2])} for folder in siblings}
        of = {word for found in words.values() for image in found & MASKS.keys() for word in MASKS[image]}
        named = (bool(found & of and not found & MASKS.keys()) for found in words.values())
        if any(named) or any(_masked(folder) in folders for folder in siblings):
            raise UserError(
                f"{root} has the layout of a segmentation data set ({listed(siblings)}): these folders are not "
                "classes. Read the masks with source.mask_classes: [NAME, NAME], the names of their values from 0; or, "
                f"to classify the images, set the root to a folder of class folders, or add a {METADATA}"
            )
    if masks := sorted(key for path, key in stems.items() if _masked(path) in stems):
        image = stems[_masked(masks[0].rpartition(".")[0])]
        raise UserError(
            f"{root}: {quantity(len(masks), 'image')} with the name of another and a word for masks, such as {masks[0]}"
            f" of {image}. Remove or rename them: masks would be trained on as images"
        )


def _masked(path: str) -> str:
    """Return what a path would be the mask of by its name, such as "a/1" of "a/1_mask"; "" for none."""
    match = _MASK.search(path)
    return path[: match.start()] if match else ""


def check_not_detection(root: Path | str, files: Sequence[str], images: Sequence[str]) -> None:
    """Raise UserError for boxes of objects, among which folders of splits or of images would be taken for classes."""
    tops = sorted({PurePosixPath(key).parts[0] for key in images})
    found = form_of(files, images)
    if found is None and all(map(_COCO_FOLDER.fullmatch, tops)):
        found = "coco", tops[0]
    if found is not None:
        form, sign = found
        raise UserError(
            f"{root} has the layout of {_FORMS[form]}, a detection data set ({sign}): its images do not have one class"
            f" each. Read their boxes with source.boxes: {form}, or give each image one label, with class folders or"
            f" {METADATA}"
        )


def check_not_joined(root: Path | str, class_names: Collection[str]) -> None:
    """Raise UserError for a label such as "cat;dog" whose parts are labels, too, or parts of others."""
    for separator in SEPARATORS:
        parts = {name: [part.strip() for part in name.split(separator)] for name in class_names}
        counts = Counter(part for found in parts.values() for part in set(found))
        if separator == " " and not _are_combined(parts, counts):
            continue
        for name, found in parts.items():
            if len(found) > 1 and all(counts[part] > 1 for part in found):
                raise UserError(
                    f"{root}: the label {name!r} looks like several labels, because its parts are labels of other"
                    f" images, too. If so, set source.multi_label: true and source.label_separator: {separator!r}; if"
                    f" it is one class, write it without {separator!r}"
                )


def _are_combined(parts: Mapping[str, Sequence[str]], counts: Mapping[str, int]) -> bool:
    """Return whether labels with spaces combine other labels, and are not names such as "sea lion" and "sea horse".

    Each word is a label, too; or each occurs in two labels, these differ in length, and words are fewer than labels.

    Args:
        parts: the words of each label. counts: the number of labels with each word.
    """
    are_labels = all(part in parts for found in parts.values() for part in found)
    differ = len({len(found) for found in parts.values()}) > 1
    return are_labels or (differ and min(counts.values()) > 1 and len(counts) < len(parts))


def inner_note(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note about folders inside class folders, whose names could be the classes, from {key: class}."""
    inner: dict[str, None] = {}
    for key, name in labels.items():
        *folders, _ = key.split("/")
        if folders[-1] != name:
            inner["/".join(folders[folders.index(name) :])] = None
    if not inner:
        return ()
    count = quantity(len(inner), "folder")
    return (f"{count} inside class folders, whose images have the outer folder's class: {listed([*inner])}",)


def unread_tables(files: Iterable[str]) -> tuple[str, ...]:
    """Return a note about the first table that could list the labels under another name."""
    tables = [key for key in files if key.endswith((".csv", ".jsonl", ".parquet"))]
    return tuple(
        f"{key} is not read: if it lists the labels, rename it to metadata{PurePosixPath(key).suffix}"
        for key in tables[:1]
    )
