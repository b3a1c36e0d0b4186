"""ImageNet-1k (ILSVRC2012) as its authors ship it.

In: ILSVRC2012_img_train.tar (a tar of `n01440764.tar`, ... of `n01440764_10026.JPEG`, ...), ILSVRC2012_img_val.tar
(flat, `ILSVRC2012_val_00000001.JPEG`, ...), ILSVRC2012_devkit_t12.tar.gz, and optionally ReaL's real.json. Out: entries
that are byte ranges of the two tars.

A label is the rank of the class's WNID, sorted as text. The devkit's ILSVRC2012_ID is a different number, and is only
used to map the validation labels to WNIDs (see the devkit's readme.txt).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.spec.archives import (
    IMAGENET_DEVKIT,
    IMAGENET_REAL,
    IMAGENET_TRAIN,
    IMAGENET_VAL,
    ImageNetSource,
)
from ray_jobs.sources import hash_fraction
from ray_jobs.sources.archives.arrays import read_array
from ray_jobs.sources.archives.containers import (
    contents,
    each_contents,
    members,
    outermost,
    read_file,
    read_member,
)
from ray_jobs.sources.archives.entries import Files, Listing, Member, Unusable, place, table
from ray_jobs.sources.names import listed
from vit_model.errors import UserError

SYNSET_TAR = re.compile(r"(?:.*/)?(n\d{8})\.tar")
_VAL_IMAGE = re.compile(r"(?:.*/)?(ILSVRC2012_val_(\d{8})\.JPEG)")
SALT = "vitflow imagenet"
_LEAST_AGREEMENT = 0.5  # of ReaL's labels with the authors'; labels of other images agree only by chance


class Devkit(NamedTuple):
    """The classes, sorted by WNID: `wnids`, `words`; and the label of each validation image, in order."""

    wnids: tuple[str, ...]
    words: tuple[str, ...]
    val_labels: tuple[int, ...]


def listing(source: ImageNetSource, files: Files) -> Listing:
    """List train from the tar of tars, dev as a hashed fraction of it, test from the authors' validation images.

    Raises:
        UserError: a synset that is not in the devkit, or validation images that do not match their labels.
    """
    devkit = read_devkit(files)
    rank = {wnid: label for label, wnid in enumerate(devkit.wnids)}
    unusable: list[Unusable] = []

    def rows() -> Iterator[dict[str, Any]]:
        for wnid, images in synsets(files, tars_in(files, IMAGENET_TRAIN, unusable), unusable):
            if wnid not in rank:
                raise UserError(f"{files[IMAGENET_TRAIN]} has {wnid}.tar, which is not a class of the devkit")
            for member in images:
                key = f"train/{wnid}/{member.path}"
                dev = hash_fraction(SALT, key) < source.dev_fraction
                yield row(key, rank[wnid], "dev" if dev else "train", member)
        yield from _validation(files, devkit, unusable)

    entries = table(rows())
    trained = set(pc.unique(entries.filter(pc.not_equal(entries["split"], "test"))["label"]).to_pylist())
    untrained = [wnid for wnid in devkit.wnids if rank[wnid] not in trained]
    names = tuple(f"{wnid} {words}" for wnid, words in zip(devkit.wnids, devkit.words, strict=True))
    without = f"{len(untrained):,} classes have no image to train on: {listed(untrained, 5)}"
    notes = (
        f"test is the authors' validation set, dev {source.dev_fraction:.2%} of train by a hash of names",
        *([without] if untrained else ()),
        *_real_note(entries.filter(pc.equal(entries["split"], "test")), files),
    )
    return Listing(names, entries, unusable=tuple(unusable), notes=notes)


def _real_note(test: pa.Table, files: Files) -> tuple[str, ...]:
    """Return a note on ReaL's labels. Raises UserError if they cannot belong to these images (90.02% should agree)."""
    if IMAGENET_REAL not in files:
        return ()
    pairs = zip(test["label"].to_pylist(), test["labels"].to_pylist(), strict=True)
    agreed = [label in labels for label, labels in pairs if labels]
    share = sum(agreed) / max(len(agreed), 1)
    if share < _LEAST_AGREEMENT:
        raise UserError(
            f"{files[IMAGENET_REAL]} agrees with the authors' labels for {share:.1%} of its images; expected 90%. "
            "Use the published file, which is in the order of the validation images"
        )
    return (
        f"test is scored by the authors' labels, and by ReaL's as a task of its own: these have the authors' label "
        f"for {share:.2%} of {len(agreed):,} images",
    )


def _validation(files: Files, devkit: Devkit, unusable: list[Unusable]) -> Iterator[dict[str, Any]]:
    images, refused = contents(files, IMAGENET_VAL)
    unusable += refused
    real = _real_labels(files, len(devkit.val_labels), len(devkit.wnids))
    numbers = set()
    misnamed: list[str] = []
    for member in images:
        if not (match := _VAL_IMAGE.fullmatch(member.path)):
            misnamed.append(member.path)
            continue
        number = int(match[2]) - 1
        if not 0 <= number < len(devkit.val_labels) or number in numbers:
            raise UserError(f"{files[IMAGENET_VAL]}: {member.path} has no label in the devkit, or is a duplicate")
        numbers.add(number)
        entry = row(f"val/{match[1]}", devkit.val_labels[number], "test", member)
        yield entry | ({} if real is None else {"labels": real[number]})
    unusable += [Unusable(f"val/{path}", "its name is none of a validation image", IMAGENET_VAL) for path in misnamed]
    if len(numbers) < len(devkit.val_labels):
        hint = f"; {misnamed[0]!r} is not a name like ILSVRC2012_val_00000001.JPEG" if misnamed else ""
        raise UserError(
            f"{files[IMAGENET_VAL]} has {len(numbers):,} images, but the devkit labels {len(devkit.val_labels):,}{hint}"
        )


