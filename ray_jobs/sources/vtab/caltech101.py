"""Caltech101: class folders in a tar, which is inside a zip in today's distribution.

It has no official splits. TFDS draws 30 files of each class for train, with numpy's legacy seed 1234, from a directory
listing in the file system's order. So the splits of VTAB's authors cannot be rebuilt from the archive alone. This
module sorts the listings, or takes a list of the files of the train split.
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
    """List images of 102 classes, including the background; class names are the sorted, lower-case folder names."""
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
        raise UserError(f"{_FILE} does not contain {_FOLDER}/<class>/image_0001.jpg")
    names = sorted(folder.lower() for folder in classes)
    label = {name: number for number, name in enumerate(names)}
    if source.membership is None:
        train, membership = drawn(classes), _SORTED
    else:
        train = set(containers.lines(containers.read_file(files, "membership"), "membership"))
        membership = f"splits by the supplied list of {len(train):,} images of TFDS's train split"
    paths = [f"{folder}/{file}" for folder, files_of_class in classes.items() for file in files_of_class]
    keys = [path for path in paths if path.endswith(".jpg")]
    if unknown := sorted(train - set(paths)):
        raise UserError(
            f"membership: {len(unknown)} of its images are not in {_FILE}, such as {unknown[0]!r}; expected lines "
            "<class>/<file>, such as accordion/image_0001.jpg"
        )

    def records(keys: Sequence[str]) -> Records:
        labels = [label[key.split("/")[0].lower()] for key in keys]
        return Records(keys, labels, [members[f"{_FOLDER}/{key}"] for key in keys])

    parts = {
        "train": records([key for key in keys if key in train]),
        "test": records([key for key in keys if key not in train]),
    }
    return splits.listing(source, names, parts, membership=membership)


def drawn(classes: Mapping[str, Sequence[str]]) -> set[str]:
    """Draw TFDS's train split, <class>/<file>, from the sorted files of each class.

    The background's stray file `tmp` can be drawn like an image, and is left out later. A class with at most 30 files,
    which exists only in an incomplete archive, gives half of them.
    """
    random = np.random.RandomState(1234)
    train: set[str] = set()
    for folder in sorted(classes):
        files = sorted(classes[folder])
        number = _TRAIN_OF_CLASS if len(files) > _TRAIN_OF_CLASS else len(files) // 2
        train.update(f"{folder}/{file}" for file in random.choice(files, number, replace=False).tolist())
    return train
