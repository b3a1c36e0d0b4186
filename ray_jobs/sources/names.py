"""The split that a name contains, and names in messages."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from pipelines.spec import quantity
from vit_model.errors import UserError

SPLIT_WORDS = {  # the words of Hugging Face's datasets, holdout, and words that end in "set"
    **dict.fromkeys(("train", "training", "trainset"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "valset", "devset"), "dev"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "holdout", "testset"), "test"),
}
_MASKS = (
    *("mask", "masks", "label", "labels", "gt", "annotation", "annotations", "segmentation", "segmentations"),
    *("target", "targets", "groundtruth", "ground_truth", "ground truth", "truth"),
)
MASKS = dict.fromkeys(("image", "images", "img", "imgs", "original", "originals", "input", "inputs"), _MASKS) | {
    "jpegimages": ("segmentationclass", "segmentationclasspng", "segmentation")
}
"""A folder of images -> folders of their masks, in small letters."""
_SUBJECTS = {"patient", "subject", "participant", "lesion", "patientid", "subjectid"}
_CODES = {"0", "1", "2", "true", "false"}  # of splits
UNSUPPORTED = (".heic", ".heif", ".jp2", ".jxl")  # formats of images
WITHOUT_SPLIT = "without a split (train, val, test), because others have one"
NAMED = 10  # files or classes in a note or a message


def split_in(name: str) -> str | None:
    """Return the split that appears as a word in a name: "train", "dev" or "test"; None for none or several.

    `words_in` says what words are: `food101-train-00000-of-00001`, `seg_test`, `val2017`, `trainA`.
    """
    splits = _splits_in(name)
    return splits.pop() if len(splits) == 1 else None


def _splits_in(name: str) -> set[str]:
    return {SPLIT_WORDS[word] for word in words_in(name) if word in SPLIT_WORDS}


def words_in(name: str) -> list[str]:
    """Return the words of a name, in small letters: other characters separate them, and capitals begin one (trainA)."""
    return re.split(r"[\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())


def says_splits(column: str, cells: Iterable[object]) -> bool:
    """Return whether a column of a table, with these cells, says which images are for testing.

    That is so if all cells contain a split's name, or two are such names; or they are 0 and 1 or booleans, and the
    column's name contains a split's, as is_train does, or the word split.
    """
    texts = {"" if cell is None else str(cell) for cell in cells}
    if len(texts) > 1 and {text.lower() for text in texts} <= _CODES:
        return bool(_splits_in(column)) or "split" in words_in(column)
    splits = {split_in(text) for text in texts}
    alone = {SPLIT_WORDS[text.lower()] for text in texts if text.lower() in SPLIT_WORDS}
    return len(alone) > 1 or (len(splits) > 1 and None not in splits)


def means_subjects(column: str) -> bool:
    """Return whether a column's name means subjects, as patient_id does."""
    words = {*words_in(column)}
    return bool(words & _SUBJECTS) and words <= _SUBJECTS | {"id", "name", "number", "code", ""}


def subject_note(column: str, cells: Sequence[object]) -> tuple[str, ...]:
    """Return a note about a column whose name means subjects if some of them have several images."""
    number = len({*map(str, cells)})
    if not means_subjects(column) or not 1 < number < len(cells):
        return ()
    kept = f"with source.group: {column}, the images of each stay in one split"
    return (f"column {column!r} has {number:,} values for {len(cells):,} images; {kept}",)


def splits_of_files(files: Collection[str]) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Return the split in the path of each file to read, and notes about files that are left out.

    If no path contains a split, all are None, to be drawn. If some do, files that name none are left out, because their
    images could be the authors' test images.

    Raises:
        UserError: a path contains several splits.
    """
    splits: dict[str, str | None] = {}
    for file in files:
        if len(named := _splits_in(file)) > 1:
            raise UserError(
                f"{file}: its name contains the splits {' and '.join(sorted(named))}; rename it, or set source.root "
                "to the folder that it is in"
            )
        splits[file] = next(iter(named), None)
    unnamed = [file for file, split in splits.items() if split is None]
    if not unnamed or len(unnamed) == len(splits):
        return splits, ()
    note = (
        f"{quantity(len(unnamed), 'file')} left out, because other files name a split (train, val, test) and these do "
        f"not: {listed(unnamed)}"
    )
    return {file: split for file, split in splits.items() if split is not None}, (note,)


def split_folders(images: Iterable[str]) -> dict[str, str]:
    """Return the split of each top folder that names one; none if the folders are classes.

    A name that only contains a split (`seg_train`) counts if every top folder contains one, and one of them train,
    because classes can be called `bullet_train` or `test_tube`.
    """
    tops = sorted({key.partition("/")[0] for key in images if "/" in key})
    contained = {top: split for top in tops if (split := split_in(top)) is not None}
    if len(contained) == len(tops) and "train" in contained.values():
        return contained
    return {top: SPLIT_WORDS[top.lower()] for top in tops if top.lower() in SPLIT_WORDS}


def around_splits(images: Iterable[str], split_folders: Mapping[str, str]) -> dict[str, str]:
    """Return the folders around the classes of each split: `seg_train/`, or `seg_train/seg_train/` if all are there."""
    inside: dict[str, set[str]] = defaultdict(set)
    for folder in {key.rpartition("/")[0] for key in images}:
        top, _, rest = folder.partition("/")
        inside[top].add(rest)
    around = {}
    for top, split in split_folders.items():
        names = {rest.partition("/")[0] for rest in inside[top] if "/" in rest}
        is_nested = len(names) == 1 and all("/" in rest for rest in inside[top])
        nested = names.pop() if is_nested else ""
        around[top] = f"{top}/{nested}/" if split_in(nested) == split else f"{top}/"
    return around


def left_out_notes(left_out: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return notes about images that are left out, from {why: their names}."""
    return tuple(
        f"{quantity(len(keys), 'image')} {why}, left out: {listed(keys)}" for why, keys in left_out.items() if keys
    )


def listed(texts: Sequence[str], most: int | None = NAMED) -> str:
    """Join the first `most` texts, and say how many more there are."""
    more = "" if most is None or len(texts) <= most else f" and {len(texts) - most:,} more"
    return ", ".join(texts[:most]) + more


def counted(counts: Mapping[str, int]) -> str:
    """Join names with their counts, such as "cat 120, dog 80"."""
    return listed([f"{name} {count:,}" for name, count in counts.items()])


def extensions(keys: Sequence[str]) -> str:
    """Return the number of files per extension, and advice for images in unsupported formats."""
    number = Counter(PurePosixPath(key).suffix.lower() or "none" for key in keys)
    counts = ", ".join(f"{extension} {count:,}" for extension, count in number.most_common(8))
    unsupported = [extension for extension in UNSUPPORTED if extension in number]
    return counts + (
        f"; to use the {' and '.join(unsupported)} files, convert them to JPEG or PNG" if unsupported else ""
    )
