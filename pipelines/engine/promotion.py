"""Promotion: what becomes of an alias after a stage `promote` has compared a candidate with the alias's model.

The comparison is an artifact like all others, and moves the alias once: what is found in the cache moves nothing if it
has done so before, such as after a rollback. If its driver died before the move, whoever finds it moves the alias. The
move names the record of the alias that the comparison was planned with, so of two who decide on the same one the second
is refused, and compares anew. A move names its comparison and its run, so a driver that continues a killed one sees
what has been done.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import takewhile
from typing import NamedTuple

from pipelines.engine.latest import Newest
from pipelines.engine.plan import PlannedStage
from pipelines.engine.runs import Run
from pipelines.spec import Promote
from pipelines.store import (
    PROMOTED,
    Alias,
    AliasMoved,
    Manifest,
    Store,
    alias_history,
    move_alias,
    newest_moves,
    read_manifest,
)

CLOCKS_DIFFER = timedelta(days=1)  # at most: an alias moves after its comparison has begun


class Rival(NamedTuple):
    """The models that a stage is planned with, and the number of the alias's record among them; 0 if there is none."""

    newest: Newest
    number: int


def rival_of(store: Store, run: Run, name: str, config: Promote) -> Rival:
    """Return what a run compares a candidate with: the model that the alias named when the run was planned.

    If a driver of this run has moved the alias for this stage, that is the model that it named before.
    """
    planned = Rival(run.latest, run.moves.get(config.against, 0))
    for record in alias_history(store, config.against[1:], since=planned.number):
        if record.run == run.id and record.report is not None:
            made = read_manifest(store, "promote", record.report)
            if made is not None and made.stage == name:
                return _before(store, config, record, planned.newest)
    return planned


def rival_now(store: Store, config: Promote, newest: Newest) -> Rival:
    """Return the same with the model that the alias names now."""
    history = alias_history(store, config.against[1:])
    return _with(config, newest, history[-1] if history else None)


def _before(store: Store, config: Promote, move: Alias, newest: Newest) -> Rival:
    earlier = [each for each in alias_history(store, config.against[1:]) if each.number == move.expected]
    return _with(config, newest, earlier[0] if earlier else None)


def _with(config: Promote, newest: Newest, record: Alias | None) -> Rival:
    return Rival({**newest, config.against: record.target}, record.number) if record else Rival(newest, 0)


def settle(store: Store, run: Run, config: Promote, manifest: Manifest, expected: int) -> Alias | None:
    """Move the alias if a comparison says so, once; return the move that it led to, if any.

    Args:
        expected: the number of the alias's record that the comparison was planned with.

    Raises:
        AliasMoved: somebody else has moved the alias since.
    """
    alias, (candidate,) = config.against[1:], manifest.inputs["candidate"]
    if manifest.metrics["verdict"] != PROMOTED:
        return None
    if (moved := _move_of(store, manifest)) is not None:
        return moved
    try:
        return move_alias(store, alias, candidate, expected, "rule", manifest.key, run.id)
    except AliasMoved:
        if (moved := _move_of(store, manifest)) is not None:  # by another driver, a moment ago
            return moved
        raise


def is_unsettled(store: Store, stage: PlannedStage) -> bool:
    """Whether a driver died between the commit of a promotion and the move of the alias, or may have."""
    manifest = stage.manifest
    if manifest is None or manifest.job != "promote" or manifest.metrics["verdict"] != PROMOTED:
        return False
    return _move_of(store, manifest) is None


def _move_of(store: Store, manifest: Manifest) -> Alias | None:
    """Return the move that a comparison led to; None if there is none."""
    since = (datetime.fromisoformat(manifest.started) - CLOCKS_DIFFER).isoformat()
    newest = takewhile(lambda move: move.time > since, newest_moves(store, str(manifest.config["against"])[1:]))
    return next((move for move in newest if move.report == manifest.key), None)
