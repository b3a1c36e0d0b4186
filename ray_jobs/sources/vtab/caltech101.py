"""Caltech101: class folders in a tar, which is in a zip in the distribution of today.

It has no splits of its own. TFDS draws 30 files of each class for train with numpy's legacy seed 1234 from the listing
of its folder, in whichever order the file system gave: what the authors of VTAB got can't be rebuilt from the archive
alone. Here listings are sorted, or a list of the train split's files is given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import numpy as np

from pipelines.spec.vtab import VtabSource
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.vtab import archives, splits
from ray_jobs.sources.vtab.splits import Records
from vit_model.errors import UserError

_FILE = "caltech-101.zip"
_FOLDER = "101_ObjectCategories"
_TRAIN_OF_CLASS = 30
_SORTED = (
    "splits are not those of VTAB's authors, which depend on a file system: TFDS's rule on sorted listings"
    " (numpy's legacy seed 1234, 30 images of each of 102 classes)"
)


def listing(source: VtabSource, files: Files) -> Listing:
    """Images of 102 classes, the background among them, whose names are lower-cased folders in plain order."""
    members = archives.by_path(files, _FILE)
    inner = [path for path in members if PurePosixPath(path).name.startswith(f"{_FOLDER}.tar")]
    if inner:
        members = archives.by_path(files, f"{_FILE}::{inner[0]}")
    classes: dict[str, list[str]] = defaultdict(list)
    for path in members:
        folder, *inside = PurePosixPath(path).parts
        if folder == _FOLDER and len(inside) == 2:
            classes[inside[0]].append(inside[1])
    if not classes:
        raise UserError(f"{_FILE} has no {_FOLDER}/<class>/image_0001.jpg")
    names = sorted(folder.lower() for folder in classes)
    label = {name: number for number, name in enumerate(names)}
    if source.membership is None:
        train, membership = drawn(classes), _SORTED
    else:
        train = set(archives.lines(containers.read_file(files, "membership"), "membership"))
        membership = f"splits by the supplied list of {len(train):,} images of TFDS's train split"
    keys = [
        f"{folder}/{file}" for folder, there in classes.items() for file in there if file.endswith(".jpg")
    ]
    if unknown := sorted(train - {f"{folder}/{file}" for folder, there in classes.items() for file in there}):
        raise UserError(
            f"membership: {len(unknown)} of its images are not in {_FILE}, such as {unknown[0]!r}; a line is "
            "<class>/<file>, as accordion/image_0001.jpg"
        )

    def records(keys: Sequence[str]) -> Records:
        labels = [label[key.split("/")[0].lower()] for key in keys]
        return Records(keys, labels, [members[f"{_FOLDER}/{key}"] for key in keys])

    parts = {
        "train": records([key for key in keys if key in train]),
        "test": records([key for key in keys if key not in train]),
    }
    return splits.listing("caltech101", names, parts, membership=membership)


def drawn(classes: Mapping[str, Sequence[str]]) -> set[str]:
    """TFDS's train split, <class>/<file>, from the files of each class if all listings were sorted.

    A stray file of the background (`tmp`) can be drawn as the images can, and is left out later. A class of 30 files
    or fewer, which only a part of the archive has, gives half of them.
    """
    random = np.random.RandomState(1234)
    found: set[str] = set()
    for folder in sorted(classes):
        files = sorted(classes[folder])
        number = _TRAIN_OF_CLASS if len(files) > _TRAIN_OF_CLASS else len(files) // 2
        found.update(f"{folder}/{file}" for file in random.choice(files, number, replace=False).tolist())
    return found
