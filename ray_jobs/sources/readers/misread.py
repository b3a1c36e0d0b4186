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
_IMAGES_OF = {
    word: [image for image, others in MASKS.items() if word in others] for words in MASKS.values() for word in words
}
_COCO_FOLDER = re.compile(r"(train|val|test|unlabeled)20\d\d")
_PARTS = {
    *("image", "images", "img", "imgs", "part", "parts", "batch", "batches", "fold", "folds", "chunk", "chunks"),
    *("ds", "dataset", "set", "sets", "shard", "shards"),
}


def check_not_inside(root: Path | str, images: Iterable[str]) -> None:
    """Raise UserError for split folders below the top, because their test images could be drawn into train."""
    folders: dict[str, set[str]] = defaultdict(set)
    for folder in {key.rpartition("/")[0] for key in images}:
        parts = folder.split("/")
        for depth in range(1, len(parts)):
            folders["/".join(parts[:depth])].add(parts[depth])
    of_splits = {folder: found for folder, names in sorted(folders.items()) if (found := _of_splits(names))}
    if of_splits:
        first, *others = of_splits
        raise UserError(
            f"{root}: {listed([*of_splits])} {'contain' if others else 'contains'} split folders "
            f"({', '.join(of_splits[first])}). Set the root to {'one of these folders' if others else first}, or put "
            f"the split folders at the top (train/<class>/), or add a {METADATA} with a column `split`"
        )


def check_not_splits(root: Path | str, tops: Collection[str]) -> None:
    """Raise UserError for top folders that differ only in the name of a split, such as seg_train and seg_test."""
    if named := _of_one_form(tops):
        others = listed(sorted({*tops} - {*named}))
        problem = f"but not {others}. Move others out" if others else "but none of them is train. Add that folder"
        raise UserError(f"{root}: {' and '.join(named)} name splits, {problem}; or, if these are classes, rename them")


def _of_splits(names: Collection[str]) -> list[str]:
    """Return the names, sorted, if each contains a split and the splits differ; else as `_of_one_form`."""
    splits = {split_in(name) for name in names}
    return sorted(names) if len(splits) > 1 and None not in splits else _of_one_form(names)


def _of_one_form(names: Iterable[str]) -> list[str]:
    """Return the names, sorted, that differ only in the name of a split, such as seg_train and seg_test."""
    forms: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in sorted(names):
        if split_in(name) is not None:
            forms[tuple("" if word in SPLIT_WORDS else word for word in words_in(name))].append(name)
    return next((named for named in forms.values() if len({*map(split_in, named)}) > 1), [])


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
        if any(named) or any(not folders.isdisjoint(_masked(folder)) for folder in siblings):
            raise UserError(
                f"{root} has the layout of a segmentation data set ({listed(siblings)}): these folders are not "
                "classes. Read the masks with source.mask_classes: [NAME, NAME], the names of their values from 0; or, "
                f"to classify the images, set the root to a folder of class folders, or add a {METADATA}"
            )
    if masks := sorted(key for path, key in stems.items() if not stems.keys().isdisjoint(_masked(path))):
        image = next(stems[path] for path in _masked(masks[0].rpartition(".")[0]) if path in stems)
        raise UserError(
            f"{root}: {quantity(len(masks), 'image')} with the name of another and a word for masks, such as {masks[0]}"
            f" of {image}. Remove or rename them: masks would be trained on as images"
        )


def _masked(path: str) -> list[str]:
    """Return what a path may be the mask of by its name: "a/1" or "a/1_sat" of "a/1_mask", "a/img" of "a/label"."""
    folder, slash, name = path.rpartition("/")
    found = [f"{folder}{slash}{image}" for image in _IMAGES_OF.get(name.lower(), ())]
    match = _MASK.search(path)
    return [*found, *(path[: match.start()] + end for end in ("", "_sat", "_image", "_img"))] if match else found


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


