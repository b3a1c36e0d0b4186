"""status, list, lineage, logs, verify, doctor, schema: commands that only read."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table

from pipelines.commands.common import (
    DEFAULT_STORE,
    AddressOption,
    Commands,
    JsonOption,
    StoreOption,
    TokenOption,
    console,
    open_,
    plain,
    print_json,
    print_table,
)
from pipelines.engine.logs import show_logs
from pipelines.engine.runs import driver_log, run_status
from pipelines.engine.status import Status
from pipelines.engine.submission import reached
from pipelines.recipe import load
from pipelines.results import lineage as tracing
from pipelines.results.listing import COLUMNS, list_kind
from pipelines.results.lookup import find_run
from pipelines.results.verify import verify as verify_store
from pipelines.spec import RecipeError
from pipelines.terminal import write

app = Commands()


@app.command("status")
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
    opened = open_(store, create=False)
    clusters = reached(address, token_file)
    found = run_status(opened, find_run(opened, run), clusters)
    if as_json:
        print_json(found)
        return
    console.print(f"[bold]{found['run']}[/]  {found['status']}", highlight=False)
    for stage in found["stages"]:
        stage["took"] = _took(stage, datetime.now(UTC))
    print_table(found["stages"], ("stage", "status", "took", "detail"))
    if found["status"] == Status.UNFINISHED:
        console.print(
            f"its driver is gone; the same command (`vitflow run` or `submit` of {found['pipeline']}) continues it"
        )
        for line in driver_log(opened, found["run"], clusters).strip().splitlines()[-3:]:
            console.print(f"[dim]driver[/]  {plain(line)}", highlight=False, soft_wrap=True)


@app.command("list")
def list_(
    store: StoreOption = DEFAULT_STORE,
    kind: Annotated[str, typer.Option(help="runs | datasets | models | evaluations | reports")] = "runs",
    as_json: JsonOption = False,
) -> None:
    """List runs, datasets, models, evaluations or reports."""
    rows = list_kind(open_(store, create=False), kind)
    if as_json:
        print_json(rows)
    else:
        print_table(rows, COLUMNS[kind])


@app.command("lineage")
def lineage(
    given: Annotated[
        str, typer.Argument(metavar="KEY|RUN", help="a key or its beginning, a RUN/STAGE, or a run")
    ],
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    as_dot: Annotated[bool, typer.Option("--dot", help="for Graphviz: | dot -Tsvg > lineage.svg")] = False,
) -> None:
    """Show what an artifact was made of, back to the source files' fingerprint."""
    if as_json and as_dot:
        raise RecipeError("--json and --dot: one of them")
    found = tracing.trace(open_(store, create=False), given)
    if as_json:
        print_json(tracing.as_json(found))
        return
    for line in tracing.as_dot(found) if as_dot else tracing.as_text(found):
        write(line)


@app.command("logs")
def logs(
    run: Annotated[str, typer.Argument(help="a run id or its unique beginning")],
    stage: Annotated[str | None, typer.Argument(help="one stage; without it, all")] = None,
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="go on until the stages have ended")] = False,
) -> None:
    """Show what a run's stages said."""
    opened = open_(store, create=False)
    clusters = reached(address, token_file)
    show_logs(opened, find_run(opened, run), stage, follow, clusters, partial(write, flush=True))


@app.command("doctor")
def doctor(
    store: StoreOption = DEFAULT_STORE,
    address: AddressOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Examine the store, Ray and this machine: what is wrong, and what to do. Exit code 1 where there is a problem."""
    from pipelines.machine.doctor import examine

    findings = examine(store, address, token_file)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        colours = {"ok": "green", "warning": "yellow", "problem": "red"}
        table = Table(box=None, pad_edge=False, show_header=False)
        for finding in findings:
            colour = colours[finding.status]
            table.add_row(f"[{colour}]{finding.status}[/]", plain(finding.what), plain(finding.said))
            if finding.do:
                table.add_row("", "", f"[bold]→[/] {plain(finding.do)}")
        console.print(table, highlight=False)
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)


@app.command("verify")
def verify(
    given: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY|RUN", help="a key or unique key prefix, RUN/STAGE or RUN; default: everything"
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Compare every file of the store with its manifest. Exit code 1 if something is damaged."""
    found = verify_store(open_(store, create=False), given)
    if as_json:
        print_json(asdict(found))
    else:
        for damage in found.damage:
            console.print(f"[red]damaged[/]  {plain(damage.what)}", highlight=False, soft_wrap=True)
            if damage.artifact is not None:
                made = f"{damage.artifact[:12]}{f' of stage {damage.stage}' if damage.stage else ''}"
                console.print(f"         artifact {plain(made)}", highlight=False, soft_wrap=True)
            console.print(f"         [bold]→[/] {plain(damage.do)}", highlight=False, soft_wrap=True)
        count = len(found.damage)
        console.print(
            f"{found.artifacts:,} artifacts, {found.files:,} files, {found.bytes / 1e6:,.1f} MB read: "
            f"{f'{count:,} damaged' if count else 'nothing is damaged'}",
            highlight=False,
        )
    if found.damage:
        raise typer.Exit(1)


@app.command("schema")
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    print_json(load.schema())


def _took(stage: dict[str, Any], moment: datetime) -> str:
    """How long a stage took, or how long it has been running."""
    if "started" not in stage:
        return ""
    if stage["status"] == Status.RUNNING:
        age = (moment - datetime.fromisoformat(stage["started"])).total_seconds()
        return f"for {timedelta(seconds=max(0, round(age)))}"
    seconds = datetime.fromisoformat(stage["changed"]) - datetime.fromisoformat(stage["started"])
    return f"{seconds.total_seconds():.1f} s"
