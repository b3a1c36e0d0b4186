"""The logs of a run: from the attempt's log.txt once the job has ended, before that from the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pipelines.cluster.jobs_client import ClusterUnreachable
from pipelines.engine.display import in_words
from pipelines.engine.runs import Clusters, driver_log, run_status
from pipelines.engine.status import ENDED, Status
from pipelines.environment import environment
from pipelines.recipe.pipeline import members
from pipelines.store import Attempt, Layout, Store, StoreDamaged, last_attempt


def show_logs(
    store: Store, run: str, stage: str | None, follow: bool, clusters: Clusters, write: Callable[[str], None]
) -> None:
    """Write the readable log lines of one stage or all; with `follow`, continue until they have ended.

    Raises:
        RecipeError: the run has no such stage.
        StoreDamaged: a log is damaged; the logs of the other stages are written first.
    """
    shown: set[tuple[str, int]] = set()
    damaged: dict[str, StoreDamaged] = {}
    while True:
        status = run_status(store, run, clusters)
        names = [entry["stage"] for entry in status["stages"]]
        chosen = names if stage is None else members(stage, names)
        wanted = [entry for entry in status["stages"] if entry["stage"] in chosen]
        for entry in wanted:
            if "key" in entry and entry["stage"] not in damaged:
                try:
                    _show_stage(store, entry, follow, clusters, write, shown)
                except StoreDamaged as error:
                    damaged[entry["stage"]] = error
        if not follow or status["status"] != Status.RUNNING or all(entry["status"] in ENDED for entry in wanted):
            break
        time.sleep(0.5)
    if not shown and (log := driver_log(store, run, clusters)):  # it says why no stage has begun
        write("--- driver")
        _write_lines(log, write)
    if damaged:
        raise next(iter(damaged.values()))


def _show_stage(
    store: Store,
    entry: dict[str, Any],
    follow: bool,
    clusters: Clusters,
    write: Callable[[str], None],
    shown: set[tuple[str, int]],
) -> None:
    """Write the log of a stage's newest attempt, unless it was already shown."""
    attempt = last_attempt(store, entry["job"], entry["key"])
    if attempt is None or (entry["stage"], attempt.number) in shown:
        return
    shown.add((entry["stage"], attempt.number))
    write(f"--- {entry['stage']} (attempt {attempt.number}, {entry['status']})")
    saved = store.read(f"{Layout.attempt(attempt.job, attempt.key, attempt.number)}/log.txt")
    if saved is not None:
        _write_lines(saved.decode(errors="replace"), write)
    else:
        _show_live(attempt, follow, clusters, write)


def _show_live(attempt: Attempt, follow: bool, clusters: Clusters, write: Callable[[str], None]) -> None:
    try:
        cluster = clusters(attempt.cluster_address)
        if follow:
            cluster.follow_logs(attempt.submission_id, lambda line: _write_lines(line, write), environment().flag())
        else:
            log = cluster.logs(attempt.submission_id)
            _write_lines(log or "(the cluster does not know this job)", write)
    except (ClusterUnreachable, ValueError) as error:
        write(f"(no log: it was not copied, and the cluster does not answer: {error})")


def _write_lines(log: str, write: Callable[[str], None]) -> None:
    for line in log.rstrip("\n").split("\n"):
        if (text := in_words(line)) is not None:
            write(text)
