"""run, submit, plan, stop: what makes things, and what ends it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cluster.jobs_client import ClusterUnreachable, connect
from pipelines.commands.common import (
    DEFAULT_STORE,
    AddressOption,
    Commands,
    ForceOption,
    JsonOption,
    OnlyOption,
    PipelineArgument,
    SetOption,
    StoreOption,
    TokenOption,
    console,
    errors,
    open_,
    plain,
    print_json,
    print_table,
    width,
)
from pipelines.commands.queries import show_report
from pipelines.engine import plan as planning
from pipelines.engine import runs, submission
from pipelines.engine.plan import PlannedStage, pin
from pipelines.engine.runs import Run, is_over, stop_run
from pipelines.engine.status import Status, run_outcome
from pipelines.engine.submission import ClusterConnection, check_store, reach, reached
from pipelines.recipe.load import load_pipeline
from pipelines.recipe.pipeline import Pipeline, members
from pipelines.results.lookup import find_run
from pipelines.spec import RecipeError
from pipelines.store import Store, StoreAbsent, StoreDamaged, StoreError, add_event, wait_for_store
from vit_model.errors import UserError

if TYPE_CHECKING:
    from pipelines.engine.driver import Connection

ParallelOption = Annotated[
    int | None,
    typer.Option("--parallel", "-p", min=1, help="stages at once; more than there are cores slows all down"),
]
StrictCodeOption = Annotated[
    bool, typer.Option("--strict-code", help="what was made by other code is made again: code is in the key")
]
CORES = os.cpu_count() or 1


app = Commands()


@app.command("run")
def run(
    pipeline: PipelineArgument,
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
    only: OnlyOption = None,
    force: ForceOption = None,
    changes: SetOption = None,
    parallel: ParallelOption = None,
    strict_code: StrictCodeOption = False,
) -> None:
    """Run a pipeline from here; what is already made is not made again."""
    loaded, _, forced = _requested(pipeline, only, force, changes)
    targets = tuple(only or ()) or tuple(loaded.stages)
    carry_out(loaded, targets, store, address, token_file, forced, parallel, strict_code)


def carry_out(
    pipeline: Pipeline,
    targets: tuple[str, ...],
    store: str,
    address: str | None,
    token_file: Path | None,
    forced: tuple[str, ...] = (),
    parallel: int | None = None,
    strict_code: bool = False,
) -> list[PlannedStage]:
    """Run the targets of a pipeline and the stages that they need from here, and print the outcome.

    Returns:
        The stages with their manifests. Where one could not be made, the command ends instead.
    """
    with _seen(store, address) as seen:
        planned = planning.plan_pipeline(seen, pipeline, pipeline.needed_for(targets), strict_code)
        if _nothing_to_do(seen, planned, forced):
            return planned
    connection = _connection(address, token_file)
    opened = open_(store)
    started = runs.start_run(opened, pipeline, targets, forced, strict_code=strict_code)
    wait_for_store(lambda: add_event(opened, started.id, "driver", **runs.driver_process()), _say)
    console.print(f"{'continuing' if started.continued else 'run'} [bold]{started.id}[/]", highlight=False)
    return _drive(opened, started, connection, parallel, shlex.join(["vitflow", *sys.argv[1:]]))


@app.command("submit")
def submit(
    pipeline: PipelineArgument,
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
    only: OnlyOption = None,
    force: ForceOption = None,
    changes: SetOption = None,
    parallel: ParallelOption = None,
    strict_code: StrictCodeOption = False,
) -> None:
    """Hand a pipeline to a cluster, or to the local Ray, and return: its driver runs there too."""
    loaded, names, forced = _requested(pipeline, only, force, changes)
    with _seen(store, address) as seen:
        planned = planning.plan_pipeline(seen, loaded, names, strict_code)
        if _nothing_to_do(seen, planned, forced):
            return
    if address is not None:
        submission.reach(address, token_file)  # a cluster that refuses is told before anything is written
    opened = open_(store)
    with translate_errors(), submission.target(address, token_file) as (cluster, ray_folder):
        targets = tuple(only or ()) or tuple(loaded.stages)
        started = runs.start_run(opened, loaded, targets, forced, strict_code=strict_code)
        submission.submit_driver(opened, started, cluster, parallel, ray_folder)
    console.print(f"submitted [bold]{started.id}[/]", highlight=False)
    where = ["--store", opened.uri, *(["--address", address] if address else [])]
    where += ["--token-file", str(token_file)] if address and token_file else []
    for verb in (f"status {started.id}", f"logs {started.id} -f", f"stop {started.id}"):
        console.print(f"  vitflow {verb} {shlex.join(where)}", highlight=False, soft_wrap=True)


@app.command("drive", hidden=True)
def drive(
    run: Annotated[str, typer.Argument()],
    store: StoreOption = DEFAULT_STORE,
    parallel: ParallelOption = None,
    local_ray: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Drive a submitted run, as a job of the cluster that runs it (`submit` starts this)."""
    from pipelines.cluster.local import LocalConnection

    opened = wait_for_store(lambda: open_(store, create=False), _say)
    started = wait_for_store(lambda: runs.load_run(opened, run), _say)
    # another driver may have been faster than whoever submitted this one
    if wait_for_store(lambda: runs.is_over(opened, run), _say):
        console.print(f"{run} has ended already", highlight=False)
        return
    connecting: AbstractContextManager[Connection] = LocalConnection(_say, local_ray)
    if local_ray is None:
        connecting = nullcontext(submission.ClusterConnection(connect()))
    _drive(opened, started, connecting, parallel, f"vitflow submit {started.pipeline.name} ...")


