"""The command gc: delete what nothing needs, in the store or in this machine's caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any

import typer

from pipelines.commands.common import (
    DEFAULT_STORE,
    Commands,
    JsonOption,
    StoreOption,
    open_,
    print_json,
    print_table,
    say,
    store_option,
)
from pipelines.engine.gc import Collection, Policy, collect
from pipelines.engine.history import recipe_of
from pipelines.machine.caches import CACHES, remove, unread
from pipelines.spec import RecipeError, quantity
from pipelines.store import Garbage

app = Commands()
GRACE, SHORTEST_GRACE = 24.0, 2.0  # hours; a driver looks for a new record once an hour


@app.command("gc")
def gc(
    store: StoreOption = DEFAULT_STORE,
    keep_runs: Annotated[
        int, typer.Option(min=1, help="keep what the last runs of each recipe used")
    ] = Policy.keep_runs,
    keep_days: Annotated[
        float, typer.Option(min=1, max=36_500, help="keep what is younger, in days")
    ] = Policy.keep_days,
    grace: Annotated[
        float, typer.Option(min=0, max=8_760, help="hours between listing and deleting; 0 only while nothing runs")
    ] = GRACE,
    delete: Annotated[
        bool, typer.Option("--delete", help="list what nothing needs, and delete what was listed long enough ago")
    ] = False,
    caches: Annotated[
        bool, typer.Option("--caches", help="this machine's cached files instead that nothing read for --keep-days")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what nothing needs and, with --delete, delete it at least --grace hours later."""
    if 0 < grace < SHORTEST_GRACE:
        raise RecipeError(
            f"--grace {grace:g}: expected 0, or at least {SHORTEST_GRACE:g} hours, within which runs see it"
        )
    days = f" --keep-days {keep_days:g}" * (keep_days != Policy.keep_days)
    if caches:
        _collect_caches(keep_days, delete, as_json, f"vitflow gc --caches --delete{days}")
        return
    opened = open_(store, create=False)
    found = collect(opened, Policy(keep_runs, keep_days), grace if delete else None)
    if as_json:
        print_json(
            {
                "kept": [{"why": why, **_total(kept)} for why, kept in found.kept.items()],
                "unneeded": _by_stage(found.unneeded),
                "deleted": _by_stage(found.deleted),
                "record": found.record,
                "due": found.due,
            }
        )
    else:
        runs = f" --keep-runs {keep_runs}" * (keep_runs != Policy.keep_runs)
        hours = f" --grace {grace:g}" * (grace != GRACE)
        _show(found, delete, grace, f"vitflow gc --delete{store_option(opened.uri)}{runs}{days}{hours}")


def _show(found: Collection, delete: bool, grace: float, command: str) -> None:
    """Print what was found; `command` deletes it."""
    rows: list[dict[str, Any]] = [{"kept": why} | _shown(_total(kept)) for why, kept in found.kept.items()]
    if rows:
        print_table(rows, ("kept", "artifacts", "size"))
        say("")
    for title, artifacts in (("deleted", found.deleted), ("not needed", found.unneeded)):
        if artifacts:
            table = [{title: _name(row)} | _shown(row) for row in _by_stage(artifacts)]
            print_table(table, (title, "artifacts", "size"))
            say("")
    total = _shown(_total(found.unneeded))
    say(f"{quantity(len(found.unneeded), 'artifact')} that nothing needs, {total['size']}")
    if found.due is not None:
        due = f"{datetime.fromisoformat(found.due):%Y-%m-%d %H:%M} UTC"
        say(f"gc/{found.record}.json lists what is deleted by `{command}` after {due}")
    elif found.unneeded and not delete:
        later = f"lists them; the same command deletes them {grace:g} hours later" if grace else "deletes them"
        say(f"`{command}` {later}")


def _name(row: dict[str, Any]) -> str:
    return f"{row['recipe']}/{row['stage']}{' (unfinished)' * (not row['finished'])}"


def _total(artifacts: Iterable[Garbage]) -> dict[str, int]:
    sizes = [each.bytes for each in artifacts]
    return {"artifacts": len(sizes), "bytes": sum(sizes)}


def _shown(total: dict[str, Any]) -> dict[str, str]:
    return {"artifacts": f"{total['artifacts']:,}", "size": f"{total['bytes'] / 1e6:,.1f} MB"}


def _by_stage(artifacts: Iterable[Garbage]) -> list[dict[str, Any]]:
    """Return one row for each stage of a recipe, finished or not, the largest first."""
    groups: dict[tuple[str, str, bool], list[Garbage]] = defaultdict(list)
    for each in artifacts:
        groups[recipe_of(each.run), each.stage, each.is_finished].append(each)
    rows = [
        {"recipe": recipe, "stage": stage, "finished": is_finished, **_total(group)}
        for (recipe, stage, is_finished), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def _collect_caches(days: float, delete: bool, as_json: bool, command: str) -> None:
    files = [cached for cached in unread(days) if not delete or remove(cached, days)]
    rows: list[dict[str, Any]] = [
        {"cache": cache, "files": len(sizes), "bytes": sum(sizes)}
        for cache in CACHES
        if (sizes := [file.bytes for file in files if file.cache == cache])
    ]
    if as_json:
        print_json({"deleted" if delete else "unread": rows})
        return
    for row in rows:
        say(f"{CACHES[row['cache']]}: {quantity(row['files'], 'file')}, {row['bytes'] / 1e6:,.1f} MB")
    say("nothing to delete" if not rows else "deleted" if delete else f"`{command}` deletes them")
