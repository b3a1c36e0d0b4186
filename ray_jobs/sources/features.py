"""What two families of prepared data sets share: which column is the image, which the label, what a split is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ray_jobs.sources.folder import SPLIT_NAMES

UNLABELLED = -1


def chosen(what: str, wanted: str | None, fitting: Sequence[str], there: Iterable[str]) -> str:
    """The column `wanted`, else the only fitting one, else that called as `what` is. Raises ValueError."""
    named = wanted or (fitting[0] if len(fitting) == 1 else what)
    if named not in (there if wanted else fitting):
        found = f"those that fit are {', '.join(fitting)}" if fitting else f"there are {', '.join(there)}"
        raise ValueError(f"source.{what}: which one it is can't be seen; {found}")
    return named


def known_split(name: str) -> str | None:
    """ "train", "dev" or "test" for what data sets call so; None: none of these."""
    return SPLIT_NAMES.get(name.lower())


def class_names(
    labels: Iterable[int | str], given: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], Mapping[int | str, int]]:
    """The names of the classes, and the number of each value of a label that is one (not `UNLABELLED`).

    Raises ValueError for a label outside of the names that are given.
    """
    values = set(labels) - {UNLABELLED}
    texts = {value for value in values if isinstance(value, str)}
    if texts:
        if len(texts) < len(values):
            raise ValueError(f"{where}: labels are partly text, partly numbers")
        names = tuple(sorted(texts))
        return names, {name: number for number, name in enumerate(names)}
    numbers = [value for value in values if isinstance(value, int)]
    if not numbers:
        raise ValueError(f"{where}: no image has a label")
    names = tuple(given) if given is not None else tuple(map(str, range(max(numbers) + 1)))
    if not 0 <= min(numbers) <= max(numbers) < len(names):
        wrong = min(numbers) if min(numbers) < 0 else max(numbers)
        raise ValueError(f"{where}: the label {wrong} is not one of {len(names)} classes")
    return names, {number: number for number in range(len(names))}