def check_class_folders(root: Path | str, labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return notes about folders inside class folders, and about classes of equal names, from {key: class}.

    Raises:
        UserError: a class folder contains one named as another; or `_check_levels`.
    """
    folders: dict[str, set[str]] = {name: set() for name in sorted(set(labels.values()))}
    for key, name in labels.items():
        parts = key.split("/")
        folders[name].add("/".join(parts[parts.index(name) + 1 : -1]))
    for name, inside in folders.items():
        if copied := sorted(folder for folder in inside if folders.keys() & ({*folder.split("/")} - {name})):
            raise UserError(
                f"{root}: class folder {name} contains folders named like other classes: "
                f"{listed([f'{name}/{folder}' for folder in copied])}. Remove copies, or move images to their class"
            )
    _check_levels(root, folders)
    notes = []
    if inner := [f"{name}/{folder}" for name, inside in folders.items() for folder in sorted(inside) if folder]:
        count = quantity(len(inner), "folder")
        notes.append(f"{count} inside class folders, whose images have the outer folder's class: {listed(inner)}")
    sizes = {*Counter(labels.values()).values()}
    keys = {key.replace(f"{name}/", "", 1).rpartition(".")[0] for key, name in labels.items() if len(sizes) == 1}
    if len(keys) > 1 and {len(keys)} == sizes and any(words_in(PurePosixPath(min(keys)).name)):
        notes.append(
            f"all classes have images of the same names, such as {min(keys)}: if these are versions of one image, such "
            "as depth or a mask, they are not classes"
        )
    return tuple(notes)


def _check_levels(root: Path | str, folders: Mapping[str, Collection[str]]) -> None:
    """Raise UserError if class folders, with the folders in them, are something else.

    They are parts of a set if their names say so (img_1, lung_image_sets with folders in it); first letters of classes
    (a/abbey); or subjects, domains or versions if they contain the same folders (color/apple, grayscale/apple).
    """
    is_numbered = len(folders) > 1 and len({tuple(words_in(name)) for name in folders}) == 1
    inner = Counter(folder for inside in folders.values() for folder in inside)
    are_several = is_numbered or len(inner) > len(folders)
    if folders and are_several and all(_PARTS & {*words_in(name)} for name in folders):
        raise UserError(
            f"{root}: {listed([*folders])} look like parts of one dataset, not classes. Add a {METADATA} with the "
            "label of each image; or, if these are classes, rename them"
        )
    if not inner or inner[""]:
        return
    if all({folder[0].lower() for folder in inside} == {name.lower()} for name, inside in folders.items()):
        raise UserError(
            f"{root}: {listed([*folders])} are the first letters of the folders in them, such as {next(iter(inner))}. "
            "If these are the classes, move them up; otherwise, move the images up"
        )
    common = sorted(folder for folder, number in inner.items() if number > 1)
    are_chunks = not is_numbered and not any(word for folder in common for word in words_in(folder.rpartition("/")[2]))
    if len(common) > 1 and not are_chunks:
        raise UserError(
            f"{root}: {listed([*folders])} contain the same folders ({listed(common)}), so either level could be the "
            f"classes. Set the root to one of the outer folders; or add a {METADATA} with the label of each image, and "
            "a `group` if the outer ones are subjects; or, if they are the classes, move the images up into them"
        )


def unread_lists(files: Iterable[str]) -> tuple[str, ...]:
    """Return a note about tables and lists that could contain labels or splits, under names that are not read."""
    found = [
        key
        for key in files
        if key.endswith((".csv", ".tsv", ".xlsx", ".jsonl", ".parquet"))
        or (key.endswith(".json") and "/" not in key)
        or (key.endswith(".txt") and not SPLIT_WORDS.keys().isdisjoint(words_in(PurePosixPath(key).name)))
    ]
    if not found:
        return ()
    verb, lists = ("are", "they list") if found[1:] else ("is", "it lists")
    return (f"{listed(found)} {verb} not read: if {lists} labels or splits, write them into a {METADATA}",)
