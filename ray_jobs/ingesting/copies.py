"""Find copies of images, and leave out images that have a copy in another split.

Copies have the same bytes ("exact"), near perceptual hashes (within `max_distance` bits), or a mirrored, rotated or
cropped view with a near hash. Test takes precedence over dev, and dev over train. The image of the weaker split is
**left out** if

- the draw put the two images into different splits, or
- the stronger image is a test image of another set, named by `against`, or
- the recipe says `duplicates: drop`, which also leaves out all copies but the first (by sample_id) within train and
  within dev.

A mirrored, rotated or cropped copy is left out only if the labels agree, because a rotated 6 is a 9: both images have
the same class, or the twin is in another set that does not have a class with the image's class name. All other pairs
are listed and kept: official splits and other sets' test images stay as their authors made them, and small pictures
(8x8 digits, flat shapes) look alike without being copies.

Images with identical bytes in two classes ("conflicting labels") are always listed, including the first image.
`duplicates: drop` leaves all of them out of train and dev, because the correct label is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ray_jobs.data.columns import CONFLICT, INDEX, large
from ray_jobs.data.images import Hashes
from ray_jobs.data.near_duplicates import Hashes as _Hashes
from ray_jobs.data.near_duplicates import Pairs, near_pairs

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
_SPLITS = ("test", "dev", "train")  # strongest first
_NONE = np.iinfo(np.int64).max

_UPRIGHT, _REVERSED = ("phash", "phash_rotated"), ("phash_mirrored", "phash_flipped")
_CROPS = ("phash_crop95", "phash_crop82", "phash_crop75")
_Views = Sequence[tuple[str, str]]


def _both_ways(views: Iterable[tuple[str, str]]) -> _Views:
    return [pair for first, second in views for pair in ((first, second), (second, first))]


# kind of copy -> pairs of hashes to compare: (of an image, of its twin)
_TURNS: dict[str, _Views] = {
    "near": [("phash", "phash"), *_both_ways([("phash", "phash_on_black")])],
    "mirrored": _both_ways(product(_UPRIGHT, _REVERSED)),
    "rotated": _both_ways([_UPRIGHT, _REVERSED]),
}
# Never compare the same crop or the inside of both images: the middles of all digits look alike.
_CUTS: dict[str, _Views] = {"cropped": _both_ways([*combinations(("phash", *_CROPS), 2), ("phash", "phash_inside")])}
_SCHEMA = large(pa.schema([INDEX.field(name) for name in ("key", "sample_id", "content_id", "label", *Hashes._fields)]))
_Ints = NDArray[np.int64]
_NO_PAIRS: Pairs = (np.zeros(0, np.int64), np.zeros(0, np.int64))


class OtherSet(NamedTuple):
    """The test images of another set: a table as `find_copies` takes it, and the set's class names."""

    images: pa.Table
    class_names: Sequence[str]


def find_copies(
    name: str,
    images: pa.Table,
    class_names: Sequence[str],
    splits: Sequence[str],
    others: Mapping[str, OtherSet],
    duplicates: Literal["keep", "drop"],
    max_distance: int | None,
) -> pa.Table:
    """Return `large` DUPLICATES: a row for each image that is a copy of an image with a lower rank, with one such twin.

    If identical bytes are in several classes, each image has a row, with a twin of another class.

    Args:
        name: the name of the dataset with these images.
        images: columns key, sample_id, content_id, label, the hashes, and the source's `split` (null: not given).
        class_names: the names of the labels.
        splits: as returned by `assign_splits`.
        others: name of another dataset -> its test images.
        duplicates: see `pipelines.spec.Ingest`.
        max_distance: see `pipelines.spec.Ingest`; None: only identical bytes are copies.
    """
    every = _all_images(name, images, class_names, splits, others)
    count, names, rank = every.number, every.standings, every.rank
    split = every.standing[:count] - len(others)
    by_kind, agreeing = _first_twins(every, others, max_distance)
    # [standing of the twin and kind, image]: prefer the twin that leaves the image out, then the strongest, then the
    # most certain kind
    shape = (len(names) * len(by_kind), count)
    twins, sure = (np.stack([*ranks.values()], axis=1).reshape(shape) for ranks in (by_kind, agreeing))
    judged = _judged(images["split"], split, duplicates, len(others))
    leaves = (sure < rank[:count]) & np.repeat(judged, len(by_kind), 0)
    is_left_out, is_copy = leaves.any(0), (twins < rank[:count]).any(0)
    chosen = np.where(is_left_out, leaves.argmax(0), (twins < rank[:count]).argmax(0))
    twin = np.where(is_left_out, sure[chosen, np.arange(count)], twins[chosen, np.arange(count)])
    conflicting = _first_of_another_class(every.content[:count], every.class_ids[:count], rank[:count])
    is_in_conflict = conflicting < _NONE
    twin = np.where(is_in_conflict & ~is_left_out, conflicting, twin)
    is_left_out |= is_in_conflict & (split > 0) & (duplicates == "drop")

    at = np.flatnonzero(is_copy | is_in_conflict)
    kinds = np.array([*by_kind])[chosen[at] % len(by_kind)]
    return _table(every, at, np.argsort(rank)[twin[at]], kinds, is_left_out[at])


