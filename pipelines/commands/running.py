"""The commands run, submit, plan and stop, and the hidden `drive` of a submitted run."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from pipelines.cluster.jobs_client import Cluster, ClusterUnreachable, connect
from pipelines.commands.common import (
    DEFAULT_STORE,
    AddressOption,
    Commands,
    ForceOption,
    JsonOption,
    NamedRun,
    OnlyOption,
    PipelineArgument,
    SetOption,
    StoreOption,
    TokenOption,
    console,
    errors,
    named_run,
    open_,
    plain,
    print_json,
    print_table,
    say,
    with_options,
)
from pipelines.commands.ending import best_lines, next_commands, promotion_lines, time_line
from pipelines.commands.queries import show_report
from pipelines.engine import plan as planning
from pipelines.engine import runs, submission
from pipelines.engine.durations import in_hours, last_seconds, longest
from pipelines.engine.history import is_over
from pipelines.engine.plan import PlannedStage
from pipelines.engine.promotion import is_unsettled
from pipelines.engine.runs import Run
from pipelines.engine.status import Status, run_outcome
from pipelines.engine.submission import Connection
from pipelines.machine.budget import estimate_unmeasured
from pipelines.recipe.load import load_pipeline
from pipelines.recipe.pipeline import Pipeline, base, members, pin
from pipelines.scratch import scratch_folder
from pipelines.spec import RecipeError
from pipelines.store import (
    Store,
    StoreAbsent,
    StoreDamaged,
    StoreError,
    add_event,
    wait_for_store,
)
from pipelines.terminal import ends_once
from vit_model.errors import UserError

ParallelOption = Annotated[
    int | None,
    typer.Option("--parallel", "-p", min=1, help="stages to run in parallel; default: the number of cores"),
]
StrictCodeOption = Annotated[
    bool,
    typer.Option(
        "--strict-code",
        help="include the code digest in the cache key, so that results of other code are rebuilt",
    ),
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="also print the logs of the stages; `vitflow logs` has them, too"),
]
STOPPED = (
    "the run and its jobs are stopped; finished stages and trials are kept, and trainings up to their last checkpoint."
    " To continue: "
)
NOT_STOPPED = "interrupted before the run's jobs were stopped; to stop them: vitflow stop {}"
CORES = os.cpu_count() or 1


app = Commands()


@dataclass(frozen=True)
class RunOptions:
    """The arguments and options of `run` and `submit`."""

    pipeline: PipelineArgument
    store: StoreOption = DEFAULT_STORE
    address: AddressOption = None
    token_file: TokenOption = None
    only: OnlyOption = None
    force: ForceOption = None
    changes: SetOption = None
    parallel: ParallelOption = None
    strict_code: StrictCodeOption = False


@dataclass(frozen=True)
class WatchedRunOptions(RunOptions):
    """The arguments and options of `run`."""

    verbose: VerboseOption = False


@app.command("run")
@with_options(WatchedRunOptions)
def run(options: WatchedRunOptions) -> None:
    """Run a pipeline and wait for it; finished stages are reused.

    Ctrl-C, SIGTERM or closing the terminal stops the run; the same command continues it. `submit` needs no terminal.
    """
    request = _requested(options.pipeline, options.only, options.force, options.changes, options.strict_code)
    planned = carry_out(
        request, options.store, options.address, options.token_file, options.parallel, verbose=options.verbose
    )
    _print_notes(planned)
    store = open_(options.store)
    for line in promotion_lines(planned):
        say(line)
    if not any(stage.config.job == "report" for stage in planned):
        for line in wait_for_store(lambda: list(best_lines(store, planned)), say):
            say(line)
    if commands := list(next_commands(store, request.pipeline, planned)):
        say("next:")
    for command in commands:
        say(f"  {command}")


class Request(NamedTuple):
    """The stages of a pipeline to make, and which of them to rerun though they are cached."""

    pipeline: Pipeline
    targets: tuple[str, ...]
    forced: tuple[str, ...] = ()
    strict_code: bool = False

    def plan(self, store: Store) -> list[PlannedStage]:
        """Plan the targets and the stages that they need."""
        names = self.pipeline.needed_for(self.targets)
        latest = runs.latest_models(store, self.pipeline, self.targets, self.forced, self.strict_code)
        return planning.plan_pipeline(store, self.pipeline, names, self.strict_code, self.forced, latest)

    def start(self, store: Store) -> Run:
        """Start the run, or continue it."""
        return runs.start_run(store, self.pipeline, self.targets, self.forced, strict_code=self.strict_code)


def _requested(
    pipeline: str, only: list[str] | None, force: list[str] | None, changes: list[str] | None, strict_code: bool
) -> Request:
    """Return what the arguments of a command request."""
    loaded = load_pipeline(pipeline, tuple(changes or ()))
    targets = tuple(only or loaded.stages)
    names = loaded.needed_for(targets)
    try:
        jobs = {name: loaded.stages[name].job for name in names}
        forced = dict.fromkeys(name for stage in force or () for name in members(stage, jobs))
    except RecipeError as error:
        raise RecipeError(f"--force: {error}") from None
    return Request(pin(loaded, names), targets, tuple(forced), strict_code)


def carry_out(
    request: Request,
    store: str,
    address: str | None,
    token_file: Path | None,
    parallel: int | None = None,
    verbose: bool = False,
) -> list[PlannedStage]:
    """Make what is requested, and print the outcome.

    Returns:
        The stages with their manifests. If a stage could not be built, the command exits instead.
    """
    with _planning_store(store, address) as current:
        planned = request.plan(current)
        if _is_complete(current, planned, request.forced):
            return planned
    connection = _connection(submission.reach(address, token_file) if address is not None else None)
    opened = open_(store)
    started = request.start(opened)
    wait_for_store(lambda: add_event(opened, started.id, "driver", **runs.driver_process()), say)
    console.print(f"{'continuing' if started.continued else 'run'} [bold]{started.id}[/]")
    again = shlex.join(["vitflow", *sys.argv[1:]])
    with ends_once():
        return _drive(opened, started, connection, parallel, again, verbose)


@app.command("submit")
@with_options(RunOptions)
def submit(options: RunOptions) -> None:
    """Submit a pipeline to a Ray cluster, or to the local Ray, and return immediately."""
    request = _requested(options.pipeline, options.only, options.force, options.changes, options.strict_code)
    address, token_file = options.address, options.token_file
    with _planning_store(options.store, address) as current:
        if _is_complete(current, request.plan(current), request.forced):
            return
    if address is not None:
        submission.reach(address, token_file)  # fail before anything is written if the cluster refuses us
    opened = open_(options.store)
    with translate_errors(), submission.target(address, token_file) as (cluster, ray_folder):
        started = request.start(opened)
        submission.submit_driver(opened, started, cluster, options.parallel, ray_folder)
    console.print(f"submitted [bold]{started.id}[/]")
    again = ["--store", opened.uri, *(["--address", address] if address else [])]
    again += ["--token-file", str(token_file)] if address and token_file else []
    for command in (f"status {started.id}", f"logs {started.id} -f", f"stop {started.id}"):
        console.print(f"  vitflow {command} {shlex.join(again)}", soft_wrap=True)


@app.command("drive", hidden=True)
def drive(
    run: Annotated[str, typer.Argument()],
    store: StoreOption = DEFAULT_STORE,
    parallel: ParallelOption = None,
    local_ray: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Drive a submitted run, as a job of the cluster that runs it (`submit` starts this)."""
    opened = wait_for_store(lambda: open_(store, create=False), say)
    started = wait_for_store(lambda: runs.load_run(opened, run), say)
    # an earlier driver may have finished the run before this one was submitted
    if wait_for_store(lambda: is_over(opened, run), say):
        console.print(f"{run} has already ended")
        return
    connecting = _connection(connect() if local_ray is None else None, local_ray)
    _drive(opened, started, connecting, parallel, f"vitflow submit {started.pipeline.name} ...")