def _drive(
    store: Store, run: Run, connecting: AbstractContextManager[Connection], parallel: int | None, again: str
) -> list[PlannedStage]:
    """Walk a run to its end and say how it ended; `again` is the command that continues it.

    Returns:
        Its stages with their manifests.

    Raises:
        Exit: with 1 where a stage has none, with 130 after Ctrl-C.
    """
    from pipelines.engine.display import RunDisplay
    from pipelines.engine.driver import Driver

    names = run.pipeline.needed_for(run.targets)
    with translate_errors():
        with RunDisplay(console, width(names)) as display, connecting as connection:
            try:
                status, made = Driver(store, run, connection, display, parallel or CORES).walk()
            except KeyboardInterrupt:
                display.say(f"stopped; to continue: {again}")
                raise typer.Exit(130) from None
        _finish(store, made)
    outcome = run_outcome(status.values())
    if outcome.succeeded:
        return made
    if outcome is Status.STOPPED:
        errors.print(f"stopped; to continue: {plain(again)}", highlight=False, soft_wrap=True)
    failed = [name for name, state in status.items() if state is Status.FAILED]
    if failed:
        errors.print(
            f"failed: {', '.join(failed)}; `vitflow logs {run.id} {failed[0]}` shows all it said",
            highlight=False,
            soft_wrap=True,
        )
    raise typer.Exit(1)


@contextmanager
def translate_errors() -> Iterator[None]:
    """What goes wrong once a run has begun is one message and exit code 1."""
    from pipelines.cluster.local import LocalRayError

    try:
        yield
    except (LocalRayError, StoreError, ClusterUnreachable, UserError) as error:
        if isinstance(error, RecipeError):
            raise
        errors.print(f"[red]error:[/] {plain(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


@contextmanager
def _seen(store: str, address: str | None = None) -> Iterator[Store]:
    """The store as it is now, empty if there is none yet; the cluster at `address` must see it, too."""
    if address is not None:
        check_store(store, address)
    with TemporaryDirectory(prefix="vitflow-") as empty:
        try:
            opened = open_(store, create=False)
        except StoreAbsent:
            opened = open_(empty)
        yield opened


def _connection(address: str | None, token_file: Path | None) -> AbstractContextManager[Connection]:
    if address is not None:
        return nullcontext(ClusterConnection(reach(address, token_file)))
    from pipelines.cluster.local import LocalConnection

    return LocalConnection(_say)


def _say(text: str) -> None:
    console.print(plain(text), highlight=False, soft_wrap=True)


def _nothing_to_do(store: Store, planned: list[PlannedStage], forced: tuple[str, ...]) -> bool:
    """Whether everything is made that can be; then it is shown.

    Raises:
        Exit: with 1, where members of a matrix can't be made.
        StoreDamaged: what is cached is not as it was committed, and is not forced.
    """
    damaged = [stage.damaged for stage in planned if stage.damaged is not None and stage.name not in forced]
    if damaged:
        raise StoreDamaged("\n".join(damaged))
    if forced or any(stage.state in {"run", "pending"} for stage in planned):
        return False
    wide = width(tuple(stage.name for stage in planned))
    ends = {"cached": "[dim]CACHED[/]   ", "missing": "[red]FAILED[/]   ", "skipped": "[yellow]SKIPPED[/]  "}
    for stage in planned:
        detail = plain(stage.lost or (stage.key or "")[:12])
        console.print(f"{stage.name:<{wide}}  {ends[stage.state]} {detail}", highlight=False, soft_wrap=True)
    _finish(store, planned)
    if missing := [stage.name for stage in planned if stage.state == "missing"]:
        errors.print(f"failed: {', '.join(missing)}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)
    return True


def _finish(store: Store, planned: list[PlannedStage]) -> None:
    """The last lines of a run: what to know of cached stages, and the report."""
    for stage in planned:
        for note in planning.notes(stage):
            console.print(f"[yellow]note:[/] {plain(note)}", highlight=False, soft_wrap=True)
    for stage in planned:
        if stage.manifest is not None and stage.manifest.kind == "report":
            # it reads first, then prints: nothing appears twice
            wait_for_store(partial(show_report, store, stage.manifest), _say)


@app.command("plan")
def plan(
    pipeline: PipelineArgument,
    store: StoreOption = DEFAULT_STORE,
    only: OnlyOption = None,
    changes: SetOption = None,
    strict_code: StrictCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what `run` would do, and why; changes nothing."""
    loaded, names, _ = _requested(pipeline, only, None, changes)
    with _seen(store) as seen:
        planned = planning.plan_pipeline(seen, loaded, names, strict_code)
        why = planning.reasons(seen, planned)
    rows = [
        {
            "stage": stage.name,
            "job": stage.config.job,
            "state": stage.state,
            "key": stage.key,
            "why": why[stage.name],
            "notes": list(planning.notes(stage)),
        }
        for stage in planned
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
    loaded = load_pipeline(pipeline, tuple(changes or ()))
    names = loaded.needed_for(tuple(only or ()) or tuple(loaded.stages))
    try:
        forced = dict.fromkeys(name for given in force or () for name in members(given, names))
    except RecipeError as error:
        raise RecipeError(f"--force: in this run {error}") from None
    return pin(loaded, names), names, tuple(forced)


@app.command("stop")
def stop(
    run: Annotated[str, typer.Argument(help="a run id or its unique beginning")],
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Stop a run: nothing that is made gets lost, and running it again goes on from there."""
    opened = open_(store, create=False)
    found = find_run(opened, run)
    if is_over(opened, found):
        console.print(f"{found} has ended already", highlight=False)
        return
    for line in stop_run(opened, found, reached(address, token_file)):
        console.print(plain(line), highlight=False)
    console.print(
        f"{found} is to stop; `vitflow run` with the same recipe goes on from there", highlight=False
    )
