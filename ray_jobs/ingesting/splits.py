"""Assign images to train, dev and test, and leave out images that have a copy in another split.

Each image is assigned on its own, by a hash of (salt, group). The group is the value of a column (a patient, a site),
or else the image's bytes.

    test [0, 0.2)  dev [0.2, 0.3)  train [0.3, 1)

Splits that the authors of a dataset made stay as they are. Then ingest looks for pairs of copies: the same bytes
("exact"), near-copies (perceptual hashes within `max_distance` bits), and mirrored, rotated and cropped views (their
hashes, within as many bits). Test beats dev, and dev beats train. The image of the weaker split is **left out** if

- the draw put the two images into different splits, or
- the stronger one is a test image of another set, named by `against`, or
- the recipe says `duplicates: drop`, which also leaves out all copies but the first (by sample_id) within train and
  within dev.

A mirrored, rotated or cropped copy is left out only if the labels agree, because a rotated 6 is a 9: both images have
the same class, or the twin is in another set that does not have a class with the image's class name. All other pairs
are listed and kept: official splits and other sets' test images stay as their authors made them, and small pictures
(8x8 digits, flat shapes) look alike without being copies.

Identical bytes in two classes ("conflicting labels") are always listed, including the first image.
`duplicates: drop` leaves all of them out of train and dev, because the right label is unknown.

The result is a function of the set of images, and not of the order in which they arrived. When images are added, no
image changes its split: an image's draw depends on nothing else, a test image is never left out, and an image that is
left out stays out, because each pair is judged on its own. (If the authors later add a dev or test split of their own,
that split is no longer drawn.) A new image joins the split that it draws. If it is a near-copy of images in another
split, the images of the weaker split are left out.

Drawing near-copies together would depend on which came first: of two near-copies that draw train and test, each must
stay where it was when it was alone, so one of them must go, and it cannot be the test image. Named groups are drawn
together and lose no image.

Last, a class without an image in train is **set aside**, because no model could learn it. It returns when one of its
images draws train.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ray_jobs.data.columns import INDEX
from ray_jobs.data.images import Hashes
from ray_jobs.data.near_duplicates import Hashes as _Hashes
from ray_jobs.data.near_duplicates import Pairs, near_pairs
from ray_jobs.sources import hash_fraction

FRACTIONS = {"test": 0.2, "dev": 0.1}  # of the images without an official split; the rest is train
DUPLICATES = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("twin", pa.string(), nullable=False),  # the key of the image that it is a copy of
        pa.field("twin_split", pa.string(), nullable=False),
        pa.field("twin_dataset", pa.string(), nullable=False),
        pa.field("class", pa.string(), nullable=False),
        pa.field("twin_class", pa.string(), nullable=False),
        pa.field("distance", pa.int32(), nullable=False),  # bits between the perceptual hashes
        pa.field("kind", pa.string(), nullable=False),  # "exact", "near", a kind of view, or CONFLICT
        pa.field("done", pa.string(), nullable=False),  # "left out" | "kept"
    ]
)
SET_ASIDE = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("class_name", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),  # to which it returns with its class
    ]
)
CONFLICT = "conflicting labels"  # the same bytes as an image of another class
_SPLITS = ("test", "dev", "train")  # strongest first
_NONE = np.iinfo(np.int64).max

_UPRIGHT, _REVERSED = ("phash", "phash_rotated"), ("phash_mirrored", "phash_flipped")
_CROPS = ("phash_crop95", "phash_crop82", "phash_crop75")
_Views = Sequence[tuple[str, str]]


def _both_ways(views: Iterable[tuple[str, str]]) -> _Views:
    return [pair for one, other in views for pair in ((one, other), (other, one))]


# kind of copy -> pairs of hashes to compare: (of an image, of its twin)
_TURNS: dict[str, _Views] = {
    "near": [("phash", "phash"), *_both_ways([("phash", "phash_on_black")])],
    "mirrored": _both_ways(product(_UPRIGHT, _REVERSED)),
    "rotated": _both_ways([_UPRIGHT, _REVERSED]),
}
# Never the same crop of both images, nor the inside of both: the middles of all digits look alike.
_CUTS: dict[str, _Views] = {
    "cropped": _both_ways([*combinations(("phash", *_CROPS), 2), ("phash", "phash_inside")])
}
_SCHEMA = pa.schema(
    [INDEX.field(name) for name in ("key", "sample_id", "content_id", "label", *Hashes._fields)]
)
_Ints = NDArray[np.int64]
_NO_PAIRS: Pairs = (np.zeros(0, np.int64), np.zeros(0, np.int64))


class OtherSet(NamedTuple):
    """The test images of another set: a table as `find_copies` takes it, and the set's class names."""

    images: pa.Table
    class_names: Sequence[str]


