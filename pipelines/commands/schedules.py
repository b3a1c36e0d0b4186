"""The commands schedule add, list, show, diff, pause, resume, remove, serve and tick: recurring runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

import typer

from pipelines.cluster.jobs_client import ClusterUnreachable
from pipelines.cluster.local import LocalRayError
from pipelines.commands.common import (
    DEFAULT_STORE,
    AddressOption,
    Commands,
    JsonOption,
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
    say,
    with_options,
)
from pipelines.engine.plan import changed_fields
from pipelines.engine.submission import check_address, check_store
from pipelines.environment import environment
from pipelines.recipe.load import load_pipeline
from pipelines.recipe.pipeline import Pipeline, pin
from pipelines.schedules.cron import check_cron, check_timezone
from pipelines.schedules.due import attend, last_outcome
from pipelines.schedules.notices import receiver
from pipelines.schedules.schedule import (
    Reach,
    Schedule,
    add_schedule,
    all_schedules,
    check_name,
    find_schedule,
    set_state,
)
from pipelines.schedules.serve import serve
from pipelines.schedules.ticks import End, Position, Tick, history, read_end, refresh
from pipelines.store import StoreError
from pipelines.terminal import write
from vit_model.errors import UserError

app = Commands(
    name="schedule",
    help="Schedule recurring runs. A run whose data and settings have not changed reuses all results.",
)
SHOWN = 10  # ticks
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="the name of a schedule")]


@dataclass(frozen=True)
class AddOptions:
    """The arguments and options of `schedule add`."""

    name: NameArgument
    pipeline: PipelineArgument
    cron: Annotated[str, typer.Option("--cron", help="minute hour day-of-month month day-of-week")]
    timezone: Annotated[str, typer.Option("--timezone", help="a time zone, such as Europe/Berlin")] = "UTC"
    store: StoreOption = DEFAULT_STORE
    address: AddressOption = None
    changes: SetOption = None
    parallel: Annotated[int | None, typer.Option("--parallel", "-p", min=1, help="stages to run in parallel")] = None
    overlap: Annotated[
        Literal["skip", "queue"],
        typer.Option("--overlap", help="while the previous run has not ended: skip a tick, or run the last one then"),
    ] = "skip"
    catch_up: Annotated[
        Literal["none", "latest"],
        typer.Option("--catch-up", help="of the ticks that no server served: run none, or the last one"),
    ] = "none"


@app.command("add")
@with_options(AddOptions)
def schedule_add(options: AddOptions) -> None:
    """Create or update a schedule. `schedule serve` runs it."""
    if options.address is not None:
        check_address(options.address)
        check_store(options.store, options.address)
    wanted = Schedule(
        name=check_name(options.name),
        pipeline=_pinned(options.pipeline, tuple(options.changes or ())),
        recipe=options.pipeline,
        changes=tuple(options.changes or ()),
        cron=check_cron(options.cron),
        timezone=check_timezone(options.timezone),
        address=options.address and options.address.rstrip("/"),
        parallel=options.parallel,
        overlap=options.overlap,
        catch_up=options.catch_up,
    )
    opened = open_(options.store)
    outcome = add_schedule(opened, wanted)
    console.print(f"{outcome} [bold]{wanted.name}[/]; next {_next_time(wanted)}")
    if outcome != "unchanged":
        say(f"  vitflow schedule serve --store {opened.uri}")


def _pinned(recipe: str, changes: tuple[str, ...]) -> Pipeline:
    """Return the pipeline of a recipe as a schedule keeps it."""
    loaded = load_pipeline(recipe, changes)
    return pin(loaded, loaded.stages)


@app.command("list")
def schedule_list(
    store: StoreOption = DEFAULT_STORE, token_file: TokenOption = None, as_json: JsonOption = False
) -> None:
    """List the schedules, when each is due next, and the status of its last run."""
    opened = open_(store, create=False)
    rows: list[dict[str, Any]] = []
    for schedule in all_schedules(opened):
        refresh(opened, schedule.name, position := Position())
        run, status = last_outcome(opened, schedule, Reach(token_file), position) or (None, None)
        rows.append(
            {
                "name": schedule.name,
                "cron": schedule.cron,
                "timezone": schedule.timezone,
                "state": schedule.state,
                "pipeline": schedule.pipeline.name,
                "address": schedule.address,
                "next": _next_due(schedule),
                "last run": run,
                "status": status,
            }
        )
    if as_json:
        print_json(rows)
        return
    for row in rows:
        row["next"] = row["next"] and f"{datetime.fromisoformat(row['next']):%Y-%m-%d %H:%M} UTC"
    print_table(rows, ("name", "cron", "timezone", "state", "next", "last run", "status"))


@app.command("show")
def schedule_show(
    name: NameArgument,
    store: StoreOption = DEFAULT_STORE,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show when a schedule is due next, and what became of its last ten ticks."""
    opened = open_(store, create=False)
    schedule = find_schedule(opened, name)
    refresh(opened, name, position := Position())
    if position.last is not None:
        position.end = read_end(opened, name, position.last.number)
    outcome = last_outcome(opened, schedule, Reach(token_file), position)
    ticks = [
        _row(tick, end, outcome[1] if outcome is not None and tick == position.last else None)
        for tick, end in history(opened, name, position, SHOWN)
    ]
    settings = schedule.model_dump(mode="json", exclude={"pipeline", "changes", "nonce", "who", "time"})
    record: dict[str, Any] = settings | {
        "pipeline": schedule.pipeline.name,
        "next": _next_due(schedule),
        "failures_in_a_row": position.failures,
        "skips_in_a_row": position.skips,
        "recipe_file": _compared(schedule),
        "ticks": ticks,
    }
    if as_json:
        print_json(record)
        return
    for field, value in record.items():
        if field not in {"name", "next", "ticks"} and value is not None:
            say(f"{field.replace('_', ' ')}: {value}")
    say(f"next: {_next_time(schedule) if schedule.state == 'active' else 'none, it is paused'}")
    for row in ticks:
        row["tick"] = f"{datetime.fromisoformat(row['tick']):%Y-%m-%d %H:%M} UTC"
    print_table(ticks, ("tick", "decision", "status", "run", "why"))