class _Images(NamedTuple):
    """The images of all sets, this set first."""

    table: pa.Table
    classes: pa.Array
    class_ids: _Ints
    content: _Ints
    """A number for each content_id."""
    hashes: dict[str, _Hashes]
    datasets: NDArray[np.str_]
    standings: NDArray[np.str_]
    """The split of each standing, strongest first: test of each other set, then test, dev and train of this one."""
    standing: _Ints
    rank: _Ints
    number: int
    """The number of images of this set."""


def _all_images(
    name: str,
    images: pa.Table,
    class_names: Sequence[str],
    splits: Sequence[str],
    others: Mapping[str, OtherSet],
) -> _Images:
    tables = (images, *(other.images for other in others.values()))
    every = pa.concat_tables([table.select(_SCHEMA.names).cast(_SCHEMA) for table in tables])
    classes = _named(tables, [class_names, *(other.class_names for other in others.values())])
    count, sizes = len(images), [*map(len, tables)]
    standing = np.repeat(np.maximum(np.arange(len(tables)) - 1, 0), sizes)
    standing[:count] = [len(others) + _SPLITS.index(split) for split in splits]
    return _Images(
        every,
        classes,
        _numbers(classes),
        _numbers(every["content_id"].combine_chunks()),
        {column: every[column].to_numpy() for column in Hashes._fields},
        np.repeat([name, *others], sizes),
        np.array(["test"] * len(others) + list(_SPLITS)),
        standing,
        _ranks(every["sample_id"], standing),
        count,
    )


def _numbers(values: pa.Array) -> _Ints:
    """Return a number for each distinct value."""
    return values.dictionary_encode().indices.to_numpy().astype(np.int64)


def _first_twins(
    every: _Images, others: Mapping[str, OtherSet], max_distance: int | None
) -> tuple[dict[str, _Ints], dict[str, _Ints]]:
    """Return {kind: first rank of a twin, [standing of the twin, image]}, of all twins and of compatible classes."""
    first = partial(
        _first, standing=every.standing, standings=len(every.standings), rank=every.rank, count=every.number
    )
    by_kind = {"exact": first({"bytes": every.content}, _NO_PAIRS, [("bytes", "bytes")])}
    agreeing = dict(by_kind)
    if max_distance is None:
        return by_kind, agreeing
    has_class = _has_class(every.classes[: every.number], others)
    for kinds in (_TURNS, _CUTS):
        different, cells = _cells(_compared(every.hashes, kinds))
        pairs = near_pairs(different, max_distance)
        cells_of_class, pairs_of_class = _of_one_class(cells, pairs, every.class_ids)
        for kind, views in kinds.items():
            by_kind[kind] = agreeing[kind] = first(cells, pairs, views)
            if kind != "near":
                of_class = first(cells_of_class, pairs_of_class, views)
                agreeing[kind] = np.where(has_class, of_class, by_kind[kind])
    return by_kind, agreeing


def _table(every: _Images, at: _Ints, best: _Ints, kinds: NDArray[np.str_], is_left_out: NDArray[np.bool_]) -> pa.Table:
    """Return `large` DUPLICATES for the images `at` and their twins `best`."""
    differs = (every.content[at] == every.content[best]) & (every.class_ids[at] != every.class_ids[best])
    kinds = np.where(differs & (best < every.number), CONFLICT, kinds)
    keys = every.table["key"].take(np.concatenate([at, best]))  # at once, because it joins all names
    return pa.table(
        [
            keys[: len(at)],
            every.standings[every.standing[at]],
            keys[len(at) :],
            every.standings[every.standing[best]],
            every.datasets[best],
            every.classes.take(at),
            every.classes.take(best),
            _distances(every.hashes, kinds, at, best),
            kinds,
            np.where(is_left_out, "left out", "kept"),
        ],
        schema=large(DUPLICATES),
    ).sort_by("key")


def _named(tables: Sequence[pa.Table], class_names: Sequence[Sequence[str]]) -> pa.Array:
    """Return the name of every image's class."""
    names = [pa.array(names_of_table, pa.large_string()) for names_of_table in class_names]
    return pa.concat_arrays(
        [array.take(table["label"].combine_chunks()) for array, table in zip(names, tables, strict=True)]
    )


