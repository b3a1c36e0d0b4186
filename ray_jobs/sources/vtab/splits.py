"""VTAB-1k's splits, equal to those of TFDS and VTAB's code, without using either.

TFDS sorts the records of each split by an MD5 of the split's name and the record's key. VTAB takes slices of that
order: `train800` is the first 800 records of train, `val200` the first 200 of its validation records, and test is a
whole TFDS split or the rest of one. Here they are "train" (train800), "dev" (val200) and "test"; train800val200 is
train and dev together. Other records are left out. Sources: google-research/task_adaptation, data/*.py; TFDS,
core/{hashing,shuffle,split_builder,splits}.py.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from numpy.typing import NDArray

from pipelines.spec.vtab import Task, VtabSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives.entries import Listing, Member, Unusable, place, table
from vit_model.errors import UserError

PARTS = ("train", "validation", "test")
"""The names of TFDS's splits, which also are the salts of their hashes."""
TRAIN, DEV = 800, 200


class Rule(NamedTuple):
    """The sizes of a task's TFDS splits, and where VTAB's slices begin in their order."""

    sizes: Mapping[str, int]
    dev: tuple[str, int]
    """The TFDS split and position of val200's first record."""
    test: tuple[str, int]
    """The TFDS split and position of the first test record; test ends with that split."""
    checks: tuple[str, str] | None
    """The check values of train800 and val200, if they are known without the archive."""


def _rule(
    train: int,
    validation: int,
    test: int,
    dev: tuple[str, int],
    test_from: tuple[str, int],
    checks: tuple[str, str] | None = None,
) -> Rule:
    sizes = {"train": train, "validation": validation, "test": test}
    return Rule({part: size for part, size in sizes.items() if size}, dev, test_from, checks)


_CLEVR = _rule(70_000, 15_000, 0, ("train", 63_000), ("validation", 0), ("5dc1033102716488", "9a9150228251ccef"))
_DSPRITES = _rule(737_280, 0, 0, ("train", 589_824), ("train", 663_552), ("54130b46ffd22579", "86005e8c04783edc"))
_SMALLNORB = _rule(24_300, 0, 24_300, ("test", 0), ("test", 12_150), ("438b845e2bd4a468", "d9fca0e85af945f0"))
# The sizes come from the tests of task_adaptation. SUN397's train list has 76,128 images, one of which cannot be
# decoded. EuroSAT's check values assume the published sizes of its classes.
RULES: dict[Task, Rule] = {
    "caltech101": _rule(3_060, 0, 6_084, ("train", 2_754), ("test", 0)),
    "cifar": _rule(50_000, 0, 10_000, ("train", 45_000), ("test", 0), ("5b25ee0661c3bc4a", "93377e439662509b")),
    "dtd": _rule(1_880, 1_880, 1_880, ("validation", 0), ("test", 0)),
    "oxford_flowers102": _rule(1_020, 1_020, 6_149, ("validation", 0), ("test", 0)),
    "oxford_iiit_pet": _rule(3_680, 0, 3_669, ("train", 2_944), ("test", 0)),
    "svhn": _rule(73_257, 0, 26_032, ("train", 65_931), ("test", 0), ("901fe4f6d4f65bc8", "36ae944d2e322a4f")),
    "sun397": _rule(76_127, 10_875, 21_750, ("validation", 0), ("test", 0), ("bbfe318c912bf278", "ed3f4079a4f342a7")),
    "patch_camelyon": _rule(
        262_144, 32_768, 32_768, ("validation", 0), ("test", 0), ("c1122cb7e413b8b3", "b3998b44bc8423a1")
    ),
    "eurosat": _rule(27_000, 0, 0, ("train", 16_200), ("train", 21_600), ("7dac90dec1b73063", "5c9a3ab3702faf20")),
    "resisc45": _rule(31_500, 0, 0, ("train", 18_900), ("train", 25_200), ("7c42d524f21f8a68", "2a2bb0da49b4bb17")),
    "diabetic_retinopathy": _rule(35_126, 10_906, 42_670, ("validation", 0), ("test", 0)),
    "clevr_count": _CLEVR,
    "clevr_dist": _CLEVR,
    "dmlab": _rule(65_550, 22_628, 22_735, ("validation", 0), ("test", 0)),
    "kitti": _rule(6_347, 423, 711, ("validation", 0), ("test", 0), ("672f709eeee9eb44", "ac4167613b6a2171")),
    "dsprites_loc": _DSPRITES,
    "dsprites_ori": _DSPRITES,
    "smallnorb_azi": _SMALLNORB,
    "smallnorb_ele": _SMALLNORB,
}