@app.command("diff")
def schedule_diff(name: NameArgument, store: StoreOption = DEFAULT_STORE) -> None:
    """Show in which fields the recipe's file differs from the pipeline that a schedule pinned when it was added."""
    schedule = find_schedule(open_(store, create=False), name)
    lines = _differences(schedule)
    for line in lines:
        say(line)
    if lines:
        say(f"the runs use what is pinned; `vitflow schedule add {name} ...` again pins the file")
    else:
        say(f"{schedule.recipe} is as {name} pinned it")


@app.command("pause")
def schedule_pause(name: NameArgument, store: StoreOption = DEFAULT_STORE) -> None:
    """Pause a schedule: it starts no runs, and does not restart the driver of one."""
    changed = set_state(open_(store, create=False), name, "paused")
    console.print(f"paused {name}" if changed else f"{name} was already paused")


@app.command("resume")
def schedule_resume(name: NameArgument, store: StoreOption = DEFAULT_STORE) -> None:
    """Resume a paused schedule. Runs that were due in the meantime are skipped."""
    opened = open_(store, create=False)
    changed = set_state(opened, name, "active")
    outcome = f"resumed {name}" if changed else f"{name} was not paused"
    console.print(f"{outcome}; next {_next_time(find_schedule(opened, name))}")


@app.command("remove")
def schedule_remove(name: NameArgument, store: StoreOption = DEFAULT_STORE) -> None:
    """Remove a schedule. Its runs and their results stay."""
    set_state(open_(store, create=False), name, "removed")
    console.print(f"removed {name}")


@app.command("serve")
def schedule_serve(store: StoreOption = DEFAULT_STORE, token_file: TokenOption = None) -> None:
    """Start the runs of a store's schedules when they are due, until SIGTERM or Ctrl-C. Started runs continue.

    You can kill it, move it to another machine, or run it twice: a tick never fires twice.
    """
    serve(open_(store), Reach(token_file, receiver()), _say)


@app.command("tick")
def schedule_tick(name: NameArgument, store: StoreOption = DEFAULT_STORE, token_file: TokenOption = None) -> None:
    """Start the run of a schedule's last tick if it has not been started; for timers (systemd, cron, Kubernetes)."""
    opened = open_(store, create=False)
    if (schedule := find_schedule(opened, name)).state == "paused":
        _say(f"{name}: is paused")
        return
    try:
        acted = False
        for line in attend(opened, schedule, environment().utc(), Reach(token_file, receiver()), None):
            _say(f"{name}: {line}")
            acted = True
    except (StoreError, ClusterUnreachable, LocalRayError, UserError) as error:
        errors.print(f"[red]error:[/] {plain(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
    if not acted:
        _say(f"{name}: nothing is due; next {_next_time(schedule)}")


def _row(tick: Tick, end: End | None, status: str | None) -> dict[str, Any]:
    """Return a tick for `schedule show`; `status`: of its run, if its end is not recorded."""
    starts = tick.decision == "run"
    return {
        "tick": tick.tick,
        "decision": tick.decision,
        "run": tick.run if starts else None,
        "status": (status if end is None else end.status) if starts else None,
        "why": "; ".join(filter(None, [tick.why, "" if end is None else end.why])),
    }


def _differences(schedule: Schedule) -> list[str]:
    """Return a line for each field in which the recipe's file differs from what is pinned.

    Raises:
        RecipeError: the file cannot be read here, or is not valid.
    """
    pinned, file = (
        each.model_dump(mode="json") for each in (schedule.pipeline, _pinned(schedule.recipe, schedule.changes))
    )
    before, after = pinned.pop("stages"), file.pop("stages")
    return [
        *changed_fields(pinned, file),
        *(f"stage {name}: only in what is pinned" for name in before if name not in after),
        *(f"stage {name}: only in the file" for name in after if name not in before),
        *changed_fields(before, {name: stage for name, stage in after.items() if name in before}, "stages."),
    ]


def _compared(schedule: Schedule) -> str:
    """Say whether the recipe's file differs from what is pinned."""
    try:
        lines = _differences(schedule)
    except (UserError, StoreError) as error:
        return f"cannot be compared with the pinned one: {error}"
    return f"differs from the pinned one (`vitflow schedule diff {schedule.name}`)" if lines else "as pinned"


def _next_due(schedule: Schedule) -> str | None:
    """Return when an active schedule is due next."""
    return next(schedule.next_ticks(environment().utc())).isoformat() if schedule.state == "active" else None


def _next_time(schedule: Schedule) -> str:
    """Return when a schedule is due next, in its own time zone."""
    following = next(schedule.next_ticks(environment().utc()))
    return f"{following.astimezone(ZoneInfo(schedule.timezone)):%a %Y-%m-%d %H:%M %Z}"


def _say(line: str) -> None:
    write(f"{environment().utc():%Y-%m-%d %H:%M:%S}Z {line}", flush=True)