def _has_class(classes: pa.Array, others: Mapping[str, OtherSet]) -> NDArray[np.bool_]:
    """Return whether the twin's set has the image's class, [standing of the twin, image]."""
    in_others = [pc.is_in(classes, pa.array(other.class_names, pa.string())) for other in others.values()]
    return np.stack([*(mask.to_numpy(False) for mask in in_others), *[np.ones(len(classes), bool)] * len(_SPLITS)])


def _ranks(sample_ids: pa.ChunkedArray, strength: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank of each image among all images: stronger splits first, then by sample_id."""
    order = pc.sort_indices(
        pa.table({"strength": strength, "sample_id": sample_ids}),
        sort_keys=[("strength", "ascending"), ("sample_id", "ascending")],
    ).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank


def _compared(hashes: Mapping[str, _Hashes], kinds: Mapping[str, _Views]) -> dict[str, _Hashes]:
    """Return the columns that these kinds compare; for cropped views, 0 for images without such a view."""
    columns = {column: hashes[column] for views in kinds.values() for pair in views for column in pair}
    if "near" not in kinds:
        has_views = np.any([values > 0 for column, values in columns.items() if column != "phash"], axis=0)
        columns["phash"] = np.where(has_views, columns["phash"], np.uint64(0))
    return columns


def _cells(values: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], dict[str, _Ints]]:
    """Return the distinct values of all columns, and each column's cells: indices into them, -1 for value 0."""
    different = np.unique(np.concatenate([*values.values()]))
    different = different[different > 0]
    return different, {
        name: np.where(column > 0, np.searchsorted(different, column), -1) for name, column in values.items()
    }


def _of_one_class(cells: Mapping[str, _Ints], pairs: Pairs, class_ids: _Ints) -> tuple[dict[str, _Ints], Pairs]:
    """Split cells and pairs of near cells by class, so that each cell has images of one class."""
    classes = class_ids.max(initial=-1) + 1
    # 0 is for images without a cell
    keys, divided = _cells(
        {column: np.where(cell < 0, 0, cell * classes + class_ids + 1) for column, cell in cells.items()}
    )
    keys -= 1
    low, high = pairs
    start = np.searchsorted(keys, low * classes)
    counts = np.searchsorted(keys, (low + 1) * classes) - start
    # every class of the first cell of a pair, and the same class of the second cell if it has images of that class
    first = np.repeat(start - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    wanted = np.repeat(high, counts) * classes + keys[first] % max(classes, 1)
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

    Twins are images with a view in the image's cell or in a cell near it.
    """
    number = 1 + max((column.max(initial=-1) for column in cells.values()), default=-1)
    first = np.full((standings, count), _NONE)
    for twin_column in {twin_column: None for _, twin_column in views}:
        in_cell = np.flatnonzero(cells[twin_column] >= 0)
        first_in_cell = np.full((standings, number), _NONE)
        np.minimum.at(first_in_cell, (standing[in_cell], cells[twin_column][in_cell]), rank[in_cell])
        first_near = first_in_cell.copy()
        for at, near_cell in (pairs, pairs[::-1]):
            for near, exact in zip(first_near, first_in_cell, strict=True):
                np.minimum.at(near, at, exact[near_cell])
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


def _distances(hashes: Mapping[str, _Hashes], kind: NDArray[np.str_], at: _Ints, best: _Ints) -> NDArray[np.int32]:
    """Return the distance in bits of the images `at` and their twins `best`, by the nearest views of their kind."""
    distance = np.bitwise_count(hashes["phash"][at] ^ hashes["phash"][best]).astype(np.int32)
    for name, views in (_TURNS | _CUTS).items():
        rows = kind == name
        pairs = [(hashes[column][at[rows]], hashes[twin][best[rows]]) for column, twin in views]
        bits = [np.where((hash_ > 0) & (twin > 0), np.bitwise_count(hash_ ^ twin), 64) for hash_, twin in pairs]
        distance[rows] = np.min(bits, axis=0)
    return distance


def _judged(
    stated: pa.ChunkedArray, split: _Ints, duplicates: Literal["keep", "drop"], others: int
) -> NDArray[np.bool_]:
    """Return whether a twin with a standing causes the image to be left out, [standing of the twin, image].

    `stated` are the source's splits, `split` the images' indices into `_SPLITS`, `others` the number of other sets.
    """
    official = {_SPLITS.index(name) for name in pc.unique(stated).to_pylist() if name is not None}
    is_drawn = pc.is_null(stated).to_numpy()
    leaves = [split > 0] * others
    for twin in range(len(_SPLITS)):
        apart = (split > twin) & (is_drawn | (twin not in official) | (duplicates == "drop"))
        leaves.append(apart | ((split == twin) & (twin > 0) & (duplicates == "drop")))
    return np.stack(leaves)