class Records(NamedTuple):
    """The records of one TFDS split, in the archive's order."""

    keys: Sequence[int | str]
    """The keys that TFDS's builder yields."""
    labels: Sequence[int] | NDArray[Any]
    """0-based."""
    members: Sequence[Member | None] | None = None
    """The position of each record's bytes; None for a record that is in a list, but not in the archive. Without members
    the images are in arrays, and are numbered consecutively through all parts, in the order of PARTS."""


class Used(NamedTuple):
    """A record that VTAB uses: its TFDS split, its number there, and its split here."""

    part: str
    number: int
    split: str


def hash_order(salt: str, keys: Sequence[int | str]) -> list[int]:
    """Return the positions of the keys in TFDS's order, by MD5 of salt and key. Raises UserError for duplicate keys."""
    salted = hashlib.md5(salt.encode(), usedforsecurity=False)
    digests = []
    for key in keys:
        digest = salted.copy()
        digest.update(_text(key).encode())
        digests.append(digest.digest())
    if len(set(digests)) < len(digests):
        duplicate, _ = Counter(map(_text, keys)).most_common(1)[0]
        raise UserError(f"{salt}: duplicate record {duplicate!r}")
    return sorted(range(len(digests)), key=digests.__getitem__)


def check_value(keys: Sequence[int | str]) -> str:
    """Return 16 hex digits that identify a slice: sha256 over its keys, in hash order, one per line."""
    return hashlib.sha256("\n".join(map(_text, keys)).encode()).hexdigest()[:16]


def used(
    task: Task, parts: Mapping[str, Sequence[int | str]], dev_fraction: float | None = None
) -> tuple[list[Used], tuple[str, ...]]:
    """Return the records that VTAB uses, from the keys of each TFDS split; and notes.

    With `dev_fraction`, dev is this last part of TFDS's train split and train is the rest, as big_vision slices a
    dataset without a dev split: train[:90%] and train[90%:].

    The splits of an incomplete archive (such as a test's) have the same order, proportional positions, and at most 800
    and 200 records. They are not VTAB's, and a note says so.
    """
    rule = RULES[task]
    present, expected = sum(map(len, parts.values())), sum(rule.sizes.values())
    # Caltech101's stray file can move one record from train to test, so only the sum shows whether all are present.
    is_complete = present == expected

    def scaled(part: str, position: int) -> int:
        return position if is_complete else position * len(parts[part]) // rule.sizes[part]

    begins = [(part, scaled(part, position)) for part, position in (rule.dev, rule.test)]
    (dev_part, dev_start), (test_part, test_start) = begins
    ends = {part: len(keys) for part, keys in parts.items()}
    dev_end = test_start if dev_part == test_part else ends[dev_part]
    train_end = min([ends["train"], *(at for part, at in begins if part == "train")])
    slices = [
        ("train", "train", 0, min(TRAIN, train_end)),
        ("dev", dev_part, dev_start, min(dev_start + DEV, dev_end)),
        ("test", test_part, test_start, ends[test_part]),
    ]
    if dev_fraction is not None:
        train_end = test_start if test_part == "train" else ends["train"]
        dev_start = max(1, round((1 - dev_fraction) * train_end))
        slices[:2] = [("train", "train", 0, dev_start), ("dev", "train", dev_start, train_end)]
    orders = {part: hash_order(part, keys) for part, keys in parts.items()}
    records = [Used(part, number, split) for split, part, start, end in slices for number in orders[part][start:end]]
    note = f"incomplete archive: {present:,} of {expected:,} records, splits are not VTAB's"
    return records, () if is_complete else (note,)


