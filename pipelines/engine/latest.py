"""The models of the store that a recipe names: `init_from: latest`, and "@alias" wherever it takes a model.

What they name is looked up once, when a run is planned, and recorded in the run's plan. So a continued run, and
everything that shows it, uses the same models even if a newer one exists or an alias has moved. When a stage with
`init_from` begins and its data is known, there are three cases:

- There is no such model: the stage starts from new weights, and has the key of a stage without `init_from`.
- The stage, started from the model that this model started from, would have this model's key: this model is the
  result. So repeating a run whose data and settings have not changed runs nothing.
- Otherwise the stage starts from this model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from pipelines import identity
from pipelines.engine.history import newest_results, runs_of
from pipelines.recipe.pipeline import Pipeline
from pipelines.spec import LATEST, STAGE_TYPES, AnyStage, RecipeError, input_fields
from pipelines.store import (
    InputRef,
    Manifest,
    Store,
    StoreDamaged,
    read_alias,
    read_manifest,
    successors,
    warn,
)

Newest = Mapping[str, InputRef | None]
"""Stage with `init_from: latest`, or @alias -> the model that it named when the run was planned; None if none."""
Inputs = dict[str, list[InputRef]]


class Named(NamedTuple):
    """What a recipe's names of models meant when a run was planned."""

    models: dict[str, InputRef | None]
    """See `Newest`."""
    moves: dict[str, int]
    """@alias -> the number of its last move at that time; 0 if it was never set."""


def named_models(store: Store, pipeline: Pipeline, names: Iterable[str]) -> Named:
    """Look up the models of the store that the stages `names` name.

    `latest` is the stage's result in the newest of the recipe's runs that has one. Artifacts with missing files are
    skipped with a warning.

    Raises:
        RecipeError: an alias names nothing, and the stage needs a model; or it names one of another kind.
    """
    stored = {name: pipeline.stages[name].from_store() for name in names}
    wanting = {name: "pretrain" for name, fields in stored.items() if LATEST in fields.values()}
    found = newest_results(store, runs_of(store, pipeline.name), wanting, partial(_is_complete, store))
    models = {name: found[name][1] if name in found else None for name in wanting}
    aliases = {alias for fields in stored.values() for alias in fields.values() if alias != LATEST}
    records = {alias: read_alias(store, alias[1:]) for alias in sorted(aliases)}
    models |= {alias: None if record is None else record.target for alias, record in records.items()}
    for name, fields in stored.items():
        empty = {field for field, alias in fields.items() if alias != LATEST and models[alias] is None}
        for field in sorted(pipeline.stages[name].lacking(empty)):
            alias = fields[field]
            raise RecipeError(
                f"stages.{name}.{field}: {alias} names no model; `vitflow alias set {alias[1:]} MODEL` names one"
            )
        for field, alias in fields.items():
            kinds, model = input_fields(type(pipeline.stages[name]))[field], models.get(alias)
            if model is not None and (kind := STAGE_TYPES[model.job].KIND) not in kinds:
                raise RecipeError(f"stages.{name}.{field}: {alias} names a {kind}; expected a {' or '.join(kinds)}")
    return Named(models, {alias: record.number if record else 0 for alias, record in records.items()})


def _is_complete(store: Store, manifest: Manifest) -> bool:
    try:
        store.check_sizes(manifest.folder, manifest.files)
    except StoreDamaged as error:
        warn(f"{error}; it does not count as the latest model of {manifest.stage}")
        return False
    return True


def stored_inputs(
    store: Store, name: str, config: AnyStage, inputs: Inputs, newest: Newest, source: str | None, code: str | None
) -> Inputs:
    """Return the models of the store that a stage names, as inputs; none for a name that names nothing.

    Args:
        inputs: the stage's other inputs.
        source, code: as `stage_key` takes them.

    Raises:
        RecipeError: a model has been removed since the run was planned.
        StoreDamaged: a record about it cannot be read.
    """
    stored: Inputs = {}
    for field, named in config.from_store().items():
        if (model := newest.get(name if named == LATEST else named)) is None:
            continue
        manifest = read_manifest(store, model.job, model.key)
        if manifest is None:
            raise RecipeError(
                f"stages.{name}.{field}: when the run was planned, {named} was {model.job} {model.key[:12]}, which has"
                " been removed since. Restore it, or stop this run and start another"
            )
        stored[field] = [model]
        if field == "init_from":
            before = {each: refs for each, refs in manifest.inputs.items() if each == field}
            if _is_result(store, model, config, inputs | before, source, code):
                stored = {each: refs for each, refs in stored.items() if each != field} | before
    return stored


def _is_result(
    store: Store, model: InputRef, config: AnyStage, inputs: Inputs, source: str | None, code: str | None
) -> bool:
    """Return whether a model is what a stage makes of these inputs."""
    digests = {field: [reference.content_digest for reference in references] for field, references in inputs.items()}
    key = identity.stage_key(config, digests, source, code)
    return model.job == config.job and (model.key == key or model.key in successors(store, model.job, key))
