"""`init_from: latest`: the model that a pretraining continues when its recipe runs again.

The newest model of a stage is looked up once, when a run is planned, and recorded in the run's plan. So a continued
run, and everything that shows it, uses the same model even if a newer one exists. When the stage begins and its data is
known, there are three cases:

- There is no newest model: the stage starts from new weights, and has the key of a stage without `init_from`.
- The stage, started from the model that the newest model started from, would have the newest model's key: the newest
  model is the result. So repeating a run whose data and settings have not changed runs nothing.
- Otherwise the stage starts from the newest model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from pipelines import identity
from pipelines.engine.history import newest_results, runs_of
from pipelines.recipe.pipeline import Pipeline
from pipelines.spec import LATEST, AnyStage, Pretrain, RecipeError
from pipelines.store import (
    InputRef,
    Manifest,
    Store,
    StoreDamaged,
    read_manifest,
    successors,
    warn,
)

Newest = Mapping[str, InputRef | None]
"""Stage with `init_from: latest` -> its newest model; None if it has made none."""
Inputs = dict[str, list[InputRef]]


def wants_latest(config: AnyStage) -> bool:
    """Whether a stage has `init_from: latest`."""
    return isinstance(config, Pretrain) and config.init_from == LATEST


def newest_models(store: Store, pipeline: Pipeline, names: Iterable[str]) -> dict[str, InputRef | None]:
    """Look up the newest models of those stages among `names` that have `init_from: latest`.

    That is the stage's result in the newest of the recipe's runs that has one. Artifacts with missing files are skipped
    with a warning.
    """
    wanting = {name: "pretrain" for name in names if wants_latest(pipeline.stages[name])}
    if not wanting:
        return {}
    found = newest_results(store, runs_of(store, pipeline.name), wanting, partial(_is_complete, store))
    return {name: found[name][1] if name in found else None for name in wanting}


def _is_complete(store: Store, manifest: Manifest) -> bool:
    try:
        store.check_sizes(manifest.folder, manifest.files)
    except StoreDamaged as error:
        warn(f"{error}; it does not count as the latest model of {manifest.stage}")
        return False
    return True


def start_of(
    store: Store,
    name: str,
    config: AnyStage,
    inputs: Inputs,
    newest: InputRef | None,
    source: str | None,
    code: str | None,
) -> Inputs:
    """Return the model that a stage with `init_from: latest` starts from, as an input; empty for new weights.

    Args:
        inputs: the stage's other inputs.
        newest: its newest model when the run was planned.
        source, code: as `stage_key` takes them.

    Raises:
        RecipeError: the newest model has been removed since the run was planned.
        StoreDamaged: a record about it cannot be read.
    """
    if newest is None:
        return {}
    manifest = read_manifest(store, newest.job, newest.key)
    if manifest is None:
        raise RecipeError(
            f"stages.{name}.init_from: when the run was planned, latest was {newest.job} {newest.key[:12]}, which has"
            " been removed since. Restore it, or stop this run and start another"
        )
    before = {field: refs for field, refs in manifest.inputs.items() if field == "init_from"}
    digests = {
        field: [reference.content_digest for reference in references] for field, references in (inputs | before).items()
    }
    again = identity.stage_key(config, digests, source, code)
    if newest.key == again or newest.key in successors(store, newest.job, again):
        return before
    return {"init_from": [newest]}
