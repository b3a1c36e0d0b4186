"""The command line. Exit codes: 0 done, 1 a stage failed, 2 the request was wrong and nothing started, 130 Ctrl-C.

Only what every command needs is imported here: a run with nothing to do takes a fraction of a second.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pipelines.spec import RecipeError
from pipelines.store import Manifest, Store, StoreError

if TYPE_CHECKING:
    from pipelines.plan import PlannedStage
    from pipelines.spec import Pipeline

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Vision Transformers on Ray: image archives to reports, as a reproducible DAG.",
)
report_app = typer.Typer(no_args_is_help=True, help="Reports of finished runs.")
app.add_typer(report_app, name="report")
console = Console()
errors = Console(stderr=True)

StoreOption = Annotated[
    str, typer.Option("--store", envvar="VITFLOW_STORE", help="the folder that keeps all results")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="STAGE.FIELD=VALUE", help="change one field")
]
OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", metavar="STAGE", help="this stage and what it needs")
]
ForceOption = Annotated[
    list[str] | None, typer.Option("--force", metavar="STAGE", help="run it again, cached or not")
]
ParallelOption = Annotated[
    int,
    typer.Option("--parallel", "-p", min=1, help="stages at once; more than there are cores slows all down"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="machine-readable output")]
PipelineArgument = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="a recipe file, or a shipped recipe's name")
]
DEFAULT_STORE = "runs"
CORES = os.cpu_count() or 1


def main() -> None:
    """Entry point: a wrong request is one message and exit code 2."""
    try:
        app()
    except (RecipeError, StoreError) as error:
        errors.print(f"[red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


# ------------------------------------------------------------------------------------------------- run and plan


@app.command()
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
    opened = _open(store)
    planned = planning.plan_pipeline(opened, loaded, names)
    if not forced and all(stage.manifest is not None for stage in planned):
        for stage in planned:
            console.print(
                f"{stage.name:<{_width(names)}}  [dim]CACHED[/]    {(stage.key or '')[:12]}", highlight=False
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
    with RunDisplay(console, _width(names)) as display, LocalConnection(display.say) as connection:
        try:
            status = runner.run_pipeline(store, started, connection, display, parallel)
        except KeyboardInterrupt:
            display.say(f"stopped; to continue: {shlex.join(['vitflow', *sys.argv[1:]])}")
            raise typer.Exit(130) from None
        except (LocalRayError, StoreError, ClusterUnreachable, ValueError) as error:
            errors.print(f"[red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
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
            console.print(f"[yellow]note:[/] {_plain(note)}", highlight=False, soft_wrap=True)
    for stage in planned:
        if stage.manifest is not None and stage.manifest.kind == "report":
            _show_report(store, stage.manifest)


@app.command()
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
    opened = _open(store)
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
        _print_json(rows)
        return
    _print_table(rows, ("stage", "job", "state", "key", "why"))
    for row in rows:
        for note in row["notes"] or ():
            console.print(f"[yellow]note:[/] {_plain(note)}", highlight=False, soft_wrap=True)


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


# ------------------------------------------------------------------------------------------------- looking


@app.command()
def status(
    run: Annotated[
        str | None, typer.Argument(help="a run id or its unique beginning; without it, the last run")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show a run: its stages and what became of them."""
    from pipelines.lookup import find_run
    from pipelines.runs import run_status

    opened = _open(store, create=False)
    found = run_status(opened, find_run(opened, run))
    if as_json:
        _print_json(found)
        return
    console.print(f"[bold]{found['run']}[/]  {found['status']}", highlight=False)
    for stage in found["stages"]:
        stage["took"] = _took(stage)
    _print_table(found["stages"], ("stage", "status", "took", "detail"))
    if found["status"] == "UNFINISHED":
        console.print(
            f"its driver is gone; `vitflow run` with the same recipe ({found['pipeline']}) continues it"
        )


@app.command("list")
def list_(
    store: StoreOption = DEFAULT_STORE,
    kind: Annotated[str, typer.Option(help="runs | datasets | models | evaluations | reports")] = "runs",
    as_json: JsonOption = False,
) -> None:
    """List runs, datasets, models, evaluations or reports."""
    from pipelines.runs import run_status, runs
    from pipelines.spec import nearest
    from pipelines.store import all_manifests

    kinds = {"datasets": "dataset", "models": "model", "evaluations": "evaluation", "reports": "report"}
    opened = _open(store, create=False)
    if kind == "runs":
        found = [run_status(opened, run) for run in runs(opened)]
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
        _print_json(rows)
    else:
        _print_table(
            rows,
            ("run", "status", "created") if kind == "runs" else ("key", "stage", "job", "finished", "run"),
        )