def read_devkit(files: Files) -> Devkit:
    """Read `data/meta.mat` and `data/ILSVRC2012_validation_ground_truth.txt` of the devkit. Raises UserError."""
    by_name = {PurePosixPath(member.path).name: member for member in members(files, IMAGENET_DEVKIT)}
    where = files[IMAGENET_DEVKIT]
    for name in ("meta.mat", "ILSVRC2012_validation_ground_truth.txt"):
        if name not in by_name:
            raise UserError(f"{where} does not contain data/{name}")
    leaves = _leaves(files, f"{IMAGENET_DEVKIT}::{by_name['meta.mat'].path}")
    wnids = tuple(sorted(wnid for wnid, _ in leaves.values()))
    words = dict(leaves.values())
    rank = {wnid: label for label, wnid in enumerate(wnids)}
    text = read_member(files, by_name["ILSVRC2012_validation_ground_truth.txt"])
    try:
        labels = tuple(rank[leaves[int(line)][0]] for line in text.split())
    except (KeyError, ValueError) as error:
        raise UserError(f"{where}: a validation label is not an ILSVRC2012_ID of meta.mat: {error}") from error
    return Devkit(wnids, tuple(words[wnid] for wnid in wnids), labels)


def _leaves(files: Files, meta: str) -> dict[int, tuple[str, str]]:
    """Return ILSVRC2012_ID -> (WNID, words) of the synsets without children in meta.mat's struct array `synsets`."""
    try:
        synsets = read_array(files, meta, "synsets", np.void, (None,))
        leaves = synsets[synsets["num_children"] == 0]
        numbers = leaves["ILSVRC2012_ID"].astype(int).tolist()
        names = list(zip(*(leaves[field].astype(str).tolist() for field in ("WNID", "words")), strict=True))
    except ValueError as error:  # numpy's for a missing field, and UserError
        raise UserError(f"{meta} is damaged, or has no synsets: {error}") from error
    if len({wnid for wnid, _ in names}) != len(names) or len(set(numbers)) != len(numbers):
        raise UserError(f"{meta} has a duplicate synset")
    return dict(zip(numbers, names, strict=True))


def _real_labels(files: Files, images: int, classes: int) -> list[list[int]] | None:
    """Read ReaL's labels (Beyer et al., "Are we done with ImageNet?", 2020).

    Element i has the labels of validation image i + 1, as ranks; it may be empty.
    """
    if IMAGENET_REAL not in files:
        return None
    where = files[IMAGENET_REAL]
    try:
        real = json.loads(read_file(files, IMAGENET_REAL))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    if not isinstance(real, list) or len(real) != images:
        raise UserError(f"{where} is not a list of {images:,} lists, one for each validation image")
    for labels in real:
        if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < classes for label in labels):
            raise UserError(f"{where}: {str(labels)[:80]} is not a list of classes from 0 to {classes - 1}")
    return [sorted(set(labels)) for labels in real]


# ------------------------------------------------------------------------------------------------- shared


def synsets(files: Files, chains: Iterable[str], unusable: list[Unusable]) -> Iterator[tuple[str, list[Member]]]:
    """Yield (WNID, images) of each synset, sorted by WNID; add refused members to `unusable`. Raises UserError."""
    tars: dict[str, str] = {}
    others: list[Unusable] = []
    for chain in chains:
        if not (match := SYNSET_TAR.fullmatch(chain.rpartition("::")[2])):
            others.append(Unusable(chain, "it is no tar of a synset", outermost(files, chain)))
        elif match[1] in tars:
            raise UserError(f"duplicate {match[1]}.tar: {tars[match[1]]} and {chain}")
        else:
            tars[match[1]] = chain
    if others and not tars:
        raise UserError(
            f"{others[0].file} contains no synset tars (expected names of n and 8 digits, such as n01440764.tar); "
            f"it contains {len(others):,} other files, such as {others[0].key}"
        )
    unusable += others
    wnids = sorted(tars)
    for wnid, (images, refused) in zip(wnids, each_contents(files, (tars[wnid] for wnid in wnids)), strict=True):
        unusable += refused
        yield wnid, images


def tars_in(files: Files, name: str, unusable: list[Unusable]) -> list[str]:
    """Return the chains of the members of a tar of tars; add refused members to `unusable`."""
    tars, refused = contents(files, name)
    unusable += refused
    return [f"{name}::{member.path}" for member in tars]


def row(key: str, label: int, split: str, member: Member) -> dict[str, Any]:
    """Return an entry of ENTRIES."""
    return {"key": key, "label": label, "split": split} | place(member)
