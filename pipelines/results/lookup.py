"""The runs and artifacts that a user names: by id, recipe, a key or a unique prefix, RUN/STAGE, RUN or @ALIAS.

Of several runs of one recipe, RUN is the newest, and RUN/STAGE the result in the newest that has one. Only a recipe's
own runs and the keys with the given prefix are listed, so that the number of requests does not grow with the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import chain

from pipelines.engine.history import plan_of, recipe_of, runs, runs_of, stage_keys
from pipelines.recipe.pipeline import members
from pipelines.spec import STAGE_TYPES, RecipeError, nearest
from pipelines.store import (
    Alias,
    Attempt,
    Manifest,
    Store,
    alias_names,
    all_manifests,
    check_alias,
    is_committed,
    read_alias,
    read_or_warn,
)

_NAMED = 8  # artifacts in a message
_UNIQUE = 12  # characters of a key in tables; of 100,000 keys, two share these with a probability of 2e-5
Artifact = tuple[str, str]
"""(job, key)"""


def find_run(store: Store, prefix: str | None) -> str:
    """Return the newest run with this id, recipe name or prefix; None: of all runs. Raises RecipeError."""
    found = reversed(_matching_runs(store, "")) if prefix is None else _runs_of_one_recipe(store, prefix)
    newest = next((run for run in found if plan_of(store, run) is not None), None)
    if newest is None:
        raise RecipeError(f"{store.uri} has no runs" if prefix is None else f"no run matches {prefix!r}")
    return newest


def _matching_runs(store: Store, prefix: str) -> list[str]:
    """Return the runs with this id or prefix of one, oldest first. Raises RecipeError if there are none."""
    ids = runs(store, prefix)
    if not ids:
        others = runs(store) if prefix else []
        raise RecipeError(
            f"no run matches {prefix!r}{nearest(prefix, others[-5:])}" if others else f"{store.uri} has no runs"
        )
    return [run for run in ids if run == prefix] or ids


def _runs_of_one_recipe(store: Store, prefix: str) -> Iterable[str]:
    """Return the runs with this id, recipe name or prefix, newest first.

    Raises:
        RecipeError: there are none, or of several recipes.
    """
    of_recipe = runs_of(store, prefix)
    if (newest := next(of_recipe, None)) is not None:
        return chain([newest], of_recipe)
    matches = _matching_runs(store, prefix)
    if len({recipe_of(run) for run in matches}) > 1:
        raise RecipeError(f"{prefix!r} is ambiguous; it matches the runs {', '.join(matches)}")
    return reversed(matches)


def find_artifact(store: Store, selector: str | None, kind: str, *others: str) -> Manifest:
    """Return the artifact of a kind, or of others, that a selector (see `find_keys`) matches; None: the newest.

    Raises:
        RecipeError: none or several match.
    """
    if selector is None:
        matches = _newest(store, kind)[-1:]
    else:
        try:
            matches = find_manifests(store, selector, kind, *others)
        except RecipeError as error:
            raise RecipeError(f"{error}. `vitflow list --kind {kind}s` shows the keys") from None
    if len(matches) != 1:
        listed = _names([(manifest.stage, manifest.key) for manifest in matches or _newest(store, kind)])
        raise RecipeError(
            f"{selector!r} is ambiguous; it matches the {kind}s {listed}"
            if matches
            else f"{selector or store.uri}: no {kind} found; "
            + (f"there are: {listed}" if listed else "there are none yet; `vitflow status` shows the last run")
        )
    return matches[0]


def score(manifest: Manifest) -> str | None:
    """Return a model's accuracy, mAP, AP or mIoU on test; of a pretraining, on dev."""
    for split in ("test", "dev"):
        for metric in ("accuracy", "mAP", "AP", "mIoU"):
            value = manifest.metrics.get(f"{split}_{metric}")
            if isinstance(value, float):
                return f"{value:.1%} {split}" + f" {metric}" * (metric != "accuracy")
    return None


def _newest(store: Store, kind: str) -> list[Manifest]:
    """Return the newest artifacts of a kind, oldest first."""
    return [*deque(all_manifests(store, *jobs_of(kind)), _NAMED)]


def jobs_of(*kinds: str) -> list[str]:
    """Return the jobs that make these kinds of artifacts; without any: all."""
    return [job for job, stage in STAGE_TYPES.items() if not kinds or stage.KIND in kinds]


