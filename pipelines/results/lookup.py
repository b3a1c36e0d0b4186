"""What a person means by RUN, MODEL or REPORT: an id, its unique beginning, RUN/STAGE, or nothing for the newest."""

from __future__ import annotations

from pipelines.engine.runs import run_status, runs
from pipelines.recipe.pipeline import members
from pipelines.spec import RecipeError, nearest
from pipelines.store import Manifest, Store, all_keys, all_manifests


def find_run(store: Store, given: str | None) -> str:
    """The run that an id, its unique beginning, or nothing (the newest) means."""
    known = runs(store)
    if not known:
        raise RecipeError(f"{store.uri} has no runs")
    if given is None:
        return known[-1]
    matches = [run for run in known if run == given] or [run for run in known if run.startswith(given)]
    if not matches:
        raise RecipeError(f"no run begins with {given!r}{nearest(given, known[-5:])}")
    if len(matches) > 1:
        raise RecipeError(f"{given!r} begins several runs: {', '.join(matches)}")
    return matches[0]


def find_artifact(store: Store, given: str | None, kind: str) -> Manifest:
    """The artifact of a kind that a key, its unique beginning, RUN/STAGE, RUN or nothing (the newest) means."""
    known = [manifest for manifest in all_manifests(store) if manifest.kind == kind]
    if given is None:
        matches = known[-1:]
    else:
        matches = [manifest for manifest in known if manifest.key.startswith(given)]
        if not matches:
            run, _, stage = given.partition("/")
            try:
                found = find_run(store, run)
            except RecipeError as error:
                raise RecipeError(
                    f"no {kind} has a key that begins with {given!r}, and {error}. "
                    f"`vitflow list --kind {kind}s` shows the keys"
                ) from None
            stages = run_status(store, found)["stages"]
            chosen = members(stage, [entry["stage"] for entry in stages]) if stage else ()
            keys = {entry.get("key") for entry in stages if not stage or entry["stage"] in chosen}
            matches = [manifest for manifest in known if manifest.key in keys]
    if len(matches) != 1:
        names = ", ".join(f"{manifest.key[:12]} ({manifest.stage})" for manifest in (matches or known)[-8:])
        raise RecipeError(
            f"{given or 'the newest'}: {'several' if matches else 'no'} {kind}s fit; there are: {names or 'none'}"
        )
    return matches[0]


def find_keys(store: Store, given: str) -> list[tuple[str, str]]:
    """(job, key) of the artifacts that a key, a unique key prefix, RUN/STAGE or RUN means, whether they can be read
    or not.

    Raises:
        RecipeError: it matches nothing, or it is ambiguous.
    """
    known = all_keys(store)
    matches = [(job, key) for job, key in known if key.startswith(given)]
    if len(matches) > 1:
        names = ", ".join(f"{key[:12]} ({job})" for job, key in matches[-8:])
        raise RecipeError(f"{given!r} is ambiguous; it matches the keys {names}")
    if matches:
        return matches
    run, _, stage = given.partition("/")
    try:
        found = find_run(store, run)
    except RecipeError as error:
        raise RecipeError(f"no artifact has a key that begins with {given!r}, and {error}") from None
    stages = run_status(store, found)["stages"]
    chosen = members(stage, [entry["stage"] for entry in stages]) if stage else ()
    keys = {entry.get("key") for entry in stages if not stage or entry["stage"] in chosen}
    return [(job, key) for job, key in known if key in keys]
