"""status, list, logs, schema: what looks, and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.commands.common import (
    DEFAULT_STORE,
    AddressOption,
    JsonOption,
    StoreOption,
    TokenOption,
    console,
    open_,
    print_json,
    print_table,
)
from pipelines.spec import RecipeError

if TYPE_CHECKING:
    pass


def status(
    run: Annotated[
        str | None, typer.Argument(help="a run id or its unique beginning; without it, the last run")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run: its stages and what became of them."""
    from pipelines.lookup import find_run
    from pipelines.runs import run_status
    from pipelines.submission import reached

    opened = open_(store, create=False)
    found = run_status(opened, find_run(opened, run), reached(address, token_file))
    if as_json:
        print_json(found)
        return
    console.print(f"[bold]{found['run']}[/]  {found['status']}", highlight=False)
    for stage in found["stages"]:
        stage["took"] = _took(stage)
    print_table(found["stages"], ("stage", "status", "took", "detail"))
    if found["status"] == "UNFINISHED":
        console.print(
            f"its driver is gone; `vitflow run` with the same recipe ({found['pipeline']}) continues it"
        )


def list_(
    store: StoreOption = DEFAULT_STORE,
    kind: Annotated[str, typer.Option(help="runs | datasets | models | evaluations | reports")] = "runs",
    as_json: JsonOption = False,
) -> None:
    """List runs, datasets, models, evaluations or reports."""
    from pipelines.local_ray import connect_running
    from pipelines.runs import run_status, runs
    from pipelines.spec import nearest
    from pipelines.store import all_manifests

    kinds = {"datasets": "dataset", "models": "model", "evaluations": "evaluation", "reports": "report"}
    opened = open_(store, create=False)
    if kind == "runs":
        found = [run_status(opened, run, connect_running) for run in runs(opened)]
        rows = [{"run": row["run"], "status": row["status"], "created": row["created"][:19]} for row in found]
    elif kind in kinds:
        rows = [
            {
                "key": manifest.key,
                "stage": manifest.stage,
                "job": manifest.job,
                "run": manifest.run,
                "finished": manifest.finished[:19],
                "metrics": manifest.metrics,
            }
            for manifest in all_manifests(opened)
            if manifest.kind == kinds[kind]
        ]
    else:
        raise RecipeError(f"--kind {kind}: no such kind{nearest(kind, ['runs', *kinds])}")
    if as_json:
        print_json(rows)
    else:
        print_table(
            rows,
            ("run", "status", "created") if kind == "runs" else ("key", "stage", "job", "finished", "run"),
        )


def logs(
    run: Annotated[str, typer.Argument(help="a run id or its unique beginning")],
    stage: Annotated[str | None, typer.Argument(help="one stage; without it, all")] = None,
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="go on until the stages have ended")] = False,
) -> None:
    """Show what a run's stages said."""
    from pipelines.logs import show_logs
    from pipelines.lookup import find_run
    from pipelines.submission import reached

    opened = open_(store, create=False)
    clusters = reached(address, token_file)
    show_logs(opened, find_run(opened, run), stage, follow, clusters, lambda text: print(text, flush=True))


def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    from pipelines import recipe

    print_json(recipe.schema())


def _took(stage: dict[str, Any]) -> str:
    from datetime import datetime

    if "started" not in stage:
        return ""
    seconds = datetime.fromisoformat(stage["changed"]) - datetime.fromisoformat(stage["started"])
    return f"{seconds.total_seconds():.1f} s"