def assign_splits(images: pa.Table, salt: str | None, official: Collection[str | None]) -> list[str]:
    """Return the split of every image.

    If the authors give some splits, a missing dev or test split is drawn from train, with the same fractions.

    Args:
        images: columns `split` (null: not given), `group` (may be null), `content_id`.
        salt: of the hash; None: nothing is drawn, because the source gives every image's split.
        official: the splits that the authors give, including those without a usable image: a damaged image must not
            turn a training image into a test image.
    """
    given_splits = images["split"].to_pylist()
    if salt is None:
        return given_splits
    fractions = {split: fraction for split, fraction in FRACTIONS.items() if split not in official}
    groups = zip(images["group"].to_pylist(), images["content_id"].to_pylist(), strict=True)
    return [
        _drawn(hash_fraction(salt, group or content), fractions) if given in (None, "train") else given
        for given, (group, content) in zip(given_splits, groups, strict=True)
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
    """Its labels are positions in `class_names`."""
    class_names: tuple[str, ...]
    set_aside: pa.Table
    """SET_ASIDE: the images of the other classes."""
    set_aside_classes: tuple[tuple[str, int], ...] = ()
    """(name, number of images) of each of these classes, including those without a usable image."""


def without_untrained(index: pa.Table, class_names: Sequence[str], may_train: Collection[int]) -> Trainable:
    """Set aside the classes that could have a training image but do not, with all their images.

    The splits of other images do not change. When one of its images draws train, a class returns, each image in the
    split drawn for it.

    Args:
        index: columns key, label, labels, split of the images in use.
        class_names: the names of the labels.
        may_train: labels of the images that are in train or have a drawn split. Other classes were kept out of train
            by the authors (some of SUN397's 397 in VTAB's 800 training images), and stay.
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
        pa.table([aside["key"], names[labels[is_lost]], aside["split"]], schema=SET_ASIDE).sort_by("key"),
        tuple((class_names[label], int(counts[label])) for label in lost),
    )


def find_copies(
    name: str,
    images: pa.Table,
    class_names: Sequence[str],
    splits: Sequence[str],
    others: Mapping[str, OtherSet],
    duplicates: Literal["keep", "drop"],
    max_distance: int | None,
) -> pa.Table:
    """Return DUPLICATES: a row for each image that is a copy of an image that ranks before it, with one such twin.

    If identical bytes are in several classes, each image has a row, with a twin of another class.

    Args:
        name: of the dataset with these images.
        images: columns key, sample_id, content_id, label, the hashes, and `split` as the source gives it (null: not
            given).
        class_names: the names of the labels.
        splits: as returned by `assign_splits`.
        others: name of another dataset -> its test images.
        duplicates: see `pipelines.spec.Ingest`.
        max_distance: see `pipelines.spec.Ingest`; None: only identical bytes are copies.
    """
    tables = (images, *(other.images for other in others.values()))
    every = pa.concat_tables([table.select(_SCHEMA.names).cast(_SCHEMA) for table in tables])
    classes = _named(tables, [class_names, *(other.class_names for other in others.values())])
    class_ids = classes.dictionary_encode().indices.to_numpy().astype(np.int64)
    count, sizes = len(images), [*map(len, tables)]
    # an image's standing, strongest first: test of another set, then test, dev and train of this one
    standings = np.array(["test"] * len(others) + list(_SPLITS))
    standing = np.repeat(np.maximum(np.arange(len(tables)) - 1, 0), sizes)
    standing[:count] = [len(others) + _SPLITS.index(split) for split in splits]
    rank, split = _ranks(every["sample_id"], standing), standing[:count] - len(others)
    first = partial(_first, standing=standing, standings=len(standings), rank=rank, count=count)

    content = every["content_id"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    hashes = {column: every[column].to_numpy() for column in Hashes._fields}
    by_kind = {"exact": first({"bytes": content}, _NO_PAIRS, [("bytes", "bytes")])}
    agreeing = dict(by_kind)  # twins of a compatible class
    if max_distance is not None:
        has_class = _has_class(classes[:count], others)
        for kinds in (_TURNS, _CUTS):
            different, cells = _cells(_compared(hashes, kinds))
            pairs = near_pairs(different, max_distance)
            cells_of_class, pairs_of_class = _of_one_class(cells, pairs, class_ids)
            for kind, views in kinds.items():
                by_kind[kind] = agreeing[kind] = first(cells, pairs, views)
                if kind != "near":
                    of_class = first(cells_of_class, pairs_of_class, views)
                    agreeing[kind] = np.where(has_class, of_class, by_kind[kind])
    # [standing of the twin and kind, image]: prefer the twin that leaves the image out, then the strongest, then the
    # most certain kind
    shape = (len(standings) * len(by_kind), count)
    twins, sure = (np.stack([*ranks.values()], axis=1).reshape(shape) for ranks in (by_kind, agreeing))
    own_rank = rank[:count]
    judged = _judged(images["split"], split, duplicates, len(others))
    leaves = (sure < own_rank) & np.repeat(judged, len(by_kind), 0)
    is_left_out, is_copy = leaves.any(0), (twins < own_rank).any(0)
    chosen = np.where(is_left_out, leaves.argmax(0), (twins < own_rank).argmax(0))
    twin = np.where(is_left_out, sure[chosen, np.arange(count)], twins[chosen, np.arange(count)])
    conflicting = _first_of_another_class(content[:count], class_ids[:count], own_rank)
    is_in_conflict = conflicting < _NONE
    twin = np.where(is_in_conflict & ~is_left_out, conflicting, twin)
    is_left_out |= is_in_conflict & (split > 0) & (duplicates == "drop")

    at = np.flatnonzero(is_copy | is_in_conflict)
    best = np.argsort(rank)[twin[at]]
    differs = (content[at] == content[best]) & (class_ids[at] != class_ids[best]) & (best < count)
    chosen_kinds = np.array([*by_kind])[chosen[at] % len(by_kind)]
    kind_of_each = np.where(differs, CONFLICT, chosen_kinds)
    return pa.table(
        [
            images["key"].take(at),
            standings[standing[at]],
            every["key"].take(best),
            standings[standing[best]],
            np.repeat([name, *others], sizes)[best],
            classes.take(at),
            classes.take(best),
            _distances(hashes, kind_of_each, at, best),
            kind_of_each,
            np.where(is_left_out[at], "left out", "kept"),
        ],
        schema=DUPLICATES,
    ).sort_by("key")


def _named(tables: Sequence[pa.Table], class_names: Sequence[Sequence[str]]) -> pa.Array:
    """Return the name of every image's class."""
    names = [pa.array(names_of_table, pa.string()) for names_of_table in class_names]
    return pa.concat_arrays(
        [array.take(table["label"].combine_chunks()) for array, table in zip(names, tables, strict=True)]
    )


def _has_class(classes: pa.Array, others: Mapping[str, OtherSet]) -> NDArray[np.bool_]:
    """Return whether the twin's set has the image's class, [standing of the twin, image]."""
    in_others = [pc.is_in(classes, pa.array(other.class_names, pa.string())) for other in others.values()]
    return np.stack(
        [*(mask.to_numpy(False) for mask in in_others), *[np.ones(len(classes), bool)] * len(_SPLITS)]
    )


def _ranks(sample_ids: pa.ChunkedArray, strength: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank of each image among all: stronger splits first, then by sample_id."""
    order = pc.sort_indices(
        pa.table({"strength": strength, "sample_id": sample_ids}),
        sort_keys=[("strength", "ascending"), ("sample_id", "ascending")],
    ).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank


def _compared(hashes: Mapping[str, _Hashes], kinds: Mapping[str, _Views]) -> dict[str, _Hashes]:
    """Return the columns that these kinds compare; for cropped views alone, without images that have no such view."""
    columns = {column: hashes[column] for views in kinds.values() for pair in views for column in pair}
    if "near" not in kinds:
        has_views = np.any([values > 0 for column, values in columns.items() if column != "phash"], axis=0)
        columns["phash"] = np.where(has_views, columns["phash"], np.uint64(0))
    return columns


def _cells(values: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], dict[str, _Ints]]:
    """Return the distinct values of all columns, and for each column the cells: positions in these; -1 for value 0."""
    different = np.unique(np.concatenate([*values.values()]))
    different = different[different > 0]
    return different, {
        name: np.where(column > 0, np.searchsorted(different, column), -1) for name, column in values.items()
    }


def _of_one_class(
    cells: Mapping[str, _Ints], pairs: Pairs, class_ids: _Ints
) -> tuple[dict[str, _Ints], Pairs]:
    """Split cells and pairs of near cells by class, so that each cell has images of one class."""
    classes = class_ids.max(initial=-1) + 1
    # 0 is for images that are in no cell
    keys, divided = _cells(
        {column: np.where(own < 0, 0, own * classes + class_ids + 1) for column, own in cells.items()}
    )
    keys -= 1
    one, other = pairs
    start = np.searchsorted(keys, one * classes)
    counts = np.searchsorted(keys, (one + 1) * classes) - start
    # every class of the first cell of a pair, and the same class of the second cell if it has images of that class
    first = np.repeat(start - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    wanted = np.repeat(other, counts) * classes + keys[first] % max(classes, 1)
    second = np.searchsorted(keys, wanted)
    exists = keys[np.minimum(second, len(keys) - 1)] == wanted
    return divided, (first[exists], second[exists])


def _first(
    cells: Mapping[str, _Ints],
    pairs: Pairs,
    views: _Views,
    standing: _Ints,
    standings: int,
    rank: _Ints,
    count: int,
) -> _Ints:
    """Return the first rank of a twin, [standing of the twin, image], for the first `count` images.

    Twins are the images with a view in one of the image's cells, or in a cell near to it.
    """
    number = 1 + max((column.max(initial=-1) for column in cells.values()), default=-1)
    first = np.full((standings, count), _NONE)
    for twin_column in {twin_column: None for _, twin_column in views}:
        in_cell = np.flatnonzero(cells[twin_column] >= 0)
        first_in_cell = np.full((standings, number), _NONE)
        np.minimum.at(first_in_cell, (standing[in_cell], cells[twin_column][in_cell]), rank[in_cell])
        first_near = first_in_cell.copy()
        for one, other in (pairs, pairs[::-1]):
            for near, exact in zip(first_near, first_in_cell, strict=True):
                np.minimum.at(near, one, exact[other])
        for column in (column for column, twin in views if twin == twin_column):
            images = np.flatnonzero(cells[column][:count] >= 0)
            first[:, images] = np.minimum(first[:, images], first_near[:, cells[column][images]])
    return first


def _first_of_another_class(content: _Ints, class_ids: _Ints, rank: _Ints) -> _Ints:
    """Return for each image the first rank among images with the same bytes and another class."""
    first, second = (np.full(content.max(initial=-1) + 1, _NONE) for _ in range(2))
    np.minimum.at(first, content, rank)
    class_of_first = np.zeros(len(first), np.int64)
    is_first = first[content] == rank
    class_of_first[content[is_first]] = class_ids[is_first]
    differs = class_ids != class_of_first[content]
    np.minimum.at(second, content[differs], rank[differs])
    return np.where(differs, first[content], second[content])


def _distances(
    hashes: Mapping[str, _Hashes], kind: NDArray[np.str_], at: _Ints, best: _Ints
) -> NDArray[np.int32]:
    """Return the bits between the images `at` and their twins `best`, for the nearest views of that kind of copy."""
    distance = np.bitwise_count(hashes["phash"][at] ^ hashes["phash"][best]).astype(np.int32)
    for one_kind, views in (_TURNS | _CUTS).items():
        rows = kind == one_kind
        pairs = [(hashes[column][at[rows]], hashes[twin][best[rows]]) for column, twin in views]
        bits = [np.where((own > 0) & (twin > 0), np.bitwise_count(own ^ twin), 64) for own, twin in pairs]
        distance[rows] = np.min(bits, axis=0)
    return distance


def _judged(
    given: pa.ChunkedArray, split: _Ints, duplicates: Literal["keep", "drop"], others: int
) -> NDArray[np.bool_]:
    """Return whether a twin of a standing leaves the image out, [standing of the twin, image].

    `given` are the splits of the source, `split` the images' positions in `_SPLITS`, `others` a number of sets.
    """
    official = {_SPLITS.index(name) for name in pc.unique(given).to_pylist() if name is not None}
    is_drawn = pc.is_null(given).to_numpy()
    leaves = [split > 0] * others
    for twin in range(len(_SPLITS)):
        apart = (split > twin) & (is_drawn | (twin not in official) | (duplicates == "drop"))
        leaves.append(apart | ((split == twin) & (twin > 0) & (duplicates == "drop")))
    return np.stack(leaves)
