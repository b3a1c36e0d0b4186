"""Stages with a `matrix`: expanded into one stage for each combination of values, and what follows them with them.

    pretrain: {job: pretrain, ..., matrix: {model.width: [32, 64], seed: [0, 1]}}

becomes pretrain@width=32,seed=0 and three more. A stage that takes `pretrain` in a field for one artifact is expanded
along: one for each member, or, where two inputs share an axis, for each pair with the same value on it. A field for
several artifacts takes all members. `pretrain@width=32` names a part: the members with that value.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pipelines.recipe.pipeline import running_order
from pipelines.spec import STAGE_TYPES, RecipeError, input_fields

MAX_STAGES = 2_000  # more is a slip of the pen: a matrix multiplies fast
LABEL_LENGTH = 40  # a longer value is named by its position
_FIELD = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+-]+")  # what a shell, a path or a selector would read otherwise

Axis = tuple[str, str]  # (the stage with the matrix, the dotted field)


@dataclass(frozen=True)
class Member:
    """A stage as it will be called, where it stands on its axes, and how its name spells that."""

    name: str
    stage: Any
    at: dict[Axis, str]  # axis -> the value's label
    spelled: dict[Axis, str]  # axis -> width=32


def expand(raw: dict[str, Any]) -> dict[str, Any]:
    """A recipe as read from YAML, its matrix stages replaced by their members; else as it is, checked or not.

    Raises:
        RecipeError: a matrix that can't be expanded, or a name that only members have.
    """
    stages = raw.get("stages")
    if not isinstance(stages, dict) or not all(isinstance(name, str) for name in stages):
        return raw
    for name in stages:
        if "@" in name:
            raise RecipeError(f"stages.{name}: '@' is for the members of a `matrix`; name it without")
    if not any(isinstance(stage, dict) and "matrix" in stage for stage in stages.values()):
        return raw
    variants = {name: list(_variants(name, stage)) for name, stage in stages.items()}
    graph = {
        name: [given.partition("@")[0] for stage, _ in found for given in _given(stage)]
        for name, found in variants.items()
    }
    members: dict[str, list[Member]] = {}
    for name in running_order(graph):
        if name in stages:
            members[name] = _follow(name, variants[name], members)
    found = [member for name in stages for member in members[name]]
    if len(found) > MAX_STAGES:
        raise RecipeError(f"stages: {len(found)} after expanding; at most {MAX_STAGES}")
    return raw | {"stages": {member.name: member.stage for member in found}}


def axes(stage: dict[str, Any]) -> dict[str, list[Any]]:
    """The axes of a stage's own matrix, as far as they can be read: dotted field -> values."""
    given = stage.get("matrix")
    return given if isinstance(given, dict) else {}


