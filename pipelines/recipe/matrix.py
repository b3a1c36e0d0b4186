"""Stages with a `matrix`: expanded into one stage per combination of values, together with the stages that use them.

    pretrain: {job: pretrain, ..., matrix: {model.width: [32, 64], seed: [0, 1]}}

becomes pretrain@width=32,seed=0 and three more. A stage that uses `pretrain` in a field for one artifact is expanded,
too: one stage per member or, if two inputs share an axis, per pair with the same value on it. A field for several
artifacts gets all members. `pretrain@width=32` selects the members with that value.
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
from pipelines.spec import BACKBONE_FIELDS, STAGE_TYPES, RecipeError, input_fields

MAX_STAGES = 2_000  # more are most likely a mistake, because a matrix multiplies
LABEL_LENGTH = 40  # a longer value is named by its position
_FIELD = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+-]+")  # special in a shell, a path or a selector

Axis = tuple[str, str]  # (the stage with the matrix, the dotted field)


@dataclass(frozen=True)
class Member:
    """A stage of a matrix with its name, its place on the axes, and the spelling of that place in its name."""

    name: str
    stage: Any
    at: dict[Axis, str]  # axis -> the value's label
    spelled: dict[Axis, str]  # axis -> width=32


def expand(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe as read from YAML, with each matrix stage replaced by its members; nothing else is validated.

    Raises:
        RecipeError: a matrix cannot be expanded, or a stage has a name that is reserved for members.
    """
    stages = raw.get("stages")
    if not isinstance(stages, dict) or not all(isinstance(name, str) for name in stages):
        return raw
    for name in stages:
        if "@" in name:
            raise RecipeError(f"stages.{name}: '@' is reserved for the members of a `matrix`; remove it from the name")
    if not any(isinstance(stage, dict) and "matrix" in stage for stage in stages.values()):
        return raw
    variants = {name: list(_variants(name, stage)) for name, stage in stages.items()}
    graph = {
        name: [source.partition("@")[0] for stage, _ in stage_variants for source in _input_names(stage)]
        for name, stage_variants in variants.items()
    }
    members: dict[str, list[Member]] = {}
    for name in running_order(graph):
        if name in stages:
            members[name] = _follow(name, variants[name], members)
    expanded = [member for name in stages for member in members[name]]
    if len(expanded) > MAX_STAGES:
        raise RecipeError(f"stages: {len(expanded)} after expanding; at most {MAX_STAGES}")
    return raw | {"stages": {member.name: member.stage for member in expanded}}


