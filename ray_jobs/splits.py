"""Which images are for training, for choosing and for testing, and which are left out for a copy elsewhere.

An image is drawn by itself: by a hash of (salt, group), where group is what a column names (a patient, a site), else
the image's own bytes.

    test [0, 0.2)  dev [0.2, 0.3)  train [0.3, 1)

What the authors of a data set have split stays as they split it. Then copies (the same bytes) and near-copies
(perceptual hashes within `max_distance` bits) are looked at, pair by pair. Test beats dev beats train, and the image
of the weaker split is **left out** of the set where

- the draw put the two apart, or
- the stronger is a test image of another set that `against` names, or
- the recipe says `duplicates: drop`, which also leaves out all but the first (by sample_id) of copies within train
  and within dev.

Every other pair is listed and kept: what official splits or named test sets of others have in common is their
business, and small pictures (8x8 digits, flat shapes) look alike without being copies.

All this is a function of the images that are there now, in whatever order they came, and still nothing ever moves, as
long as the authors' own splits are the same (a dev or test of theirs that comes later ends the draw of it):
an image's own draw depends on nothing else, a test image is never left out, and one that is left out stays so when
others are added, since each pair is judged by itself. A new image thus joins the split that it draws; where it is a
near-copy of images in another split, those of the weaker one (it, or they) are left out. Drawing near-copies together
instead would need to know which came first: of two near-copies that draw train and test, each must stay where it was
if it was there alone, so that one must go, and it can't be the test image. Named groups draw together and lose nothing.

Last, a class none of whose images drew train is **set aside** whole: nothing could learn it. It returns when one of its
images draws train.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ray_jobs.near import Pairs, near_pairs
from ray_jobs.shards import INDEX
from ray_jobs.sources import hash_fraction

FRACTIONS = {"test": 0.2, "dev": 0.1}  # of the images without a given split; the rest is train
DUPLICATES = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("twin", pa.string(), nullable=False),  # the key of the one that it is a copy of
        pa.field("twin_split", pa.string(), nullable=False),
        pa.field("twin_dataset", pa.string(), nullable=False),
        pa.field("distance", pa.int32(), nullable=False),  # bits between the perceptual hashes
        pa.field("kind", pa.string(), nullable=False),  # "exact": the same bytes | "near"
        pa.field("done", pa.string(), nullable=False),  # "left out" | "kept"
    ]
)
SET_ASIDE = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("class_name", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),  # it returns there with its class
    ]
)
_ORDER = ("other test", "test", "dev", "train")  # strongest first
_NONE = np.iinfo(np.int64).max


def assign_splits(images: pa.Table, salt: str | None, official: Collection[str | None]) -> list[str]:
    """The split of every image by itself, from columns `split` (null: not given), `group` (may be null), `content_id`.

    Where the authors give some splits, a dev or test that is missing is taken from train in the same shares. Without a
    salt nothing is drawn: the source says every image's split itself. `official` are the splits that the authors give,
    also where no image of one can be used: what is damaged today must not make a test image of a training image.
    """
    given = images["split"].to_pylist()
    if salt is None:
        return given
    wanted = {split: share for split, share in FRACTIONS.items() if split not in official}
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


class Trainable(NamedTuple):
    """A dataset without the classes that have no training image."""

    index: pa.Table
    """Its labels number `class_names`."""
    class_names: tuple[str, ...]
    set_aside: pa.Table
    """SET_ASIDE: the images of the other classes."""
    set_aside_classes: tuple[tuple[str, int], ...] = ()
    """(name, number of images) of each of them, also where no image of it can be used."""


def without_untrained(index: pa.Table, class_names: Sequence[str], may_train: Collection[int]) -> Trainable:
    """Set aside the classes that could have a training image and have none, with all their images.

    The splits of the other images do not depend on it, and a class returns, each image to the split that it drew, when
    one of its images draws train.

    Args:
        index: columns key, label, labels, split of the images that are used.
        class_names: of the labels.
        may_train: labels of the images whose split is drawn or train. A class without any is one that the authors
            keep out of train (some of SUN397's in VTAB's 800 training images), and stays.
    """
    trained = pc.unique(index.filter(pc.equal(index["split"], "train"))["label"]).to_pylist()
    lost = np.array(sorted(set(may_train) - set(trained)), np.int64)
    labels = index["label"].to_numpy()
    is_lost = np.isin(labels, lost)
    aside, index = index.filter(pa.array(is_lost)), index.filter(pa.array(~is_lost))
    if len(lost):
        kept = np.delete(np.arange(len(class_names)), lost)
        number = {int(label): place for place, label in enumerate(kept)}
        several = [
            None if own is None else [number[label] for label in own if label in number]
            for own in index["labels"].to_pylist()
        ]
        columns = {"label": np.searchsorted(kept, labels[~is_lost]), "labels": several}
        for name, values in columns.items():
            field = INDEX.field(name)
            index = index.set_column(index.schema.get_field_index(name), field, pa.array(values, field.type))
    counts = np.bincount(labels[is_lost], minlength=len(class_names))
    names = np.array(class_names, object)
    return Trainable(
        index,
        tuple(np.delete(names, lost)),
        pa.table([aside["key"], names[labels[is_lost]], aside["split"]], schema=SET_ASIDE).sort_by("key"),
        tuple((class_names[label], int(counts[label])) for label in lost),
    )


def find_copies(
    name: str,
    images: pa.Table,
    splits: Sequence[str],
    others: Mapping[str, pa.Table],
    duplicates: Literal["keep", "drop"],
    max_distance: int | None,
) -> pa.Table:
    """DUPLICATES: a row for each image that is a copy of another which ranks before it, with one such twin.

    Args:
        name: what these images are called.
        images: columns key, sample_id, content_id, phash, and `split` as the source gives it (null: not given).
        splits: what `assign_splits` says of them.
        others: the test images of other sets, the same columns, by their names.
        duplicates, max_distance: see `pipelines.spec.Ingest`; None: only the same bytes are copies.
    """
    schema = pa.schema([INDEX.field(name) for name in ("key", "sample_id", "content_id", "phash")])
    tables = (images, *others.values())
    every = pa.concat_tables([table.select(schema.names).cast(schema) for table in tables])
    strength = np.zeros(len(every), np.int64)
    strength[: len(images)] = [_ORDER.index(split) for split in splits]
    rank = _ranks(every["sample_id"], strength)
    phash = every["phash"].to_numpy()

    content = every["content_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    exact = _first_near(content, (np.zeros(0, np.int64), np.zeros(0, np.int64)), strength, rank)
    near = np.full_like(exact, _NONE)
    if max_distance is not None:
        different, cell = np.unique(phash, return_inverse=True)
        near = _first_near(cell, near_pairs(different, max_distance), strength, rank)
        near[:, phash == 0] = _NONE  # flat: the hash says nothing
    own = slice(0, len(images))
    exact, near, mine = exact[:, own], near[:, own], rank[own]
    twin = np.where(exact < mine, exact, np.where(near < mine, near, _NONE))  # [strength of the twin, image]
    leaves = (twin < _NONE) & _judged(images["split"], strength[own], duplicates)
    # of several twins one that leaves the image out, and of those the strongest
    chosen = np.where(leaves.any(0), leaves.argmax(0), (twin < _NONE).argmax(0))
    at = np.flatnonzero((twin < _NONE).any(0))
    best = np.argsort(rank)[twin[chosen[at], at]]
    names = np.repeat([name, *others], [len(images), *map(len, others.values())])
    order = np.array(_ORDER)
    return pa.table(
        [
            images["key"].take(at),
            order[strength[at]],
            every["key"].take(best),
            np.where(strength[best] == 0, "test", order[strength[best]]),
            names[best],
            np.bitwise_count(phash[at] ^ phash[best]).astype(np.int32),
            np.where(exact[chosen[at], at] < mine[at], "exact", "near"),
            np.where(leaves[chosen[at], at], "left out", "kept"),
        ],
        schema=DUPLICATES,
    ).sort_by("key")


def _ranks(sample_ids: pa.ChunkedArray, strength: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each image among all: stronger splits first, then by sample_id."""
    order = pc.sort_indices(
        pa.table({"strength": strength, "sample_id": sample_ids}),
        sort_keys=[("strength", "ascending"), ("sample_id", "ascending")],
    ).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank


def _first_near(
    cell: NDArray[np.int64], pairs: Pairs, strength: NDArray[np.int64], rank: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[strength, image]: the first rank of that strength among the images in an image's cell and in near cells."""
    found = np.full((len(_ORDER), cell.max(initial=-1) + 1), _NONE)
    np.minimum.at(found, (strength, cell), rank)
    near = found.copy()
    for here, there in (pairs, pairs[::-1]):
        for each, own in zip(near, found, strict=True):
            np.minimum.at(each, here, own[there])
    return near[:, cell]


def _judged(
    given: pa.ChunkedArray, strength: NDArray[np.int64], duplicates: Literal["keep", "drop"]
) -> NDArray[np.bool_]:
    """[strength of the twin, image]: whether a twin of that strength leaves the image out."""
    official = {_ORDER.index(split) for split in pc.unique(given).to_pylist() if split is not None}
    is_drawn = pc.is_null(given).to_numpy()
    leaves = np.zeros((len(_ORDER), len(strength)), bool)
    for twin in range(len(_ORDER)):
        if twin == 0:
            leaves[twin] = strength > 1
        else:
            apart = (strength > twin) & (is_drawn | (twin not in official) | (duplicates == "drop"))
            leaves[twin] = apart | ((strength == twin) & (twin > 1) & (duplicates == "drop"))
    return leaves
