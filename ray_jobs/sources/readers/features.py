"""Shared by readers: columns of image and label, classes of labels, one spelling of a name, a split by pixels."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ray_jobs.data.images import content_id
from ray_jobs.sources import hash_fraction
from ray_jobs.sources.names import listed
from vit_model.errors import UserError

UNLABELLED = -1
_NO_LABEL = {"nolabel", "unlabeled", "unlabelled", "unannotated", "nan", "null"}


def one_spelling(texts: Iterable[str]) -> dict[str, str]:
    """Return the spelling to use for each text: the same for texts that look alike, as Unicode's NFC and NFD do.

    A text without a look-alike does not change.
    """
    spellings: dict[str, set[str]] = defaultdict(set)
    for text in texts:
        spellings[unicodedata.normalize("NFC", text)].add(text)
    return {
        text: composed if composed in alike else min(alike) for composed, alike in spellings.items() for text in alike
    }


def alike_note(class_names: Iterable[str]) -> tuple[str, ...]:
    """Return a note on names that are likely of one class; names of one letter (A and a) can be two classes."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in class_names:
        alike[re.sub(r"[\s_-]", "", name).casefold()].append(name)
    groups = [" and ".join(map(repr, names)) for key, names in alike.items() if len(names) > 1 and len(key) > 1]
    if not groups:
        return ()
    return (
        f"classes whose names differ only in case, spaces, - or _: {listed(groups, 10)}. If they are one class, give"
        " them one name",
    )


def check_labels(where: object, names: Iterable[str]) -> None:
    """Raise UserError for a label that says that an image has none, as CVAT and pandas write it."""
    for name in names:
        if re.sub(r"[\W_]", "", name).lower() in _NO_LABEL:
            raise UserError(
                f"{where}: {name!r} looks like a mark for images without a label, not a class. Label these images, or "
                "remove them; if it is a class, rename it"
            )


def choose_column(field: str, wanted: str | None, fitting: Sequence[str], columns: Iterable[str]) -> str:
    """Return the column `wanted`, else the only fitting one, else the one with the name of the field.

    Args:
        field: "image" or "label", a field of the source.
        wanted: the value of that field.
        fitting: columns with a suitable type.
        columns: all columns.

    Raises:
        UserError: there is no such column, or several fit.
    """
    column = wanted or (fitting[0] if len(fitting) == 1 else field)
    if column not in (columns if wanted else fitting):
        problem = f"there is no column {wanted!r}" if wanted else "it cannot be inferred"
        candidates = ", ".join(fitting or columns) or "there are none"
        raise UserError(f"source.{field}: {problem}; name one of these columns: {candidates}")
    return column


def split_by_pixels(salt: str, part: str, image: NDArray[np.uint8], dev_fraction: float) -> str:
    """Return the split of an image of train or test: dev is drawn from train by the pixels, so copies stay together."""
    content = content_id(hashlib.sha256(image.tobytes()).digest())
    return "dev" if part == "train" and hash_fraction(salt, content) < dev_fraction else part


class Classes(NamedTuple):
    """The classes of a data set."""

    names: tuple[str, ...]
    numbers: Mapping[int | str, int]
    """The class of each label value (except `UNLABELLED`)."""
    notes: tuple[str, ...] = ()


def classes_of(labels: Sequence[int | str], names: Sequence[str] | None, where: str) -> Classes:
    """Return the classes of these labels: `names`, if labels are numbers from 0; else the values that occur, sorted.

    A note says how many labels are `UNLABELLED`.

    Raises:
        UserError: no labels, a mix of numbers and text, an empty text, a negative label, or a label without a name.
    """
    unlabelled = labels.count(UNLABELLED)
    left_out = (f"{unlabelled} images without a label are left out",) if unlabelled else ()
    values = set(labels) - {UNLABELLED}
    numbers = sorted(value for value in values if isinstance(value, int))
    texts = sorted(value for value in values if isinstance(value, str))
    if not values:
        raise UserError(f"{where}: no image has a label")
    if "" in (text.strip() for text in texts):
        raise UserError(f"{where}: a label is an empty text; for an image without a label, write null")
    check_labels(where, texts)
    if numbers and texts:
        raise UserError(f"{where}: some labels are numbers ({numbers[0]}), others text ({texts[0]!r})")
    if numbers and names is not None:
        if not 0 <= numbers[0] <= numbers[-1] < len(names):
            wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
            raise UserError(f"{where}: the label {wrong} is not one of {len(names)} classes")
        return Classes(tuple(names), {number: number for number in range(len(names))}, left_out)
    if numbers and numbers[0] < 0:
        raise UserError(
            f"{where}: the label {numbers[0]} is negative; the only negative label allowed is -1 (no label)"
        )
    spelled = one_spelling(texts)
    ordered: list[int | str] = [*numbers, *sorted(set(spelled.values()))]
    numbering = {value: number for number, value in enumerate(ordered)}
    numbering |= {text: numbering[spelling] for text, spelling in spelled.items()}
    if not numbers or numbers[-1] == len(numbers) - 1:
        return Classes(tuple(map(str, ordered)), numbering, (*alike_note(map(str, ordered)), *left_out))
    note = (
        f"{where}: no class names are given and the labels are not 0, 1, 2, ...: "
        f"the {len(numbers):,} numbers that occur ({numbers[0]} to {numbers[-1]}) become the classes and their names"
    )
    return Classes(tuple(map(str, ordered)), numbering, (note, *left_out))
