"""Shared by readers of prepared datasets: choose the columns of image and label, name splits and classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ray_jobs.sources.readers.folder import SPLIT_NAMES
from vit_model.errors import UserError

UNLABELLED = -1


def choose_column(field: str, wanted: str | None, fitting: Sequence[str], columns: Iterable[str]) -> str:
    """Return the column `wanted`, else the only fitting one, else the one that is named as the field is.

    Args:
        field: of the source: "image" or "label".
        wanted: the value of that field.
        fitting: columns that can be it by their type.
        columns: all columns.

    Raises:
        UserError: there is no such column, or several fit.
    """
    column = wanted or (fitting[0] if len(fitting) == 1 else field)
    if column not in (columns if wanted else fitting):
        problem = f"there is no column {wanted!r}" if wanted else "it cannot be inferred"
        candidates = fitting or list(columns)
        raise UserError(f"source.{field}: {problem}; name one of these columns: {', '.join(candidates)}")
    return column


def known_split(name: str) -> str | None:
    """Return "train", "dev" or "test" for the names that datasets give these splits; None for other names."""
    return SPLIT_NAMES.get(name.lower())


class Classes(NamedTuple):
    """The classes of a data set."""

    names: tuple[str, ...]
    numbers: Mapping[int | str, int]
    """The class of each label value (except `UNLABELLED`)."""
    notes: tuple[str, ...] = ()


def classes_of(labels: Iterable[int | str], names: Sequence[str] | None, where: str) -> Classes:
    """Return the classes of these labels: `names`, if labels are numbers from 0; else the values that occur, sorted.

    Raises:
        UserError: no labels, a mix of numbers and text, a negative label, or a label without a name.
    """
    values = set(labels) - {UNLABELLED}
    numbers = sorted(value for value in values if isinstance(value, int))
    texts = sorted(value for value in values if isinstance(value, str))
    if not values:
        raise UserError(f"{where}: no image has a label")
    if numbers and texts:
        raise UserError(f"{where}: some labels are numbers ({numbers[0]}), others text ({texts[0]!r})")
    if numbers and names is not None:
        if not 0 <= numbers[0] <= numbers[-1] < len(names):
            wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
            raise UserError(f"{where}: the label {wrong} is not one of {len(names)} classes")
        return Classes(tuple(names), {number: number for number in range(len(names))})
    if numbers and numbers[0] < 0:
        raise UserError(
            f"{where}: the label {numbers[0]} is negative; the only negative label allowed is -1 (no label)"
        )
    every: list[int | str] = [*numbers, *texts]
    numbering = {value: number for number, value in enumerate(every)}
    if not numbers or numbers[-1] == len(numbers) - 1:
        return Classes(tuple(map(str, every)), numbering)
    note = (
        f"{where}: no class names are given and the labels are not 0, 1, 2, ...: "
        f"the {len(numbers):,} numbers that occur ({numbers[0]} to {numbers[-1]}) become the classes and their names"
    )
    return Classes(tuple(map(str, every)), numbering, (note,))
