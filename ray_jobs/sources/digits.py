"""scikit-learn's 1,797 handwritten digits: 8x8 images of 10 classes, inside scikit-learn's wheel.

In: `digits.csv.gz` (UCI's "Optical Recognition of Handwritten Digits", its test part), 64 ink counts 0..16
and the digit in a row (`pipelines.spec.DigitsSource` knows where). Out: images, labels, keys, and a split that
never moves.
"""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ray_jobs.sources import counts_to_uint8, hash_fraction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CLASS_NAMES = tuple("0123456789")
TEST_FRACTION = 540 / 1797
DEV_FRACTION_OF_REST = 1 / 5


def read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str]]:
    """Images [1797, 8, 8, 1] (0 is background, 255 full ink), labels [1797], keys ("row-0000" by line)."""
    import numpy as np

    with gzip.open(path, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",").astype(np.int64)
    images = counts_to_uint8(table[:, :64]).reshape(-1, 8, 8, 1)
    return images, table[:, 64], [f"row-{row:04d}" for row in range(len(table))]


def assign_splits(sample_ids: Sequence[str], labels: Sequence[int], salt: str) -> list[str]:
    """The split of each sample: 30 % of every class is "test", a fifth of the rest "dev", what is left "train".

    Within a class the samples are taken in the order of a hash of salt and id, so that the counts are exact
    and the order in which samples come does not matter.
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
