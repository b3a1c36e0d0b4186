"""Which images are for training, for choosing and for testing, and which are left out for a copy elsewhere.

An image is drawn by itself: by a hash of (salt, group), where group is what a column names (a patient, a site), else
the image's own bytes.

    test [0, 0.2)  dev [0.2, 0.3)  train [0.3, 1)

What the authors of a data set have split stays as they split it. Then copies are looked at, pair by pair: the same
bytes ("exact"), near-copies (perceptual hashes within `max_distance` bits), and the hashes of mirrored, rotated and
cropped views within as many bits. Test beats dev beats train, and the image of the weaker split is **left out** of the
set where

- the draw put the two apart, or
- the stronger is a test image of another set that `against` names, or
- the recipe says `duplicates: drop`, which also leaves out all but the first (by sample_id) of copies within train
  and within dev.

A mirrored, rotated or cropped copy is left out only if the labels allow it, because a rotated 6 is a 9: both images are
of one class, or the twin is in another set that does not have the image's class, by name. Every other pair is listed
and kept: official splits and other sets' test images stay as their authors made them, and small pictures (8x8 digits,
flat shapes) look alike without being copies.

Identical bytes in two classes ("conflicting labels") are always listed, including the first image.
`duplicates: drop` leaves all of them out of train and dev, because the right label is unknown.

All this is a function of the images that are there now, in whatever order they came, and still nothing ever moves, as
long as the authors' own splits are the same (a dev or test of theirs that comes later ends the draw of it):
an image's own draw depends on nothing else, a test image is never left out, and one that is left out stays so when
others are added, since each pair is judged by itself. A new image thus joins the split that it draws; where it is a
near-copy of images in another split, those of the weaker one (it, or they) are left out. Drawing near-copies together
instead would need to know which came first: of two near-copies that draw train and test, each must stay where it was
if it was there alone, so that one must go, and it can't be the test image. Named groups draw together and lose nothing.

Last, a class without an image in train is **set aside**: nothing could learn it. It returns when one of its images
draws train.
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

FRACTIONS = {"test": 0.2, "dev": 0.1}  # of the images without a given split; the rest is train
DUPLICATES = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("twin", pa.string(), nullable=False),  # the key of the one that it is a copy of
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
        pa.field("split", pa.string(), nullable=False),  # it returns there with its class
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


# which hash of an image is compared with which hash of another, by the kind of copy that this finds
_TURNS: dict[str, _Views] = {
    "near": [("phash", "phash"), *_both_ways([("phash", "phash_on_black")])],
    "mirrored": _both_ways(product(_UPRIGHT, _REVERSED)),
    "rotated": _both_ways([_UPRIGHT, _REVERSED]),
}
# not the same crop of both, nor the inside of both: the middles of all digits look alike
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
    """(name, number of images) of each of these classes, including those without a usable image."""


def without_untrained(index: pa.Table, class_names: Sequence[str], may_train: Collection[int]) -> Trainable:
    """Set aside the classes that could have a training image but have none, with all their images.

    This does not affect the splits of other images. When one of its images draws train, the class returns, each image
    in the split drawn for it.

    Args:
        index: columns key, label, labels, split of the images that are used.
        class_names: of the labels.
        may_train: labels of the images whose split is drawn or train. A class without any was kept out of train by
            the authors (some of SUN397's in VTAB's 800 training images), and stays.
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
    class_names: Sequence[str],
    splits: Sequence[str],
    others: Mapping[str, OtherSet],
    duplicates: Literal["keep", "drop"],
    max_distance: int | None,
) -> pa.Table:
    """DUPLICATES: a row for each image that is a copy of another which ranks before it, with one such twin.

    If identical bytes are in several classes, each image has a row, with a twin of another class.

    Args:
        name: what these images are called.
        images: columns key, sample_id, content_id, label, the hashes, and `split` as the source gives it (null: not
            given).
        class_names: of the labels.
        splits: what `assign_splits` says of them.
        others: the test images of other sets by their names.
        duplicates, max_distance: see `pipelines.spec.Ingest`; None: only the same bytes are copies.
    """
    tables = (images, *(other.images for other in others.values()))
    every = pa.concat_tables([table.select(_SCHEMA.names).cast(_SCHEMA) for table in tables])
    classes = _named(tables, [class_names, *(other.class_names for other in others.values())])
    class_ids = classes.dictionary_encode().indices.to_numpy().astype(np.int64)
    own, sizes = len(images), [*map(len, tables)]
    # an image's standing, strongest first: another set's test, then test, dev and train here
    standings = np.array(["test"] * len(others) + list(_SPLITS))
    standing = np.repeat(np.maximum(np.arange(len(tables)) - 1, 0), sizes)
    standing[:own] = [len(others) + _SPLITS.index(split) for split in splits]
    rank, place = _ranks(every["sample_id"], standing), standing[:own] - len(others)
    first = partial(_first, standing=standing, standings=len(standings), rank=rank, own=own)

    content = every["content_id"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    hashes = {column: every[column].to_numpy() for column in Hashes._fields}
    found = {"exact": first({"bytes": content}, _NO_PAIRS, [("bytes", "bytes")])}
    agreeing = dict(found)  # twins of a compatible class
    if max_distance is not None:
        knows = _knows(classes[:own], others)
        for kinds in (_TURNS, _CUTS):
            different, cells = _cells(_compared(hashes, kinds))
            pairs = near_pairs(different, max_distance)
            cells_of_class, pairs_of_class = _of_one_class(cells, pairs, class_ids)
            for kind, views in kinds.items():
                found[kind] = agreeing[kind] = first(cells, pairs, views)
                if kind != "near":
                    of_class = first(cells_of_class, pairs_of_class, views)
                    agreeing[kind] = np.where(knows, of_class, found[kind])
    # [standing of the twin and kind, image]: prefer the twin that leaves the image out, then the strongest, the surest
    shape = (len(standings) * len(found), own)
    twins, sure = (np.stack([*each.values()], axis=1).reshape(shape) for each in (found, agreeing))
    mine = rank[:own]
    leaves = (sure < mine) & np.repeat(
        _judged(images["split"], place, duplicates, len(others)), len(found), 0
    )
    is_left_out, is_copy = leaves.any(0), (twins < mine).any(0)
    chosen = np.where(is_left_out, leaves.argmax(0), (twins < mine).argmax(0))
    twin = np.where(is_left_out, sure[chosen, np.arange(own)], twins[chosen, np.arange(own)])
    conflicting = _first_of_another_class(content[:own], class_ids[:own], mine)
    is_in_conflict = conflicting < _NONE
    twin = np.where(is_in_conflict & ~is_left_out, conflicting, twin)
    is_left_out |= is_in_conflict & (place > 0) & (duplicates == "drop")

    at = np.flatnonzero(is_copy | is_in_conflict)
    best = np.argsort(rank)[twin[at]]
    differs = (content[at] == content[best]) & (class_ids[at] != class_ids[best]) & (best < own)
    kinds_found = np.array([*found])[chosen[at] % len(found)]
    kind_of_each = np.where(differs, CONFLICT, kinds_found)
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
    """The name of every image's class."""
    names = [pa.array(own, pa.string()) for own in class_names]
    return pa.concat_arrays(
        [own.take(table["label"].combine_chunks()) for own, table in zip(names, tables, strict=True)]
    )


def _knows(classes: pa.Array, others: Mapping[str, OtherSet]) -> NDArray[np.bool_]:
    """[standing of a twin, image]: whether the twin's set has the image's class."""
    known = [pc.is_in(classes, pa.array(other.class_names, pa.string())) for other in others.values()]
    return np.stack(
        [*(each.to_numpy(False) for each in known), *[np.ones(len(classes), bool)] * len(_SPLITS)]
    )


def _ranks(sample_ids: pa.ChunkedArray, strength: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each image among all: stronger splits first, then by sample_id."""
    order = pc.sort_indices(
        pa.table({"strength": strength, "sample_id": sample_ids}),
        sort_keys=[("strength", "ascending"), ("sample_id", "ascending")],
    ).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank


def _compared(hashes: Mapping[str, _Hashes], kinds: Mapping[str, _Views]) -> dict[str, _Hashes]:
    """The columns of the views of these kinds. If only cropped views are compared, images without any are skipped."""
    columns = {column: hashes[column] for views in kinds.values() for one in views for column in one}
    if "near" not in kinds:
        has_views = np.any([own > 0 for column, own in columns.items() if column != "phash"], axis=0)
        columns["phash"] = np.where(has_views, columns["phash"], np.uint64(0))
    return columns


def _cells(values: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], dict[str, _Ints]]:
    """The distinct values of some columns, and the number of each image's value among them; -1 for the value 0."""
    different = np.unique(np.concatenate([*values.values()]))
    different = different[different > 0]
    return different, {
        column: np.where(own > 0, np.searchsorted(different, own), -1) for column, own in values.items()
    }


def _of_one_class(
    cells: Mapping[str, _Ints], pairs: Pairs, class_ids: _Ints
) -> tuple[dict[str, _Ints], Pairs]:
    """Split cells and near cells by class, so that each holds images of one class."""
    number = class_ids.max(initial=-1) + 1
    # 0 is for images that are in no cell
    keys, divided = _cells(
        {column: np.where(own < 0, 0, own * number + class_ids + 1) for column, own in cells.items()}
    )
    keys -= 1
    one, other = pairs
    start = np.searchsorted(keys, one * number)
    counts = np.searchsorted(keys, (one + 1) * number) - start
    # every class of the first cell of a pair, and the same class of the second, where that has it
    here = np.repeat(start - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    wanted = np.repeat(other, counts) * number + keys[here] % max(number, 1)
    there = np.searchsorted(keys, wanted)
    exists = keys[np.minimum(there, len(keys) - 1)] == wanted
    return divided, (here[exists], there[exists])


def _first(
    cells: Mapping[str, _Ints],
    pairs: Pairs,
    views: _Views,
    standing: _Ints,
    standings: int,
    rank: _Ints,
    own: int,
) -> _Ints:
    """[standing, image]: the first rank of that standing among the images whose views are in an image's cells or in
    near ones."""
    number = 1 + max((each.max(initial=-1) for each in cells.values()), default=-1)
    first = np.full((standings, own), _NONE)
    for column in {theirs: None for _, theirs in views}:
        is_there = np.flatnonzero(cells[column] >= 0)
        found = np.full((standings, number), _NONE)
        np.minimum.at(found, (standing[is_there], cells[column][is_there]), rank[is_there])
        near = found.copy()
        for here, there in (pairs, pairs[::-1]):
            for each, of_standing in zip(near, found, strict=True):
                np.minimum.at(each, here, of_standing[there])
        for asking in (mine for mine, theirs in views if theirs == column):
            asked = np.flatnonzero(cells[asking][:own] >= 0)
            first[:, asked] = np.minimum(first[:, asked], near[:, cells[asking][asked]])
    return first


def _first_of_another_class(content: _Ints, class_ids: _Ints, rank: _Ints) -> _Ints:
    """The first rank, for each image, among images with the same bytes and another class."""
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
    """Bits between the images `at` and their twins, by the nearest of the views that made them twins."""
    distance = np.bitwise_count(hashes["phash"][at] ^ hashes["phash"][best]).astype(np.int32)
    for one, views in (_TURNS | _CUTS).items():
        rows = kind == one
        ours, theirs = at[rows], best[rows]
        pairs = [(hashes[mine][ours], hashes[other][theirs]) for mine, other in views]
        bits = [np.where((own > 0) & (twin > 0), np.bitwise_count(own ^ twin), 64) for own, twin in pairs]
        distance[rows] = np.min(bits, axis=0)
    return distance


def _judged(
    given: pa.ChunkedArray, place: _Ints, duplicates: Literal["keep", "drop"], others: int
) -> NDArray[np.bool_]:
    """[standing of the twin, image]: whether a twin of that standing leaves the image out."""
    official = {_SPLITS.index(split) for split in pc.unique(given).to_pylist() if split is not None}
    is_drawn = pc.is_null(given).to_numpy()
    leaves = [place > 0] * others
    for twin in range(len(_SPLITS)):
        apart = (place > twin) & (is_drawn | (twin not in official) | (duplicates == "drop"))
        leaves.append(apart | ((place == twin) & (twin > 0) & (duplicates == "drop")))
    return np.stack(leaves)
