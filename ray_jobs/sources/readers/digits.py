"""scikit-learn's 1,797 handwritten digits: 8x8 images of 10 classes, inside scikit-learn's wheel.

In: `digits.csv.gz` (the test part of UCI's "Optical Recognition of Handwritten Digits"), located by
`pipelines.spec.DigitsSource`; a row has 64 ink counts 0..16 and the digit. Out: images, labels, keys, and a fixed
split.
"""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.spec import DigitsSource
from ray_jobs.data.images import sample_id
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources import counts_to_uint8, hash_fraction
from ray_jobs.sources.archives.entries import Files, Listing, of_rows

CLASS_NAMES = tuple("0123456789")
TEST_FRACTION = 540 / 1797
DEV_FRACTION_OF_REST = 1 / 5


def listing(source: DigitsSource, files: Files) -> Listing:
    """List all digits, with their splits."""
    images, labels, keys = read(_file(files))
    ids = [sample_id(sha256(image.tobytes()).digest(), key) for image, key in zip(images, keys, strict=True)]
    splits = assign_splits(ids, labels.tolist(), "vitflow digits")
    return Listing(CLASS_NAMES, of_rows(keys, labels.tolist(), splits, 64), ImageSize(height=8, width=8, channels=1))


def rows(source: DigitsSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the images [8, 8, 1] of these rows."""
    images, _, _ = read(_file(files))
    yield from images[list(numbers)]


def _file(files: Files) -> Path:
    [path] = files.values()
    return Path(path)


@cache
def read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str]]:
    """Return images [1797, 8, 8, 1] (0 is background, 255 full ink), labels [1797], keys ("row-0000", ... by line)."""
    with gzip.open(path, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",").astype(np.int64)
    images = counts_to_uint8(table[:, :64]).reshape(-1, 8, 8, 1)
    return images, table[:, 64], [f"row-{row:04d}" for row in range(len(table))]


def assign_splits(sample_ids: Sequence[str], labels: Sequence[int], salt: str) -> list[str]:
    """Return the split of each sample: 30% of every class are "test", a fifth of the rest "dev", the others "train".

    Within a class, samples are ordered by a hash of salt and id. So the counts are exact, and the order of the samples
    does not matter.
    """
    by_class: dict[int, list[int]] = defaultdict(list)
    for row, label in enumerate(labels):
        by_class[int(label)].append(row)
    splits = ["train"] * len(sample_ids)
    for rows in by_class.values():
        rows.sort(key=lambda row: (hash_fraction(salt, sample_ids[row]), sample_ids[row]))
        num_test = round(len(rows) * TEST_FRACTION)
        num_dev = round((len(rows) - num_test) * DEV_FRACTION_OF_REST)
        for position, row in enumerate(rows[: num_test + num_dev]):
            splits[row] = "test" if position < num_test else "dev"
    return splits