def listing(
    source: VtabSource,
    class_names: Sequence[str],
    parts: Mapping[str, Records],
    *,
    image: ImageSize | None = None,
    notes: Sequence[str] = (),
    membership: str = "splits confirmed by their sizes alone: no check values are known",
) -> Listing:
    """List the records of a task that VTAB uses, with their splits.

    Args:
        parts: the records of each TFDS split.
        image: the size of all images, if they are in arrays.
        notes: changes of pixels and the like.
        membership: the note on a complete archive, if the task has no check values.

    Raises:
        UserError: a label without a name, or a key that leads outside.
    """
    task, keys = source.task, {part: records.keys for part, records in parts.items()}
    in_vtab_1k, incomplete = used(task, keys)
    chosen, whole = in_vtab_1k, tuple[str, ...]()
    if source.subset == "whole":
        chosen, _ = used(task, keys, source.dev_fraction)
        whole = (f"all of TFDS's train, of which the last {source.dev_fraction:.0%} is dev; not VTAB-1k",)
    starts = dict(zip(PARTS, _starts({part: len(part_keys) for part, part_keys in keys.items()}), strict=True))
    rows: list[dict[str, Any]] = []
    unusable: list[Unusable] = []
    for part, number, split in chosen:
        records = parts[part]
        label = int(records.labels[number])
        key = f"{part}/{_text(records.keys[number]).lstrip('/')}"
        if not 0 <= label < len(class_names):
            raise UserError(f"{key} has the label {label}, but there are only {len(class_names)} classes")
        if ".." in PurePosixPath(key).parts:
            raise UserError(f"{key!r} is not a valid name of an image")
        row: dict[str, Any] = {"key": key, "label": label, "split": split}
        if records.members is None:
            assert image is not None
            size = image.height * image.width * image.channels
            rows.append(row | {"file": "", "offset": starts[part] + number, "length": size, "codec": "row"})
        elif member := records.members[number]:
            rows.append(row | place(member))
        else:
            unusable.append(Unusable(key, "not in the archive"))
    confirmed = incomplete or (_confirmed(task, keys, in_vtab_1k, membership),)
    return Listing(tuple(class_names), table(rows), image, tuple(unusable), (*whole, *confirmed, *notes))


def _confirmed(task: Task, keys: Mapping[str, Sequence[int | str]], chosen: Sequence[Used], membership: str) -> str:
    """Return a note that says whether a complete archive's splits have the same records as VTAB's."""
    expected = RULES[task].checks
    if expected is None:
        return membership
    actual = tuple(
        check_value([keys[record.part][record.number] for record in chosen if record.split == split])
        for split in ("train", "dev")
    )
    if actual == expected:
        numbered = task == "patch_camelyon" or all(
            isinstance(key, int) for part_keys in keys.values() for key in part_keys[:1]
        )
        trusted = "; keys are running numbers, so that the records' order is taken from the file" * numbered
        return f"splits confirmed by the check values of train800 and val200{trusted}"
    return f"splits not confirmed: check values {' and '.join(actual)}, VTAB's are {' and '.join(expected)}"


def rows(parts: Mapping[str, NDArray[Any]], numbers: Sequence[int]) -> Iterator[NDArray[Any]]:
    """Yield the rows that `listing` gave these numbers, from one array per TFDS split."""
    sizes = {part: len(images) for part, images in parts.items()}
    for number in numbers:
        part, row = row_place(sizes, number)
        yield parts[part][row]


def row_place(sizes: Mapping[str, int], number: int) -> tuple[str, int]:
    """Return the TFDS split and the position in it of the image that `listing` gave this number."""
    starts = _starts(sizes)
    index = bisect_right(starts, number) - 1
    return PARTS[index], number - starts[index]


def _starts(sizes: Mapping[str, int]) -> list[int]:
    return [0, *accumulate(sizes.get(part, 0) for part in PARTS[:-1])]


def _text(key: int | str) -> str:
    return str(key).replace("\\", "/")
