"""Which images are for training, for choosing and for testing: a pure function of their names and bytes.

    test [0, 0.2)  dev [0.2, 0.3)  train [0.3, 1)    of a hash of (salt, group)

A group is what must not be torn apart: what a column names (a patient, a site), else the copies of one image. What
the authors of a data set have split stays as they split it.
"""

from __future__ import annotations

import pyarrow as pa

from ray_jobs.sources import hash_fraction

FRACTIONS = {"test": 0.2, "dev": 0.1}  # of the images without a given split; the rest is train


def assign_splits(images: pa.Table, salt: str) -> list[str]:
    """The split of every image, from columns `split` (null: not given), `group` (may be null) and `content_id`.

    Where the authors give some splits, a dev or test that is missing is taken from train in the same shares.
    """
    given = images["split"].to_pylist()
    wanted = {split: share for split, share in FRACTIONS.items() if split not in given}
    groups = zip(images["group"].to_pylist(), images["content_id"].to_pylist(), strict=True)
    return [
        _drawn(hash_fraction(salt, group or content), wanted) if own in (None, "train") else own
        for own, (group, content) in zip(given, groups, strict=True)
    ]


def _drawn(fraction: float, wanted: dict[str, float]) -> str:
    for split, share in wanted.items():
        if fraction < share:
            return split
        fraction -= share
    return "train"