def _drive(
    store: Store,
    run: Run,
    connecting: AbstractContextManager[Connection],
    parallel: int | None,
    again: str,
    verbose: bool = False,
) -> list[PlannedStage]:
    """Drive a run to its end and print how it ended; `again` is the command that continues it.

    Returns:
        Its stages with their manifests.

    Raises:
        Exit: with 1 if a stage has no manifest, with 130 after Ctrl-C.
    """
    began = time.monotonic()
    from pipelines.engine.display import RunDisplay
    from pipelines.engine.driver import Driver

    names = run.pipeline.needed_for(run.targets)
    with translate_errors():
        with RunDisplay(console, max(map(len, names)), verbose) as display, connecting as connection:
            driver = Driver(store, run, connection, display, parallel or CORES)
            try:
                status, committed = driver.walk()
            except KeyboardInterrupt:
                is_stopped = len(driver.status) == len(names)
                display.say(f"{STOPPED}{again}" if is_stopped else NOT_STOPPED.format(run.id))
                raise typer.Exit(130) from None
        _finish(store, committed)
    say(time_line(time.monotonic() - began, display.took))
    outcome = run_outcome(status.values())
    if outcome.succeeded:
        return committed
    if outcome is Status.STOPPED:
        errors.print(plain(f"{STOPPED}{again}"), soft_wrap=True)
    failed = [name for name, state in status.items() if state is Status.FAILED]
    if failed:
        errors.print(
            f"failed: {', '.join(failed)}; `vitflow logs {run.id} {failed[0]}` shows the whole log",
            soft_wrap=True,
        )
    raise typer.Exit(1)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn errors after the start of a run into one message and exit code 1."""
    from pipelines.cluster.local import LocalRayError

    try:
        yield
    except (LocalRayError, StoreError, ClusterUnreachable, UserError) as error:
        if isinstance(error, RecipeError):
            raise
        errors.print(f"[red]error:[/] {plain(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None


@contextmanager
def _planning_store(store: str, address: str | None = None) -> Iterator[Store]:
    """Yield the store to plan with, an empty one if there is none yet; the cluster at `address` must see it, too."""
    if address is not None:
        submission.check_store(store, address)
    with scratch_folder() as empty:
        try:
            opened = open_(store, create=False)
        except StoreAbsent:
            opened = open_(str(empty))
        yield opened


def _connection(cluster: Cluster | None, ray_folder: Path | None = None) -> AbstractContextManager[Connection]:
    """Return the connection to a cluster; without one, to the local Ray in this folder, or in the usual one."""
    if cluster is not None:
        return nullcontext(submission.ClusterConnection(cluster))
    from pipelines.cluster.local import LocalConnection

    return LocalConnection(say, ray_folder)


def _is_complete(store: Store, planned: list[PlannedStage], forced: tuple[str, ...]) -> bool:
    """Return whether all stages are cached; if so, print them first.

    Raises:
        Exit: with 1, if the sources of some members of a matrix cannot be read.
        StoreDamaged: a cached result is damaged, and is not forced.
    """
    damaged = [stage.damaged for stage in planned if stage.damaged is not None and stage.name not in forced]
    if damaged:
        raise StoreDamaged("\n".join(damaged))
    if forced or any(stage.state in {"run", "pending"} or is_unsettled(store, stage) for stage in planned):
        return False
    name_width = max(len(stage.name) for stage in planned)
    labels = {
        "cached": "[dim]CACHED[/]   ",
        "missing": "[red]FAILED[/]   ",
        "skipped": "[yellow]SKIPPED[/]  ",
    }
    for stage in planned:
        detail = plain(stage.lost or (stage.key or "")[:12])
        line = f"{stage.name:<{name_width}}  {labels[stage.state]} {detail}"
        console.print(line, soft_wrap=True)
    _finish(store, planned)
    if missing := [stage.name for stage in planned if stage.state == "missing"]:
        errors.print(f"failed: {', '.join(missing)}", soft_wrap=True)
        raise typer.Exit(1)
    return True


def _finish(store: Store, planned: list[PlannedStage]) -> None:
    """Print the reports of a run."""
    for stage in planned:
        if stage.manifest is not None and stage.manifest.kind == "report":
            # `show_report` reads everything before it prints, so a retry prints nothing twice
            wait_for_store(partial(show_report, store, stage.manifest, is_brief=True), say)


def _print_notes(planned: list[PlannedStage]) -> None:
    for note in planning.notes(planned):
        console.print(f"[yellow]note:[/] {plain(note)}", soft_wrap=True)


@app.command("plan")
def plan(
    pipeline: PipelineArgument,
    store: StoreOption = DEFAULT_STORE,
    only: OnlyOption = None,
    force: ForceOption = None,
    changes: SetOption = None,
    strict_code: StrictCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what `run` would do, and why. Changes nothing.

    `took` is the duration of the last similar result: of this stage, or of a training with the same work.
    Other trainings are estimated at the speed that `init` measured on this machine.
    """
    request = _requested(pipeline, only, force, changes, strict_code)
    with _planning_store(store) as current:
        planned = list(planning.rerun(request.plan(current), request.forced))
        to_make = [stage for stage in planned if stage.state in {"run", "pending"}]
        previous = planning.previous_results(current, request.pipeline.name, planned)
        why = planning.reasons(planned, previous, request.forced)
        seconds = last_seconds(previous, to_make)
    rows = [
        {
            "stage": stage.name,
            "job": stage.config.job,
            "state": stage.state,
            "took": in_hours(seconds[stage.name]) if stage.name in seconds else None,
            "seconds": seconds.get(stage.name),
            "key": stage.key,
            "why": why[stage.name],
            "notes": list(planning.notes([stage])),
        }
        for stage in planned
    ]
    if as_json:
        print_json(rows)
        return
    print_table(rows, ("stage", "job", "state", *(["took"] if seconds else []), "key", "why"))
    if seconds:
        say(f"longest the last time: {longest(seconds)}")
    if unmeasured := [stage.name for stage in to_make if stage.name not in seconds]:
        counts = Counter(map(base, unmeasured))
        named = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())
        say(f"time not yet measured: {named}")
        if estimated := estimate_unmeasured({name: request.pipeline.stages[name] for name in unmeasured}):
            say(estimated)
    _print_notes(planned)


@app.command("stop")
def stop(
    run: NamedRun,
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Stop a run. Finished stages are kept, and running it again continues it."""
    opened = open_(store, create=False)
    run_id = named_run(opened, run)
    if is_over(opened, run_id):
        console.print(f"{run_id} has already ended")
        return
    for line in runs.stop_run(opened, run_id, submission.reached(address, token_file)):
        console.print(plain(line))
    console.print(f"stopped {run_id}; `vitflow run` with the same recipe continues it")
