"""The commands that only read: status, list, lineage, logs, verify, doctor, schema."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipelines.commands.common import (
    ARTIFACT,
    DEFAULT_STORE,
    AddressOption,
    Commands,
    JsonOption,
    RunArgument,
    StoreOption,
    TokenOption,
    console,
    named_run,
    open_,
    plain,
    print_json,
    print_rows,
    print_table,
    say,
)
from pipelines.engine.durations import in_hours
from pipelines.engine.logs import show_logs
from pipelines.engine.runs import driver_log, run_status
from pipelines.engine.status import Status
from pipelines.engine.submission import reached
from pipelines.engine.trainings import Trainings
from pipelines.recipe import load
from pipelines.results import lineage as tracing
from pipelines.results.listing import COLUMNS, list_kind
from pipelines.results.verify import verify as verify_store
from pipelines.spec import RecipeError
from pipelines.store import wait_for_store
from pipelines.terminal import write

WATCH_SECONDS = 2.0  # between two refreshes
app = Commands()


@app.command("status")
def status(
    run: RunArgument = None,
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="refresh until the run has ended")] = False,
) -> None:
    """Show the stages of a run, their status, and the progress of trainings."""
    if as_json and watch:
        raise RecipeError("--json and --watch cannot be combined; use one of them")
    opened = open_(store, create=False)
    clusters, run_id = reached(address, token_file), named_run(opened, run)
    trainings = Trainings(opened, run_id)

    def look() -> dict[str, Any]:
        shown = run_status(opened, run_id, clusters)
        trainings.add_progress(shown)
        return shown

    shown = _watch(look) if watch else look()
    if as_json:
        print_json(shown)
        return
    _show_status(shown)
    if shown["status"] == Status.UNFINISHED:
        say(
            f"its driver is gone; `vitflow run` or `vitflow submit` of {shown['pipeline']} continues this run, and "
            f"`vitflow stop {shown['run']}` stops stages that are still running"
        )
        for line in driver_log(opened, shown["run"], clusters).strip().splitlines()[-3:]:
            console.print(f"[dim]driver[/]  {plain(line)}", soft_wrap=True)


def _show_status(shown: dict[str, Any]) -> None:
    console.print(f"[bold]{shown['run']}[/]  {shown['status']}")
    for stage in shown["stages"]:
        stage["took"] = _took(stage, datetime.now(UTC))
    print_table(shown["stages"], ("stage", "status", "took", "detail"))


def _watch(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Show a run's status until the run has ended; return the last status.

    On a terminal it is refreshed in place, otherwise each change of a stage is a line.
    """
    lines: dict[str, str] = {}

    def say_changes(shown: dict[str, Any]) -> None:
        for stage in shown["stages"]:
            text = f"{stage['stage']}  {stage['status']}  {stage.get('detail') or ''}".rstrip()
            if lines.get(stage["stage"]) != text:
                lines[stage["stage"]] = text
                say(text)

    def refresh(shown: dict[str, Any]) -> None:
        with console.capture() as capture:
            _show_status(shown)
        live.update(Text.from_ansi(capture.get()), refresh=True)

    with Live(console=console, auto_refresh=False, transient=True) as live:
        while (shown := wait_for_store(look, say))["status"] == Status.RUNNING:
            refresh(shown) if console.is_terminal else say_changes(shown)
            time.sleep(WATCH_SECONDS)
    return shown


@app.command("list")
def list_(
    store: StoreOption = DEFAULT_STORE,
    kind: Annotated[str, typer.Option(help=" | ".join(COLUMNS))] = "runs",
    as_json: JsonOption = False,
) -> None:
    """List runs, checkpoints, or results of one kind."""
    rows = list_kind(open_(store, create=False), kind)
    print_rows(rows, COLUMNS[kind], as_json)


@app.command("lineage")
def lineage(
    selector: Annotated[str, typer.Argument(metavar="KEY|RUN", help=ARTIFACT)],
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show what an artifact was made from, back to the fingerprint of the source files."""
    traced = tracing.trace(open_(store, create=False), selector)
    if as_json:
        print_json(tracing.as_json(traced))
    else:
        write("\n".join(tracing.as_text(traced)))


@app.command("logs")
def logs(
    run: RunArgument = None,
    stage: Annotated[str | None, typer.Argument(help="one stage; default: all")] = None,
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="print new lines until the stages end")] = False,
) -> None:
    """Show the logs of a run."""
    opened = open_(store, create=False)
    clusters = reached(address, token_file)
    show_logs(opened, named_run(opened, run), stage, follow, clusters, partial(write, flush=True))


@app.command("doctor")
def doctor(
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the store, Ray and this machine; print problems and how to fix them. Exit code 1 if there is a problem."""
    from pipelines.machine.doctor import examine

    findings = examine(store, address, token_file)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        colours = {"ok": "green", "warning": "yellow", "problem": "red"}
        table = Table(box=None, pad_edge=False, show_header=False)
        for finding in findings:
            colour = colours[finding.status]
            table.add_row(f"[{colour}]{finding.status}[/]", plain(finding.what), plain(finding.text))
            if finding.do:
                table.add_row("", "", f"[bold]→[/] {plain(finding.do)}")
        console.print(table)
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)


@app.command("verify")
def verify(
    selector: Annotated[
        str | None,
        typer.Argument(metavar="KEY|RUN", help=f"{ARTIFACT}; default: everything"),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Compare every file in the store with its manifest. Exit code 1 if a file is damaged or cannot be read."""
    verified = verify_store(open_(store, create=False), selector)
    if as_json:
        print_json(asdict(verified))
    else:
        for damage in verified.damage:
            console.print(f"[red]damaged[/]  {plain(damage.what)}", soft_wrap=True)
            if damage.artifact is not None:
                made = f"{damage.artifact[:12]}{f' of stage {damage.stage}' if damage.stage else ''}"
                console.print(f"         artifact {plain(made)}", soft_wrap=True)
            console.print(f"         [bold]→[/] {plain(damage.do)}", soft_wrap=True)
        for label, objects in (("not read", verified.unread), ("not checked", verified.unchecked)):
            for unread in objects:
                line = f"[yellow]{label}[/]  {plain(unread.name)}: {plain(unread.why)}"
                console.print(line, soft_wrap=True)
        counts = {"damaged": len(verified.damage), "not read": len(verified.unread)}
        problems = ", ".join(f"{count:,} {label}" for label, count in counts.items() if count)
        console.print(
            f"{verified.artifacts:,} artifacts, {verified.files:,} files, {verified.bytes / 1e6:,.1f} MB: "
            f"{problems or 'nothing is damaged'}"
        )
    if verified.damage or verified.unread:
        raise typer.Exit(1)


@app.command("schema")
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    print_json(load.schema())


def _took(stage: dict[str, Any], moment: datetime) -> str:
    """Return how long a stage took or has been running, as text."""
    if "started" not in stage:
        return ""
    if stage["status"] == Status.RUNNING:
        age = (moment - datetime.fromisoformat(stage["started"])).total_seconds()
        return f"for {in_hours(max(0, age))}"
    seconds = datetime.fromisoformat(stage["changed"]) - datetime.fromisoformat(stage["started"])
    return in_hours(seconds.total_seconds())