def axes(stage: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the axes of a stage's own matrix, {dotted field: values}; empty if it has none or it is invalid."""
    matrix = stage.get("matrix")
    return matrix if isinstance(matrix, dict) else {}


def set_field(stage: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted field of a stage as it was read from YAML.

    Raises:
        RecipeError: the field is inside one that has no fields.
    """
    *parents, last = dotted.split(".")
    if len(parents) == 1 and parents[0] in BACKBONE_FIELDS and isinstance(stage.get(parents[0]), str):
        # the longer of its two forms, see `pipelines.spec.checkpoints.Backbone`
        stage[parents[0]] = {"stage": stage[parents[0]]}
    at = stage
    for number, parent in enumerate(parents):
        at = at.setdefault(parent, {})
        if not isinstance(at, dict):
            raise RecipeError(f"{'.'.join(parents[: number + 1])} has no fields of its own")
    at[last] = value


def _variants(name: str, stage: Any) -> Iterator[tuple[Any, dict[Axis, str]]]:
    """Yield a stage without its matrix for each combination of its own axes' values, with its place on these axes."""
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
    matrix = stage["matrix"]
    if not isinstance(matrix, dict) or not matrix:
        raise RecipeError(f"{where}: expected fields with their values, as in matrix: {{seed: [0, 1, 2]}}")
    for field, values in matrix.items():
        if not isinstance(field, str) or not _FIELD.fullmatch(field):
            raise RecipeError(f"{where}: {field!r} is not a field; write a nested field with a dot, as in model.width")
        if field == "job":
            raise RecipeError(f"{where}.job: a stage has one job; write a stage for each")
        if not isinstance(values, list) or not values:
            raise RecipeError(f"{where}.{field}: expected a list of values, such as [1, 2], not {values!r}")
        for position, value in enumerate(values):
            if value in values[:position]:
                raise RecipeError(f"{where}.{field}: duplicate value {value!r}")
        for other in matrix:
            if inside(field, other) and field != other:
                raise RecipeError(f"{where}: {field} is inside {other}, which is also an axis; remove one of them")
    if (count := math.prod(map(len, matrix.values()))) > MAX_STAGES:
        sizes = " x ".join(f"{len(values)} {field}" for field, values in matrix.items())
        raise RecipeError(f"{where}: {sizes} makes {count} stages; at most {MAX_STAGES}")


def inside(field: str, other: str) -> bool:
    """Whether a dotted field is the same as another, or inside it."""
    return f"{field}.".startswith(f"{other}.")


def _labels(values: list[Any]) -> list[str]:
    """Return the spelling of an axis's values in names: the values if they are short and distinct, else 1, 2, 3.

    Mappings without names are spelled by the first field that differs in all of them: width-32, width-64.
    """
    labels = [_label(value) for value in values]
    if not any(labels) and all(isinstance(value, dict) for value in values):
        for field in values[0]:
            spelled = [_label(value.get(field)) if field in value else "" for value in values]
            if all(spelled) and len(set(spelled)) == len(values):
                labels = [f"{_label(field)}-{label}" if _label(field) else "" for label in spelled]
                break
    plain = all(0 < len(label) <= LABEL_LENGTH for label in labels) and len(set(labels)) == len(labels)
    return labels if plain else [str(position) for position in range(1, len(values) + 1)]


def _label(value: Any) -> str:
    """Return the spelling of a value: the last part of a path, the `name` of a mapping, 2-2 for [2, 2]; '' if none."""
    if isinstance(value, list):
        parts = [_label(part) for part in value]
        return "-".join(parts) if all(parts) else ""
    if isinstance(value, dict):
        value = value.get("name", "")
    if isinstance(value, str):
        return _UNSAFE.sub("-", PurePosixPath(value).name).strip("-")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, int | float) else ""


def _input_names(stage: Any) -> Iterator[str]:
    """Yield the names in a stage's input fields."""
    for field in _input_fields(stage):
        value = stage.get(field)
        values = value if isinstance(value, list) else [_named(value)]
        yield from (name for name in values if isinstance(name, str))


def _named(value: Any) -> Any:
    """Return the name in a field for one artifact, which may be inside {stage: NAME, checkpoint: ...}."""
    return value.get("stage") if isinstance(value, dict) else value


def _renamed(value: Any, name: str) -> Any:
    """Return such a field's value with another name."""
    return value | {"stage": name} if isinstance(value, dict) else name


def _input_fields(stage: Any) -> list[str]:
    job = stage.get("job") if isinstance(stage, dict) else None
    kind = STAGE_TYPES.get(job) if isinstance(job, str) else None
    return [] if kind is None else list(input_fields(kind))


def _follow(name: str, variants: list[tuple[Any, dict[Axis, str]]], members: dict[str, list[Member]]) -> list[Member]:
    """Return the members of a stage, given its inputs' members: inherited axes first, then its own."""
    expanded: list[tuple[Any, dict[Axis, str]]] = []
    for variant, own in variants:
        combined: list[tuple[Any, dict[Axis, str]]] = [(variant, {})]
        for field in _input_fields(variant):
            value = variant.get(field)
            if isinstance(value, list):
                names = [member for name in value for member, _ in _chosen(name, members)]
                combined = [(stage | {field: names}, at) for stage, at in combined]
            elif isinstance(named := _named(value), str):
                combined = _joined(name, field, combined, _chosen(named, members))
        expanded += [(stage, at | own) for stage, at in combined]
    axis_names = _axis_names(list(dict.fromkeys(axis for _, at in expanded for axis in at)))
    ranks = {axis: list(dict.fromkeys(at[axis] for _, at in expanded if axis in at)) for axis in axis_names}

    def position(variant: tuple[Any, dict[Axis, str]]) -> list[int]:
        _, at = variant
        return [ranks[axis].index(at[axis]) if axis in at else -1 for axis in axis_names]

    return [
        _member(name, stage, {axis: at[axis] for axis in axis_names if axis in at}, axis_names)
        for stage, at in sorted(expanded, key=position)
    ]


def _joined(
    name: str,
    field: str,
    combined: list[tuple[Any, dict[Axis, str]]],
    inputs: list[tuple[str, dict[Axis, str]]],
) -> list[tuple[Any, dict[Axis, str]]]:
    """Join each combination with each member of another input that has the same values on their shared axes."""
    joined: list[tuple[Any, dict[Axis, str]]] = []
    for stage, at in combined:
        joined += [
            (stage | {field: _renamed(stage[field], member)}, at | member_at)
            for member, member_at in inputs
            if all(at.get(axis, label) == label for axis, label in member_at.items())
        ]
        if len(joined) > MAX_STAGES:
            raise RecipeError(f"stages.{name}.{field}: its inputs expand it to more than {MAX_STAGES} stages")
    return joined


def _chosen(name: Any, members: dict[str, list[Member]]) -> list[tuple[str, dict[Axis, str]]]:
    """Return the members that a name in an input field selects, with their places on the axes that it leaves open."""
    base, _, labels = str(name).partition("@")
    wanted = set(filter(None, labels.split(",")))
    chosen = [
        (
            member.name,
            {axis: label for axis, label in member.at.items() if member.spelled[axis] not in wanted},
        )
        for member in members.get(base, ())
        if wanted <= set(member.spelled.values())
    ]
    return chosen or [(name, {})]  # the pipeline rejects an unknown name


def _axis_names(unnamed: list[Axis]) -> dict[Axis, str]:
    """Return the shortest unique suffix of each axis's `stage.field`: width, else model.width, else ..."""
    parts = {axis: [axis[0], *axis[1].split(".")] for axis in unnamed}
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
