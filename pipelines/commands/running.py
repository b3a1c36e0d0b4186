"""run, plan, stop: what makes things, and what ends it."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.common import (
    DEFAULT_STORE,
    ForceOption,
    JsonOption,
    OnlyOption,
    PipelineArgument,
    SetOption,
    StoreOption,
    console,
    errors,
    open_,
    plain,
    print_json,
    print_table,
    width,
)
from pipelines.commands.reports import show_report
from pipelines.spec import RecipeError
from pipelines.store import Store, StoreError

if TYPE_CHECKING:
    from pipelines.plan import PlannedStage
    from pipelines.spec import Pipeline

ParallelOption = Annotated[
    int,
    typer.Option("--parallel", "-p", min=1, help="stages at once; more than there are cores slows all down"),
]
CORES = os.cpu_count() or 1


def run(
    pipeline: PipelineArgument,
    store: StoreOption = DEFAULT_STORE,
    only: OnlyOption = None,
    force: ForceOption = None,
    changes: SetOption = None,
    parallel: ParallelOption = CORES,
) -> None:
    """Run a pipeline here; what is already made is not made again."""
    from pipelines import plan as planning

    loaded, names, forced = _requested(pipeline, only, force, changes)
    opened = open_(store)
    planned = planning.plan_pipeline(opened, loaded, names)
    if not forced and all(stage.manifest is not None for stage in planned):
        for stage in planned:
            console.print(
                f"{stage.name:<{width(names)}}  [dim]CACHED[/]    {(stage.key or '')[:12]}", highlight=False
            )
        _finish(opened, planned)
        return
    _drive(opened, loaded, names, tuple(only or ()) or tuple(loaded.stages), forced, parallel)


def _drive(
    store: Store,
    pipeline: Pipeline,
    names: tuple[str, ...],
    targets: tuple[str, ...],
    forced: tuple[str, ...],
    parallel: int,
) -> None:
    """Run what is to be run, with the shared local Ray."""
    from pipelines import plan as planning
    from pipelines import runner, runs
    from pipelines.cluster import ClusterUnreachable
    from pipelines.display import RunDisplay
    from pipelines.local_ray import LocalConnection, LocalRayError

    started = runs.start_run(store, pipeline, targets, forced)
    console.print(f"{'continuing' if started.continued else 'run'} [bold]{started.id}[/]", highlight=False)
    with RunDisplay(console, width(names)) as display, LocalConnection(display.say) as connection:
        try:
            status = runner.run_pipeline(store, started, connection, display, parallel)
        except KeyboardInterrupt:
            display.say(f"stopped; to continue: {shlex.join(['vitflow', *sys.argv[1:]])}")
            raise typer.Exit(130) from None
        except (LocalRayError, StoreError, ClusterUnreachable, ValueError) as error:
            errors.print(f"[red]error:[/] {plain(str(error))}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
    if set(status.values()) <= {"CACHED", "SUCCEEDED"}:
        _finish(store, planning.plan_pipeline(store, pipeline, names))
        return
    if "STOPPED" in status.values():
        errors.print(f"stopped; to continue: {shlex.join(['vitflow', *sys.argv[1:]])}", highlight=False)
    failed = [name for name, state in status.items() if state == "FAILED"]
    if failed:
        errors.print(
            f"failed: {', '.join(failed)}; `vitflow logs {started.id} {failed[0]}` shows all it said",
            highlight=False,
            soft_wrap=True,
        )
    raise typer.Exit(1)


def _finish(store: Store, planned: list[PlannedStage]) -> None:
    """The last lines of a run: what to know of cached stages, and the report."""
    from pipelines import plan as planning

    for stage in planned:
        for note in planning.notes(store, stage):
            console.print(f"[yellow]note:[/] {plain(note)}", highlight=False, soft_wrap=True)
    for stage in planned:
        if stage.manifest is not None and stage.manifest.kind == "report":
            show_report(store, stage.manifest)


def plan(
    pipeline: PipelineArgument,
    store: StoreOption = DEFAULT_STORE,
    only: OnlyOption = None,
    changes: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what `run` would do, and why; changes nothing."""
    from pipelines import plan as planning

    loaded, names, _ = _requested(pipeline, only, None, changes)
    opened = open_(store)
    rows = [
        {
            "stage": stage.name,
            "job": stage.config.job,
            "state": stage.state,
            "key": stage.key,
            "why": planning.reason(opened, stage),
            "notes": list(planning.notes(opened, stage)),
        }
        for stage in planning.plan_pipeline(opened, loaded, names)
    ]
    if as_json:
        print_json(rows)
        return
    print_table(rows, ("stage", "job", "state", "key", "why"))
    for row in rows:
        for note in row["notes"] or ():
            console.print(f"[yellow]note:[/] {plain(note)}", highlight=False, soft_wrap=True)


def _requested(
    pipeline: str, only: list[str] | None, force: list[str] | None, changes: list[str] | None
) -> tuple[Pipeline, tuple[str, ...], tuple[str, ...]]:
    """The pipeline, the names of the stages that are wanted in running order, and of those that are forced."""
    from pipelines.recipe import load_pipeline
    from pipelines.spec import nearest

    loaded = load_pipeline(pipeline, tuple(changes or ()))
    names = loaded.needed_for(tuple(only or ()) or tuple(loaded.stages))
    for name in force or ():
        if name not in names:
            raise RecipeError(f"--force {name}: not a stage of this run{nearest(name, names)}")
    return loaded, names, tuple(force or ())


def stop(
    run: Annotated[str, typer.Argument(help="a run id or its unique beginning")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Stop a run: nothing that is made gets lost, and running it again goes on from there."""
    from pipelines.local_ray import connect_running
    from pipelines.lookup import find_run
    from pipelines.runs import is_over, stop_run

    opened = open_(store, create=False)
    found = find_run(opened, run)
    if is_over(opened, found):
        console.print(f"{found} has ended already", highlight=False)
        return
    for line in stop_run(opened, found, connect_running):
        console.print(plain(line), highlight=False)
    console.print(
        f"{found} is to stop; `vitflow run` with the same recipe goes on from there", highlight=False
    )