@app.command()
def logs(
    run: Annotated[str, typer.Argument(help="a run id or its unique beginning")],
    stage: Annotated[str | None, typer.Argument(help="one stage; without it, all")] = None,
    store: StoreOption = DEFAULT_STORE,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="go on until the stages have ended")] = False,
) -> None:
    """Show what a run's stages said."""
    from pipelines.logs import show_logs
    from pipelines.lookup import find_run

    opened = _open(store, create=False)
    show_logs(opened, find_run(opened, run), stage, follow, lambda text: print(text, flush=True))


@app.command()
def stop(
    run: Annotated[str, typer.Argument(help="a run id or its unique beginning")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Stop a run: nothing that is made gets lost, and running it again goes on from there."""
    from pipelines.local_ray import connect_running
    from pipelines.lookup import find_run
    from pipelines.runs import is_over, stop_run

    opened = _open(store, create=False)
    found = find_run(opened, run)
    if is_over(opened, found):
        console.print(f"{found} has ended already", highlight=False)
        return
    for line in stop_run(opened, found, connect_running):
        console.print(_plain(line), highlight=False)
    console.print(
        f"{found} is to stop; `vitflow run` with the same recipe goes on from there", highlight=False
    )


@app.command()
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    from pipelines.spec import Pipeline

    _print_json(Pipeline.model_json_schema())


# ------------------------------------------------------------------------------------------------- your own images


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="the recipe to write")],
    images: Annotated[
        Path, typer.Option(help="class folders, train/val/test folders, or a folder with metadata.csv")
    ],
) -> None:
    """Look at a folder of images and write a recipe that trains on them."""
    from pipelines.init import write_recipe

    write_recipe(file, images, console)


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="a model's key or its beginning, or RUN/STAGE")],
    images: Annotated[list[Path], typer.Argument(help="image files")],
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Classify images with a model of the store: the five likeliest classes of each."""
    from pipelines.lookup import find_artifact

    opened = _open(store, create=False)
    manifest = find_artifact(opened, model, "model")
    missing = [str(path) for path in images if not path.is_file()]
    if missing:
        raise RecipeError(f"no such file: {', '.join(missing)}")
    from vit_model.predict import classify

    try:
        rows = classify(opened.local(manifest.folder), images)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    if as_json:
        _print_json(rows)
        return
    for row in rows:
        console.print(f"[bold]{_plain(row['image'])}[/]", highlight=False)
        for top in row["top"]:
            console.print(f"  {top['probability']:7.2%}  {_plain(top['class'])}", highlight=False)


# ------------------------------------------------------------------------------------------------- reports


@report_app.command("list")
def report_list(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """List the reports of this store."""
    from pipelines.store import all_manifests

    opened = _open(store, create=False)
    rows = [
        {
            "key": manifest.key[:12],
            "run": manifest.run,
            "finished": manifest.finished[:19],
            "title": manifest.config["title"],
            "page": str(opened.local(manifest.folder) / "report.html"),
        }
        for manifest in all_manifests(opened)
        if manifest.kind == "report"
    ]
    if as_json:
        _print_json(rows)
    else:
        _print_table(rows, ("key", "run", "finished", "title", "page"))


@report_app.command("show")
def report_show(
    report: Annotated[
        str | None, typer.Argument(help="a report's key or RUN; without it, the newest")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Print a report's verdict and its table of accuracies."""
    from pipelines.lookup import find_artifact

    opened = _open(store, create=False)
    manifest = find_artifact(opened, report, "report")
    if as_json:
        _print_json(json.loads(opened.local(f"{manifest.folder}/report.json").read_text()))
    else:
        _show_report(opened, manifest)


def _show_report(store: Store, manifest: Manifest) -> None:
    from pipelines.reports import accuracy_table, verdict_lines

    folder = store.local(manifest.folder)
    report = json.loads((folder / "report.json").read_text())
    console.print(accuracy_table(report))
    for line in verdict_lines(report):
        console.print(_plain(line), highlight=False)
    console.print(f"report: [bold]{_plain(str(folder / 'report.html'))}[/]", highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------------- helpers


def _open(uri: str, *, create: bool = True) -> Store:
    from pipelines.store import open_store

    return open_store(uri, create=create)


def _took(stage: dict[str, Any]) -> str:
    from datetime import datetime

    if "started" not in stage:
        return ""
    seconds = datetime.fromisoformat(stage["changed"]) - datetime.fromisoformat(stage["started"])
    return f"{seconds.total_seconds():.1f} s"


def _width(names: tuple[str, ...]) -> int:
    return max(len(name) for name in names)


def _plain(text: str) -> str:
    """Text from outside, shown as it is."""
    from rich.markup import escape

    return escape(text)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def _print_table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_plain(_cell(column, row.get(column))) for column in columns))
    console.print(table)


def _cell(column: str, value: Any) -> str:
    text = "" if value is None else str(value)
    return text[:12] if column == "key" else text
