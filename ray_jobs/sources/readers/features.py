"""What prepared data sets share: the columns of the image and of the label, and the names of splits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ray_jobs.sources.readers.folder import SPLIT_NAMES
from vit_model.errors import UserError

UNLABELLED = -1


def chosen(what: str, wanted: str | None, fitting: Sequence[str], there: Iterable[str]) -> str:
    """The column `wanted`, else the only fitting one, else that called as `what` is. Raises UserError."""
    named = wanted or (fitting[0] if len(fitting) == 1 else what)
    if named not in (there if wanted else fitting):
        found = f"those that fit are {', '.join(fitting)}" if fitting else f"there are {', '.join(there)}"
        raise UserError(f"source.{what}: which one it is can't be seen; {found}")
    return named


def known_split(name: str) -> str | None:
    """ "train", "dev" or "test" for what data sets call so; None: none of these."""
    return SPLIT_NAMES.get(name.lower())


class Classes(NamedTuple):
    """The classes of a data set."""

    names: tuple[str, ...]
    numbers: Mapping[int | str, int]
    """The class of each label value (except `UNLABELLED`)."""
    notes: tuple[str, ...] = ()


def classes_of(labels: Iterable[int | str], given: Sequence[str] | None, where: str) -> Classes:
    """The classes of these labels: the `given` names, for numbers from 0; else the values that occur.

    Values become classes in numeric or alphabetical order. Raises UserError for no label, for a mix of numbers and
    text, and for a label that is negative or has no given name.
    """
    values = set(labels) - {UNLABELLED}
    numbers = sorted(value for value in values if isinstance(value, int))
    texts = sorted(value for value in values if isinstance(value, str))
    if not values:
        raise UserError(f"{where}: no image has a label")
    if numbers and texts:
        raise UserError(f"{where}: some labels are numbers ({numbers[0]}), others text ({texts[0]!r})")
    if numbers and given is not None:
        if not 0 <= numbers[0] <= numbers[-1] < len(given):
            wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
            raise UserError(f"{where}: the label {wrong} is not one of {len(given)} classes")
        return Classes(tuple(given), {number: number for number in range(len(given))})
    if numbers and numbers[0] < 0:
        raise UserError(
            f"{where}: the label {numbers[0]} is negative; the only negative label allowed is -1 (no label)"
        )
    every: list[int | str] = [*numbers, *texts]
    found = {value: number for number, value in enumerate(every)}
    if not numbers or numbers[-1] == len(numbers) - 1:
        return Classes(tuple(map(str, every)), found)
    note = (
        f"{where}: no class names are given and the labels are not 0, 1, 2, ...: "
        f"the {len(numbers):,} numbers that occur ({numbers[0]} to {numbers[-1]}) become the classes and their names"
    )
    return Classes(tuple(map(str, every)), found, (note,))