def find_manifests(store: Store, selector: str, *kinds: str) -> list[Manifest]:
    """Return the manifests that a selector (see `find_keys`) matches, oldest first; skip damaged ones with a warning.

    Raises:
        RecipeError: nothing matches, or it is ambiguous.
    """
    read = (read_or_warn(store, job, key) for job, key in find_keys(store, selector, *kinds))
    return sorted((found[0] for found in read if found is not None), key=lambda manifest: manifest.finished)


def find_keys(store: Store, selector: str, *kinds: str) -> list[Artifact]:
    """Return the artifacts that a key, a unique key prefix, RUN/STAGE, RUN or @ALIAS matches, even damaged ones.

    A key or its prefix may be of an artifact that is not committed; a RUN may have none that is.

    Args:
        kinds: only artifacts of these; without any, of all.

    Raises:
        RecipeError: there is no such key, run, stage or alias, it is ambiguous, or the alias names nothing.
    """
    jobs = jobs_of(*kinds)
    if selector.startswith("@"):
        if (target := alias_record(store, selector.removeprefix("@")).target) is None:
            raise RecipeError(f"{selector} names no model now; `vitflow alias set {selector[1:]} MODEL` names one")
        return [(target.job, target.key)] if target.job in jobs else []
    prefix, _, stage = selector.partition("/")
    matches = [] if stage or not selector else _with_prefix(store, jobs, selector)
    if len(matches) > 1:
        raise RecipeError(f"{selector!r} is ambiguous; it matches the keys {_names(matches)}")
    if matches:
        return matches
    try:
        found = (
            _newest_result(store, _runs_of_one_recipe(store, prefix), stage)
            if stage
            else _committed(store, find_run(store, prefix))
        )
    except RecipeError as error:
        named = " or ".join(kinds) or "artifact"
        raise RecipeError(f"no {named} has a key that begins with {selector!r}, and {error}") from None
    return [artifact for artifact in found if artifact[0] in jobs]


def alias_record(store: Store, name: str) -> Alias:
    """Return the current record of an alias. Raises RecipeError if it was never set."""
    if (record := read_alias(store, check_alias(name))) is None:
        known = nearest(name, alias_names(store))
        raise RecipeError(f"no alias is called {name!r}{known}; `vitflow alias set {name} MODEL` creates it")
    return record


def recipe_and_stage(made: Manifest | Attempt) -> str:
    """Return RECIPE/STAGE, the name for people of an artifact."""
    return f"{recipe_of(made.run)}/{made.stage}"


def _with_prefix(store: Store, jobs: Sequence[str], prefix: str) -> list[Artifact]:
    """Return the artifacts whose keys begin with a prefix; of one with `_UNIQUE` characters, of the first job found."""
    found: list[Artifact] = []
    for job in reversed(jobs):  # results first, because they are asked for more often than datasets
        found += [(job, key) for key in store.names(f"artifacts/{job}", prefix)]
        if found and len(prefix) >= _UNIQUE:
            break
    return found


def _committed(store: Store, run: str) -> list[Artifact]:
    """Return the results of a run."""
    (stages,) = stage_keys(store, [run])
    return [artifact for artifact in stages.values() if artifact is not None and is_committed(store, *artifact)]


def _newest_result(store: Store, newest_first: Iterable[str], stage: str) -> list[Artifact]:
    """Return the results of a stage, or of all members of a matrix, in the newest run that has all of them.

    If no run has all, return those in the newest run that has some.

    Raises:
        RecipeError: no run has this stage.
    """
    some: list[Artifact] = []
    unknown: RecipeError | None = None
    is_known = False
    is_made = cache(partial(is_committed, store))
    for stages in stage_keys(store, newest_first):
        try:
            named = members(stage, stages)
        except RecipeError as error:
            unknown = unknown or error
            continue
        is_known = True
        made = [artifact for name in named if (artifact := stages[name]) is not None and is_made(*artifact)]
        if len(made) == len(named):
            return made
        some = some or made
    if not is_known and unknown is not None:
        raise unknown
    return some


def _names(artifacts: Sequence[Artifact]) -> str:
    """Name artifacts by the beginnings of their keys, and by their stages or jobs."""
    return ", ".join(f"{key[:12]} ({label})" for label, key in artifacts[-_NAMED:])
