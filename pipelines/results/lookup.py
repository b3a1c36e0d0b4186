"""The runs and artifacts that a user names: by an id, a recipe's name, a key or a unique prefix, RUN/STAGE or RUN.

Of several runs of one recipe, RUN is the newest, and RUN/STAGE the result in the newest that has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipelines.engine.runs import run_status, runs
from pipelines.recipe.pipeline import members
from pipelines.spec import RecipeError, nearest
from pipelines.store import Manifest, Store, all_keys, all_manifests


def find_run(store: Store, prefix: str | None) -> str:
    """Return the newest run with this id, recipe name or prefix; None: of all runs. Raises RecipeError."""
    return (_matching_runs(store, "") if prefix is None else _runs_of_one_recipe(store, prefix))[-1]


def _matching_runs(store: Store, prefix: str) -> list[str]:
    """Return the runs with this id or prefix of one, oldest first. Raises RecipeError if there are none."""
    ids = runs(store)
    if not ids:
        raise RecipeError(f"{store.uri} has no runs")
    matches = [run for run in ids if run == prefix] or [run for run in ids if run.startswith(prefix)]
    if not matches:
        raise RecipeError(f"no run matches {prefix!r}{nearest(prefix, ids[-5:])}")
    return matches


def find_artifact(store: Store, selector: str | None, kind: str) -> Manifest:
    """Return the artifact of a kind that a selector (see `_find`) matches; None: the newest.

    Raises:
        RecipeError: none or several match.
    """
    manifests = [manifest for manifest in all_manifests(store) if manifest.kind == kind]
    if selector is None:
        matches = manifests[-1:]
    else:
        try:
            matches = find_manifests(store, selector, manifests, kind)
        except RecipeError as error:
            raise RecipeError(f"{error}. `vitflow list --kind {kind}s` shows the keys") from None
    if len(matches) != 1:
        listed = _names({manifest.key: manifest.stage for manifest in matches or manifests})
        raise RecipeError(
            f"{selector!r} is ambiguous; it matches the {kind}s {listed}"
            if matches
            else f"{selector or store.uri}: no {kind} found; "
            + (
                f"there are: {listed}"
                if listed
                else "there are none yet; `vitflow status` shows the last run"
            )
        )
    return matches[0]


def find_manifests(
    store: Store, selector: str, manifests: Sequence[Manifest], kind: str = "artifact"
) -> list[Manifest]:
    """Return the manifests that a selector (see `_find`) matches; messages call one a `kind`. Raises RecipeError."""
    keys = _find(store, selector, {manifest.key: manifest.stage for manifest in manifests}, kind)
    return [manifest for manifest in manifests if manifest.key in keys]


def find_keys(store: Store, selector: str) -> list[tuple[str, str]]:
    """Return (job, key) of the artifacts that a selector (see `_find`) matches, even of damaged ones.

    Raises:
        RecipeError: nothing matches, or the prefix is ambiguous.
    """
    artifacts = all_keys(store)
    keys = _find(store, selector, {key: job for job, key in artifacts}, "artifact")
    return [(job, key) for job, key in artifacts if key in keys]


def _find(store: Store, selector: str, labels: Mapping[str, str], kind: str) -> set[str]:
    """Return the keys that a key, a unique key prefix, RUN/STAGE or RUN matches; a RUN may have none.

    Args:
        labels: key -> its stage, which messages show beside it.
        kind: the kind of artifact, for messages.

    Raises:
        RecipeError: there is no such key, run or stage, or it is ambiguous.
    """
    matches = {key: label for key, label in labels.items() if selector and key.startswith(selector)}
    if not matches:
        prefix, _, stage = selector.partition("/")
        try:
            if stage:
                return _newest_result(store, _runs_of_one_recipe(store, prefix), stage, labels)
            return labels.keys() & _stage_keys(store, find_run(store, prefix)).values()
        except RecipeError as error:
            raise RecipeError(f"no {kind} has a key that begins with {selector!r}, and {error}") from None
    if len(matches) > 1:
        raise RecipeError(f"{selector!r} is ambiguous; it matches the keys {_names(matches)}")
    return set(matches)


def _runs_of_one_recipe(store: Store, prefix: str) -> list[str]:
    """Return the runs with this id, recipe name or prefix. Raises RecipeError: none, or of several recipes."""
    matches = _matching_runs(store, prefix)
    if of_recipe := [run for run in matches if _recipe(run) == prefix]:
        return of_recipe
    if len({_recipe(run) for run in matches}) > 1:
        raise RecipeError(f"{prefix!r} is ambiguous; it matches the runs {', '.join(matches)}")
    return matches


def _recipe(run: str) -> str:
    return run.rsplit("-", 3)[0]


def _newest_result(store: Store, matches: Sequence[str], stage: str, labels: Mapping[str, str]) -> set[str]:
    """Return the keys in `labels` of a stage, or of all members of a matrix, in the newest run that has all of them.

    If no run has all, return the keys in the newest run that has some.

    Args:
        matches: the runs, oldest first.

    Raises:
        RecipeError: none has this stage.
    """
    some: set[str] = set()
    unknown: list[RecipeError] = []
    for run in reversed(matches):
        stages = _stage_keys(store, run)
        try:
            keys = [stages[name] for name in members(stage, stages)]
        except RecipeError as error:
            unknown.append(error)
            continue
        some = some or labels.keys() & keys
        if all(key in labels for key in keys):
            return labels.keys() & keys
    if len(unknown) == len(matches):
        raise unknown[0]
    return some


def _stage_keys(store: Store, run: str) -> dict[str, str | None]:
    """Return {stage: its key} of a run; None: its key is not known yet."""
    return {entry["stage"]: entry.get("key") for entry in run_status(store, run)["stages"]}


def _names(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key[:12]} ({label})" for key, label in list(labels.items())[-8:])
