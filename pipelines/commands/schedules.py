"""The commands schedule add, list, pause, resume, remove, serve and tick: recurring runs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any
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
)
from pipelines.engine.submission import check_address, check_store
from pipelines.recipe.load import load_pipeline
from pipelines.recipe.pipeline import pin
from pipelines.schedules.cron import check_cron, check_timezone
from pipelines.schedules.schedule import (
    Reach,
    Schedule,
    add_schedule,
    all_schedules,
    attend,
    check_name,
    find_schedule,
    last_run,
    set_state,
)
from pipelines.schedules.serve import serve
from pipelines.store import StoreError
from pipelines.terminal import write
from vit_model.errors import UserError

app = Commands(
    name="schedule",
    help="Schedule recurring runs. A run whose data and settings have not changed reuses all results.",
)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="the name of a schedule")]


@app.command("add")
def schedule_add(
    name: NameArgument,
    pipeline: PipelineArgument,
    cron: Annotated[str, typer.Option("--cron", help="minute hour day-of-month month day-of-week")],
    timezone: Annotated[str, typer.Option("--timezone", help="a time zone, such as Europe/Berlin")] = "UTC",
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    changes: SetOption = None,
    parallel: Annotated[int | None, typer.Option("--parallel", "-p", min=1, help="stages to run in parallel")] = None,
) -> None:
    """Create or update a schedule. `schedule serve` runs it."""
    if address is not None:
        check_address(address)
        check_store(store, address)
    loaded = load_pipeline(pipeline, tuple(changes or ()))
    wanted = Schedule(
        name=check_name(name),
        pipeline=pin(loaded, loaded.stages),
        recipe=pipeline,
        changes=tuple(changes or ()),
        cron=check_cron(cron),
        timezone=check_timezone(timezone),
        address=address and address.rstrip("/"),
        parallel=parallel,
    )
    opened = open_(store)
    outcome = add_schedule(opened, wanted)
    console.print(f"{outcome} [bold]{name}[/]; next {_next_time(wanted)}")
    if outcome != "unchanged":
        say(f"  vitflow schedule serve --store {opened.uri}")


@app.command("list")
def schedule_list(
    store: StoreOption = DEFAULT_STORE, token_file: TokenOption = None, as_json: JsonOption = False
) -> None:
    """List the schedules, when each is due next, and the status of its last run."""
    opened = open_(store, create=False)
    rows: list[dict[str, Any]] = []
    for schedule in all_schedules(opened):
        run, status = last_run(opened, schedule, Reach(token_file)) or (None, None)
        rows.append(
            {
                "name": schedule.name,
                "cron": schedule.cron,
                "timezone": schedule.timezone,
                "state": schedule.state,
                "pipeline": schedule.pipeline.name,
                "address": schedule.address,
                "next": next(schedule.next_ticks(datetime.now(UTC))).isoformat()
                if schedule.state == "active"
                else None,
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
    serve(open_(store), Reach(token_file), _say)


@app.command("tick")
def schedule_tick(name: NameArgument, store: StoreOption = DEFAULT_STORE, token_file: TokenOption = None) -> None:
    """Start the run of a schedule's last tick if it has not been started; for timers (systemd, cron, Kubernetes)."""
    opened = open_(store, create=False)
    if (schedule := find_schedule(opened, name)).state == "paused":
        _say(f"{name}: is paused")
        return
    try:
        acted = False
        for line in attend(opened, schedule, datetime.now(UTC), Reach(token_file), None):
            _say(f"{name}: {line}")
            acted = True
    except (StoreError, ClusterUnreachable, LocalRayError, UserError) as error:
        errors.print(f"[red]error:[/] {plain(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
    if not acted:
        _say(f"{name}: nothing is due; next {_next_time(schedule)}")


def _next_time(schedule: Schedule) -> str:
    """Return when a schedule is due next, in its own time zone."""
    following = next(schedule.next_ticks(datetime.now(UTC)))
    return f"{following.astimezone(ZoneInfo(schedule.timezone)):%a %Y-%m-%d %H:%M %Z}"


def _say(line: str) -> None:
    write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z {line}", flush=True)
