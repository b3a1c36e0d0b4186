"""Assign images to train, dev and test.

Each image is assigned independently, by a hash of (salt, group). The group is the value of a column (a patient, a
site), or otherwise the image's bytes.

    test [0, 0.2)  dev [0.2, 0.3)  train [0.3, 1)

Official splits stay as they are. `copies` leaves out images that have a copy in another split.

The result depends on the set of images, not on the order in which they arrived. When images are added, no image changes
its split: an image's draw depends on nothing else, a test image is never left out, and an image that is left out stays
out, because each pair is judged independently. (If the authors later add a dev or test split, that split is no longer
drawn.) A new image joins the split that it draws. If it is a near-copy of images in another split, the images of the
weaker split are left out.

Drawing near-copies together would depend on which came first: if two near-copies draw train and test, neither may move,
so one of them must leave, and it cannot be the test image. Named groups are drawn together and lose no image.

Finally, a class without an image in train is **set aside**, because no model could learn it. It returns when one of its
images draws train.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ray_jobs.data.columns import INDEX, large
from ray_jobs.sources import hash_fraction

FRACTIONS = {"test": 0.2, "dev": 0.1}  # shares of the images without an official split; the rest is train
# `split` is the split that an image joins when its class returns
SET_ASIDE = pa.schema(pa.field(name, pa.string(), nullable=False) for name in ("key", "class_name", "split"))


def assign_splits(images: pa.Table, salt: str | None, official: Collection[str | None]) -> list[str]:
    """Return the split of every image.

    If the source has official splits, a missing dev or test split is drawn from train, with the same fractions.

    Args:
        images: columns `split` (null: not given), `group` (may be null), `content_id`.
        salt: the salt of the hash; None: nothing is drawn, because the source gives every image's split.
        official: the official splits, including splits without a usable image: a damaged image must not turn a
            training image into a test image.
    """
    stated_splits = images["split"].to_pylist()
    if salt is None:
        return stated_splits
    fractions = {split: fraction for split, fraction in FRACTIONS.items() if split not in official}
    groups = zip(images["group"].to_pylist(), images["content_id"].to_pylist(), strict=True)
    return [
        _drawn(hash_fraction(salt, group or content), fractions) if stated in (None, "train") else stated
        for stated, (group, content) in zip(stated_splits, groups, strict=True)
    ]


def _drawn(fraction: float, fractions: dict[str, float]) -> str:
    for split, share in fractions.items():
        if fraction < share:
            return split
        fraction -= share
    return "train"


class Trainable(NamedTuple):
    """A dataset without the classes that have no training image."""

    index: pa.Table
    """INDEX; labels are indices into `class_names`."""
    class_names: tuple[str, ...]
    set_aside: pa.Table
    """`large` SET_ASIDE: the images of the other classes."""
    set_aside_classes: tuple[tuple[str, int], ...] = ()
    """(name, number of images) of each other class, including classes without a usable image."""


def without_untrained(index: pa.Table, class_names: Sequence[str], may_train: Collection[int]) -> Trainable:
    """Set aside the classes that could have a training image but do not, with all their images.

    The splits of other images do not change. When one of its images draws train, a class returns with all its images,
    in the splits drawn for them.

    Args:
        index: columns key, label, labels, split of the images in use.
        class_names: the names of the labels.
        may_train: labels of the images that are in train or have a drawn split. The authors kept other classes out of
            train (some of SUN397's 397 in VTAB's 800 training images), and these stay.
    """
    trained = pc.unique(index.filter(pc.equal(index["split"], "train"))["label"]).to_pylist()
    lost = np.array(sorted(set(may_train) - set(trained)), np.int64)
    labels = index["label"].to_numpy()
    is_lost = np.isin(labels, lost)
    aside, index = index.filter(pa.array(is_lost)), index.filter(pa.array(~is_lost))
    if len(lost):
        kept = np.delete(np.arange(len(class_names)), lost)
        new_label = {int(label): position for position, label in enumerate(kept)}
        new_labels = [
            None if old is None else [new_label[label] for label in old if label in new_label]
            for old in index["labels"].to_pylist()
        ]
        columns = {"label": np.searchsorted(kept, labels[~is_lost]), "labels": new_labels}
        for name, values in columns.items():
            field = INDEX.field(name)
            index = index.set_column(index.schema.get_field_index(name), field, pa.array(values, field.type))
    counts = np.bincount(labels[is_lost], minlength=len(class_names))
    names = np.array(class_names, object)
    return Trainable(
        index,
        tuple(np.delete(names, lost)),
        pa.table([aside["key"], names[labels[is_lost]], aside["split"]], schema=large(SET_ASIDE)).sort_by("key"),
        tuple((class_names[label], int(counts[label])) for label in lost),
    )