def set_field(stage: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted field of a stage as it was read from YAML.

    Raises:
        RecipeError: it lies in a field that has no fields.
    """
    *parents, last = dotted.split(".")
    at = stage
    for number, parent in enumerate(parents):
        at = at.setdefault(parent, {})
        if not isinstance(at, dict):
            raise RecipeError(f"{'.'.join(parents[: number + 1])} has no fields of its own")
    at[last] = value


def _variants(name: str, stage: Any) -> Iterator[tuple[Any, dict[Axis, str]]]:
    """A stage without its matrix, once for each combination of the values of its own axes, and where that stands."""
    if not isinstance(stage, dict) or "matrix" not in stage:
        yield stage, {}
        return
    _check(name, stage)
    labels = {field: _labels(values) for field, values in axes(stage).items()}
    plain = {field: value for field, value in stage.items() if field != "matrix"}
    for positions in itertools.product(*(range(len(values)) for values in labels.values())):
        variant, at = copy.deepcopy(plain), {}
        for field, position in zip(labels, positions, strict=True):
            try:
                set_field(variant, field, copy.deepcopy(axes(stage)[field][position]))
            except RecipeError as error:
                raise RecipeError(f"stages.{name}.matrix.{field}: {error}") from None
            at[name, field] = labels[field][position]
        yield variant, at


def _check(name: str, stage: dict[str, Any]) -> None:
    where = f"stages.{name}.matrix"
    given = stage["matrix"]
    if not isinstance(given, dict) or not given:
        raise RecipeError(f"{where}: write the fields and their values, as in matrix: {{seed: [0, 1, 2]}}")
    for field, values in given.items():
        if not isinstance(field, str) or not _FIELD.fullmatch(field):
            raise RecipeError(
                f"{where}: {field!r} is no field; a field in a field is written with a dot: model.width"
            )
        if field == "job":
            raise RecipeError(f"{where}.job: a stage has one job; write a stage for each")
        if not isinstance(values, list) or not values:
            raise RecipeError(f"{where}.{field}: a list of values is needed, as in [1, 2], not {values!r}")
        for position, value in enumerate(values):
            if value in values[:position]:
                raise RecipeError(f"{where}.{field}: {value!r} stands twice")
        for other in given:
            if inside(field, other) and field != other:
                raise RecipeError(f"{where}: {field} lies in {other}, which is an axis itself; take one")
    if (count := math.prod(map(len, given.values()))) > MAX_STAGES:
        sizes = " x ".join(f"{len(values)} {field}" for field, values in given.items())
        raise RecipeError(f"{where}: {sizes} makes {count} stages; at most {MAX_STAGES}")


def inside(field: str, other: str) -> bool:
    """Whether a dotted field is another or lies in it."""
    return f"{field}.".startswith(f"{other}.")


def _labels(values: list[Any]) -> list[str]:
    """How names spell the values of an axis: as they are where that is plain and tells them apart, else 1, 2, 3."""
    found = [_label(value) for value in values]
    plain = all(0 < len(label) <= LABEL_LENGTH for label in found) and len(set(found)) == len(found)
    return found if plain else [str(position) for position in range(1, len(values) + 1)]


def _label(value: Any) -> str:
    """A value in a name: a path by its last part, a mapping by its `name`; '' where there is no plain spelling."""
    if isinstance(value, dict):
        value = value.get("name", "")
    if isinstance(value, str):
        return _UNSAFE.sub("-", PurePosixPath(value).name).strip("-")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, int | float) else ""


def _given(stage: Any) -> Iterator[str]:
    """The names that stand in a stage's input fields."""
    for field in _input_fields(stage):
        value = stage.get(field)
        yield from (
            given for given in (value if isinstance(value, list) else [value]) if isinstance(given, str)
        )


def _input_fields(stage: Any) -> list[str]:
    job = stage.get("job") if isinstance(stage, dict) else None
    kind = STAGE_TYPES.get(job) if isinstance(job, str) else None
    return [] if kind is None else list(input_fields(kind))


def _follow(
    name: str, variants: list[tuple[Any, dict[Axis, str]]], members: dict[str, list[Member]]
) -> list[Member]:
    """The members of a stage, given those of all that it takes: inherited axes first, then its own."""
    found: list[tuple[Any, dict[Axis, str]]] = []
    for variant, own in variants:
        combined: list[tuple[Any, dict[Axis, str]]] = [(variant, {})]
        for field in _input_fields(variant):
            value = variant.get(field)
            if isinstance(value, list):
                taken = [taking for given in value for taking, _ in _chosen(given, members)]
                combined = [(stage | {field: taken}, at) for stage, at in combined]
            elif isinstance(value, str):
                combined = _joined(name, field, combined, _chosen(value, members))
        found += [(stage, at | own) for stage, at in combined]
    names = _axis_names(list(dict.fromkeys(axis for _, at in found for axis in at)))
    ranks = {axis: list(dict.fromkeys(at[axis] for _, at in found if axis in at)) for axis in names}
    found.sort(key=lambda one: [ranks[axis].index(one[1][axis]) if axis in one[1] else -1 for axis in names])
    return [
        _member(name, stage, {axis: at[axis] for axis in names if axis in at}, names) for stage, at in found
    ]


def _joined(
    name: str,
    field: str,
    combined: list[tuple[Any, dict[Axis, str]]],
    taken: list[tuple[str, dict[Axis, str]]],
) -> list[tuple[Any, dict[Axis, str]]]:
    """Each combination so far with each member of one more input that has the same values on the axes they share."""
    found: list[tuple[Any, dict[Axis, str]]] = []
    for stage, at in combined:
        found += [
            (stage | {field: taking}, at | its)
            for taking, its in taken
            if all(at.get(axis, label) == label for axis, label in its.items())
        ]
        if len(found) > MAX_STAGES:
            raise RecipeError(f"stages.{name}.{field}: more than {MAX_STAGES} stages follow from its inputs")
    return found


def _chosen(given: Any, members: dict[str, list[Member]]) -> list[tuple[str, dict[Axis, str]]]:
    """The members that a name in an input field means, and where each stands on the axes that the name leaves open."""
    base, _, labels = str(given).partition("@")
    wanted = set(filter(None, labels.split(",")))
    found = [
        (
            member.name,
            {axis: label for axis, label in member.at.items() if member.spelled[axis] not in wanted},
        )
        for member in members.get(base, ())
        if wanted <= set(member.spelled.values())
    ]
    return found or [(given, {})]  # a name that is none: the pipeline says so


def _axis_names(found: list[Axis]) -> dict[Axis, str]:
    """The shortest end of each axis' `stage.field` that no other axis ends in: width, else model.width, else ..."""
    parts = {axis: [axis[0], *axis[1].split(".")] for axis in found}
    return {
        axis: next(
            (
                ".".join(own[-size:])
                for size in range(1, len(own))
                if sum(other[-size:] == own[-size:] for other in parts.values()) == 1
            ),
            ".".join(own),
        )
        for axis, own in parts.items()
    }


def _member(name: str, stage: Any, at: dict[Axis, str], names: dict[Axis, str]) -> Member:
    spelled = {axis: f"{names[axis]}={label}" for axis, label in at.items()}
    return Member(f"{name}@{','.join(spelled.values())}" if at else name, stage, at, spelled)
